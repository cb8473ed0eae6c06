"""Filling in what was left on auto."""

import pytest

from raycp.config import FitConfig, ParallelConfig
from raycp.errors import Problem
from raycp.resolve import needs_checkpointing, resolve_workers


class TinyModel:
    hidden_size = 64
    intermediate_size = 128
    num_hidden_layers = 2


def resolved(config: FitConfig, *, existing: bool = False, cpus: int = 8, gpus: int = 0) -> FitConfig | list[Problem]:
    resource = "GPU" if gpus else None
    found, problems = resolve_workers(
        config, existing_cluster=existing, resources={"CPU": cpus, "GPU": gpus}, resource=resource
    )
    return problems or found


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
    assert isinstance(config, FitConfig)
    assert (config.workers, config.parallel.cp, config.parallel.dp) == want


def test_all_accelerators_of_this_machine_by_default() -> None:
    config = resolved(FitConfig(), gpus=6)
    assert isinstance(config, FitConfig)
    assert config.workers == 6


def test_workers_must_be_said_on_an_existing_cluster() -> None:
    problems = resolved(FitConfig(), existing=True)
    assert isinstance(problems, list)
    assert "workers is not set" in problems[0].message


def test_more_workers_than_the_cluster_has() -> None:
    problems = resolved(FitConfig(workers=9), existing=True, cpus=8)
    assert isinstance(problems, list)
    assert "workers=9" in problems[0].message
    assert "8 CPU" in problems[0].message


def test_a_local_cpu_machine_runs_more_ranks_than_cores() -> None:
    config = resolved(FitConfig(workers=4), cpus=2)
    assert isinstance(config, FitConfig)
    assert config.workers == 4


def test_checkpointing_is_chosen_by_memory_on_cpu() -> None:
    config = FitConfig(seq_length=131_072)

    def auto(host: int, *, accelerator: bool = False) -> bool:
        return needs_checkpointing(config, TinyModel(), itemsize=4, accelerator=accelerator, host_bytes=host)

    assert not auto(24 << 30)
    assert auto(2 << 30)
    assert auto(24 << 30, accelerator=True)
