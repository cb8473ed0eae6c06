import dataclasses
import pickle
import subprocess
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycp.errors import PlanError
from raycp.plan import AttentionPlan, CostModel, MaskKind, Range, RankGrid, RankProgram, Slice, Transfer, query_runs
from raycp.plan.layout import LAYOUTS

SCHEDULES = [
    *((ring, 1, "ring") for ring in range(1, 7)),
    *((ring, 1, "allgather") for ring in range(1, 7)),
    *((4, 2, "ring"), (6, 2, "ring"), (6, 3, "ring"), (8, 4, "ring"), (9, 3, "ring"), (3, 3, "ring")),
]
"""Ranks, ranks of a window, algorithm."""
plans = st.builds(
    lambda lengths, schedule, layout, mask, window: build(
        lengths, schedule[0], layout, mask, window if mask == "causal" else None, schedule[1], schedule[2]
    ),
    st.lists(st.integers(1, 20), min_size=0, max_size=7),
    st.sampled_from(SCHEDULES),
    st.sampled_from(LAYOUTS),
    st.sampled_from(["causal", "full"]),
    st.none() | st.integers(1, 24),
)


def build(
    lengths: list[int],
    ring: int,
    layout: str = "auto",
    mask: str = "causal",
    window: int | None = None,
    inner: int = 1,
    algorithm: str = "ring",
    **options: Any,
) -> AttentionPlan:
    return AttentionPlan.build(
        np.cumsum(lengths).tolist(),
        RankGrid(1, ring, window=inner),
        num_heads=4,
        num_kv_heads=2,
        layout=layout,
        mask=mask,
        sliding_window=window,
        algorithm=algorithm,
        **options,
    )


def visible_pairs(plan: AttentionPlan) -> npt.NDArray[np.int64]:
    """What the mask says, by brute force."""
    document = np.searchsorted(plan.doc_ends, np.arange(plan.pack_length), side="right")
    same = document[:, None] == document[None, :]
    if plan.sliding_window is not None:
        same = np.triu(same, 1 - plan.sliding_window)
    return np.tril(same).astype(np.int64) if plan.mask == "causal" else same.astype(np.int64)


def blocks_of(plan: AttentionPlan, programs: list[RankProgram]) -> list[list[npt.NDArray[np.int64]]]:
    """Global positions of the rows of each rank's K/V block of each step, as the transfers bring them."""
    blocks = [[plan.token_index(rank)] for rank in range(plan.grid.cp)]
    for index in range(1, len(programs[0].steps)):
        for rank, program in enumerate(programs):
            step = program.steps[index]
            block = np.full(step.block_rows, -1, dtype=np.int64)
            for own, place in step.own:
                block[place.start : place.stop] = blocks[rank][0][own.start : own.stop]
            for transfer, places in step.arrivals():
                there = blocks[transfer.peer][programs[transfer.peer].steps[index].source]
                rows = np.concatenate([there[r.start : r.stop] for r in transfer.rows])
                block[np.concatenate([np.arange(r.start, r.stop) for r in places])] = rows
            assert (block >= 0).all()
            blocks[rank].append(block)
    return blocks


def computed_pairs(plan: AttentionPlan, programs: list[RankProgram]) -> npt.NDArray[np.int64]:
    """How often each (query, key) pair is computed when all ranks run `programs`."""
    count = np.zeros((plan.pack_length, plan.pack_length), dtype=np.int64)
    blocks = blocks_of(plan, programs)
    for rank, program in enumerate(programs):
        for step in program.steps:
            for s in step.slices:
                q, k = blocks[rank][0][s.q_start : s.q_stop], blocks[rank][step.index][s.k_start : s.k_stop]
                assert len(q) == s.q_stop - s.q_start
                assert len(k) == s.k_stop - s.k_start
                count[np.ix_(q, k)] += entries(s)
    return count


def own_pairs(program: RankProgram) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """How often each pair of the own shard is computed: forward, and by the parts of backward."""
    forward, backward = (np.zeros((program.num_tokens, program.num_tokens), dtype=np.int64) for _ in range(2))
    for s in program.steps[0].slices:
        forward[s.q_start : s.q_stop, s.k_start : s.k_stop] += entries(s)
    for part in program.own:
        keys = backward[:, part.keys.start : part.keys.stop]
        for s in part.slices:
            keys[s.q_start : s.q_stop, s.k_start : s.k_stop] += entries(s)
    return forward, backward


