"""Which rows of a named tensor a rank holds, in logical offsets.

A parameter or optimizer moment of shape [n, ...] is cut along its first dimension by FSDP2's rule: c = ceil(n / W)
rows per rank, the last ranks may hold fewer or none. Everything that moves training state (initial weights,
checkpoints, resharding) speaks in these rows and never in rank files, so it works between any two world sizes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from raycp.training.manifest import ShardEntry
from raycp.training.mesh import SHARD


@runtime_checkable
class Resting(Protocol):
    """A module that holds other parameters during a pass than between passes."""

    def rest(self) -> None:
        """Holds again what the optimizer holds."""
        ...


@dataclass(frozen=True)
class ShardSpan:
    """Rows [start, stop) of tensor `name`, whose whole shape is `shape`. A scalar travels as shape (1,)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not self.shape or not 0 <= self.start <= self.stop <= self.shape[0]:
            raise ValueError(f"{self.name}: rows [{self.start}, {self.stop}) of shape {self.shape}")

    @property
    def entry(self) -> ShardEntry:
        """The same rows as a manifest names them."""
        dtype = str(self.dtype).removeprefix("torch.")
        return ShardEntry(name=self.name, shape=self.shape, dtype=dtype, start=self.start, stop=self.stop)


def row_range(rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """[start, stop) of `rank` when `rows` rows are cut over `world_size` ranks by FSDP2's rule."""
    each = -(-rows // world_size)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def held_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """(local tensor, start, stop): the rows of a parameter, gradient or moment that this rank holds.

    The local tensor shares memory with `tensor`. Not to be kept across a forward: FSDP2 may move it.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0, tensor.shape[0]
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    axis = names.index(SHARD)
    start, stop = row_range(tensor.shape[0], mesh.get_local_rank(axis), mesh.size(axis))
    local = tensor.to_local().detach()
    assert local.shape[0] == stop - start, (tuple(local.shape), start, stop)
    return local, start, stop


def written_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """As `held_rows`, but each row of the world is given by exactly one rank: replicas share the rows out."""
    local, start, stop = held_rows(tensor)
    if not isinstance(tensor, DTensor) or tensor.device_mesh.ndim == 1:
        return local, start, stop
    mesh = tensor.device_mesh
    first, last = row_range(stop - start, mesh.get_local_rank(0), mesh.size(0))
    return local[first:last], start + first, start + last


def named_weights(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by the names that Hugging Face's files use; a tied parameter once, under its first name.

    A forward pass leaves parameters gathered that no backward pass let go (FSDP2: those of the root, in evaluation):
    they are let go first, so that what is yielded is what the optimizer holds, and no stale copy outlives a change.

    Args:
        module: a `Trainee`, or a language model itself.
    """
    if isinstance(module, Resting):
        module.rest()
    elif isinstance(module, FSDPModule):
        module.reshard()
    for name, parameter in module.named_parameters():
        yield name.removeprefix("lm."), parameter
