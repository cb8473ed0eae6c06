"""What a plan says about itself is what it does."""

import pytest

from raycp.plan import AttentionPlan, RankGrid
from raycp.plan.explain import rows_held


def plan_of(grid: RankGrid, algorithm: str = "auto") -> AttentionPlan:
    return AttentionPlan.build([8000], grid, num_heads=16, num_kv_heads=8, layout="zigzag", algorithm=algorithm)


def column(plan: AttentionPlan, name: str) -> list[float]:
    """A column of the table, whose names have a unit in some places."""
    lines = plan.explain(head_dim=128, itemsize=2).splitlines()
    stop = lines[1].index(name) + len(name)
    start = lines[1].rindex("  ", 0, lines[1].index(name) + 1) if name != "rank" else 0
    return [float(line[start:stop].split()[-1]) for line in lines[2 : 2 + plan.grid.cp]]


def test_two_blocks_of_a_ring_and_three_of_a_double_ring() -> None:
    ring, double = plan_of(RankGrid(1, 8), "ring"), plan_of(RankGrid(1, 8, 1, 2), "ring")
    assert rows_held(ring.program(0)) == 2 * 1000
    assert rows_held(double.program(0)) == 3 * 1000
    assert rows_held(plan_of(RankGrid(1, 1)).program(0)) == 0


def test_the_table_is_the_plans() -> None:
    for plan in (plan_of(RankGrid(1, 4), "ring"), plan_of(RankGrid(1, 2, 2)), plan_of(RankGrid(1, 4), "allgather")):
        assert column(plan, "tokens") == [plan.num_tokens(rank) for rank in range(4)]
        assert column(plan, "entries") == [plan.work(rank) for rank in range(4)]
        sent = [plan.bytes_moved(rank, head_dim=128) / 2**20 for rank in range(4)]
        assert column(plan, "sent MiB") == pytest.approx(sent, abs=0.06)


def test_memory_is_in_bytes_of_the_heads_of_a_rank() -> None:
    row = 8 * 2 * 128 * 2 / 2**20
    ring, gather = plan_of(RankGrid(1, 8), "ring"), plan_of(RankGrid(1, 8), "allgather")
    assert column(ring, "held MiB")[0] == pytest.approx(2000 * row, abs=0.06)
    assert column(ring, "cache MiB")[0] == pytest.approx(7000 * row, abs=0.06)
    groups = len(gather.head_groups())
    assert groups > 1
    assert column(gather, "held MiB")[0] == pytest.approx(7000 * row * 2 / groups, abs=0.06)
