"""Collectives by peer-to-peer transfers, for gloo: FSDP2's all-gather and reduce-scatter, and a sum over ranks.

gloo's own all-gather and reduce-scatter cost about 4x the same bytes by P2P. The first two plug into FSDP2's public
hooks (`set_custom_all_gather`, `set_custom_reduce_scatter`). Guarantees: sums are added in rank order, so a gradient is
bit-equal from run to run at one world size. Costs one receive buffer of the size of the input in reduce-scatter and in
a sum.
"""

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

_TAG = 7001
"""Keeps these transfers apart from others that share the group."""


def _allocate(size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device=device)


class Transfers(dist.Work):
    """Transfers that were posted, as one operation of FSDP2's."""

    def __init__(self, works: Sequence[dist.Work | None]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns when all are over; each has the group's own time-out."""
        for work in self._works:
            assert work is not None
            work.wait()
        self._works = ()
        return True


Pieces = Sequence[torch.Tensor] | torch.Tensor
"""A tensor for each rank of a group; the rows of a tensor are such."""


def _exchange(group: dist.ProcessGroup, incoming: Pieces, outgoing: Pieces, tag: int) -> Transfers:
    """Posts a receive from, and a send to, each other rank; empty pieces stay where they are."""
    works, rank, size = [], group.rank(), group.size()
    for i in range(1, size):
        source, target = (rank - i) % size, (rank + i) % size
        if incoming[source].numel():
            works.append(dist.irecv(incoming[source], group=group, group_src=source, tag=tag))
        if outgoing[target].numel():
            works.append(dist.isend(outgoing[target], group=group, group_dst=target, tag=tag))
    return Transfers(works)


class P2PAllGather(AllGather):
    """Every rank sends its piece to every other rank; all transfers are posted at once, and FSDP2 waits for them."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return _allocate(size, dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        size = group.size()
        pieces = output_tensor.view(size, -1)
        transfers = _exchange(group, pieces, [input_tensor] * size, _TAG)
        own = pieces[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        return transfers


class PairwiseReduceScatter(ReduceScatter):
    """Every rank sends each other rank that rank's piece, and adds what it receives in rank order."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return _allocate(size, dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if op != dist.ReduceOp.SUM:
            raise ValueError(
                f"only sums are reduced here, not {op}: set_force_sum_reduction_for_comms(True) is missing"
            )
        rank, world_size = group.rank(), group.size()
        pieces = input_tensor.view(world_size, -1)
        received = torch.empty_like(pieces)
        _exchange(group, received, pieces, _TAG).wait()
        output = output_tensor.view(-1)
        for source in range(world_size):
            piece = pieces[rank] if source == rank else received[source]
            if source == 0:
                output.copy_(piece)
            else:
                output.add_(piece)
        return None


class RankSum(Protocol):
    """A tensor that is being summed over ranks, in place; it must not be touched before `wait` returns."""

    def spread(self) -> None:
        """Waits for the shares of the other ranks, and begins to exchange their sums."""
        ...

    def wait(self) -> None:
        """Returns when the tensor is the sum; after `spread`."""
        ...


def start_sum(x: torch.Tensor, group: dist.ProcessGroup, index: int) -> RankSum:
    """Begins to sum `x` over the ranks of a group, in place. Collective.

    Args:
        x: contiguous.
        group: its ranks.
        index: tells sums apart that are under way at the same time.
    """
    return _PairwiseSum(x, group, index) if x.device.type == "cpu" else _BackendSum(x, group)


class _BackendSum:
    """The back end's own all-reduce."""

    def __init__(self, x: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._work = dist.all_reduce(x, group=group, async_op=True)

    def spread(self) -> None:
        """Nothing: it is one operation."""

    def wait(self) -> None:
        """See `RankSum.wait`."""
        if self._work is not None:
            self._work.wait()


class _PairwiseSum:
    """Every rank adds up one piece of the tensor, in rank order, and sends it to the others."""

    def __init__(self, x: torch.Tensor, group: dist.ProcessGroup, index: int) -> None:
        self._group, self._tag = group, _TAG + 1 + 2 * index
        self._rank, size = group.rank(), group.size()
        flat = x.view(-1)
        bounds = [flat.numel() * r // size for r in range(size + 1)]
        self._pieces = [flat[a:b] for a, b in pairwise(bounds)]
        own = self._pieces[self._rank]
        self._shares = [own if r == self._rank else torch.empty_like(own) for r in range(size)]
        self._works = _exchange(group, self._shares, self._pieces, self._tag)

    def spread(self) -> None:
        """See `RankSum.spread`."""
        self._works.wait()
        total = self._shares[0]
        for share in self._shares[1:]:
            total.add_(share)
        own = self._pieces[self._rank]
        if self._rank:
            own.copy_(total)
        self._shares = []
        self._works = _exchange(self._group, self._pieces, [own] * len(self._pieces), self._tag + 1)

    def wait(self) -> None:
        """See `RankSum.wait`."""
        self._works.wait()
