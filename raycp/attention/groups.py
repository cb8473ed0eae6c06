"""Process groups of the attention: which ranks form a ring.

Guarantees: every rank creates all groups in the same order, as torch.distributed demands; the raw groups are listed, so
that whoever made them can abort or destroy them; nothing is kept in a global.
"""

import datetime
from dataclasses import dataclass

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

    @property
    def cp_rank(self) -> int:
        """Context-parallel rank: which shard of a pack this rank holds."""
        return self.grid.cp_rank(self.rank)


def build_groups(grid: RankGrid, *, rank: int | None = None, timeout: datetime.timedelta | None = None) -> Groups:
    """Makes the groups of a grid; a collective over the default process group, which must have `grid.world_size` ranks.

    A grid of one rank needs no process group, and a ring of one rank makes none.

    Args:
        grid: the world.
        rank: own global rank; None: that of the default process group.
        timeout: of every operation in the new groups; None: that of the default process group.

    Raises:
        PlanError: the world has another size than the grid, `rank` is not in it, or this version has no such groups.
    """
    if grid.ulysses != 1 or grid.window != 1:
        raise PlanError(f"{grid}: this version has single rings only", fix="set ulysses=1 and window=1")
    if grid.world_size > 1:
        _check_world(grid)
    if rank is None:
        rank = dist.get_rank() if grid.world_size > 1 else 0
    coordinates = grid.coordinates(rank)
    if grid.ring == 1:
        return Groups(grid, rank, LocalCommunicator())
    mine = None
    for dp_index in range(grid.dp):
        group = dist.new_group(list(grid.ring_ranks(dp_index)), timeout=timeout)
        if dp_index == coordinates.dp_index:
            mine = group
    assert isinstance(mine, dist.ProcessGroup)
    return Groups(grid, rank, ProcessGroupCommunicator(mine), (mine,))


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
