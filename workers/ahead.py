"""Packs and attention plans of the next micro-batches, made while the current one computes.

Guarantees: plans are made in the order of use by one thread, `DEPTH` ahead, across the end of a step too, so a step
waits for a plan only when planning is slower than computing. That ranks agree on a plan is checked where it is first
used (`raycp.attention.agreement`). Costs one thread and `DEPTH` packs in memory.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from data_pipeline import Pack
from raycp.plan import AttentionPlan

DEPTH = 2


class Planned(NamedTuple):
    """A pack and how its attention is computed."""

    pack: Pack
    plan: AttentionPlan | dict[str, AttentionPlan]


class PlanAhead:
    """The queue of packs that are being read and planned.

    Args:
        make: reads and plans one pack (None: the empty micro-batch); runs in this object's thread.
    """

    def __init__(self, make: Callable[[int | None], Planned]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plan-ahead")
        self._queue: deque[tuple[int | None, Future[Planned]]] = deque()

    def take(self, pack_id: int | None, then: Sequence[int | None]) -> Planned:
        """The plan of `pack_id`; starts on those in `then` that are not being made yet.

        Raises:
            DataError: the pack cannot be read.
        """
        wanted = [pack_id, *then[:DEPTH]]
        made = [queued for queued, _ in self._queue]
        if made != wanted[: len(made)]:  # another step than was expected
            self._queue.clear()
            made = []
        for following in wanted[len(made) :]:
            self._queue.append((following, self._thread.submit(self._make, following)))
        return self._queue.popleft()[1].result()
