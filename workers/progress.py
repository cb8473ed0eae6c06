"""Counters that move from inside the calls of a rank, read by the driver while a call runs.

Guarantees: a reader sees in which call a rank is, in which part of it, and when its own work last moved on: a step of
the ring inside attention, a tensor that was read, made or written, a piece of a file. Only work moves the counters,
never an idle thread, so a rank whose counters stop is stuck, or waits and says for whom (`MEET`, `COPY`, `KEEPER`).
Work that waits for no other rank is ended here, too, once the driver said that it has no use any more.
Costs two integer stores per step of a ring; no lock is needed: one thread writes, or several write the time.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from raycp.errors import WorkerError

IDLE = "idle"
"""No call runs."""
JOIN, BUILD, RESTORE, RECALL = "join", "build", "restore", "restore from memory"
ATTACH, STEP, EVAL, SNAPSHOT, SAVE, EXPORT = "attach", "step", "eval", "snapshot", "save", "export"
ALONE = frozenset({RESTORE, RECALL, ATTACH, SNAPSHOT, SAVE, EXPORT})
"""Calls in which no rank waits for another one: each is measured by itself."""
COPY = "copy"
"""Part of a call that waits until the copy of the state is made, which may wait for the network and other nodes."""
MEET = "meet"
"""Part of a call that waits for the other ranks."""
KEEPER = "keeper"
"""Part of a call that waits for a keeper's answer."""
WHOLE = "whole"
"""Part of a call in which a library reads a whole model without a sign of progress."""
_UNMEASURED = frozenset({COPY, MEET, KEEPER, WHOLE})


@dataclass(slots=True)
class Progress:
    """Progress of one rank.

    Attributes:
        step, micro_batch, micro_batches: where the step or evaluation is.
        ring_steps: since the start of the process; `ring_steps_done` since the start of the step.
        call: what runs, or `IDLE`.
        phase: the part of it that runs.
        done: how often each call was completed by this process.
        longest: by call: the longest time between two movements so far, waits left out (seconds), which tells a slow
            rank from a stuck one.
        heaviest: by call: work of the heaviest micro-batch so far.
        heavier: how much more work the one that runs is than any before it, at least 1.
        moved: when a counter last moved (`time.monotonic`).
        began: when `call` began.
        ahead: the counters move when work is ordered, which a device does later.
        generation: that the call belongs to.
        cancelled: calls of this generation and of older ones have no use any more.
    """

    step: int = 0
    micro_batch: int = 0
    micro_batches: int = 0
    ring_steps: int = 0
    ring_steps_done: int = 0
    call: str = IDLE
    phase: str = IDLE
    done: dict[str, int] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=dict)
    heaviest: dict[str, float] = field(default_factory=dict)
    heavier: float = 1.0
    moved: float = field(default_factory=time.monotonic)
    began: float = field(default_factory=time.monotonic)
    ahead: bool = False
    generation: int = 0
    cancelled: int = -1

    @contextmanager
    def during(self, call: str, generation: int = 0) -> Iterator[None]:
        """Everything inside is part of `call`, which counts as done if it does not raise."""
        self.generation, self.heavier = generation, 1.0
        self.micro_batch = self.micro_batches = self.ring_steps_done = 0
        self.moved = self.began = time.monotonic()
        self.call = self.phase = call
        try:
            yield
            self.move()
            self.done[call] = self.done.get(call, 0) + 1
        finally:
            self.moved = self.began = time.monotonic()
            self.call = self.phase = IDLE

    def begin(self, step: int, micro_batches: int) -> None:
        """The step, or the evaluation, that runs has so many micro-batches."""
        self.step, self.micro_batches = step, micro_batches
        self.micro_batch = self.ring_steps_done = 0
        self.move()

    def enter(self, phase: str) -> None:
        """Another part of the same call begins."""
        self.move()
        self.phase = phase

    def next_micro_batch(self, work: float = 0.0) -> None:
        """The next micro-batch begins.

        Args:
            work: of its attention, in any unit: pauses of a pack that is heavier than all before it are longer.
        """
        before = self.heaviest.get(self.call, 0.0)
        self.heavier = work / before if 0.0 < before < work else 1.0
        self.heaviest[self.call] = max(before, work)
        self.micro_batch += 1
        self.move()

    def ring_step(self, *_: object) -> None:
        """One step of one layer's attention was computed (forward, recomputation or backward)."""
        self.ring_steps += 1
        self.ring_steps_done += 1
        self.move()

    def move(self, *_: object) -> None:
        """A piece of the work is done."""
        now = time.monotonic()
        if self.phase not in _UNMEASURED:
            self.longest[self.call] = max(self.longest.get(self.call, 0.0), now - self.moved)
        self.moved = now

    def piece(self, *_: object) -> None:
        """As `move`, inside work that waits for no other rank: no broken connection would end it.

        Raises:
            WorkerError: another rank failed, and the driver said so (`cancel`).
        """
        self.move()
        if self.generation <= self.cancelled:
            raise WorkerError(
                f"{self.call} was given up, since another rank of generation {self.generation} failed",
                fix="look for the first failure",
            )

    def cancel(self, generation: int) -> None:
        """Calls of this generation and of older ones have no use any more. From any thread."""
        self.cancelled = max(self.cancelled, generation)

    def snapshot(self) -> dict[str, float | int | str]:
        """Plain values, for the driver. `idle_seconds`: since a counter moved; `call_seconds`: since the call began;
        `calls_done` and `longest`: of this call; the latter as it would be for the micro-batch that runs.
        """
        now, call = time.monotonic(), self.call
        return {
            "step": self.step,
            "micro_batch": self.micro_batch,
            "micro_batches": self.micro_batches,
            "ring_steps": self.ring_steps,
            "ring_steps_done": self.ring_steps_done,
            "call": call,
            "phase": self.phase,
            "calls_done": self.done.get(call, 0),
            "longest": self.longest.get(call, 0.0) * self.heavier,
            "idle_seconds": now - self.moved,
            "call_seconds": now - self.began,
        }
