"""Filling in what was left on auto."""

from dataclasses import replace
from typing import Any

import pytest

from raycp.config import ElasticConfig, FitConfig, ParallelConfig
from raycp.errors import PlanError
from raycp.plan import RankGrid
from raycp.resolve import (
    capacity_problems,
    cost_model,
    grid_problems,
    grid_warning,
    needs_checkpointing,
    rank_bytes,
    resolve_grid,
    resolve_workers,
    token_flops,
)

BF16: dict[str, Any] = {"itemsize": 2, "recompute": True}


class TinyModel:
    hidden_size = 64
    intermediate_size = 128
    num_hidden_layers = 2
    num_attention_heads = 4
    num_key_value_heads = 2


class WideModel(TinyModel):
    hidden_size = 4096
    num_attention_heads = 32
    num_key_value_heads = 32


def resolved(config: FitConfig, *, cpus: int = 8, gpus: int = 0) -> FitConfig:
    return resolve_workers(config, resources={"CPU": cpus, "GPU": gpus}, resource="GPU" if gpus else None)


def problems(workers: int | None, *, existing: bool, cpus: int = 8, gpus: int | None = None) -> str:
    resources = {"CPU": float(cpus), "GPU": float(gpus or 0)}
    resource = None if gpus is None else "GPU"
    found = capacity_problems(workers, existing_cluster=existing, resources=resources, resource=resource)
    return "; ".join(p.message for p in found)


@pytest.mark.parametrize(
    ("workers", "cp", "dp", "want"),
    [
        (4, "auto", "auto", (4, 4, 1)),
        (4, 2, "auto", (4, 2, 2)),
        (4, "auto", 4, (4, 1, 4)),
        (None, 3, 2, (6, 3, 2)),
        (None, 3, "auto", (3, 3, 1)),
        (None, "auto", "auto", (1, 1, 1)),
    ],
)
def test_workers_cp_and_dp(workers: int | None, cp: int | str, dp: int | str, want: tuple[int, int, int]) -> None:
    config = resolved(FitConfig(workers=workers, parallel=ParallelConfig(cp=cp, dp=dp)))  # type: ignore[arg-type]
    assert (config.workers, config.parallel.cp, config.parallel.dp) == want


@pytest.mark.parametrize(
    ("gpus", "cp", "elastic", "want"),
    [
        (7, (2, 4), {}, (6, 3, 2)),  # it was cp 7, outside the pair
        (16, (2, 4), {}, (16, 4, 4)),
        (8, "auto", {"max_workers": 2}, (2, 2, 1)),  # it was 8, and worlds of 2 after
        (8, "auto", {"spares": 1}, (7, 7, 1)),
    ],
)
def test_workers_on_auto_keep_to_what_else_was_said(
    gpus: int, cp: str | tuple[int, int], elastic: dict[str, int], want: tuple[int, int, int]
) -> None:
    asked = FitConfig(parallel=ParallelConfig(cp=cp), elastic=ElasticConfig(**elastic))  # type: ignore[arg-type]
    config = resolved(asked, gpus=gpus)
    assert (config.workers, config.parallel.cp, config.parallel.dp) == want
    assert config.problems() == []


def test_fewer_accelerators_than_min_workers_are_a_problem() -> None:
    """`fit` reports the problems of the resolved configuration, too."""
    asked = FitConfig(elastic=ElasticConfig(min_workers=8))
    assert asked.problems() == []
    (problem,) = resolved(asked, gpus=4).problems()
    assert "min_workers=8 with workers=4" in problem.message


def test_memory_of_a_rank_has_the_head_in_it() -> None:
    """Measured on two CPU ranks, bf16, one layer, a vocabulary of 131 072: 1995 MiB at the peak; it said 1168."""

    class Headed(TinyModel):
        hidden_size = 512
        intermediate_size = 512
        num_hidden_layers = 1
        vocab_size = 131_072

    config = FitConfig(seq_length=128, workers=2, parallel=ParallelConfig(cp=2, dp=1))
    mib = {
        shard: rank_bytes(
            replace(config, parallel=replace(config.parallel, shard=shard)), Headed, RankGrid(1, 2), **BF16
        )
        / 2**20
        for shard in ("full", "none")
    }
    assert 1995 <= mib["full"] <= 1.3 * 1995
    assert 2555 <= mib["none"] <= 1.3 * 2555


def test_the_models_sliding_windows_decide_over_the_grid() -> None:
    class Windowed(WideModel):
        num_key_value_heads = 8
        num_hidden_layers = 32
        intermediate_size = 14336
        sliding_window = 1024

    class Full(Windowed):
        sliding_window = None  # type: ignore[assignment]

    config = resolved(FitConfig(workers=16, seq_length=131_072, parallel=ParallelConfig(cp=16)))
    cost = cost_model(config, Full, device="cuda", itemsize=2)
    grids = [resolve_grid(config, model, cost, node_ranks=[8, 8]).grid for model in (Full, Windowed)]
    assert [(grid.ring, grid.ulysses) for grid in grids] == [(2, 8), (16, 1)]


