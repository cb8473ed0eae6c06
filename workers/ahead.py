"""Packs and attention plans of the next micro-batches, made while the current one computes.

Guarantees: plans are made in the order of use by one thread, `DEPTH` ahead, across the end of a step too, so a step
waits for a plan only when planning is slower than computing; before its first use a plan's hash is compared with that
of the replica's first rank, so ranks that plan differently (another numpy, another version of raycp) stop with both
hashes instead of exchanging rows that do not fit. They compare through the run's store, not through a collective.
Costs one thread, `DEPTH` packs in memory, and one round trip to the store (about 0.2 ms) per pack and rank.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

from data_pipeline import Pack
from raycp.errors import PlanError
from raycp.plan import AttentionPlan

DEPTH = 2


class Store(Protocol):
    """What is used of `torch.distributed.Store`: `get` waits until the key is set."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


class Planned(NamedTuple):
    """A pack and how its attention is computed."""

    pack: Pack
    plan: AttentionPlan


class PlanAgreement:
    """Compares plans over the ranks of one replica, in the order in which they are made.

    Args:
        store: shared by the ranks of one generation; this object's alone in this process, since `get` blocks it.
        name: of this replica and purpose, the same on its ranks and no other's.
        cp_rank: rank inside the replica.
        cp: ranks of the replica.
    """

    def __init__(self, store: Store, *, name: str, cp_rank: int, cp: int) -> None:
        self._store = store
        self._name = name
        self._cp_rank = cp_rank
        self._cp = cp
        self._count = 0

    def check(self, plan: AttentionPlan) -> None:
        """Raises:
        PlanError: this rank's plan is another one than that of the replica's first rank.
        """
        if self._cp == 1:
            return
        self._count += 1
        key = f"{self._name}/{self._count}"
        if self._cp_rank == 0:
            self._store.set(key, plan.hash)
            return
        first = self._store.get(key).decode()
        if first != plan.hash:
            raise PlanError(
                f"cp rank {self._cp_rank} plans attention as {plan.hash[:16]}, cp rank 0 as {first[:16]}",
                fix="install the same versions of raycp, numpy and Python on every node",
                cp_rank=self._cp_rank,
            )
        if self._cp_rank == self._cp - 1 and self._count > 2 * DEPTH + 2:
            self._store.delete_key(f"{self._name}/{self._count - 2 * DEPTH - 2}")  # every rank is past it


class PlanAhead:
    """The queue of packs that are being read and planned.

    Args:
        make: reads and plans one pack (None: the empty micro-batch); runs in this object's thread.
        agreement: checks each plan, in order.
    """

    def __init__(self, make: Callable[[int | None], Planned], agreement: PlanAgreement) -> None:
        self._make = make
        self._agreement = agreement
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plan-ahead")
        self._queue: deque[tuple[int | None, Future[Planned]]] = deque()

    def take(self, pack_id: int | None, then: Sequence[int | None]) -> Planned:
        """The plan of `pack_id`; starts on those in `then` that are not being made yet.

        Every rank of a replica calls it with the same arguments in the same order.

        Raises:
            PlanError: ranks do not agree on the plan.
            DataError: the pack cannot be read.
        """
        wanted = [pack_id, *then[:DEPTH]]
        made = [queued for queued, _ in self._queue]
        if made != wanted[: len(made)]:  # planned for another step: let it end, every rank started it
            self._queue.clear()
            made = []
        for following in wanted[len(made) :]:
            self._queue.append((following, self._thread.submit(self._prepare, following)))
        return self._queue.popleft()[1].result()

    def _prepare(self, pack_id: int | None) -> Planned:
        planned = self._make(pack_id)
        self._agreement.check(planned.plan)
        return planned
