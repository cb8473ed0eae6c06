"""Ranks that would obey different plans find out before anything moves."""

import pytest
import torch

from raycp.attention import Carrier, InMemoryWorld
from raycp.attention.communicator import Communicator
from raycp.errors import PlanError
from raycp.plan import AttentionPlan, CostModel, RankGrid
from tests.unit.attention.cases import groups_in_memory

GRIDS = [RankGrid(1, 3), RankGrid(1, 1, 2), RankGrid(1, 2, 2)]


def _plan(grid: RankGrid, **options: object) -> AttentionPlan:
    return AttentionPlan.build([20, 44], grid, **{"num_heads": 4, "num_kv_heads": 2, "layout": "zigzag", **options})  # type: ignore[arg-type]


def _attend(grid: RankGrid, odd_rank: int, odd: AttentionPlan) -> list[int]:
    """Bytes that each rank's attention sends when one rank has the plan `odd`."""
    world = InMemoryWorld(grid.cp)
    sent: list[int] = [0] * grid.cp

    def rank(whole: Communicator) -> None:
        plan = odd if whole.rank == odd_rank else _plan(grid)
        carrier = Carrier(plan, groups_in_memory(world, grid, whole.rank))
        rows = plan.num_tokens(whole.rank)
        carrier.attend(0, torch.randn(rows, 4, 8), torch.randn(rows, 2, 8), torch.randn(rows, 2, 8), 0.3)
        sent[whole.rank] = carrier.stats.bytes_sent

    world.run(rank)
    return sent


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_equal_plans_agree_whatever_their_cost_figures(grid: RankGrid) -> None:
    assert sum(_attend(grid, 1, _plan(grid, cost=CostModel(flops=1.0)))) > 0


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("odd_rank", [0, 1])
def test_another_plan_on_one_rank_is_an_error(grid: RankGrid, odd_rank: int) -> None:
    """Planted fault: a window that the others do not have; shapes are the same, so nothing else would notice."""
    with pytest.raises(PlanError, match=r"has plan .* group has") as error:
        _attend(grid, odd_rank, _plan(grid, sliding_window=5))
    assert "every rank" in error.value.fix


def test_plans_by_kind_are_compared_too() -> None:
    grid = RankGrid(1, 2)
    world = InMemoryWorld(2)

    def rank(whole: Communicator) -> None:
        window = 5 + whole.rank
        plans = {"full_attention": _plan(grid), "sliding_attention": _plan(grid, sliding_window=window)}
        rows = plans["full_attention"].num_tokens(whole.rank)
        carrier = Carrier(plans, groups_in_memory(world, grid, whole.rank))
        tensors = (torch.randn(rows, heads, 8) for heads in (4, 2, 2))
        carrier.attend(0, *tensors, 0.3, kind="full_attention")

    with pytest.raises(PlanError, match="has plan"):
        world.run(rank)
