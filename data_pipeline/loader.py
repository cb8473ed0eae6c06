"""Packs by their global id, read from a document store and built ahead in one thread.

Guarantees: `pack` gives the same pack whether it was prefetched or not; an error of the thread is raised where that
pack is used, not lost. `step_weight` is the loss denominator of a whole step, from per-document sums: no token is read,
and every process gets the same float. Cost: one pack's copy, plus those prefetched and not yet used.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from data_pipeline.cursor import StepSchedule, attention_cost
from data_pipeline.document import Pack, pack_documents
from data_pipeline.packing import PackPlan
from data_pipeline.store import DocumentStore
from raycp.errors import PlanError


class PackLoader:
    """Reads packs of a run.

    Args:
        store: the documents.
        plan_of_epoch: epoch -> its PackPlan; called once per epoch in use (two are kept).
        schedule: of the run; says which packs a step takes.
    """

    def __init__(self, store: DocumentStore, plan_of_epoch: Callable[[int], PackPlan], schedule: StepSchedule) -> None:
        self.store = store
        self.schedule = schedule
        self._plan_of_epoch = plan_of_epoch
        self._plans: dict[int, PackPlan] = {}
        self._plans_lock = Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pack-prefetch")
        self._ahead: dict[int, Future[Pack]] = {}

    def documents(self, pack_id: int) -> tuple[int, ...]:
        """Document indices of a pack.

        Raises:
            PlanError: the plan of that epoch does not belong to the schedule, or is of another length.
        """
        epoch, index = self.schedule.locate(pack_id)
        return self._plan(epoch).pack(index)

    def doc_lengths(self, pack_id: int) -> tuple[int, ...]:
        """Tokens of each document of a pack, without reading it."""
        return tuple(self.store.lengths[list(self.documents(pack_id))].tolist())

    def costs(self, step: int) -> list[float]:
        """Attention work of each pack of a step, for `assign_packs`."""
        return [attention_cost(self.doc_lengths(pack_id)) for pack_id in self.schedule.pack_ids(step)]

    def step_weight(self, step: int) -> float:
        """Sum of the target weights of all packs of a step, whoever computes them."""
        documents = [d for pack_id in self.schedule.pack_ids(step) for d in self.documents(pack_id)]
        return math.fsum(self.store.target_weights[documents].tolist())

    def prefetch(self, pack_ids: Sequence[int]) -> None:
        """Starts building these packs, in order. Earlier ones that were not used and are not among them are let go."""
        wanted = set(pack_ids)
        for pack_id in [p for p in self._ahead if p not in wanted]:
            self._ahead.pop(pack_id).cancel()
        for pack_id in pack_ids:
            if pack_id not in self._ahead:
                self._ahead[pack_id] = self._thread.submit(self._read, pack_id)

    def pack(self, pack_id: int) -> Pack:
        """The pack; waits for it if it is on its way."""
        future = self._ahead.pop(pack_id, None)
        return self._read(pack_id) if future is None else future.result()

    def close(self) -> None:
        """Ends the thread; packs on their way are dropped."""
        self._ahead.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _read(self, pack_id: int) -> Pack:
        return pack_documents([self.store.document(index) for index in self.documents(pack_id)])

    def _plan(self, epoch: int) -> PackPlan:
        with self._plans_lock:
            if epoch not in self._plans:
                plan = self._plan_of_epoch(epoch)
                schedule = self.schedule
                if (len(plan), plan.epoch, plan.family) != (schedule.num_packs, epoch, schedule.family):
                    raise PlanError(
                        f"the plan given for epoch {epoch} has {len(plan)} packs, epoch {plan.epoch} and family "
                        f"{plan.family[:12]}; the schedule has {schedule.num_packs} packs and {schedule.family[:12]}",
                        fix="make schedule and plans from the same store, seq_length, packing and seed",
                    )
                while len(self._plans) > 1:
                    del self._plans[min(self._plans)]
                self._plans[epoch] = plan
            return self._plans[epoch]