def gradients_home(plan: AttentionPlan, programs: list[RankProgram]) -> list[npt.NDArray[np.int64]]:
    """What each rank's rows collect if each rank adds, for each block row that it computes with, 1 << its rank."""
    blocks = blocks_of(plan, programs)
    sums = [[np.zeros(len(b), dtype=np.int64) for b in mine] for mine in blocks]
    for rank, program in enumerate(programs):
        for step in program.steps:
            for row in {x for s in step.slices for x in range(s.k_start, s.k_stop)}:
                sums[rank][step.index][row] += 1 << rank
    steps = programs[0].steps
    order = sorted(steps[1:], key=lambda step: (step.settled, step.outer, step.index))
    for step in order:
        sent = [
            {t.peer: np.concatenate([sums[rank][step.index][r.start : r.stop] for r in t.rows]) for t in p.returns}
            for rank, p in ((rank, program.steps[step.index]) for rank, program in enumerate(programs))
        ]
        for rank, program in enumerate(programs):
            mine = program.steps[step.index]
            for own, place in mine.own:
                sums[rank][0][own.start : own.stop] |= sums[rank][step.index][place.start : place.stop]
            for t in mine.collects:
                rows = np.concatenate([np.arange(r.start, r.stop) for r in t.rows])
                sums[rank][mine.into][rows] += sent[t.peer].pop(rank)
        assert not any(sent), "gradients that nobody collects"
    return [mine[0] for mine in sums]


def entries(s: Slice) -> npt.NDArray[np.int64]:
    """The block as a dense 0 / 1 matrix."""
    distance = np.arange(s.k_stop - s.k_start)[None, :] - np.arange(s.q_stop - s.q_start)[:, None]
    low, high = {
        MaskKind.FULL: (-(1 << 40), 1 << 40),
        MaskKind.CAUSAL: (-(1 << 40), 0),
        MaskKind.DIAGONAL: (0, 0),
        MaskKind.BAND: (s.lower, s.upper),
    }[s.kind]
    return ((low <= distance) & (distance <= high)).astype(np.int64)


def check_pairs(plan: AttentionPlan, programs: list[RankProgram]) -> None:
    assert np.array_equal(computed_pairs(plan, programs), visible_pairs(plan))
    for program in programs:
        if program.own:
            forward, backward = own_pairs(program)
            assert np.array_equal(forward, backward), "backward computes another own block than forward"
            for part in program.own:
                assert part.slices
                assert [s.q_start for s in part.slices] == sorted(s.q_start for s in part.slices)


def check_transfers(plan: AttentionPlan, programs: list[RankProgram]) -> None:
    """Each send meets its receive in the same step; what is computed with is what some query of the receiver sees."""
    visible = visible_pairs(plan)
    blocks = blocks_of(plan, programs)
    for rank, program in enumerate(programs):
        own = set(blocks[rank][0].tolist())
        needed = set(np.flatnonzero(visible[blocks[rank][0]].any(0)).tolist()) - own
        used = [
            int(x)
            for step in program.steps[1:]
            for x in blocks[rank][step.index][sorted({x for s in step.slices for x in range(s.k_start, s.k_stop)})]
        ]
        assert len(used) == len(set(used))
        assert set(used) - own == needed
        if plan.grid.window in (1, plan.grid.ring):
            assert program.rows_received == program.rows_returned == len(needed)
        for step in program.steps:
            assert step.source <= step.posted < max(step.index, 1)
            for t in step.receives:
                assert Transfer(rank, t.rows) in programs[t.peer].steps[step.index].sends
                assert all(a.stop < b.start for a, b in zip(t.rows, t.rows[1:], strict=False))
            starts = [s.q_start for s in step.slices]
            assert starts == sorted(starts)
            assert all(entries(s).sum() == s.area for s in step.slices)
            assert all(entries(s).any(1).all() for s in step.slices), "a query of a slice sees no key"
            queries = [x for s in step.slices for x in range(s.q_start, s.q_stop)]
            if plan.sliding_window is None or plan.algorithm == "allgather":
                assert len(queries) == len(set(queries)), "a query row is in two slices of a step"
    assert sum(p.rows_sent for p in programs) == sum(p.rows_received for p in programs)
    for rank, sums in enumerate(gradients_home(plan, programs)):
        who = np.array([1 << r for r in range(plan.grid.cp)])
        readers = [visible[blocks[r][0]].any(0)[blocks[rank][0]] for r in range(plan.grid.cp)]
        assert np.array_equal(sums, who @ np.array(readers).reshape(plan.grid.cp, -1))


