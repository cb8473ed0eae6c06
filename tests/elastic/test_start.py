"""Workers that die, or fail, while the run starts."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import raycp
from raycp.driver import fleet
from raycp.driver.record import write_json
from raycp.errors import ClusterError
from tests.elastic.runs import STEPS, config
from workers.actor import TrainWorker
from workers.messages import Probe


class DiesOnce(TrainWorker):
    """The first of all workers to come is killed while it starts, as by an out-of-memory killer."""

    def probe(self, nonce_path: str, nonce: str) -> Probe:
        try:
            (Path(self._spec.output_dir) / "died").touch(exist_ok=False)
        except FileExistsError:
            return super().probe(nonce_path, nonce)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


class AlwaysDies(TrainWorker):
    """No worker comes up."""

    def probe(self, nonce_path: str, nonce: str) -> Probe:
        with (Path(self._spec.output_dir) / "deaths").open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def test_a_worker_that_dies_while_it_starts_is_started_again(
    cluster: None, inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the run with "a worker did not start"."""
    monkeypatch.setattr(fleet, "TrainWorker", DiesOnce)
    result = raycp.fit(**inputs, output_dir=tmp_path, config=config())
    assert result.steps == STEPS
    assert result.recoveries == []


def test_workers_that_always_die_end_the_start_with_the_cause(
    cluster: None, inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "TrainWorker", AlwaysDies)
    with pytest.raises(ClusterError, match="a worker did not start"):
        raycp.fit(**inputs, output_dir=tmp_path, config=config())
    assert (tmp_path / "deaths").read_text() == "x" * 2 * fleet.START_ATTEMPTS


def test_checkpoints_at_a_url_are_written_continued_from_and_exported(
    cluster: None, inputs: dict[str, Any], tmp_path: Path
) -> None:
    """Workers took the URL for a path, which has one slash less."""
    settings = config(checkpoint_dir=f"file://{tmp_path}/elsewhere")
    result = raycp.fit(**inputs, output_dir=tmp_path / "run", config=settings)
    assert (tmp_path / "elsewhere" / f"step-{STEPS:08d}" / "manifest.json").exists()
    assert result.export_path is not None
    assert (result.export_path / "model.safetensors").exists()
    shutil.rmtree(result.export_path)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    write_json(tmp_path / "run" / "run.json", record | {"status": "running"})
    again = raycp.fit(**inputs, output_dir=tmp_path / "run", config=settings)
    assert [r["source"] for r in again.recoveries] == ["checkpoint"]
    assert again.export_path is not None
