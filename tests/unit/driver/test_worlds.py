"""Worlds for the live workers: nodes kept whole, memory judged, recomputation before a smaller world."""

import pytest

from raycp.driver.placement import share_out
from raycp.driver.worlds import Worlds
from raycp.plan import CostModel, GridChoice, RankGrid
from raycp.plan.resize import WorldLimits
from workers.messages import Probe

LIMITS = WorldLimits(cp=(1, 4), dp=(1, 2), workers=(1, 8), wanted=(1, 4))


def probes(memory: int = 100, **nodes: int) -> list[Probe]:
    return [
        Probe(node_id=n, address=n, pid=i, accelerators=(), cpu_count=1, memory=memory)
        for n, count in nodes.items()
        for i in range(count)
    ]


def chooser(plain: int, recomputed: int, limits: WorldLimits = LIMITS) -> Worlds:
    """Ranks take `plain` / cp bytes, or `recomputed` / cp."""
    return Worlds(
        limits,
        grid_of=lambda dp, cp, cost: None if cp == 3 else GridChoice(RankGrid(dp=dp, ring=cp), ()),  # of the window
        cost_of=lambda node_ranks: CostModel().on_nodes(node_ranks),
        bytes_of=lambda grid, recompute: (recomputed if recompute else plain) // grid.cp,
        recompute=False,
    )


def test_a_degree_without_a_grid_is_passed_over() -> None:
    world = chooser(1, 1).choose(probes(a=3), shared_memory=False)
    assert world is not None
    assert (world.grid.dp, world.grid.cp) == (1, 2)


def test_recomputation_comes_before_a_smaller_world() -> None:
    roomy, tight = chooser(400, 100), chooser(800, 400)
    first = roomy.choose(probes(a=4), shared_memory=False)
    assert first is not None
    assert not first.recompute
    second = tight.choose(probes(a=4), shared_memory=False)
    assert second is not None
    assert (second.grid.world_size, second.recompute) == (4, True)


def test_nothing_fits_where_memory_is_short_but_the_first_world_is_not_judged() -> None:
    chooser_ = chooser(10_000, 10_000)
    assert chooser_.choose(probes(a=4), shared_memory=False) is None
    assert chooser_.choose(probes(a=4), shared_memory=False, first=True) is not None


def test_ranks_of_one_node_share_its_memory_on_cpu() -> None:
    chooser_ = chooser(400, 400)
    assert chooser_.choose(probes(a=4), shared_memory=False) is not None
    assert chooser_.choose(probes(a=4), shared_memory=True) is None
    assert chooser_.choose(probes(a=1, b=1, c=1, d=1), shared_memory=True) is not None


@pytest.mark.parametrize(
    ("room", "workers", "cp", "takes"),
    [
        ({"a": 2, "b": 3}, 4, 2, {"a": 2, "b": 2}),
        ({"a": 3, "b": 3}, 4, 2, {"a": 2, "b": 2}),
        ({"a": 4, "b": 4}, 4, 4, {"a": 4, "b": 0}),
        ({"a": 1, "b": 3}, 4, 4, {"a": 1, "b": 3}),
        ({"a": 1, "b": 1}, 3, 1, None),
    ],
)
def test_a_group_is_cut_over_nodes_only_where_it_must_be(
    room: dict[str, int], workers: int, cp: int, takes: dict[str, int] | None
) -> None:
    assert share_out(room, workers, cp=cp) == takes


def test_the_figures_of_the_first_placement_stay() -> None:
    """A spare on another node changed what "auto" chose, and the same world computed other bits."""
    chooser_ = chooser(1, 1)
    first = chooser_.choose(probes(a=2, b=2), shared_memory=False, first=True)
    assert first is not None
    assert (first.node_ranks, first.cost.ranks_per_node) == ((2, 2), 2)
    chooser_.settle(first.node_ranks)
    moved = chooser_.choose(probes(a=3, c=1), shared_memory=False)
    assert moved is not None
    assert (moved.node_ranks, moved.cost) == ((3, 1), first.cost)


def test_the_first_world_leaves_spares_alone_also_where_the_run_may_grow() -> None:
    limits = WorldLimits(cp=(1, 4), dp=(1, 2), workers=(1, 8), wanted=(1, 4))
    world = chooser(1, 1, limits).choose(probes(a=6), shared_memory=False, first=True)
    assert world is not None
    assert world.grid.world_size == 4
