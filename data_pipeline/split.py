"""One context-parallel rank's tokens of a pack.

Guarantees: every per-token field is taken with the same index, after the targets were shifted in the whole document, so
that no target is lost or moved at a cut; the shards of all ranks together are the pack. Cost: one gather per field.

Legend: T tokens of the pack, t tokens of the rank (may be 0).
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from data_pipeline.document import IGNORE, Float32, Int32, Pack, target_weight
from raycp.errors import PlanError


class TokenIndex(Protocol):
    """Of an AttentionPlan, all that a split needs."""

    def token_index(self, cp_rank: int) -> npt.NDArray[np.int64]:
        """[t] int64: global positions that the rank holds, in local order."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PackShard:
    """Fields of `Pack` at the positions of one rank, each [t]; `token_index` [t] int64 holds those positions."""

    ids: Int32
    targets: Int32
    weights: Float32 | None
    position_ids: Int32
    token_index: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.ids.size)

    @property
    def num_targets(self) -> int:
        """Positions of this rank that are trained."""
        return int(np.count_nonzero(self.targets != IGNORE))

    @property
    def target_weight(self) -> float:
        """Sum of the weights of this rank's targets."""
        return target_weight(self.targets, self.weights)


def split_pack(pack: Pack, attention_plan: TokenIndex, cp_rank: int) -> PackShard:
    """The shard of `cp_rank`: each field of `pack` [T] at `attention_plan.token_index(cp_rank)` -> [t].

    Raises:
        PlanError: the plan was made for a longer pack, or for other documents.
    """
    index = np.asarray(attention_plan.token_index(cp_rank), dtype=np.int64)
    if index.size and (index.min() < 0 or index.max() >= len(pack)):
        raise PlanError(
            f"the attention plan places token {index.max()} on rank {cp_rank}, the pack has {len(pack)} tokens",
            fix="build the plan from this pack's doc_ends",
        )
    planned = getattr(attention_plan, "doc_ends", None)
    if planned is not None and tuple(planned) != pack.doc_ends:
        raise PlanError(
            f"the attention plan is for {len(planned)} documents, the pack has {len(pack.doc_ends)} with other ends",
            fix="build the plan from this pack's doc_ends",
        )
    return PackShard(
        ids=pack.ids[index],
        targets=pack.targets[index],
        weights=None if pack.weights is None else pack.weights[index],
        position_ids=pack.position_ids[index],
        token_index=index,
    )
