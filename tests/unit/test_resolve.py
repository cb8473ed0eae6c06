"""Filling in what was left on auto."""

import pytest

from raycp.config import FitConfig, ParallelConfig
from raycp.resolve import capacity_problems, needs_checkpointing, resolve_workers


class TinyModel:
    hidden_size = 64
    intermediate_size = 128
    num_hidden_layers = 2


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


def test_checkpointing_is_chosen_by_memory_on_cpu() -> None:
    config = FitConfig(seq_length=131_072)

    def auto(host: int, *, accelerator: bool = False) -> bool:
        return needs_checkpointing(config, TinyModel(), itemsize=4, accelerator=accelerator, host_bytes=host)

    assert not auto(24 << 30)
    assert auto(2 << 30)
    assert auto(24 << 30, accelerator=True)
