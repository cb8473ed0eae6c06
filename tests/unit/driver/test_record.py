"""run.json: who may open a run, and what may not change between two starts."""

import errno
import json
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raycp.config import DataConfig, ElasticConfig, FitConfig, OptimConfig, ParallelConfig
from raycp.driver import record
from raycp.driver.record import RunRecord, folder_problems, identity_of, single_driver, storage_errors, write_json
from raycp.errors import CheckpointError, ClusterError, ConfigError
from raycp.events import EventLog
from raycp.training.checkpoint import Manifest, ShardEntry, ShardRecord, commit, step_folder


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


def put_checkpoint(folder: Path, run_id: str, step: int = 6) -> None:
    place = step_folder(folder / "checkpoints", step)
    place.mkdir(parents=True)
    (place / "x").touch()
    entry = ShardEntry(name="param/w", shape=(1,), dtype="float32", start=0, stop=1)
    shard = ShardRecord(file="x", bytes=0, crc32=0, entries=(entry,))
    manifest = Manifest(step=step, cursor={}, plan_hash="", generation=1, run_id=run_id, grid={}, shards=(shard,))
    commit(place, manifest)


def put_events(folder: Path, run_id: str) -> None:
    log = EventLog(folder / "events.jsonl", generation=1)
    log.write("run_started", run_id=run_id)
    log.close()


@pytest.mark.parametrize(("put", "name"), [(put_checkpoint, "checkpoints"), (put_events, "events.jsonl")])
def test_what_another_run_left_is_not_taken_for_this_runs(
    tmp_path: Path, put: Callable[[Path, str], None], name: str
) -> None:
    put(tmp_path, "another-run")
    with pytest.raises(CheckpointError, match=f"{name} of run another-run, but no run.json") as caught:
        opened(tmp_path)
    assert name in caught.value.fix
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize(("put", "name"), [(put_checkpoint, "checkpoints"), (put_events, "events.jsonl")])
def test_what_this_run_left_is_its_own(tmp_path: Path, put: Callable[[Path, str], None], name: str) -> None:
    run_id = opened(tmp_path).run_id
    put(tmp_path, run_id)
    assert opened(tmp_path).generation == 2
    write_json(tmp_path / "run.json", json.loads((tmp_path / "run.json").read_text()) | {"run_id": "other"})
    with pytest.raises(CheckpointError, match=f"{name} of run {run_id}, but run.json says other"):
        opened(tmp_path)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        (problem,) = folder_problems(folder)
        assert f"{tmp_path / 'file'} is a file" in problem.message
        assert problem.fix
    assert folder_problems(tmp_path / "new" / "run") == []


def test_a_folder_without_write_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    (problem,) = folder_problems(tmp_path / "run")
    assert f"{tmp_path} cannot be written" in problem.message


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_full_or_forbidden_disk_is_an_error_with_a_fix(tmp_path: Path, number: int) -> None:
    with pytest.raises(ClusterError, match="cannot be written") as caught, storage_errors(tmp_path):
        raise OSError(number, os.strerror(number))
    assert caught.value.fix


def test_a_file_of_the_run_in_the_way_is_an_error_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    with pytest.raises(ClusterError, match="data") as caught, storage_errors(tmp_path):
        (tmp_path / "data" / "store").mkdir()
    assert caught.value.fix


def test_other_operating_system_errors_are_left_alone(tmp_path: Path) -> None:
    """Planted: the user's own rows come over a network that breaks; nothing is wrong with the folder."""
    with pytest.raises(ConnectionResetError), storage_errors(tmp_path):
        raise ConnectionResetError(errno.ECONNRESET, "reset by peer")
    with pytest.raises(FileNotFoundError), storage_errors(tmp_path / "run"):
        (tmp_path / "elsewhere").read_text()


@pytest.mark.parametrize("line", ["{torn", "[1]", "{}"])
def test_a_damaged_line_inside_the_events_is_named(tmp_path: Path, line: str) -> None:
    put_events(tmp_path, opened(tmp_path).run_id)
    log = tmp_path / "events.jsonl"
    log.write_text(f"{line}\n{log.read_text()}")
    with pytest.raises(CheckpointError, match=r"events\.jsonl is damaged") as caught:
        opened(tmp_path)
    assert caught.value.fix


def test_a_mount_that_is_away_for_a_moment_is_no_other_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was called "taken over by another driver (run.json says None)", and ended the run at once."""
    run = RunRecord(tmp_path)
    run.open({}, resume="auto")
    file, aside = tmp_path / "run.json", tmp_path / "aside"
    file.rename(aside)
    threading.Timer(0.3, aside.rename, args=(file,)).start()
    run.check_current()
    file.rename(aside)
    monkeypatch.setattr(record, "AWAY_SECONDS", 0.2)
    with pytest.raises(ClusterError, match=r"run.json is missing.*nobody knows"):
        run.check_current()


def test_what_could_not_be_written_did_not_happen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation that was never on disk made the next look say that another driver has the run."""
    run = RunRecord(tmp_path)
    run.open({}, resume="auto")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(record, "write_json", full)
        with pytest.raises(OSError, match="No space"):
            run.raise_generation()
    assert run.generation == 1
    run.check_current()
    assert run.raise_generation() == 2
