"""A person stops the run while it computes nothing: at once, nothing committed is lost, the same command goes on."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from raycp.driver.controller import RunState
from raycp.driver.record import RunRecord
from raycp.driver.saving import Saving
from raycp.driver.signals import StopSignal
from raycp.errors import WorkerError
from raycp.training.manifest import Manifest
from tests.unit.driver.fake_cluster import FakeCluster, FakeKeepers, Fault
from tests.unit.driver.test_controller import TWO_NODES, Run, check_complete, named, steps, stop_at


def stop_in_wait(run: Run) -> list[float]:
    """A person presses Ctrl-C while the run waits for capacity; when that was."""
    asked: list[float] = []
    sleep = run.cluster.sleep

    def slept(seconds: float) -> None:
        if not asked and "waiting up to" in run.screen.getvalue():
            run.stop._interrupt(2, None)
            asked.append(run.cluster.clock.now)
        sleep(seconds)

    run.cluster.sleep = slept
    return asked


def next_driver(folder: Path, run: Run, **how: Any) -> Run:
    """The same command again: on the cluster that is still there, or with the files only."""
    cluster = run.cluster
    cluster.workers, cluster.sleep, cluster.closed = [], cluster.clock.sleep, False
    cluster.dead_nodes.clear()
    again = Run(folder, cluster, **how)
    again.checkpoints.manifests = run.checkpoints.manifests
    return again


@pytest.mark.parametrize("local", [False, True])
def test_ctrl_c_while_the_run_waits_for_capacity_stops_it_at_once(local: bool, tmp_path: Path) -> None:
    """It was not heard for `wait_for_capacity`, and then the run had failed."""
    cluster = FakeCluster(TWO_NODES, [Fault("step 3", 0, "node", rank=3)])
    cluster.local = local
    run = Run(tmp_path, cluster, cp=(4, 4), wait_for_capacity=600.0, checkpoint_every=50)
    asked = stop_in_wait(run)
    outcome = run()
    assert cluster.clock.now - asked[0] < 2.0
    assert (outcome.status, run.record.status, run.controller.state) == ("stopped", "stopped", RunState.DONE)
    (end,) = named(tmp_path, "run_finished", "run_failed")
    assert (end["event"], end["status"], end["steps"]) == ("run_finished", "stopped", 2)
    assert "stopped while it waited for workers" in run.screen.getvalue()
    assert max(step for step, _ in cluster.disk.values()) == 2, "what was committed in memory is on storage"
    assert cluster.closed
    assert cluster.memory is not None
    assert cluster.memory.closed is local, "keepers that were not waited for stay"
    if not local:
        again = next_driver(tmp_path, run, cp=(4, 4), checkpoint_every=50)
        again()
        check_complete(tmp_path, again)
        (found,) = named(tmp_path, "recovered")
        assert (found["source"], found["step"], found["steps_lost"]) == ("memory", 2, 0)


def test_ctrl_c_while_a_run_waits_gives_memory_back_where_all_of_it_is_on_storage(tmp_path: Path) -> None:
    cluster = FakeCluster(TWO_NODES, [Fault("step 4", 0, "node", rank=3)])
    run = Run(tmp_path, cluster, min_workers=3, wait_for_capacity=600.0, on_loss="wait")
    stop_in_wait(run)
    assert run().status == "stopped"
    assert cluster.memory is not None
    assert cluster.memory.closed, "all of it is on storage: nothing stays in memory"
    assert [e["step"] for e in named(tmp_path, "checkpoint")] == [3]
    again = next_driver(tmp_path, run)
    again()
    check_complete(tmp_path, again)


def test_ctrl_c_while_the_first_workers_are_waited_for_leaves_what_an_earlier_driver_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster(TWO_NODES, [Fault("step 5", 0, "fatal")])
    run = Run(tmp_path, cluster, checkpoint_every=50)
    with monkeypatch.context() as patch:
        patch.setattr(Saving, "last_words", lambda saving, **_: setattr(saving, "_unsaved", True))  # as if killed
        with pytest.raises(WorkerError):
            run()
    again = next_driver(tmp_path, run, checkpoint_every=50)
    again.stop._interrupt(2, None)
    outcome = again()
    assert (outcome.status, again.record.status) == ("stopped", "stopped")
    assert named(tmp_path, "run_finished")[-1]["steps"] == 4
    assert cluster.memory is not None
    assert not cluster.memory.closed
    third = next_driver(tmp_path, again, checkpoint_every=50)
    third()
    check_complete(tmp_path, third)
    assert named(tmp_path, "recovered")[-1]["source"] == "memory"


@pytest.mark.parametrize("what", ["connecting the workers", "building the model", "restoring step 2 from memory"])
def test_a_stop_while_a_world_is_formed_computes_no_further_step(what: str, tmp_path: Path) -> None:
    """Its first step was computed and saved before anybody looked, which takes minutes on long sequences."""
    cluster = FakeCluster(TWO_NODES, [Fault("step 3", 0, "die")] if what.startswith("restoring") else [])
    run = Run(tmp_path, cluster, checkpoint_every=50)
    stop_at(run, what)
    done = 2 if what.startswith("restoring") else 0
    outcome = run()
    assert outcome.status == "stopped"
    assert [s for s, _ in steps(tmp_path)] == list(range(1, done + 1))
    assert [e["step"] for e in named(tmp_path, "checkpoint")] == ([2] if done else [])
    again = Run(tmp_path, FakeCluster(TWO_NODES))
    again.cluster.disk, again.checkpoints.manifests = cluster.disk, run.checkpoints.manifests
    again()
    check_complete(tmp_path, again)


def test_ctrl_c_while_the_export_waits_for_other_workers_does_not_export_with_those_that_are_lost(
    tmp_path: Path,
) -> None:
    cluster = FakeCluster(TWO_NODES, [Fault("export", 0, "node", rank=3), Fault("export", 0, "node", rank=0)])
    run = Run(tmp_path, cluster, cp=(4, 4), wait_for_capacity=600.0)
    stop_in_wait(run)
    outcome = run()
    assert (outcome.status, outcome.export) == ("stopped", None)
    again = next_driver(tmp_path, run, cp=(4, 4))
    assert again().status == "finished"
    check_complete(tmp_path, again)


def test_a_full_output_dir_does_not_keep_a_run_that_is_stopped_at_once_from_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status could not be written: nothing went to storage, and the keepers ended with the only copy."""
    cluster = FakeCluster(TWO_NODES)
    run = Run(tmp_path, cluster, checkpoint_every=50)

    class Terminated(list[str]):
        def append(self, what: str) -> None:
            super().append(what)
            if what == "step 5":
                monkeypatch.setattr(run.record, "set_status", full)
                raise SystemExit(143)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cluster.calls = Terminated()
    with pytest.raises(SystemExit):
        run()
    assert "could not be recorded" in run.screen.getvalue()
    assert max(step for step, _ in cluster.disk.values()) >= 3
    assert cluster.memory is not None
    assert not cluster.memory.closed


