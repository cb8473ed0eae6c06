"""Counters that move from inside the step, read by the driver while a step runs.

Guarantees: a reader sees how far the rank's own compute has come (step, micro-batch, attention calls); only work moves
the counters, never an idle thread, so a rank whose counters stop is stuck or waiting. Costs two integer stores per
attention call; no lock is needed, since one thread writes.
"""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """Progress of one rank. `calls` counts attention calls since the start of the process."""

    step: int = 0
    micro_batch: int = 0
    micro_batches: int = 0
    calls: int = 0
    calls_in_step: int = 0
    phase: str = "idle"
    moved: float = field(default_factory=time.monotonic)

    def begin(self, phase: str, step: int, micro_batches: int) -> None:
        self.phase, self.step, self.micro_batches = phase, step, micro_batches
        self.micro_batch = self.calls_in_step = 0
        self.moved = time.monotonic()

    def next_micro_batch(self) -> None:
        self.micro_batch += 1
        self.moved = time.monotonic()

    def attention_call(self, *_: object) -> None:
        """One layer's attention was called (forward or recomputation)."""
        self.calls += 1
        self.calls_in_step += 1
        self.moved = time.monotonic()

    def end(self) -> None:
        self.phase = "idle"
        self.moved = time.monotonic()

    def snapshot(self) -> dict[str, float | int | str]:
        """Plain values, for the driver. `idle_seconds`: since a counter moved."""
        return {
            "step": self.step,
            "micro_batch": self.micro_batch,
            "micro_batches": self.micro_batches,
            "calls": self.calls,
            "calls_in_step": self.calls_in_step,
            "phase": self.phase,
            "idle_seconds": time.monotonic() - self.moved,
        }
