"""Counters that move from inside the step, read by the driver while a step runs.

Guarantees: a reader sees how far the rank's own compute has come (step, micro-batch, steps of the ring inside
attention); only work moves the counters, never an idle thread, so a rank whose counters stop is stuck or waiting. Costs
two integer stores per step of a ring; no lock is needed, since one thread writes.
"""

import time
from dataclasses import dataclass, field

COPY = "copy"
"""Phase of a rank that waits for the copy of its state: for the network and other nodes, and not stuck itself."""


@dataclass(slots=True)
class Progress:
    """Progress of one rank.

    `ring_steps` counts since the start of the process, `ring_steps_done` since the start of the optimizer step;
    `longest` is the longest time between two movements so far (seconds), which tells a slow rank from a stuck one.
    """

    step: int = 0
    micro_batch: int = 0
    micro_batches: int = 0
    ring_steps: int = 0
    ring_steps_done: int = 0
    phase: str = "idle"
    phases_done: int = 0
    longest: float = 0.0
    moved: float = field(default_factory=time.monotonic)

    def begin(self, phase: str, step: int, micro_batches: int) -> None:
        self.phase, self.step, self.micro_batches = phase, step, micro_batches
        self.micro_batch = self.ring_steps_done = 0
        self.moved = time.monotonic()

    def enter(self, phase: str) -> None:
        """Another part of the same step begins."""
        self.phase = phase
        self._move()

    def next_micro_batch(self) -> None:
        self.micro_batch += 1
        self._move()

    def ring_step(self, *_: object) -> None:
        """One step of one layer's attention was computed (forward, recomputation or backward)."""
        self.ring_steps += 1
        self.ring_steps_done += 1
        self._move()

    def end(self) -> None:
        self._move()
        self.phase = "idle"
        self.phases_done += 1

    def _move(self) -> None:
        now = time.monotonic()
        self.longest = max(self.longest, now - self.moved)
        self.moved = now

    def snapshot(self) -> dict[str, float | int | str]:
        """Plain values, for the driver. `idle_seconds`: since a counter moved."""
        return {
            "step": self.step,
            "micro_batch": self.micro_batch,
            "micro_batches": self.micro_batches,
            "ring_steps": self.ring_steps,
            "ring_steps_done": self.ring_steps_done,
            "phase": self.phase,
            "phases_done": self.phases_done,
            "longest": self.longest,
            "idle_seconds": time.monotonic() - self.moved,
        }
