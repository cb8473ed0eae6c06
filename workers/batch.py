"""From the pack ids of a step to the tensors that one rank computes on.

Guarantees: which packs form a step never depends on the world; which replica takes which pack is decided the same way
on every rank, without a message; where a replica has fewer packs than another, it runs an empty micro-batch (one token,
no target), so that every rank enters the same collectives. Costs one attention plan per pack and rank, made ahead.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from data_pipeline import Document, Pack, PackLoader, assign_packs, pack_documents, split_pack
from raycp.attention import Carrier, Groups
from raycp.plan import AttentionPlan, CostModel, RankGrid
from raycp.training.layers import AttentionLayers, split_of
from workers.ahead import Ahead


@dataclass(kw_only=True)
class MicroBatch:
    """One rank's share of one pack. t: tokens of this rank, possibly 0.

    Attributes:
        ids, targets: int64 [t]; targets are shifted already, -100 where nothing is trained.
        position_ids: int64 [t].
        weights: float32 [t] or None.
        carrier: the attention plan of this pack, fresh for this micro-batch.
        num_tokens, num_targets: of the whole pack.
    """

    ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    weights: torch.Tensor | None
    carrier: Carrier
    num_tokens: int
    num_targets: int


class Batcher:
    """Makes the micro-batches of one rank.

    Args:
        loader: the packs.
        grid, rank: who this rank is.
        groups: attention groups of the current generation.
        layers: attention layers of the model.
        layout, algorithm, kv_cache: of `ParallelConfig`.
        cost: figures that "auto" is decided by, the same on every rank; None: those of a CPU core.
        keep_attention: keep attention's output for the recomputation of a checkpointed layer.
        device: where tensors go.
        on_layer: called after every step of every attention call.
    """

    def __init__(
        self,
        *,
        loader: PackLoader,
        grid: RankGrid,
        rank: int,
        groups: Groups,
        layers: AttentionLayers,
        layout: str,
        algorithm: str,
        keep_attention: bool,
        device: torch.device,
        on_layer: Callable[..., None],
        kv_cache: str = "none",
        cost: CostModel | None = None,
    ) -> None:
        self._loader = loader
        self._grid = grid
        self._dp_index, self._cp_rank = divmod(rank, grid.cp)
        self._groups = groups
        self._layers = layers
        self._layout = layout
        self._algorithm = algorithm
        self._kv_cache = kv_cache
        self._cost = cost
        self._keep = keep_attention
        self._device = device
        self._on_layer = on_layer
        self._ahead = Ahead(self._share)
        self.waited = 0.0
        """Seconds that `micro_batches` waited for shares of packs, or moved them to the device, in all."""

    def assigned(self, pack_ids: Sequence[int]) -> list[int | None]:
        """Pack ids that this rank's replica runs, in order; None is an empty micro-batch.

        The length is the same on every rank: the most packs that any replica has.
        """
        if not pack_ids:
            return []
        per_replica = assign_packs([self._loader.cost(p) for p in pack_ids], self._grid.dp)
        depth = max(len(part) for part in per_replica)
        mine: list[int | None] = [pack_ids[i] for i in per_replica[self._dp_index]]
        return mine + [None] * (depth - len(mine))

    def micro_batches(
        self, assigned: Sequence[int | None], following: Sequence[int | None] = ()
    ) -> Iterator[MicroBatch]:
        """The micro-batches of `assigned`; the next ones are read and planned while the current one computes.

        Args:
            assigned: of `assigned()`.
            following: what the next call will probably ask for.
        """
        coming = [*assigned, *following]
        for i, pack_id in enumerate(assigned):
            began = time.perf_counter()
            batch = self._on_device(self._ahead.take(pack_id, coming[i + 1 :]))
            self.waited += time.perf_counter() - began
            yield batch

    def _share(self, pack_id: int | None) -> "_Share":
        """Reads a pack, plans its attention, and cuts out what this rank holds; in the thread that works ahead."""
        pack = _empty_pack() if pack_id is None else self._loader.pack(pack_id)
        plan = self._layers.plan(
            pack.doc_ends,
            self._grid,
            layout=self._layout,
            algorithm=self._algorithm,
            kv_cache=self._kv_cache,
            cost=self._cost,
        )
        for one in [plan] if isinstance(plan, AttentionPlan) else plan.values():
            one.program(self._cp_rank)  # made lazily: here, not in the step
        shard = split_pack(pack, split_of(plan), self._cp_rank)
        return _Share(
            ids=_tensor(shard.ids, torch.int64),
            targets=_tensor(shard.targets, torch.int64),
            position_ids=_tensor(shard.position_ids, torch.int64),
            weights=None if shard.weights is None else _tensor(shard.weights, torch.float32),
            plan=plan,
            num_tokens=len(pack),
            num_targets=pack.num_targets,
        )

    def _on_device(self, share: "_Share") -> MicroBatch:
        return MicroBatch(
            ids=share.ids.to(self._device),
            targets=share.targets.to(self._device),
            position_ids=share.position_ids.to(self._device),
            weights=None if share.weights is None else share.weights.to(self._device),
            carrier=Carrier(plan=share.plan, groups=self._groups, keep=self._keep, on_layer=self._on_layer),
            num_tokens=share.num_tokens,
            num_targets=share.num_targets,
        )


class _Share(NamedTuple):
    """A `MicroBatch` that is not on its device yet."""

    ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    weights: torch.Tensor | None
    plan: AttentionPlan | dict[str, AttentionPlan]
    num_tokens: int
    num_targets: int


def _tensor(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype=dtype)


def _empty_pack() -> Pack:
    one = Document(
        ids=np.zeros(1, np.int32),
        targets=np.full(1, -100, np.int32),
        weights=None,
        start_position=0,
        row_id="",
    )
    return pack_documents([one])
