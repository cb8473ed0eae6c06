"""Process groups of the attention: which ranks form a ring.

Guarantees: every rank creates all groups in the same order, as torch.distributed demands; the raw groups are listed, so
that whoever made them can abort or destroy them; nothing is kept in a global.
"""

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from raycp.attention.communicator import Communicator, LocalCommunicator, ProcessGroupCommunicator
from raycp.errors import PlanError
from raycp.plan import RankGrid


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups of one rank.

    Fields: `grid`; `rank`, the global rank; `communicator` of this rank's ring; `process_groups`, every torch group
    that `build_groups` made and this rank is a member of.
    """

    grid: RankGrid
    rank: int
    communicator: Communicator
    process_groups: tuple[dist.ProcessGroup, ...] = ()
    ulysses: Communicator = field(default_factory=LocalCommunicator)
    """Of this rank's Ulysses group."""
    outer: Communicator = field(default_factory=LocalCommunicator)
    """The ring again, in a double ring: what goes between windows has a group of its own, since accelerators run the
    exchanges of one group in turn and the outer ones take several steps."""

    @property
    def cp_rank(self) -> int:
        """Context-parallel rank: which shard of a pack this rank holds."""
        return self.grid.cp_rank(self.rank)


def build_groups(
    grid: RankGrid,
    *,
    rank: int | None = None,
    timeout: datetime.timedelta | None = None,
    options: Callable[[str], Any] | None = None,
) -> Groups:
    """Makes the groups of a grid; a collective over the default process group, which must have `grid.world_size` ranks.

    A grid of one rank needs no process group, and a ring or Ulysses group of one rank makes none.

    Args:
        grid: the world.
        rank: own global rank; None: that of the default process group.
        timeout: of every operation in the new groups; None: that of the default process group.
        options: gives `pg_options` of the groups of a kind, "ring" or "ulysses"; None: none.

    Raises:
        PlanError: the world has another size than the grid, or `rank` is not in it.
    """
    if grid.world_size > 1:
        _check_world(grid)
    if rank is None:
        rank = dist.get_rank() if grid.world_size > 1 else 0
    grid.coordinates(rank)
    communicators: list[Communicator] = []
    made: list[dist.ProcessGroup] = []
    double = grid.window not in (1, grid.ring)
    kinds = (("ring", _rings(grid)), ("ulysses", _ulysses_groups(grid)), ("ring", _rings(grid) if double else iter(())))
    for name, kind in kinds:
        mine: Communicator = LocalCommunicator()
        for members in kind:
            if len(members) == 1:
                continue
            group = dist.new_group(list(members), timeout=timeout, pg_options=options(name) if options else None)
            if rank in members:
                assert isinstance(group, dist.ProcessGroup)
                mine = ProcessGroupCommunicator(group)
                made.append(group)
        communicators.append(mine)
    return Groups(grid, rank, communicators[0], tuple(made), communicators[1], communicators[2])


def _rings(grid: RankGrid) -> Iterator[tuple[int, ...]]:
    for dp_index in range(grid.dp):
        for ulysses_index in range(grid.ulysses):
            yield grid.ring_ranks(dp_index, ulysses_index)


def _ulysses_groups(grid: RankGrid) -> Iterator[tuple[int, ...]]:
    for dp_index in range(grid.dp):
        for ring_index in range(grid.ring):
            yield grid.ulysses_ranks(dp_index, ring_index)


def _check_world(grid: RankGrid) -> None:
    if not dist.is_initialized():
        raise PlanError(
            f"{grid} has {grid.world_size} ranks, but torch.distributed is not initialised",
            fix="call torch.distributed.init_process_group first",
        )
    if dist.get_world_size() != grid.world_size:
        raise PlanError(
            f"{grid} has {grid.world_size} ranks, but the process group has {dist.get_world_size()}",
            fix="make dp * ring * ulysses the number of ranks",
        )
