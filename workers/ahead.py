"""What the next micro-batches need, made while the current one computes.

Guarantees: shares are made in the order of use by one thread, `DEPTH` ahead, across the end of a step too, so a step
waits for data only when reading, planning and cutting are slower than computing. That ranks agree on a plan is checked
where it is first used (`raycp.attention.agreement`). Costs one thread, which takes turns with the step at the
interpreter, and `DEPTH` shares in memory.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

DEPTH = 2

Share = TypeVar("Share")
"""What a rank needs of one pack."""


class Ahead(Generic[Share]):
    """The queue of packs that are being read, planned and cut.

    Args:
        make: does that for one pack (None: the empty micro-batch); runs in this object's thread.
    """

    def __init__(self, make: Callable[[int | None], Share]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data-ahead")
        self._queue: deque[tuple[int | None, Future[Share]]] = deque()

    def take(self, pack_id: int | None, then: Sequence[int | None]) -> Share:
        """The share of `pack_id`; starts on those in `then` that are not being made yet.

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