def test_the_window_of_a_double_ring_is_chosen_if_asked() -> None:
    for window, chosen in (("auto", 8), (1, 1), (4, 4)):
        parallel = ParallelConfig(cp=16, algorithm="ring", window=window)  # type: ignore[arg-type]
        config = resolved(FitConfig(workers=16, seq_length=4096, parallel=parallel))
        cost = cost_model(config, WideModel, device="npu", itemsize=2)
        assert resolve_grid(config, WideModel, cost, node_ranks=[8, 8]).grid.window == chosen


def test_what_ulysses_keeps_for_recomputation_counts_as_memory() -> None:
    class Grouped(WideModel):
        num_key_value_heads = 8
        vocab_size = 1000

    config = resolved(FitConfig(workers=8, seq_length=1024, parallel=ParallelConfig(cp=8)))
    ring, ulysses = (rank_bytes(config, Grouped, grid, **BF16) for grid in (RankGrid(1, 8), RankGrid(1, 1, 8)))
    assert ulysses - ring == 1024 // 8 * 2 * 2 * 128 * (32 + 8) * 2  # tokens, layers, tensors, head dim, heads, bytes
    again = {"itemsize": 2, "recompute": False}
    assert len({rank_bytes(config, Grouped, grid, **again) for grid in (RankGrid(1, 8), RankGrid(1, 1, 8))}) == 1


def test_figures_that_the_user_gives_are_not_those_of_the_model() -> None:
    config = FitConfig(parallel=ParallelConfig(cost="cpu, head_dim=96, itemsize=2"))
    cost = cost_model(config, WideModel, device="cpu", itemsize=4)
    assert (cost.head_dim, cost.value_dim, cost.itemsize) == (96, 128, 2)


@pytest.mark.parametrize("cost", [None, "cpu, links=inf", "cpu, bandwidth=nan"])
def test_cost_figures_that_are_none_are_a_problem(cost: Any) -> None:
    config = FitConfig(workers=2, parallel=ParallelConfig(cp=2, dp=1, cost=cost))
    (problem,) = grid_problems(config, WideModel, device="cpu", itemsize=4)
    assert problem.fix


def test_all_accelerators_of_this_machine_by_default() -> None:
    config = resolved(FitConfig(), gpus=6)
    assert config.workers == 6


def test_workers_must_be_said_on_an_existing_cluster_only() -> None:
    assert "workers is not set" in problems(None, existing=True)
    assert problems(None, existing=False) == ""


def test_more_workers_than_there_is_room_for() -> None:
    assert problems(9, existing=True) == "workers=9, and the cluster has 8 CPU in all"
    assert problems(8, existing=True) == ""
    assert problems(3, existing=False, gpus=2) == "workers=3, and this machine has 2 GPU in all"


def test_a_local_cpu_machine_runs_more_ranks_than_cores() -> None:
    assert problems(4, existing=False, cpus=2) == ""
    assert resolved(FitConfig(workers=4), cpus=2).workers == 4


def grid_of(device: str = "cpu", seq_length: int = 4096, workers: int = 8, **parallel: object) -> RankGrid:
    config = resolved(FitConfig(workers=workers, seq_length=seq_length, parallel=ParallelConfig(**parallel)))  # type: ignore[arg-type]
    return resolve_grid(config, TinyModel(), cost_model(config, TinyModel(), device=device, itemsize=2)).grid


def test_the_grid_is_what_was_asked_for() -> None:
    assert grid_of(algorithm="ring", cp=4) == RankGrid(2, 4)
    assert grid_of(algorithm="ulysses", cp=4) == RankGrid(2, 1, 4)
    assert grid_of(algorithm="hybrid", ulysses=4) == RankGrid(1, 2, 4)
    assert grid_of(algorithm="hybrid", ulysses=2, window=2) == RankGrid(1, 4, 2, 2)
    assert grid_of(algorithm="allgather") == RankGrid(1, 8)


def test_the_grid_follows_the_figures_where_it_was_left_open() -> None:
    assert grid_of(cp=4, cost="flops=1e9") == RankGrid(2, 4)
    assert grid_of(cp=4, cost="bandwidth=1e7, flops=1e15, links=7, latency=0") == RankGrid(2, 1, 4)


def test_figures_are_those_of_the_device_and_the_model() -> None:
    config = resolved(FitConfig(workers=2, parallel=ParallelConfig(cost="bandwidth=5e9")))
    cost = cost_model(config, TinyModel(), device="npu", itemsize=2)
    assert (cost.bandwidth, cost.flops, cost.head_dim, cost.itemsize) == (5e9, 2e14, 16, 2)
    assert cost.linear_flops == 2 * (64 * 16 * 12 + 3 * 64 * 128)


