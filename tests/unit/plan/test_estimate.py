"""Counts of a layout are those of the programs; estimates follow the figures."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycp.plan import AttentionPlan, CostModel, RankGrid, choose_grid
from raycp.plan.estimate import Counts, Estimate, _step_rows, count, estimate
from raycp.plan.layout import LAYOUTS, make_shards

COST = CostModel()


def counts_of(plan: AttentionPlan, block: int = 1) -> Counts:
    causal, window = plan.mask == "causal", plan.sliding_window
    shards = make_shards(plan.doc_ends, plan.grid.ring, plan.layout, causal=causal, window=window)
    return count(shards, plan.doc_ends, causal=causal, window=window, block=block)


def programs(plan: AttentionPlan) -> dict[str, npt.NDArray[np.float64]]:
    size = plan.grid.ring
    found = {name: np.zeros((size, size)) for name in ("entries", "rows", "calls", "queries")}
    for rank in range(size):
        for step in plan.program(rank).steps:
            at = rank, (rank - step.index) % size
            found["entries"][at] = sum(s.area for s in step.slices)
            found["rows"][at] = step.num_rows
            found["calls"][at] = len(step.slices)
            if step.index:
                found["queries"][at] = len({q for s in step.slices for q in range(s.q_start, s.q_stop)})
    return found


def check_counts(plan: AttentionPlan, counts: Counts) -> None:
    want = programs(plan)
    assert np.array_equal(counts.rows, want["rows"])
    assert np.allclose(counts.entries.sum(1), want["entries"].sum(1))
    assert counts.tokens.tolist() == [plan.num_tokens(rank) for rank in range(plan.grid.ring)]
    if plan.sliding_window is None:
        assert np.allclose(counts.entries, want["entries"])
        assert np.array_equal(counts.calls, want["calls"])
        assert np.array_equal(counts.queries, want["queries"])


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), max_size=8),
    ring=st.integers(1, 6),
    layout=st.sampled_from(LAYOUTS),
    mask=st.sampled_from(["causal", "full"]),
    window=st.none() | st.integers(1, 24),
)
def test_counts_are_those_of_the_programs(
    lengths: list[int], ring: int, layout: str, mask: str, window: int | None
) -> None:
    plan = AttentionPlan.build(
        np.cumsum(lengths).tolist(),
        RankGrid(1, ring),
        num_heads=4,
        num_kv_heads=2,
        layout=layout,
        algorithm="ring",
        mask=mask,
        sliding_window=window if mask == "causal" else None,
    )
    check_counts(plan, counts_of(plan))


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), max_size=8),
    ring=st.integers(1, 6),
    layout=st.sampled_from(LAYOUTS),
    mask=st.sampled_from(["causal", "full"]),
    window=st.none() | st.integers(1, 24),
)
def test_what_a_gathering_rank_computes_alone_is_known(
    lengths: list[int], ring: int, layout: str, mask: str, window: int | None
) -> None:
    plan = AttentionPlan.build(
        np.cumsum(lengths).tolist(),
        RankGrid(1, ring),
        num_heads=4,
        num_kv_heads=2,
        layout=layout,
        algorithm="allgather",
        mask=mask,
        sliding_window=window if mask == "causal" else None,
    )
    counts = counts_of(plan)
    programs = [plan.program(rank) for rank in range(ring)]
    assert np.allclose(counts.local, [sum(s.area for s in p.steps[0].slices) for p in programs])
    assert np.allclose(counts.entries.sum(1), [p.area for p in programs])
    assert np.array_equal(counts.rows.sum(1), [p.rows_received for p in programs])


@pytest.mark.parametrize("name", ["rows", "entries", "calls", "queries", "tokens"])
def test_a_wrong_count_is_seen(name: str) -> None:
    plan = AttentionPlan.build(
        [30, 64, 65], RankGrid(1, 3), num_heads=4, num_kv_heads=2, layout="zigzag", algorithm="ring"
    )
    counts = counts_of(plan)
    wrong = getattr(counts, name).copy()
    wrong[-1] += 1
    with pytest.raises(AssertionError):
        check_counts(plan, replace(counts, **{name: wrong}))


def test_a_blocked_kernel_computes_small_causal_slices_whole() -> None:
    plan = AttentionPlan.build([300, 600], RankGrid(1, 1), num_heads=1, num_kv_heads=1)
    assert counts_of(plan, block=512).masked.tolist() == [2 * 300 * 300 / 2]
    assert counts_of(plan).masked.tolist() == [0]


def one_document(cost: CostModel, grid: RankGrid, *, algorithm: str = "ring", length: int = 65_536) -> Estimate:
    plan = AttentionPlan.build([length], grid, num_heads=32, num_kv_heads=8, layout="zigzag")
    return estimate(counts_of(plan), grid, cost, algorithm=algorithm, num_heads=32, num_kv_heads=8)


@pytest.mark.parametrize(
    ("grid", "algorithm", "bound"),
    [
        (RankGrid(1, 8), "ring", lambda e: e.exposed == 0),
        (RankGrid(1, 8), "allgather", lambda e: e.exposed > 0),
        (RankGrid(1, 1, 8), "ulysses", lambda e: e.exposed > 0),
        (RankGrid(1, 1), "ring", lambda e: e.exposed == 0 and e.block_bytes == 0),
    ],
)
def test_what_is_hidden(grid: RankGrid, algorithm: str, bound: Callable[[Estimate], bool]) -> None:
    """A long document's ring traffic is hidden; the first head of an all-gather and a trade of heads never are."""
    assert bound(one_document(CostModel.named("h100", device="cuda"), grid, algorithm=algorithm))


