"""The configuration: immutable, plain, and every problem of it reported at once and by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from raycp.config import (
    DataConfig,
    ElasticConfig,
    FitConfig,
    OptimConfig,
    ParallelConfig,
    describe_source,
)
from raycp.errors import ConfigError

PARTS: dict[str, Any] = {"parallel": ParallelConfig, "data": DataConfig, "optim": OptimConfig, "elastic": ElasticConfig}


def with_field(name: str, value: Any) -> FitConfig:
    """`FitConfig` with one field set, `name` as in messages: "seq_length" or "optim.lr"."""
    part, _, field = name.rpartition(".")
    return FitConfig(**({part: PARTS[part](**{field: value})} if part else {field: value}))


def test_the_defaults_are_those_that_the_documentation_promises() -> None:
    config = FitConfig()
    config.validate()
    assert (config.seq_length, config.global_batch, config.epochs, config.steps) == (131_072, 8, 1.0, None)
    assert (config.optim.name, config.optim.lr, config.optim.warmup, config.optim.clip) == ("adamw", 1e-5, 0.03, 1.0)
    assert (config.parallel.cp, config.parallel.dp, config.parallel.shard) == ("auto", "auto", "full")
    assert (config.elastic.snapshot_every, config.elastic.checkpoint_every, config.elastic.keep) == (1, 50, 3)
    assert (config.elastic.resume, config.data.overflow, config.data.packing) == ("auto", "raise", "best_fit")


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", None])
@pytest.mark.parametrize("name", ["seq_length", "global_batch", "loss_chunk", "elastic.keep", "parallel.window"])
def test_a_bad_whole_number_is_one_problem_that_names_field_and_value(name: str, value: Any) -> None:
    problems = with_field(name, value).problems()
    assert any(name in p.message and repr(value) in p.message for p in problems)
    assert all(p.fix for p in problems)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("epochs", 0.0),
        ("epochs", float("nan")),
        ("seed", -1),
        ("workers", 0),
        ("dtype", "float16"),
        ("device", "tpu"),
        ("activation_checkpointing", "yes"),
        ("peak_flops", "fast"),
        ("peak_flops", "H100="),
        ("peak_flops", "H100=-1"),
        ("peak_flops", 3e14),
        ("parallel.cp", 0),
        ("parallel.algorithm", "rings"),
        ("parallel.layout", "zig"),
        ("parallel.shard", "half"),
        ("data.format", "csv"),
        ("data.overflow", "ignore"),
        ("data.packing", "worst_fit"),
        ("data.train_on", "user"),
        ("optim.name", "lion"),
        ("optim.lr", 0.0),
        ("optim.lr", float("inf")),
        ("optim.clip", -1.0),
        ("optim.betas", (0.9, 1.0)),
        ("optim.betas", 0.9),
        ("optim.momentum", 1.0),
        ("optim.momentum", 0.9),
        ("optim.min_lr_ratio", 10.0),
        ("eval_every", 5),
        ("parallel.dp", 9),
        ("elastic.resume", "maybe"),
        ("elastic.on_loss", "cry"),
        ("elastic.heartbeat_timeout", 0),
    ],
)
def test_a_bad_value_is_exactly_one_problem(name: str, value: Any) -> None:
    (problem,) = with_field(name, value).problems()
    assert name.split("[")[0] in problem.message
    assert problem.fix


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    config = FitConfig(steps=100, optim=OptimConfig(warmup=1000))
    assert [p.message for p in config.problems()] == [
        "optim.warmup=1000 steps with steps=100: the rate never gets to optim.lr"
    ]


def test_limits_of_the_world_that_exclude_each_other_are_refused_without_workers_too() -> None:
    (problem,) = FitConfig(elastic=ElasticConfig(min_workers=8, max_workers=4)).problems()
    assert "min_workers=8" in problem.message
    assert "max_workers=4" in problem.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", None),
        ("workers", None),
        ("optim.clip", None),
        ("parallel.cp", "auto"),
        ("elastic.wait_for_capacity", 0),
    ],
)
def test_a_good_value_is_no_problem(name: str, value: Any) -> None:
    assert with_field(name, value).problems() == []


def test_all_problems_are_reported_at_once() -> None:
    config = FitConfig(
        seq_length=0,
        workers=6,
        parallel=ParallelConfig(cp=4, dp=2),
        optim=OptimConfig(lr=-1.0),
        data=DataConfig(overflow="ignore"),
    )
    with pytest.raises(ConfigError) as caught:
        config.validate()
    for words in ("seq_length=0", "4 x parallel.dp=2 = 8 ranks, but workers=6", "optim.lr=-1.0", "overflow='ignore'"):
        assert words in str(caught.value)
    assert len(caught.value.details["problems"]) == 4


@pytest.mark.parametrize(("part", "value"), [("cp", 3), ("dp", 3)])
def test_a_degree_that_does_not_divide_the_workers_is_refused(part: str, value: int) -> None:
    (problem,) = FitConfig(workers=8, parallel=ParallelConfig(**{part: value})).problems()
    assert f"parallel.{part}=3 does not divide workers=8" in problem.message


def shaped(workers: int | None = None, **parallel: Any) -> list[str]:
    return [p.message for p in FitConfig(workers=workers, parallel=ParallelConfig(**parallel)).problems() if p.fix]


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"algorithm": "ring", "ulysses": 2}, "algorithm='ring' with parallel.ulysses=2"),
        ({"algorithm": "allgather", "ulysses": 2}, "algorithm='allgather' with parallel.ulysses=2"),
        ({"algorithm": "hybrid", "ulysses": 1}, "algorithm='hybrid' with parallel.ulysses=1"),
        ({"algorithm": "hybrid", "cp": 4, "ulysses": 4}, "algorithm='hybrid' with 4 ranks a pack"),
        ({"algorithm": "hybrid", "cp": 3}, "algorithm='hybrid' with 3 ranks a pack"),
        ({"algorithm": "ulysses", "cp": 4, "ulysses": 2}, "algorithm='ulysses' with parallel.ulysses=2 and 4 ranks"),
        ({"cp": 4, "ulysses": 3}, "ulysses=3 does not divide the 4 ranks"),
        ({"workers": 6, "ulysses": 4}, "ulysses=4 does not divide the 6 ranks"),
        ({"workers": 12, "dp": 2, "ulysses": 4}, "ulysses=4 does not divide the 6 ranks"),
        ({"algorithm": "ring", "cp": 6, "window": 4}, "window=4 does not divide the ring of 6 ranks"),
        ({"cp": 8, "ulysses": 4, "window": 4}, "window=4 does not divide the ring of 2 ranks"),
        ({"algorithm": "ulysses", "cp": 4, "window": 2}, "window=2 with parallel.algorithm='ulysses'"),
        ({"algorithm": "allgather", "kv_cache": "full"}, "kv_cache='full' with parallel.algorithm='allgather'"),
        ({"kv_cache": "some"}, "kv_cache='some'"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(parallel: dict[str, Any], said: str) -> None:
    (problem,) = shaped(**parallel)
    assert said in problem


@pytest.mark.parametrize(
    "parallel",
    [
        {"algorithm": "ring", "ulysses": 1, "cp": 6, "window": 3},
        {"algorithm": "ulysses", "cp": 4, "ulysses": 4},
        {"algorithm": "ulysses", "workers": 4},
        {"algorithm": "hybrid", "cp": 8, "ulysses": 2, "window": 2},
        {"algorithm": "ring", "cp": 6, "window": "auto"},
        {"algorithm": "ulysses", "cp": 4, "window": "auto"},
        {"algorithm": "hybrid", "kv_cache": "half"},
        {"algorithm": "allgather", "cp": 3},
        {"layout": "balanced"},
        {"ulysses": 3, "workers": 6},
    ],
)
def test_shapes_that_fit_are_no_problem(parallel: dict[str, Any]) -> None:
    assert shaped(**parallel) == []


def test_problems_of_the_shape_are_reported_together() -> None:
    found = shaped(workers=8, cp=4, dp=3, algorithm="ulysses", ulysses=2, window=2, layout="spiral", kv_cache="half")
    assert len(found) == 5, found


def test_the_tree_cannot_be_changed() -> None:
    config = FitConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.optim.lr = 1.0  # type: ignore[misc]


def test_to_dict_is_json_and_tells_every_field_apart() -> None:
    """A changed field of any part shows up in config.json, an unchanged tree does not."""
    base = json.dumps(FitConfig().to_dict())
    changed = [
        FitConfig(seed=1),
        FitConfig(parallel=ParallelConfig(cp=2)),
        FitConfig(data=DataConfig(packing="none")),
        FitConfig(optim=OptimConfig(lr=2e-5)),
        FitConfig(elastic=ElasticConfig(keep=4)),
        FitConfig(eval_data="held.jsonl"),
    ]
    dumps = [json.dumps(config.to_dict()) for config in changed]
    assert len({base, *dumps}) == len(changed) + 1
    assert json.dumps(FitConfig(seed=0).to_dict()) == base


def test_sources_are_described_without_their_rows() -> None:
    assert describe_source(None) is None
    assert describe_source("a.jsonl") == "a.jsonl"
    assert describe_source(Path("a.jsonl")) == "a.jsonl"
    assert describe_source(["a", Path("b")]) == ["a", "b"]
    assert describe_source([{"text": "secret"}]) == "<builtins.list>"


def test_betas_of_another_length_are_a_problem_not_a_crash_in_a_worker() -> None:
    (problem,) = FitConfig(optim=OptimConfig(betas=(0.9,))).problems()  # type: ignore[arg-type]
    assert "optim.betas=(0.9,) are not two" in problem.message
