"""Real Ray, real kills: a lost, raising or frozen rank ends the run fast, by name, and the same command continues."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import raycp
from raycp.driver import fleet
from raycp.driver.record import write_json
from raycp.events import read_events
from tests.elastic import faulty_worker
from tests.elastic.runs import GLOBAL_BATCH, STEPS, config, pack_ids


def worker_processes() -> list[int]:
    """Pids of the train workers under the Ray that this process started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            line = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if any("Worker" in part and part.startswith("ray::") for part in line):
            found.append(process.pid)
    return found


def wait_until_gone(seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := worker_processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def test_every_pack_is_consumed_once_per_epoch(unbroken: raycp.FitResult) -> None:
    packs = pack_ids(unbroken)
    assert packs == list(range(len(packs)))
    assert unbroken.steps == STEPS
    assert len(packs) > STEPS * (GLOBAL_BATCH - 1)


def test_the_same_command_on_a_finished_run_returns_at_once_and_starts_nothing(
    unbroken: raycp.FitResult, inputs: dict[str, Any]
) -> None:
    lines = unbroken.events_path.read_text()
    began = time.monotonic()
    again = raycp.fit(**inputs, output_dir=unbroken.output_dir, config=config())
    assert time.monotonic() - began < 5
    assert again.losses == unbroken.losses
    assert again.export_path == unbroken.export_path
    assert unbroken.events_path.read_text() == lines


@pytest.mark.parametrize(
    ("worker", "cause", "limit"),
    [
        ("RaisingWorker", "ValueError: planted", 10),
        ("DyingWorker", "died", 10),
        ("FrozenWorker", "no answer from its control thread", 20),
        pytest.param("DivergingWorker", "NonFiniteError", 10, marks=pytest.mark.slow),
    ],
)
def test_a_failing_rank_ends_the_run_by_name_and_the_same_command_continues_bit_equal(
    worker: str,
    cause: str,
    limit: float,
    unbroken: raycp.FitResult,
    inputs: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = config(heartbeat_timeout=6.0, on_loss="stop")
    monkeypatch.setattr(fleet, "TrainWorker", getattr(faulty_worker, worker))
    with pytest.raises(raycp.WorkerError) as caught:
        raycp.fit(**inputs, output_dir=tmp_path, config=settings)
    ended = time.time()
    error = caught.value
    assert cause in str(error)
    assert "step 3 failed" in str(error)
    assert error.fix
    if worker != "DivergingWorker":  # a NaN is seen by all ranks at once
        assert error.details["rank"] == faulty_worker.FAULT_RANK
    assert error.details["node"] in str(error)
    assert wait_until_gone(10) == []
    events = list(read_events(tmp_path / "events.jsonl"))
    last_step = max(e["time"] for e in events if e["event"] in ("step", "checkpoint"))
    assert ended - last_step < limit, "from the last good event to the error"
    assert next(e["cause"] for e in events if e["event"] == "worker_lost") in str(error)
    assert events[-1]["event"] == "run_failed"
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "failed"

    result = raycp.fit(**inputs, output_dir=tmp_path, config=settings)
    assert result.losses == unbroken.losses
    assert pack_ids(result) == pack_ids(unbroken)
    (recovered,) = result.recoveries
    assert recovered["step"] in (1, 2), "a copy that was on its way from the lost rank may be missing"
    assert recovered["steps_lost"] == 0


def test_a_planted_loss_of_optimizer_state_is_seen_by_the_comparison(
    unbroken: raycp.FitResult, inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "TrainWorker", faulty_worker.ForgetfulWorker)
    result = raycp.fit(**inputs, output_dir=tmp_path, config=config())
    assert result.losses != unbroken.losses
    assert result.losses[3] == unbroken.losses[3]
    assert result.losses[4] != unbroken.losses[4]


def rewound(run: raycp.FitResult, folder: Path, step: int) -> Path:
    """A copy of a run's folder as it was just after the checkpoint of `step`."""
    shutil.copytree(run.output_dir, folder / "run")
    copy = folder / "run"
    shutil.rmtree(copy / "export")
    for later in (copy / "checkpoints").glob("step-*"):
        if int(later.name.removeprefix("step-")) > step:
            shutil.rmtree(later)
    events = [
        e for e in read_events(copy / "events.jsonl") if e.get("step", 0) <= step and e["event"] != "run_finished"
    ]
    (copy / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    record = json.loads((copy / "run.json").read_text())
    write_json(copy / "run.json", record | {"status": "running"})
    return copy


def test_a_damaged_checkpoint_is_set_aside_and_the_older_one_used(
    unbroken: raycp.FitResult, inputs: dict[str, Any], tmp_path: Path
) -> None:
    copy = rewound(unbroken, tmp_path, 4)
    shard = next((copy / "checkpoints" / "step-00000004").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    result = raycp.fit(**inputs, output_dir=copy, config=config())
    assert [r["step"] for r in result.recoveries] == [2]
    assert [r["steps_redone"] for r in result.recoveries] == [2]
    assert result.losses == unbroken.losses
    assert pack_ids(result) == pack_ids(unbroken)
    assert (copy / "checkpoints" / "damaged-step-00000004").is_dir()


def test_continuing_with_another_number_of_workers_is_equal_to_tolerance(
    unbroken: raycp.FitResult, inputs: dict[str, Any], tmp_path: Path
) -> None:
    copy = rewound(unbroken, tmp_path, 2)
    result = raycp.fit(**inputs, output_dir=copy, config=config(workers=3, cp=1))
    assert pack_ids(result) == pack_ids(unbroken)
    for step in range(3, STEPS + 1):
        assert result.losses[step] == pytest.approx(unbroken.losses[step], rel=1e-5)
    grids = {e["step"]: e["grid"]["dp"] for e in read_events(result.events_path) if e["event"] == "step"}
    assert grids == {1: 1, 2: 1, 3: 3, 4: 3, 5: 3, 6: 3}


def test_a_changed_configuration_is_refused_with_both_values(unbroken: raycp.FitResult, inputs: dict[str, Any]) -> None:
    with pytest.raises(raycp.CheckpointError, match=r"total_steps: 6 there, 9 now"):
        raycp.fit(
            **inputs,
            output_dir=unbroken.output_dir,
            config=raycp.FitConfig(**{**vars(config()), "steps": 9}),
        )