def test_a_second_sigterm_while_the_first_one_is_recorded_breaks_nothing_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler says it again: the newest step was not brought to storage, and its keepers were ended."""
    run = Run(tmp_path, FakeCluster(TWO_NODES), checkpoint_every=50)
    set_status = RunRecord.set_status
    said: list[str] = []

    class Calls(list[str]):
        def append(self, text: str) -> None:
            super().append(text)
            if text == "step 5":
                run.stop._terminate(15, None)

    def again(record: RunRecord, status: str, **fields: Any) -> None:
        if status == "stopped":
            said.append(status)
            run.stop._terminate(15, None)
        set_status(record, status, **fields)

    run.cluster.calls = Calls()
    monkeypatch.setattr(RunRecord, "set_status", again)
    with pytest.raises(SystemExit):
        run()
    assert said
    assert steps(tmp_path)[-1][0] == 4
    assert run.cluster.memory is not None
    stored = max((step for step, _ in run.cluster.disk.values()), default=-1)
    assert stored == 4 or not run.cluster.memory.closed
    monkeypatch.setattr(RunRecord, "set_status", set_status)
    next_driver(tmp_path, run, checkpoint_every=50)()
    assert [e["steps_lost"] for e in named(tmp_path, "recovered")] == [0]


def test_ctrl_c_between_two_looks_of_the_driver_still_saves(tmp_path: Path) -> None:
    """Asked for after one look and before the next, the run ended without its last steps, and ended their keepers."""

    class Stop(StopSignal):
        looks, late = 0, False

        @property
        def requested(self) -> bool:
            self.looks += self.late
            return self.looks > 1

        @requested.setter
        def requested(self, value: bool) -> None: ...

    run = Run(tmp_path, FakeCluster(TWO_NODES, [Fault("step 3", 0, "die")]), checkpoint_every=50)
    stop = run.controller._stop = Stop(print)
    train = run.controller._train

    def trained(done: int) -> int:
        done = train(done)
        stop.late = done < 6
        return done

    run.controller._train = trained  # type: ignore[method-assign]
    outcome = run()
    assert outcome.status == "stopped"
    last = steps(tmp_path)[-1][0]
    assert [e["step"] for e in named(tmp_path, "checkpoint")][-1] == last
    again = next_driver(tmp_path, run, checkpoint_every=50)
    again()
    check_complete(tmp_path, again)
    assert sum(e["steps_lost"] for e in named(tmp_path, "recovered")) == 0


@pytest.mark.parametrize("local", [True, False])
def test_sigterm_inside_a_commit_brings_the_newest_step_to_storage(
    local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keepers had given up the step before, which was the newest that the driver knew of: nothing was written."""
    cluster = FakeCluster(TWO_NODES)
    cluster.local = local
    run = Run(tmp_path, cluster, checkpoint_every=50)
    commit = FakeKeepers.commit

    def interrupted(memory: FakeKeepers, manifest: Manifest) -> None:
        commit(memory, manifest)
        if manifest.step == 4:
            run.stop._terminate(15, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeKeepers, "commit", interrupted)
        with pytest.raises(SystemExit):
            run()
    assert [step for step, _ in steps(tmp_path)] == [1, 2, 3]
    assert max(step for step, _ in cluster.disk.values()) == 4
    again = next_driver(tmp_path, run, checkpoint_every=50)
    again()
    check_complete(tmp_path, again)
    assert [e["steps_lost"] for e in named(tmp_path, "recovered")] == [0]


def test_a_run_that_is_interrupted_while_it_says_why_it_failed_leaves_its_keepers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were ended with the only copies: nobody had looked yet whether storage has what they hold."""
    cluster = FakeCluster(TWO_NODES, [Fault("step 5", 0, "fatal")])
    run = Run(tmp_path, cluster, checkpoint_every=50)

    def interrupted(saving: Saving, **_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saving, "last_words", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert cluster.memory is not None
    assert not cluster.memory.closed
    next_driver(tmp_path, run, checkpoint_every=50)()
    assert [(e["source"], e["step"]) for e in named(tmp_path, "recovered")] == [("memory", 4)]
