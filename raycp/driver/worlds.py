"""Which world the live workers form: degrees within the limits, a grid that exists, memory that suffices.

Guarantees: the best world is taken in the order of `raycp.plan.resize`; one whose ranks would not fit into memory is
taken with recomputation of layers if that fits, else skipped. Deciding costs milliseconds and touches nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from raycp.driver.placement import share_out
from raycp.plan import CostModel, GridChoice, RankGrid
from raycp.plan.resize import WorldLimits, worlds
from workers.messages import Probe


@dataclass(frozen=True, kw_only=True)
class World:
    """A world to run.

    Attributes:
        grid: dp x ring x ulysses.
        reason: why it has that shape.
        recompute: layers are recomputed in backward.
        takes: {node id: ranks there}.
        cost: figures that layouts and algorithms of packs are chosen by.
        node_ranks: ranks of each node, in the order of the ranks.
    """

    grid: RankGrid
    reason: str
    recompute: bool
    takes: dict[str, int]
    cost: CostModel
    node_ranks: tuple[int, ...]


class Worlds:
    """Chooses worlds for one run.

    Args:
        limits: of degrees and workers.
        grid_of: (dp, cp, figures) -> grid and the reason, or None if no grid of these degrees can run the model.
        cost_of: ranks of each node -> figures.
        bytes_of: (grid, recompute) -> bytes of memory that one rank takes.
        recompute: what the configuration asks for when memory is no question.
    """

    def __init__(
        self,
        limits: WorldLimits,
        *,
        grid_of: Callable[[int, int, CostModel], GridChoice | None],
        cost_of: Callable[[tuple[int, ...]], CostModel],
        bytes_of: Callable[[RankGrid, bool], int],
        recompute: bool,
    ) -> None:
        self.limits = limits
        self._grid_of = grid_of
        self._cost_of = cost_of
        self._settled: CostModel | None = None
        self._bytes_of = bytes_of
        self._recompute = recompute

    def settle(self, node_ranks: Sequence[int]) -> None:
        """The placement that the run began with: its figures stay, wherever ranks move. Else a spare on another node
        would change what "auto" chooses, and a world of the same size would not compute the same bits.
        """
        self._settled = self._cost_of(tuple(node_ranks))

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
        wanted_dp, wanted_cp = self.limits.wanted
        usable = min(len(probes), wanted_dp * wanted_cp) if first else len(probes)
        for dp, cp in worlds(usable, self.limits):
            takes = share_out(room, dp * cp, cp=cp)
            if takes is None:
                continue
            node_ranks = tuple(takes[n] for n in room if takes[n])
            cost = self._settled or self._cost_of(node_ranks)
            choice = self._grid_of(dp, cp, cost)
            if choice is None:
                continue
            world = World(
                grid=choice.grid,
                reason=choice.reason,
                recompute=self._recompute,
                takes=takes,
                cost=cost,
                node_ranks=node_ranks,
            )
            if first:
                return world
            have = min(memory[n] // (takes[n] if shared_memory else 1) for n in takes if takes[n])
            for recompute in (self._recompute, True):
                if self._bytes_of(world.grid, recompute) <= have:
                    return replace(world, recompute=recompute)
        return None
