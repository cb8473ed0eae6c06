"""run.json: who may open a run, and what may not change between two starts."""

import json
import multiprocessing
from pathlib import Path

import pytest

from raycp.config import DataConfig, ElasticConfig, FitConfig, OptimConfig, ParallelConfig
from raycp.driver.record import RunRecord, identity_of, single_driver, write_json
from raycp.errors import CheckpointError, ConfigError


def identity(config: FitConfig | None = None, **changed: str) -> dict[str, object]:
    known = {"model": "m", "data": "d", "plan": "p", "dtype": "float32"} | changed
    return identity_of(config or FitConfig(), evaluation=None, total_steps=4, **known)


def opened(folder: Path, what: dict[str, object] | None = None, resume: str = "auto") -> RunRecord:
    record = RunRecord(folder)
    record.open(what if what is not None else identity(), resume=resume)
    return record


def test_generation_rises_with_every_driver_and_the_run_id_stays(tmp_path: Path) -> None:
    first = opened(tmp_path)
    second = opened(tmp_path)
    assert (first.generation, second.generation) == (1, 2)
    assert first.run_id == second.run_id
    assert json.loads((tmp_path / "run.json").read_text())["generation"] == 2


def test_a_changed_run_is_refused_with_both_values(tmp_path: Path) -> None:
    opened(tmp_path)
    changed = FitConfig(seed=7, optim=OptimConfig(lr=0.5), data=DataConfig(packing="sequential"))
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, identity(changed, model="other"))
    text = str(caught.value)
    assert "seed: 0 there, 7 now" in text
    assert "optim.lr: 1e-05 there, 0.5 now" in text
    assert "data.packing: 'best_fit' there, 'sequential' now" in text
    assert "model: 'm' there, 'other' now" in text


def test_workers_parallelism_and_elastic_settings_may_change(tmp_path: Path) -> None:
    opened(tmp_path)
    other = FitConfig(workers=4, parallel=ParallelConfig(cp=4), elastic=ElasticConfig(keep=9), eval_every=3)
    assert opened(tmp_path, identity(other)).generation == 2


@pytest.mark.parametrize(("resume", "exists"), [("must", False), ("never", True)])
def test_resume_is_obeyed(tmp_path: Path, resume: str, exists: bool) -> None:
    if exists:
        opened(tmp_path)
    with pytest.raises(ConfigError, match=f"resume='{resume}'"):
        opened(tmp_path, resume=resume)


def test_a_torn_record_is_named(tmp_path: Path) -> None:
    opened(tmp_path)
    (tmp_path / "run.json").write_text('{"version": 1, "run_')
    with pytest.raises(CheckpointError, match=r"run\.json is damaged"):
        opened(tmp_path)


def test_a_record_of_another_version_is_named(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"version": 99})
    with pytest.raises(CheckpointError, match="version 99"):
        opened(tmp_path)


def _hold(folder: str, held: "multiprocessing.synchronize.Event", end: "multiprocessing.synchronize.Event") -> None:
    with single_driver(Path(folder)):
        held.set()
        end.wait(30)


def test_a_second_live_driver_is_refused_and_a_dead_one_is_not_in_the_way(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held, end = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(str(tmp_path), held, end))
    other.start()
    try:
        assert held.wait(60)
        with pytest.raises(ConfigError, match=f"pid {other.pid}"), single_driver(tmp_path):
            pass
    finally:
        other.kill()
        other.join()
    with single_driver(tmp_path):
        assert (tmp_path / "run.lock").exists()
