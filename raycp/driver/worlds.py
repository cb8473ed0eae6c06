"""Which world the live workers form: degrees within the limits, a grid that exists, memory that suffices.

Guarantees: the best world is taken in the order of `raycp.plan.resize`; one whose ranks would not fit into memory is
taken with recomputation of layers if that fits, else skipped. Deciding costs milliseconds and touches nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raycp.driver.placement import share_out
from raycp.plan import RankGrid
from raycp.plan.resize import WorldLimits, worlds
from workers.messages import Probe


@dataclass(frozen=True, kw_only=True)
class World:
    """A world to run.

    Attributes:
        grid: dp x ring x ulysses.
        recompute: layers are recomputed in backward.
        takes: {node id: ranks there}.
    """

    grid: RankGrid
    recompute: bool
    takes: dict[str, int]


class Worlds:
    """Chooses worlds for one run.

    Args:
        limits: of degrees and workers.
        grid_of: (dp, cp) -> grid, or None if no grid of these degrees can run the model.
        bytes_of: (grid, recompute) -> bytes of memory that one rank takes.
        recompute: what the configuration asks for when memory is no question.
    """

    def __init__(
        self,
        limits: WorldLimits,
        *,
        grid_of: Callable[[int, int], RankGrid | None],
        bytes_of: Callable[[RankGrid, bool], int],
        recompute: bool,
    ) -> None:
        self.limits = limits
        self._grid_of = grid_of
        self._bytes_of = bytes_of
        self._recompute = recompute

    def choose(self, probes: Sequence[Probe], *, shared_memory: bool, first: bool = False) -> World | None:
        """The best world that these workers can form; None if there is none.

        Args:
            probes: of the healthy workers.
            shared_memory: the ranks of a node share its memory (CPU); else each has its own.
            first: at the start of the run the wanted world is taken without judging its memory.
        """
        room: dict[str, int] = {}
        memory: dict[str, int] = {}
        for probe in probes:
            room[probe.node_id] = room.get(probe.node_id, 0) + 1
            memory[probe.node_id] = probe.memory
        for dp, cp in worlds(len(probes), self.limits):
            grid = self._grid_of(dp, cp)
            takes = None if grid is None else share_out(room, grid.world_size, cp=grid.cp)
            if grid is None or takes is None:
                continue
            if first:
                return World(grid=grid, recompute=self._recompute, takes=takes)
            have = min(memory[n] // (takes[n] if shared_memory else 1) for n in takes if takes[n])
            for recompute in (self._recompute, True):
                if self._bytes_of(grid, recompute) <= have:
                    return World(grid=grid, recompute=recompute, takes=takes)
        return None