def programs_of(plan: AttentionPlan) -> list[RankProgram]:
    return [plan.program(rank) for rank in range(plan.grid.cp)]


@settings(max_examples=300, deadline=None)
@given(plan=plans)
def test_every_visible_pair_is_computed_exactly_once(plan: AttentionPlan) -> None:
    programs = programs_of(plan)
    check_pairs(plan, programs)
    areas = sum(plan.work(rank) for rank in range(plan.grid.cp))
    assert areas == visible_pairs(plan).sum() * plan.num_heads


@settings(max_examples=300, deadline=None)
@given(plan=plans)
def test_needed_rows_move_once_and_nothing_else(plan: AttentionPlan) -> None:
    programs = programs_of(plan)
    check_transfers(plan, programs)
    row = plan.num_kv_heads * (8 + 6)
    for rank, program in enumerate(programs):
        forward = plan.bytes_moved(rank, head_dim=8, value_dim=6, itemsize=2)
        backward = plan.bytes_moved(rank, head_dim=8, value_dim=6, itemsize=2, direction="backward")
        assert forward == program.rows_sent * row * 2
        assert backward == forward + program.rows_returned * row * 4


def rows_into_windows(plan: AttentionPlan, programs: list[RankProgram], inner: int) -> int:
    """K/V rows that cross from one window to another."""
    return sum(
        t.num_rows
        for rank, program in enumerate(programs)
        for step in program.steps
        for t in step.receives
        if t.peer // inner != rank // inner
    )


@settings(max_examples=100, deadline=None)
@given(plan=plans.filter(lambda plan: plan.grid.window not in (1, plan.grid.ring)))
def test_a_row_enters_a_window_once(plan: AttentionPlan) -> None:
    inner, visible = plan.grid.window, visible_pairs(plan)
    held = [plan.token_index(rank) for rank in range(plan.grid.ring)]
    needed = 0
    for home in range(0, plan.grid.ring, inner):
        own = np.concatenate(held[home : home + inner])
        needed += len(set(np.flatnonzero(visible[own].any(0)).tolist()) - set(own.tolist()))
    programs = programs_of(plan)
    assert rows_into_windows(plan, programs, inner) == needed
    for program in programs:
        assert all(step.posted == step.index - inner for step in program.steps if step.outer)


def test_direct_pull_would_multiply_what_enters_a_window() -> None:
    """A full mask on 4 windows of 4: each row enters 3 windows once; by direct pull each of their ranks fetches it."""
    double, single = (build([160], 16, "contiguous", "full", None, inner) for inner in (4, 1))
    assert rows_into_windows(double, programs_of(double), 4) == 3 * 160
    assert rows_into_windows(single, programs_of(single), 4) == 4 * 3 * 160


def _without_a_slice(program: RankProgram) -> RankProgram:
    last = program.steps[-1]
    return dataclasses.replace(program, steps=(*program.steps[:-1], dataclasses.replace(last, slices=last.slices[1:])))


def _with_a_slice_twice(program: RankProgram) -> RankProgram:
    last = program.steps[-1]
    doubled = dataclasses.replace(last, slices=(*last.slices, last.slices[0]))
    return dataclasses.replace(program, steps=(*program.steps[:-1], doubled))


def _with_a_leaked_key(program: RankProgram) -> RankProgram:
    own = program.steps[0]
    s = own.slices[-1]
    leaked = dataclasses.replace(s, k_start=s.k_start - 1, q_start=s.q_start - 1)
    first = dataclasses.replace(own, slices=(*own.slices[:-1], leaked))
    return dataclasses.replace(program, steps=(first, *program.steps[1:]))