def test_a_cache_of_keys_and_values_wants_a_ring() -> None:
    """With "auto" the figures wanted Ulysses alone, and the first plan of the run was refused."""
    fast = "bandwidth=1e7, flops=1e15, links=7, latency=0"
    assert grid_of(cp=4, cost=fast).ring == 1
    assert grid_of(cp=4, cost=fast, kv_cache="half").ring > 1
    assert grid_of(workers=1, kv_cache="half") == RankGrid(1, 1)


def test_nodes_are_as_large_as_ranks_were_placed_on_them() -> None:
    """Ulysses inside a node, a ring across: the table's nodes have 8 ranks."""

    def shape(node_ranks: tuple[int, ...], cost: str = "auto") -> tuple[int, int]:
        config = resolved(FitConfig(workers=8, seq_length=8192, parallel=ParallelConfig(cost=cost)))
        figures = cost_model(config, WideModel(), device="npu", itemsize=2)
        grid = resolve_grid(config, WideModel(), figures, node_ranks=node_ranks).grid
        return grid.ring, grid.ulysses

    assert shape(()) == shape((8,)) == (1, 8)
    assert shape((4, 4)) == (2, 4)
    assert shape((4, 4), "910b, ranks_per_node=8") == (1, 8), "a user's figure stays"


def test_what_fits_no_grid_is_a_problem_with_a_fix() -> None:
    for parallel, said in (
        (ParallelConfig(algorithm="ulysses"), "4 query heads"),
        (ParallelConfig(ulysses=8), "4 query heads"),
        (ParallelConfig(cost="tpu"), "'tpu'"),
        (ParallelConfig(cp=4, ulysses=4, kv_cache="full"), "alone brings no K/V blocks"),
    ):
        config = resolved(FitConfig(workers=8, parallel=parallel))
        (problem,) = grid_problems(config, TinyModel(), device="cpu", itemsize=4)
        assert said in problem.message
        assert problem.fix
        assert isinstance(problem.error, PlanError)
    assert grid_problems(resolved(FitConfig(workers=8)), TinyModel(), device="cpu", itemsize=4) == []


def test_a_short_ring_is_warned_about_where_it_was_asked_for() -> None:
    def warning(**parallel: object) -> str | None:
        config = resolved(FitConfig(workers=4, seq_length=1024, parallel=ParallelConfig(**parallel)))  # type: ignore[arg-type]
        cost = cost_model(config, TinyModel(), device="npu", itemsize=2)
        return grid_warning(RankGrid(1, 4), config, TinyModel(), cost)

    said = warning(algorithm="ring")
    assert said is not None
    assert "256 tokens a rank" in said
    assert warning() is None


def test_checkpointing_is_chosen_by_memory_on_cpu() -> None:
    config = FitConfig(seq_length=131_072)

    def auto(host: int, *, accelerator: bool = False) -> bool:
        return needs_checkpointing(config, TinyModel(), itemsize=4, accelerator=accelerator, host_bytes=host)

    assert not auto(24 << 30)
    assert auto(2 << 30)
    assert auto(24 << 30, accelerator=True)


@pytest.mark.parametrize(
    ("own", "device", "factor"),
    [
        ("auto", "npu", 1.0),
        ("1.77e14", "npu", 0.5),
        ("Ascend910B3=1.77e14", "npu", 0.5),
        ("Ascend910B3=1.77e14, Ascend910B2=3.54e14", "npu", 0.5),
        ("Ascend910B3=1.77e14", "cuda", 1.0),
        ("1e12", "cpu", 1.0),
    ],
)
def test_the_cost_figures_scale_with_the_peak_that_the_user_gives(own: str, device: str, factor: float) -> None:
    usual, mine = (
        cost_model(FitConfig(peak_flops=text), TinyModel(), device=device, itemsize=2).flops for text in ("auto", own)
    )
    assert mine == pytest.approx(factor * usual)
    given = FitConfig(peak_flops=own, parallel=ParallelConfig(cost="flops=1e13"))
    assert cost_model(given, TinyModel(), device=device, itemsize=2).flops == 1e13


class WordyModel(TinyModel):
    vocab_size = 512


def test_flop_of_a_token() -> None:
    model = WordyModel()
    whole, halves = (token_flops(model, [ends]) for ends in ([1000], [500, 1000]))
    heads, layers = model.num_attention_heads, model.num_hidden_layers
    dim = model.hidden_size // heads
    assert whole - halves == pytest.approx(3 * layers * heads * 4 * dim * (1001 - 501) / 2)
    assert token_flops(model, []) == pytest.approx(halves - 3 * layers * heads * 4 * dim * 501 / 2)
