"""Packs by their global id, read from a document store.

Guarantees: every process that opens the same store plans the same packs; any pack is read by itself, so resuming costs
a seek. Sums over a pack (weight, tokens, targets, cost) come from per-document numbers: no token is read. Reading ahead
of the step is the caller's (`workers.ahead`). Cost: the plans of two epochs, and one copy of a pack's tokens.
"""

import math
from collections.abc import Sequence
from threading import Lock

from data_pipeline.cursor import attention_cost
from data_pipeline.document import Pack, pack_documents
from data_pipeline.packing import PackPlan, plan_packs
from data_pipeline.store import DocumentStore
from raycp.errors import PlanError

_PLANS_KEPT = 2


class PackLoader:
    """Reads packs of a run; a pack id is `epoch * packs_per_epoch + index`.

    Args:
        store: the documents.
        seq_length, policy, seed: as for `plan_packs`.
    """

    def __init__(self, store: DocumentStore, *, seq_length: int, policy: str = "best_fit", seed: int = 0) -> None:
        self.store = store
        self._seq_length, self._policy, self._seed = seq_length, policy, seed
        self._plans: dict[int, PackPlan] = {}
        self._plans_lock = Lock()
        self.packs_per_epoch = len(self.plan(0))

    def plan(self, epoch: int) -> PackPlan:
        """The plan of an epoch."""
        with self._plans_lock:
            if epoch not in self._plans:
                plan = plan_packs(
                    self.store.lengths, seq_length=self._seq_length, policy=self._policy, seed=self._seed, epoch=epoch
                )
                while len(self._plans) >= _PLANS_KEPT:
                    del self._plans[next(iter(self._plans))]  # the one that was made first
                self._plans[epoch] = plan
            return self._plans[epoch]

    def documents(self, pack_id: int) -> tuple[int, ...]:
        """Document indices of a pack.

        Raises:
            PlanError: a negative pack id.
        """
        if pack_id < 0:
            raise PlanError(f"pack id {pack_id} is negative", fix="take pack ids from StepSchedule.pack_ids")
        epoch, index = divmod(pack_id, self.packs_per_epoch)
        return self.plan(epoch).pack(index)

    def doc_lengths(self, pack_id: int) -> tuple[int, ...]:
        """Tokens of each document of a pack."""
        return tuple(self.store.lengths[list(self.documents(pack_id))].tolist())

    def num_tokens(self, pack_id: int) -> int:
        """Tokens of a pack."""
        return sum(self.doc_lengths(pack_id))

    def num_targets(self, pack_id: int) -> int:
        """Trained positions of a pack."""
        return int(self.store.num_targets[list(self.documents(pack_id))].sum())

    def weight(self, pack_id: int) -> float:
        """Sum of the target weights of a pack."""
        return math.fsum(self.store.target_weights[list(self.documents(pack_id))].tolist())

    def step_weight(self, pack_ids: Sequence[int]) -> float:
        """Loss denominator of a step: the target weights of all its packs, whoever computes them."""
        return math.fsum(self.weight(pack_id) for pack_id in pack_ids)

    def cost(self, pack_id: int) -> float:
        """Attention work of a pack, for `assign_packs`."""
        return attention_cost(self.doc_lengths(pack_id))

    def pack(self, pack_id: int) -> Pack:
        """Reads a pack; from any thread."""
        return pack_documents([self.store.document(index) for index in self.documents(pack_id)])