def _with_other_rows(program: RankProgram) -> RankProgram:
    last = program.steps[-1]
    (transfer,) = last.receives
    first = transfer.rows[0]
    moved = Transfer(transfer.peer, (Range(first.start + 1, first.stop + 1), *transfer.rows[1:]))
    return dataclasses.replace(program, steps=(*program.steps[:-1], dataclasses.replace(last, receives=(moved,))))


def _with_half_an_own_block(program: RankProgram) -> RankProgram:
    return dataclasses.replace(program, own=program.own[:1])


FAULTS = [_without_a_slice, _with_a_slice_twice, _with_a_leaked_key, _with_other_rows, _with_half_an_own_block]


@pytest.mark.parametrize("fault", FAULTS)
def test_checks_see_planted_faults(fault) -> None:  # type: ignore[no-untyped-def]
    plan = build([10, 30, 12], 3, "balanced")
    programs = programs_of(plan)
    check_pairs(plan, programs)
    check_transfers(plan, programs)
    programs[1] = fault(programs[1])
    with pytest.raises(AssertionError):
        check_pairs(plan, programs)
    if fault is _with_other_rows:
        with pytest.raises(AssertionError):
            check_transfers(plan, programs)


def test_backward_keeps_half_of_the_own_block_for_last_where_gradients_return_last() -> None:
    for lengths, cut in (([3000], True), ([600] * 5, True), ([40, 3000, 10], True)):
        for program in programs_of(build(lengths, 2, "zigzag")):
            shares = [
                sum(s.area for s in part.slices) / sum(s.area for s in program.steps[0].slices) for part in program.own
            ]
            assert all(0.39 < share < 0.61 for share in shares) == cut
    assert not any(p.own for p in programs_of(build([1500] * 2, 2, "contiguous"))), "nothing travels"


def test_bounds_between_documents_are_preferred_to_cuts() -> None:
    whole = build([500] * 4, 2, "zigzag").program(0)
    assert [len(part.slices) for part in whole.own] == [2, 2]
    assert [part.keys for part in whole.own] == [Range(0, 500), Range(500, 1000)]
    first, last = build([2000], 2, "zigzag").program(0).own
    assert [s.kind for part in (first, last) for s in part.slices] == [MaskKind.CAUSAL, MaskKind.BAND]


@pytest.mark.parametrize("kind", list(MaskKind))
def test_a_slice_cut_anywhere_has_the_same_pairs(kind: MaskKind) -> None:
    wide = 12 if kind in (MaskKind.CAUSAL, MaskKind.DIAGONAL) else 15
    s = Slice(2, 14, 5, 5 + wide, kind, -4, 3)
    dense = np.zeros((20, 25), dtype=np.int64)
    dense[s.q_start : s.q_stop, s.k_start : s.k_stop] = entries(s)
    for rows in range(1, 12):
        both = np.zeros_like(dense)
        for part in s.cut(rows):
            assert part.area == entries(part).sum()
            both[part.q_start : part.q_stop, part.k_start : part.k_stop] += entries(part)
        assert np.array_equal(both, dense)


def test_runs_of_queries_leave_out_what_is_far() -> None:
    rows = [(0, 4), (4, 9), (50, 60), (200, 201), (190 + 64 + 12, 300)]
    runs = query_runs([Slice(a, b, 0, 1, MaskKind.FULL) for a, b in rows])
    assert list(runs) == [slice(0, 60), slice(200, 201), slice(266, 300)]
    assert list(query_runs([])) == []


def test_zigzag_takes_one_block_per_document_and_step() -> None:
    plan = build([64, 80], 4, "zigzag")
    for rank in range(4):
        own, *others = plan.program(rank).steps
        assert [s.kind for s in own.slices] == [MaskKind.CAUSAL] * 2
        for step in others:
            assert len(step.slices) == 2
            earlier = (rank - step.index) % 4 < rank
            total = {s.q_stop - s.q_start for s in step.slices}
            assert total == ({16, 20} if earlier else {8, 10})


def test_a_run_of_single_rows_is_one_block() -> None:
    plan = build([4] + [1] * 100 + [4] + [1], 1)
    kinds = [(s.q_start, s.q_stop, s.kind.value) for s in plan.program(0).steps[0].slices]
    assert kinds == [(0, 4, "causal"), (4, 104, "diagonal"), (104, 108, "causal"), (108, 109, "diagonal")]
    assert plan.program(0).area == 10 + 100 + 10 + 1


