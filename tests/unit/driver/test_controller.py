"""What the driver does between steps, with the calls to the ranks answered here instead of by actors."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline import StepSchedule
from raycp.config import ElasticConfig, FitConfig
from raycp.driver.cluster import ClusterHandle
from raycp.driver.controller import Controller
from raycp.driver.display import Display
from raycp.driver.record import RunRecord
from raycp.driver.signals import StopSignal
from raycp.errors import WorkerError
from raycp.events import EventLog, read_events
from raycp.plan import CostModel, RankGrid
from raycp.training.device import resolve_device
from raycp.training.spec import ModelSpec
from workers.messages import EvalReport, RunSpec, StepReport, StoreSpec

TOTAL = 5
STORE = StoreSpec(folder="", fingerprint="", packing="best_fit", plan_hash="")


class KilledError(BaseException):
    """The driver's process ends here."""


class Ranks:
    """Answers of one rank to everything that the controller asks; `die_at` is the call at which the driver dies."""

    def __init__(self, die_at: str = "") -> None:
        self.asked: list[str] = []
        self.die_at = die_at

    def gather(self, call: Callable[..., Any], *, what: str, **_: Any) -> list[Any]:
        if what == self.die_at:
            raise KilledError
        self.asked.append(what)
        if what.startswith("evaluation"):
            return [EvalReport(generation=1, rank=0, loss_sum=2.0, weight=1.0, targets=1)]
        return [
            StepReport(
                generation=1,
                step=0,
                rank=0,
                loss_sum=3.0,
                weight=1.0,
                grad_norm=1.0,
                lr=0.1,
                tokens=1,
                targets=1,
                seconds=1.0,
                remote_blocks_held=0,
            )
        ]


def controller(folder: Path) -> Controller:
    config = FitConfig(eval_every=2, elastic=ElasticConfig(checkpoint_every=100))
    record = RunRecord(folder)
    record.open({}, resume="auto")
    spec = RunSpec(
        run_id=record.run_id,
        output_dir=str(folder),
        model=ModelSpec(kind="hub", source="none"),
        model_fingerprint="",
        tokenizer_folder="",
        device=resolve_device("cpu", {}),
        dtype="float32",
        config=config,
        activation_checkpointing=False,
        total_steps=TOTAL,
        cost=CostModel(),
        train=STORE,
        evaluation=STORE,
    )
    display = Display(total_steps=TOTAL)
    return Controller(
        spec=spec,
        grid=RankGrid(dp=1, ring=1, ulysses=1, window=1),
        schedule=StepSchedule(num_packs=8, global_batch=1, steps=TOTAL, family="f"),
        cluster=ClusterHandle(started_here=False, in_job=False, driver_address=""),
        record=record,
        events=EventLog(folder / "events.jsonl", generation=record.generation),
        display=display,
        stop=StopSignal(display.say),
    )


def drive(folder: Path, done: int, die_at: str = "") -> list[str]:
    """Runs the steps after `done`, checkpoints left out; returns what the ranks were asked."""
    run, ranks = controller(folder), Ranks(die_at)
    run._save = lambda membership, step: None  # type: ignore[method-assign]
    try:
        run._steps(ranks, done)  # type: ignore[arg-type]
    except KilledError:
        assert die_at
    return ranks.asked


def evaluations(folder: Path) -> list[int]:
    return [e["step"] for e in read_events(folder / "events.jsonl") if e["event"] == "eval"]


def test_evaluations_of_an_unbroken_run(tmp_path: Path) -> None:
    drive(tmp_path, 0)
    assert evaluations(tmp_path) == [0, 2, 4, TOTAL]


@pytest.mark.parametrize("step", [0, 2, 4, TOTAL])
def test_an_evaluation_that_the_driver_died_before_is_made_up_for(tmp_path: Path, step: int) -> None:
    """Its checkpoint was committed, so no step after it runs: the last evaluation used to be lost for good."""
    drive(tmp_path, 0, die_at=f"evaluation after step {step}")
    assert step not in evaluations(tmp_path)
    drive(tmp_path, step)
    assert evaluations(tmp_path) == [0, 2, 4, TOTAL]


@pytest.mark.parametrize("back_to", [0, 1, 2, 3])
def test_steps_that_are_computed_again_are_not_evaluated_again(tmp_path: Path, back_to: int) -> None:
    drive(tmp_path, 0, die_at="step 4")
    drive(tmp_path, back_to)
    assert evaluations(tmp_path) == [0, 2, 4, TOTAL]


def test_a_finished_run_is_not_evaluated_again(tmp_path: Path) -> None:
    drive(tmp_path, 0)
    assert drive(tmp_path, TOTAL) == []


def test_a_disk_that_is_full_does_not_hide_why_the_run_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = controller(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run._events, "write", full)
    run._note_failure(WorkerError("x", fix="y", rank=0, node="n", cause="c"), 3)
    assert "could not be recorded" in capsys.readouterr().err
