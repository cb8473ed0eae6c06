"""Real Ray, real kills: the run goes on in the same call, in place, and computes what an unbroken run computes."""

import time
from pathlib import Path
from typing import Any

import pytest

import raycp
from raycp.driver import fleet, keeper_calls
from raycp.events import read_events
from tests.elastic import faulty_worker
from tests.elastic.runs import STEPS, config, pack_ids
from tests.elastic.slow_keeper import SLOW_SECONDS, SlowKeeper


def events(folder: Path, *names: str) -> list[dict[str, Any]]:
    return [e for e in read_events(folder / "events.jsonl") if e["event"] in names]


def check(result: raycp.FitResult, unbroken: raycp.FitResult, *, same_world: bool) -> None:
    """Every pack once in the order of an unbroken run; losses bit-equal, or to 1e-5 where the world changed."""
    assert result.status == "finished"
    assert result.steps == STEPS
    assert pack_ids(result) == pack_ids(unbroken)
    assert set(result.losses) == set(unbroken.losses)
    for step, loss in unbroken.losses.items():
        assert result.losses[step] == (loss if same_world else pytest.approx(loss, rel=1e-5)), step


@pytest.mark.parametrize(
    ("worker", "spares", "cause"),
    [
        ("RaisingWorker", 0, "ValueError: planted"),
        ("DyingWorker", 1, "died"),
        ("DyingWorker", 0, "died"),
        ("FrozenWorker", 1, "no answer from its control thread"),
    ],
)
def test_a_lost_rank_interrupts_the_run_and_costs_no_committed_step(
    worker: str,
    spares: int,
    cause: str,
    unbroken: raycp.FitResult,
    inputs: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "TrainWorker", getattr(faulty_worker, worker))
    began = time.monotonic()
    result = raycp.fit(
        **inputs, output_dir=tmp_path, config=config(spares=spares, heartbeat_timeout=4.0, checkpoint_every=100)
    )
    print(f"{time.monotonic() - began:.1f} s in all;", *result.recoveries)
    check(result, unbroken, same_world=spares > 0 or worker == "RaisingWorker")
    (recovered,) = result.recoveries
    assert recovered["source"] == "memory"
    assert recovered["steps_lost"] == 0
    assert 1 <= recovered["steps_redone"] <= 2
    assert cause in recovered["causes"][0]["cause"]
    assert len(events(tmp_path, "worker_lost")) == 1
    grids = [e["grid"]["cp"] for e in events(tmp_path, "step")]
    assert grids[0] == grids[-1] == 2 or (worker, spares) == ("DyingWorker", 0)


def test_a_rank_that_freezes_while_it_loads_is_seen_by_heartbeat_timeout(
    unbroken: raycp.FitResult, inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was seen after ten times as long, since whoever loads may be silent for that time."""
    monkeypatch.setattr(fleet, "TrainWorker", faulty_worker.FrozenLoader)
    result = raycp.fit(**inputs, output_dir=tmp_path, config=config(spares=1, heartbeat_timeout=4.0))
    check(result, unbroken, same_world=True)
    (recovered,) = result.recoveries
    assert "no answer from its control thread" in recovered["causes"][0]["cause"]
    assert 4.0 <= recovered["seconds"]["detect"] < 8.0


def test_a_copy_that_was_not_made_is_tried_again_and_a_later_loss_costs_no_more_than_ever(
    unbroken: raycp.FitResult, inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step was committed any more, and nobody said so: the next loss took all of them."""
    monkeypatch.setattr(fleet, "TrainWorker", faulty_worker.UncopiedWorker)
    result = raycp.fit(**inputs, output_dir=tmp_path, config=config(spares=1, checkpoint_every=100))
    check(result, unbroken, same_world=True)
    (failed,) = events(tmp_path, "snapshot_failed")
    assert failed["rank"] == faulty_worker.FAULT_RANK
    assert failed["step"] == faulty_worker.FAULT_STEP - 1
    assert "the keeper of node" in failed["cause"]
    assert events(tmp_path, "keeper_lost") == []
    (recovered,) = result.recoveries
    assert (recovered["source"], recovered["steps_lost"]) == ("memory", 0)
    assert recovered["steps_redone"] <= 2


def test_a_slow_keeper_neither_stalls_the_run_nor_is_taken_for_a_dead_one(
    unbroken: raycp.FitResult, inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first loss while it wrote, the driver gave it up, and with it the newest copies."""
    monkeypatch.setattr(fleet, "TrainWorker", faulty_worker.DyingWriter)
    monkeypatch.setattr(keeper_calls, "Keeper", SlowKeeper)
    result = raycp.fit(**inputs, output_dir=tmp_path, config=config(spares=1))
    check(result, unbroken, same_world=True)
    assert events(tmp_path, "keeper_lost", "snapshot_failed", "checkpoint_failed") == []
    (recovered,) = result.recoveries
    assert (recovered["source"], recovered["steps_lost"]) == ("memory", 0)
    assert recovered["seconds"]["fence"] < 1.5, "its node has a rank that lives: nobody waits for it"
    assert max(e["stall_seconds"] for e in events(tmp_path, "snapshot")) < SLOW_SECONDS / 3
    order = [(e["event"], e["step"]) for e in events(tmp_path, "step", "checkpoint")]
    assert order[-1] == ("checkpoint", STEPS)
    saved = [step for event, step in order if event == "checkpoint" and step < STEPS]
    assert saved, "the one that the loss broke off is made up for"
    assert order.index(("step", saved[0] + 1)) < order.index(("checkpoint", saved[0])), "steps went on while it wrote"


def test_a_planted_stale_state_after_recovery_is_seen_by_the_comparison(
    unbroken: raycp.FitResult, inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "TrainWorker", faulty_worker.StaleWorker)
    result = raycp.fit(**inputs, output_dir=tmp_path, config=config(heartbeat_timeout=4.0))
    assert result.steps == STEPS
    with pytest.raises(AssertionError):
        check(result, unbroken, same_world=False)