def test_window_moves_and_computes_only_what_it_shows() -> None:
    wide, narrow = (build([4096], 4, "contiguous", window=w) for w in (None, 64))
    assert narrow.bytes_moved(1, head_dim=8) == 63 * 2 * 16 * 2
    assert narrow.bytes_moved(3, head_dim=8) == 0
    assert wide.bytes_moved(0, head_dim=8) == 3 * 1024 * 2 * 16 * 2
    assert sum(narrow.work(rank) for rank in range(4)) == 4 * (4096 * 64 - 64 * 63 // 2)
    assert "window 64" in narrow.explain()


def test_zigzag_balances_one_long_document() -> None:
    plan = build([4096], 8, "zigzag")
    work = [plan.work(rank) for rank in range(8)]
    assert max(work) - min(work) <= 0.001 * max(work)
    contiguous = build([4096], 8, "contiguous")
    assert max(contiguous.work(rank) for rank in range(8)) > 1.8 * max(work)


def test_documents_inside_one_rank_move_nothing() -> None:
    plan = build([8, 8, 8, 8], 4, "contiguous")
    assert all(plan.bytes_moved(rank, head_dim=64) == 0 for rank in range(4))


@pytest.mark.parametrize(
    ("grid", "algorithm"), [(RankGrid(1, 4), "ring"), (RankGrid(1, 1, 4), "ulysses"), (RankGrid(1, 2, 2), "hybrid")]
)
def test_auto_is_what_the_grid_says(grid: RankGrid, algorithm: str) -> None:
    plan = AttentionPlan.build([30, 41], grid, num_heads=9, num_kv_heads=3)
    assert plan.algorithm == algorithm
    assert np.array_equal(np.sort(np.concatenate([plan.token_index(r) for r in range(4)])), np.arange(41))
    pairs = visible_pairs(plan).sum()
    assert sum(plan.work(rank) for rank in range(4)) == pairs * 9
    assert [plan.num_tokens(rank) for rank in range(4)] == [len(plan.token_index(rank)) for rank in range(4)]


def test_hash_names_everything_that_decides_the_plan() -> None:
    base = {
        "doc_ends": [3, 7, 8],
        "grid": RankGrid(1, 2),
        "num_heads": 4,
        "num_kv_heads": 2,
        "layout": "balanced",
        "algorithm": "ring",
    }
    first = AttentionPlan.build(**base)
    assert first.hash == AttentionPlan.build(**base).hash
    assert first.hash == AttentionPlan.build(**base, cost=CostModel(flops=1.0)).hash
    auto = AttentionPlan.build(**{**base, "layout": "auto", "algorithm": "auto"})
    assert auto.hash == AttentionPlan.build(**{**base, "layout": auto.layout, "algorithm": auto.algorithm}).hash
    others = [
        {"doc_ends": [3, 6, 8]},
        {"grid": RankGrid(2, 2)},
        {"grid": RankGrid(1, 3)},
        {"grid": RankGrid(1, 1, 2), "algorithm": "ulysses"},
        {"num_heads": 8},
        {"num_kv_heads": 1},
        {"layout": "contiguous"},
        {"mask": "full"},
        {"sliding_window": 2},
        {"sliding_window": 3},
        {"algorithm": "allgather"},
        {"kv_cache": "half"},
        {"kv_cache": "full"},
        {"balance": [(2, 1), (None, 3)]},
    ]
    hashes = {AttentionPlan.build(**{**base, **other}).hash for other in others}
    assert len(hashes | {first.hash}) == len(others) + 1
    assert first == AttentionPlan.build(**base)


def test_plan_is_frozen_and_pickles_without_its_programs() -> None:
    plan = build([30, 12], 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.layout = "contiguous"  # type: ignore[misc]
    before = len(pickle.dumps(plan))
    plan.program(1)
    copy = pickle.loads(pickle.dumps(plan))
    assert len(pickle.dumps(plan)) <= before + 8
    assert copy == plan
    assert copy.program(1) == plan.program(1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_golden_pack(layout: str) -> None:
    plan = build([3, 4, 1], 2, layout)
    expected = {
        "zigzag": ([2, 3, 6, 7], [0, 1, 4, 5]),
        "contiguous": ([0, 1, 2, 3], [4, 5, 6, 7]),
        "balanced": ([0, 2, 3, 6], [1, 4, 5, 7]),
    }[layout]
    assert tuple(plan.token_index(rank).tolist() for rank in range(2)) == expected


def test_empty_pack_gives_every_rank_an_empty_program() -> None:
    plan = build([], 3)
    for rank in range(3):
        assert plan.num_tokens(rank) == 0
        assert plan.work(rank) == 0
        assert [step.slices for step in plan.program(rank).steps] == [()] * 3
    assert "0 tokens" in plan.explain()


def test_explain_has_a_line_per_rank() -> None:
    text = build([300, 200], 4, "balanced").explain(head_dim=64)
    assert "500 tokens in 2 documents; ring, balanced, causal; cp=4" in text
    assert len(text.splitlines()) == 2 + 4
    plan = build([300, 200], 4)
    chosen, *others = plan.explain().splitlines()[2 + 4 :]
    assert chosen.startswith(f"chosen: {plan.algorithm}, {plan.layout}: ")
    assert all(line.startswith("  instead of ") for line in others)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"doc_ends": [3, 3]}, r"doc_ends\[1\]=3"),
        ({"doc_ends": [0, 3]}, r"doc_ends\[0\]=0"),
        ({"doc_ends": [5, 3]}, r"doc_ends\[1\]=3"),
        ({"doc_ends": [1.5]}, "dtype float64"),
        ({"doc_ends": [[1, 2]]}, "2 dimensions"),
        ({"num_heads": 9, "num_kv_heads": 2}, "num_heads=9"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"mask": "sawtooth"}, "mask='sawtooth'"),
        ({"layout": "striped"}, "layout='striped'"),
        ({"algorithm": "ulysses"}, "ring=2"),
        ({"grid": RankGrid(1, 1, 5)}, "ulysses=5.*4 query heads"),
        ({"grid": RankGrid(1, 2, 2), "algorithm": "allgather"}, "algorithm='allgather'"),
        ({"grid": RankGrid(1, 4, window=2), "algorithm": "allgather"}, "window=2"),
        ({"algorithm": "allgather", "kv_cache": "full"}, "kv_cache='full' with algorithm='allgather'"),
        ({"kv_cache": "most"}, "kv_cache='most'"),
        ({"grid": RankGrid(1, 1, 2), "algorithm": "ring"}, "ulysses=2"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"sliding_window": 3, "mask": "full"}, "sliding_window=3 with mask='full'"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_a_fix(change: dict[str, object], said: str) -> None:
    good = {"doc_ends": [4, 8], "grid": RankGrid(1, 2), "num_heads": 4, "num_kv_heads": 2}
    with pytest.raises(PlanError, match=said) as error:
        AttentionPlan.build(**{**good, **change})  # type: ignore[arg-type]
    assert error.value.fix


def test_window_that_hides_nothing_is_accepted() -> None:
    plan = AttentionPlan.build([4, 8], RankGrid(1, 2), num_heads=4, num_kv_heads=2, sliding_window=4)
    assert plan == build([4, 4], 2)
    assert plan.sliding_window is None
    assert plan.longest_document == 4


def test_ranks_and_directions_are_checked() -> None:
    plan = build([8], 2)
    with pytest.raises(PlanError, match="cp_rank=2"):
        plan.token_index(2)
    with pytest.raises(PlanError, match="direction='sideways'"):
        plan.bytes_moved(0, head_dim=8, direction="sideways")
    with pytest.raises(PlanError, match="bandwidth"):
        CostModel(bandwidth=0)


def test_planning_a_long_pack_is_fast() -> None:
    rng = np.random.default_rng(0)
    ends = [*np.sort(rng.choice(np.arange(1, 131_072), 999, replace=False)).tolist(), 131_072]
    seconds = []
    for _ in range(3):
        start = time.thread_time()
        AttentionPlan.build(ends, RankGrid(1, 8), num_heads=32, num_kv_heads=8).program(3)
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.1, seconds  # 0.015 on an idle core


def test_planning_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys, raycp.plan; print([m for m in ('torch', 'ray', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