def test_a_slower_link_a_slower_kernel_and_more_latency_cost_time() -> None:
    base = one_document(COST, RankGrid(1, 4), length=1024).seconds
    for worse in ({"bandwidth": 1e7}, {"flops": 1e10}, {"latency": 1e-1}, {"call_seconds": 1e-2}):
        assert one_document(replace(COST, **worse), RankGrid(1, 4), length=1024).seconds > base


def test_traffic_between_nodes_goes_over_the_slower_link() -> None:
    slow = replace(COST, ranks_per_node=4, inter_bandwidth=1e6)
    assert one_document(slow, RankGrid(1, 4), length=4096).exposed < 1
    assert one_document(slow, RankGrid(1, 8), length=4096).exposed > 1
    assert one_document(slow, RankGrid(1, 1, 4), length=4096).exposed < 1


def test_a_ulysses_group_across_two_nodes_goes_over_the_slower_link() -> None:
    """Groups of 3 on nodes of 4: ranks 3, 4, 5 are on two nodes."""
    slow = replace(COST, ranks_per_node=4, inter_bandwidth=1e6)
    across = one_document(slow, RankGrid(1, 2, 3), length=4096).exposed
    inside = one_document(replace(slow, ranks_per_node=3), RankGrid(1, 2, 3), length=4096).exposed
    assert across > 1.5 * inside


def test_a_double_ring_crosses_nodes_less_often() -> None:
    """8 ranks on nodes of 2: every rank's blocks cross, in a single ring; in windows of 2, one pull in two."""
    slow = replace(COST, ranks_per_node=2, inter_bandwidth=1e6)
    single, double = one_document(slow, RankGrid(1, 8)), one_document(slow, RankGrid(1, 8, 1, 2))
    assert 0 < double.exposed < 0.75 * single.exposed
    assert double.compute == pytest.approx(single.compute)
    assert double.block_bytes > single.block_bytes
    assert choose_grid(8, 4, 4, 65_536, slow, algorithm="ring", window=None).grid.window == 2


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_ring_meets_every_owner_once(window: int) -> None:
    """Whose rows a step uses, who sends them and to whom, as in the programs of the plan."""
    plan = AttentionPlan.build(
        [600], RankGrid(1, 6, 1, window), num_heads=4, num_kv_heads=2, layout="zigzag", algorithm="ring"
    )
    counts = counts_of(plan)
    for i in range(1, 6):
        source, provider, target, incoming = _step_rows(counts.rows, 6 if window == 1 else window, i)
        for rank in range(6):
            step = plan.program(rank).steps[i]
            assert [t.peer for t in step.receives] == [provider[rank]]
            assert [t.peer for t in step.sends] == [target[rank]]
            assert step.num_rows == pytest.approx(incoming[rank], rel=0.5)
            assert sum(s.area for s in step.slices) == counts.entries[rank, source[rank]]


def test_memory_of_a_zigzag_ring() -> None:
    """Two blocks of what a rank needs of another, 3/4 of its rows on average; a cache keeps all of them."""
    e = one_document(COST, RankGrid(1, 8))
    row = 8 * 2 * 128 * COST.itemsize
    assert e.block_bytes == 2 * 8192 * row
    assert e.cache_bytes == 7 * 8192 * row
    assert e.rows == pytest.approx(1.0)  # of the busiest rank; 3/4 in the mean


def test_named_figures() -> None:
    assert CostModel.named("auto", device="npu") == CostModel.named("910b", device="cpu")
    mine = CostModel.named("910b, bandwidth=5.6e10, links=1, one_call=0", device="npu")
    assert (mine.bandwidth, mine.links, mine.one_call, mine.flops) == (5.6e10, 1, False, 2e14)
    assert CostModel.named("latency=0", device="cpu") == CostModel(latency=0)


def test_the_smallest_chunk_of_a_ring() -> None:
    """2 bytes x 2e14 FLOP/s over one link of 25 GB/s; a quarter of it with 4 query heads to a key/value head."""
    npu = CostModel.named("910b", device="npu")
    assert npu.smallest_ring_chunk() == 16_000
    assert npu.smallest_ring_chunk(heads_per_kv_head=4) == 4000
    assert npu.smallest_ring_chunk(inter=True) == 20_000
    assert npu.smallest_ring_chunk(inter=True, window=8) == 2500


@pytest.mark.parametrize(
    ("ranks", "block"),
    [((8,), 8), ((8, 8), 8), ((8, 8, 3), 8), ((4, 0, 4), 4), ((5, 3), 5), ((3, 5), 1), ((8, 4, 8), 4), ((6, 9), 3)],
)
def test_ranks_of_a_block_never_lie_on_two_nodes(ranks: tuple[int, ...], block: int) -> None:
    assert CostModel().on_nodes(ranks).ranks_per_node == block
    home = np.repeat(np.arange(len(ranks)), ranks)
    assert all(len(set(home[n : n + block].tolist())) == 1 for n in range(0, len(home), block))
    assert CostModel().on_nodes(()) == CostModel()
