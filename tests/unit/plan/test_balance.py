import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycp.plan import AttentionPlan, RankGrid
from raycp.plan.balance import place_documents


def _build(lengths: list[int], ring: int, layout: str = "balanced", **options: object) -> AttentionPlan:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return AttentionPlan.build(ends, RankGrid(1, ring), num_heads=1, num_kv_heads=1, layout=layout, **options)  # type: ignore[arg-type]


def _spread(plan: AttentionPlan) -> float:
    """Largest work over mean work."""
    work = [plan.work(rank) for rank in range(plan.grid.cp)]
    return max(work) * len(work) / sum(work)


def _rows(plan: AttentionPlan) -> int:
    return sum(plan.program(rank).rows_received for rank in range(plan.grid.cp))


def _mixed_pack(seed: int, total: int = 32_768) -> list[int]:
    """Log-uniform lengths, 8 to a quarter of the pack."""
    rng = random.Random(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, int(math.exp(rng.uniform(math.log(8), math.log(total // 4))))))
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


def test_placing_many_documents_is_fast() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(1, 260) for _ in range(1000)]
    ends = [sum(lengths[: i + 1]) for i in range(1000)]
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        place_documents(ends, 8, lambda x, length: x * (x + 1) // 2)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.1, seconds  # 0.004 on an idle core
