import heapq
import math
import random
import time
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycp.plan import AttentionPlan, RankGrid
from raycp.plan.balance import _Placement, place_documents


def _build(lengths: list[int], ring: int, layout: str = "balanced", **options: object) -> AttentionPlan:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return AttentionPlan.build(ends, RankGrid(1, ring), num_heads=1, num_kv_heads=1, layout=layout, **options)  # type: ignore[arg-type]


def _spread(plan: AttentionPlan) -> float:
    """Largest work over mean work."""
    work = [plan.work(rank) for rank in range(plan.grid.cp)]
    return max(work) * len(work) / sum(work)


def _rows(plan: AttentionPlan) -> int:
    return sum(plan.program(rank).rows_received for rank in range(plan.grid.cp))


def _mixed_pack(seed: int, total: int = 32_768, longest: int | None = None) -> list[int]:
    """Log-uniform lengths, 8 to a quarter of the pack, or to `longest`."""
    rng = random.Random(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, int(math.exp(rng.uniform(math.log(8), math.log(longest or total // 4))))))
    return lengths


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 300), max_size=20), st.integers(1, 9))
def test_tokens_are_equal_to_one(lengths: list[int], ring: int) -> None:
    tokens = [_build(lengths, ring).num_tokens(rank) for rank in range(ring)]
    assert max(tokens) - min(tokens) <= 1


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
def test_work_is_balanced_with_few_rows_moved(ring: int) -> None:
    moved, whole = 0, 0
    for seed in range(20):
        plan = _build(_mixed_pack(seed), ring)
        assert _spread(plan) <= 1.08
        moved += _rows(plan)
        whole += _rows(_build(_mixed_pack(seed), ring, "zigzag"))
    assert moved <= 0.75 * whole


@pytest.mark.parametrize("options", [{"mask": "full"}, {"sliding_window": 700}])
def test_work_is_weighed_by_the_mask(options: dict[str, object]) -> None:
    for seed in range(5):
        assert _spread(_build(_mixed_pack(seed), 4, **options)) <= 1.08


def test_documents_that_fit_stay_whole() -> None:
    plan = _build([64] * 8, 4)
    assert _rows(plan) == 0
    assert _spread(plan) == 1.0


def test_one_long_document_is_a_zigzag() -> None:
    balanced, zigzag = _build([4096], 4), _build([4096], 4, "zigzag")
    assert _rows(balanced) == _rows(zigzag)
    assert _spread(balanced) <= 1.001


def test_a_long_document_among_short_ones_is_the_only_one_that_is_split() -> None:
    ends = [4096 + 128 * i for i in range(33)]
    placed = place_documents(ends, 4, lambda x, length: x * (x + 1) // 2)
    split = {d for d in range(33) if sum(any(piece[0] == d for piece in pieces) for pieces in placed) > 1}
    assert split == {0}


@pytest.mark.parametrize(
    ("total", "ring", "assign", "build"), [(131_072, 8, 0.001, 0.010), (1 << 20, 64, 0.010, 0.100)]
)
def test_planning_is_fast(total: int, ring: int, assign: float, build: float) -> None:
    """Bars in seconds of one core; the test allows five times as much."""
    ends = list(accumulate(_mixed_pack(3, total, 8192)))
    seconds = []
    for _ in range(4):
        start = time.thread_time()
        place_documents(ends, ring, lambda x, length: x * (x + 1) // 2)
        placed = time.thread_time()
        plan = AttentionPlan.build(ends, RankGrid(1, ring), num_heads=32, num_kv_heads=8)
        plan.program(ring // 2)
        plan.token_index(ring // 2)
        seconds.append((placed - start, time.thread_time() - placed))
    assert min(a for a, _ in seconds) <= 5 * assign, seconds
    assert min(b for _, b in seconds) <= 5 * build, seconds


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), max_size=30), st.integers(1, 9))
def test_the_rank_with_least_work_that_has_room_is_taken(lengths: list[int], ring: int) -> None:
    """The two heaps find what a look at all ranks finds."""
    work = [length * (length + 1) // 2 for length in lengths]
    bounds = list(pairwise((0, *accumulate(lengths))))
    placement = _Placement(bounds, work, ring, lambda x, length: x * (x + 1) // 2)
    free, full = placement._ranks()
    for length in sorted(lengths, reverse=True):
        fits = [(placement.work[r], r) for r in range(ring) if placement.room[r] >= length]
        rank = placement._least_with_room(free, full, length)
        assert rank == (min(fits)[1] if fits else None)
        if rank is not None:
            placement.room[rank] -= length
            placement.work[rank] += length
            heapq.heappush(free, (placement.work[rank], rank))
