"""Choices differ where the figures say so, and never from rank to rank."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from raycp.errors import PlanError
from raycp.plan import AttentionPlan, CostModel, GridChoice, RankGrid, choose_grid, ring_warning

NPU = CostModel.named("910b", device="npu")
CUDA = CostModel.named("h100", device="cuda")
LONG = [131_072]


def packed(seed: int = 0, total: int = 131_072, longest: int = 8192) -> list[int]:
    """Ends of documents of 64 to `longest` tokens, log-uniform."""
    lengths = np.exp(np.random.default_rng(seed).uniform(np.log(64), np.log(longest), 1000)).astype(int)
    ends = np.cumsum(lengths)
    return [*ends[ends < total].tolist(), total]


def layout_of(ends: Sequence[int], cost: CostModel, ring: int = 8, **more: object) -> str:
    plan = AttentionPlan.build(ends, RankGrid(1, ring), num_heads=32, num_kv_heads=8, cost=cost, **more)  # type: ignore[arg-type]
    return plan.layout


def test_packs_of_many_documents_are_balanced() -> None:
    assert {layout_of(packed(seed), cost) for seed in range(4) for cost in (NPU, CUDA, CostModel())} == {"balanced"}


def test_a_window_much_shorter_than_a_shard_wants_neighbours() -> None:
    assert layout_of(LONG, NPU, sliding_window=1024, algorithm="ring") == "contiguous"
    assert layout_of(LONG, NPU, algorithm="ring") == "balanced"


def algorithm_of(ends: Sequence[int], cost: CostModel, **more: object) -> str:
    plan = AttentionPlan.build(ends, RankGrid(1, 8), num_heads=32, num_kv_heads=8, cost=cost, **more)  # type: ignore[arg-type]
    return plan.algorithm


def test_ring_or_allgather_for_each_pack() -> None:
    """One exchange over all links and no merging, where traffic is long; a few messages, where little of it is left."""
    assert algorithm_of(LONG, NPU) == "allgather"
    assert algorithm_of(packed(), NPU) == "ring"
    assert algorithm_of(LONG, CostModel()) == "ring", "mask tensors are slow on CPU"
    assert algorithm_of(LONG, NPU, kv_cache="full") == "ring", "only a ring has something to keep"


def shape(cp: int, heads: int, kv: int, length: int, cost: CostModel, **more: object) -> tuple[int, int]:
    grid = choose_grid(cp, heads, kv, length, cost, **more).grid  # type: ignore[arg-type]
    return grid.ring, grid.ulysses


def test_regimes_of_the_grid() -> None:
    """A ring where compute hides it; Ulysses where it does not; both where a ring would leave the node."""
    assert shape(8, 32, 8, 1_048_576, CUDA) == (8, 1)
    assert shape(8, 32, 32, 8192, NPU) == (1, 8)
    assert shape(16, 32, 8, 32_768, NPU) == (2, 8)
    assert shape(8, 2, 2, 8192, NPU)[1] <= 2, "a rank cannot have less than a query head"


def test_packs_decide_over_one_long_document() -> None:
    assert shape(8, 32, 32, 131_072, NPU) == (1, 8)
    assert shape(8, 32, 32, 131_072, NPU, packs=[packed(seed) for seed in range(3)]) == (8, 1)


def test_a_sliding_window_decides_over_the_grid() -> None:
    """A short window needs few rows of other ranks: no reason to pay for exchanges of all tokens."""
    cost, window = replace(CUDA, linear_flops=4.4e8), 1024

    def of(*layers: tuple[int | None, int]) -> GridChoice:
        return choose_grid(16, 32, 8, 131_072, cost, layers=layers)

    full, windowed, mixed = of((None, 1)), of((window, 32)), of((window, 1), (None, 1))
    assert (full.grid.ring, full.grid.ulysses) == (2, 8)
    assert windowed.grid.ring == 16, "planted fault: windows that are not looked at choose as full attention does"
    assert of((window, 31), (None, 1)).grid == windowed.grid
    assert of((window, 1), (None, 31)).grid == full.grid
    assert of((131_072, 32)).seconds == full.seconds
    ulysses = [dict(choice.seconds)[1, 16, 1] for choice in (full, windowed, mixed)]
    assert ulysses[2] == pytest.approx((ulysses[0] + ulysses[1]) / 2), "seconds are of a mean layer"


def test_a_double_ring_is_chosen_where_a_ring_leaves_the_node_and_cannot_hide_it() -> None:
    def window_of(cp: int, length: int, cost: CostModel = NPU, **more: object) -> int:
        return choose_grid(cp, 32, 8, length, cost, window=None, **more).grid.window  # type: ignore[arg-type]

    assert window_of(16, 32_768, algorithm="ring") == 8
    assert window_of(16, 1_048_576, algorithm="ring") == 1, "compute hides all of it"
    assert window_of(8, 32_768, algorithm="ring") == 1, "one node"
    assert window_of(16, 32_768, algorithm="allgather") == 1
    assert choose_grid(16, 32, 8, 32_768, NPU, algorithm="ring").grid.window == 1, "1 unless asked"
    tried = [s for s, _ in choose_grid(48, 32, 8, 32_768, NPU, window=None).seconds]
    assert {(48, 1, 8), (24, 2, 4), (12, 4, 2)} <= set(tried)
    assert (16, 3, 2) not in tried, "Ulysses groups of 3 do not fill a node of 8"


def test_what_was_asked_for_is_kept() -> None:
    assert shape(8, 32, 8, 1024, NPU, algorithm="ring") == (8, 1)
    assert shape(8, 32, 8, 131_072, CUDA, algorithm="ulysses") == (1, 8)
    assert shape(8, 32, 8, 131_072, CUDA, ulysses=4) == (2, 4)
    ring, ulysses = shape(8, 32, 8, 131_072, CUDA, algorithm="hybrid")
    assert ring > 1
    assert ulysses > 1
    with pytest.raises(PlanError, match="algorithm='hybrid' with cp=5"):
        choose_grid(5, 32, 8, 1024, NPU, algorithm="hybrid")
    with pytest.raises(PlanError, match="2 query heads"):
        choose_grid(8, 2, 1, 1024, NPU, algorithm="ulysses")


def test_the_reason_names_the_choice_and_the_alternatives() -> None:
    choice = choose_grid(8, 32, 32, 8192, NPU)
    assert choice.reason.startswith("chosen: ring 1 x ulysses 8 (window 1); ring 1 x ulysses 8 (window 1): ")
    assert choice.reason.count("ms a layer") == 4
    plan = AttentionPlan.build(packed(), RankGrid(1, 8), num_heads=32, num_kv_heads=8, cost=NPU)
    text = plan.explain(head_dim=128)
    assert "chosen: ring, balanced" in text
    assert "instead of ring, zigzag" in text
    assert "held MiB" in text


def test_short_chunks_of_a_ring_are_said() -> None:
    heads = {"num_heads": 32, "num_kv_heads": 8, "cost": NPU}
    said = ring_warning(RankGrid(1, 8), 16_384, **heads)  # type: ignore[arg-type]
    assert said is not None
    assert "holds 2048 tokens a rank, and needs 4000" in said
    assert ring_warning(RankGrid(1, 8), 131_072, **heads) is None  # type: ignore[arg-type]
    assert ring_warning(RankGrid(1, 1, 8), 16_384, **heads) is None  # type: ignore[arg-type]


def test_the_same_answer_every_time() -> None:
    plans = [AttentionPlan.build(packed(3), RankGrid(1, 4), num_heads=32, num_kv_heads=8, cost=NPU) for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0].hash == plans[1].hash
    assert plans[0].explain() == plans[1].explain()


@pytest.mark.parametrize(
    ("text", "said"),
    [("tpu", "named 'tpu'"), ("910b, speed=3", "speed=3"), ("bandwidth=fast", "fast"), ("flops=-1", "flops=-1.0")],
)
def test_figures_that_do_not_exist_are_refused(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said) as error:
        CostModel.named(text, device="npu")
    assert error.value.fix
