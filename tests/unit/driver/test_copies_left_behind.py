"""Where copies in memory, checkpoints and a stop cross: nothing that is held is lost, and nobody waits for ever."""

from pathlib import Path
from typing import Any

import pytest

from data_pipeline import StepSchedule
from raycp.driver import checkpoints, saving
from raycp.driver.copies import Room
from raycp.driver.formation import Formation
from raycp.driver.saving import Saving
from raycp.errors import WorkerError
from raycp.training.committed import Newest
from tests.unit.driver import test_controller
from tests.unit.driver.fake_cluster import FakeCheckpoints, FakeCluster, FakeKeepers, FakeRanks, Fault
from tests.unit.driver.test_controller import TWO_NODES, Run, named


@pytest.fixture
def longer(monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs of 30 steps."""
    schedule = StepSchedule(num_packs=62, global_batch=2, steps=30, family="f")
    monkeypatch.setattr(test_controller, "TOTAL", 30)
    monkeypatch.setattr(test_controller, "SCHEDULE", schedule)
    return 30


def check_complete(folder: Path, run: Run) -> None:
    test_controller.check_complete(folder, run)


def killed(run: Run) -> None:
    """The run, whose driver is gone before it can do anything about the fault that ends it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saving, "last_words", lambda saving, **_: setattr(saving, "_unsaved", True))
        with pytest.raises(WorkerError):
            run()
    run.cluster.workers, run.cluster.calls = [], []


@pytest.mark.parametrize("how", ["terminated", "three failures"])
def test_a_second_driver_that_ends_before_it_has_restored_anything_leaves_the_only_copies(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had committed nothing itself, and ended the keepers: steps in the log were nowhere any more."""
    cluster = FakeCluster(TWO_NODES, [Fault("step 5", 0, "fatal")])
    killed(Run(tmp_path, cluster, checkpoint_every=50))
    again = Run(tmp_path, cluster, checkpoint_every=50)
    gather = FakeRanks.gather

    def terminated(ranks: FakeRanks, call: Any, *, what: str, **options: Any) -> Any:
        if what.startswith("building"):
            raise SystemExit(143)
        return gather(ranks, call, what=what, **options)

    if how == "terminated":
        monkeypatch.setattr(FakeRanks, "gather", terminated)
    else:
        cluster.faults = [Fault("connecting", at, "raise") for at in range(3)]
    with pytest.raises((SystemExit, WorkerError)):
        again()
    monkeypatch.setattr(FakeRanks, "gather", gather)
    assert cluster.memory is not None
    saved = [step for step, _ in cluster.disk.values()]
    assert saved == [4] or not cluster.memory.closed
    cluster.workers, cluster.calls, cluster.closed = [], [], False
    last = Run(tmp_path, cluster, checkpoint_every=50)
    last.checkpoints.manifests = again.checkpoints.manifests
    last()
    check_complete(tmp_path, last)
    assert [e["steps_lost"] for e in named(tmp_path, "recovered")] == [0]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("slow", [3, 7, 12])
def test_storage_slower_than_the_interval_of_checkpoints_makes_nobody_wait(
    slow: int, lag: int, longer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks wrote a checkpoint beside it, and then waited for the commit of a copy that nobody expected."""
    by_ranks: list[int] = []
    plain = Saving.save_by_ranks
    monkeypatch.setattr(Saving, "save_by_ranks", lambda self, step: (by_ranks.append(step), plain(self, step))[1])
    cluster = FakeCluster(TWO_NODES, slow=slow)
    cluster.lag, cluster.host_memory = lag, 48
    run = Run(tmp_path, cluster, state_bytes=12, checkpoint_every=2)
    run()
    check_complete(tmp_path, run)
    assert run.controller._formation.room is Room.TIGHT
    assert by_ranks == []
    assert named(tmp_path, "snapshot_failed") == []


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_a_checkpoint_at_every_step_is_made_of_copies_though_they_arrive_late(
    lag: int, longer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_ranks: list[int] = []
    plain = Saving.save_by_ranks
    monkeypatch.setattr(Saving, "save_by_ranks", lambda self, step: (by_ranks.append(step), plain(self, step))[1])
    cluster = FakeCluster(TWO_NODES)
    cluster.lag = lag
    run = Run(tmp_path, cluster, checkpoint_every=1)
    run()
    check_complete(tmp_path, run)
    assert by_ranks == []


def test_after_a_node_was_full_for_a_while_and_the_ranks_wrote_themselves_copies_go_on(
    longer: int, tmp_path: Path
) -> None:
    cluster = FakeCluster(TWO_NODES, [Fault("step", at, "full", rank=0) for at in range(2, 8)])
    run = Run(tmp_path, cluster, checkpoint_every=3)
    run()
    check_complete(tmp_path, run)
    assert [e["step"] for e in named(tmp_path, "snapshot")][-3:] == [28, 29, 30]


@pytest.mark.parametrize("memory", [48, 1 << 40])
def test_storage_that_hangs_is_said_and_ends_neither_the_copies_nor_the_run_at_once(
    memory: int, longer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write without an end was never mentioned; with little memory no step was committed any more."""
    monkeypatch.setattr(checkpoints, "PATIENCE_SECONDS", 0.0)
    cluster = FakeCluster(TWO_NODES, [Fault("step 25", 0, "die", rank=1)], slow=10**9)
    cluster.host_memory = memory
    run = Run(tmp_path, cluster, state_bytes=12, checkpoint_every=12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "PATIENCE", 1e-9)
        run()
    check_complete(tmp_path, run)
    failed = named(tmp_path, "checkpoint_failed")
    assert failed[0]["step"] == 12
    assert "has not taken it in" in failed[0]["error"]
    assert failed[0]["fix"]
    (recovered,) = named(tmp_path, "recovered")
    assert (recovered["steps_lost"], recovered["steps_redone"]) == (0, 1)


def test_a_stop_that_is_asked_for_as_a_resize_begins_has_its_checkpoint(
    longer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state was in memory only when the run stopped, and went with it."""
    cluster = FakeCluster({"a": 2, "b": 2}, [Fault("step 2", 0, "node", rank=3)], late={12: {"b": 2}})
    run = Run(tmp_path, cluster, checkpoint_every=50)
    bigger = Formation.bigger

    def asked(formation: Formation) -> Any:
        found = bigger(formation)
        run.stop.requested = run.stop.requested or found is not None
        return found

    monkeypatch.setattr(Formation, "bigger", asked)
    outcome = run()
    assert outcome.status == "stopped"
    assert outcome.checkpoint is not None
    assert [step for step, _ in cluster.disk.values()] == [max(e["step"] for e in named(tmp_path, "step"))]


def test_a_worker_that_replaces_another_does_not_count_the_copies_against_themselves(tmp_path: Path) -> None:
    """It found its node with the run's own copies in it: too little memory for copies, for the rest of the run."""
    cluster = FakeCluster({"a": 1, "b": 1}, [Fault("step 3", 0, "die", rank=1)])
    cluster.host_memory = 60  # 5 x 6 bytes are needed on each node

    class Calls(list[str]):
        def append(self, what: str) -> None:
            super().append(what)
            cluster.host_memory = 60 - 4 * 6

    cluster.calls = Calls()
    run = Run(tmp_path, cluster, size=2, cp=(1, 2), state_bytes=12, checkpoint_every=50, on_loss="wait")
    run()
    check_complete(tmp_path, run)
    assert run.controller._formation.room is Room.AMPLE
    assert [e["step"] for e in named(tmp_path, "snapshot")] == list(range(1, 7))


def test_the_second_home_of_copies_that_was_lost_with_a_spares_keeper_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper on the spare's node started again beside the run, and nothing was copied there until a recovery."""
    cluster = FakeCluster({"a": 2, "b": 1}, [Fault("step 2", 0, "keeper", rank=0)])
    begin, asked = FakeKeepers.begin, list[str]()

    def beside(keepers: FakeKeepers, node: Any) -> None:  # as the real one: not there at the first call
        if node.node_id not in keepers.addresses:
            asked.append(node.node_id)
        if len(asked) >= 2:
            begin(keepers, node)

    class Calls(list[str]):
        def append(self, what: str) -> None:
            super().append(what)
            if what == "step 2" and cluster.memory is not None:
                cluster.memory.lose("b")

    cluster.faults, cluster.calls = [], Calls()
    monkeypatch.setattr(FakeKeepers, "begin", beside)
    run = Run(tmp_path, cluster, size=2, cp=(1, 2), checkpoint_every=50, spares=1)
    run()
    check_complete(tmp_path, run)
    assert cluster.memory is not None
    assert cluster.memory.peers["a"] == "b"


@pytest.mark.parametrize("slow", [1, 2, 3, 5, 8])
def test_an_older_checkpoint_that_is_written_later_than_the_last_is_not_taken_for_the_newest(
    slow: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run said that it had stopped, and exported nothing."""
    monkeypatch.setattr(saving, "PATIENCE", 1e-9)
    run = Run(tmp_path, FakeCluster(TWO_NODES, slow=slow), checkpoint_every=4)
    assert run().status == "finished"
    check_complete(tmp_path, run)
    assert run.checkpoints.newest_step == 6


def test_after_the_only_checkpoint_proved_damaged_what_is_in_memory_counts(
    longer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step was still taken for stored, and newer than the copies: each later fault began the run anew."""
    faults = [Fault("step 9", 0, "keeper", rank=0), Fault("step 9", 0, "keeper", rank=2)]
    faults += [Fault("step 9", 0, "die", rank=1), Fault("step 4", 1, "die", rank=1)]
    run = Run(tmp_path, FakeCluster(TWO_NODES, faults), checkpoint_every=6, on_loss="wait")
    find = FakeCheckpoints.find

    def damaged(found: FakeCheckpoints) -> Any:
        found.manifests.clear()
        return find(found)

    monkeypatch.setattr(FakeCheckpoints, "find", damaged)
    run()
    assert [(e["source"], e["step"]) for e in named(tmp_path, "recovered")] == [("start", 0), ("memory", 3)]


def test_the_last_copy_that_is_known_to_have_failed_is_not_waited_for(tmp_path: Path) -> None:
    """The end of the run waited a minute for it."""
    cluster = FakeCluster(TWO_NODES, [Fault("step 6", 0, "copy", rank=0)])
    run, began = Run(tmp_path, cluster, checkpoint_every=50), cluster.clock.now
    run()
    check_complete(tmp_path, run)
    assert cluster.clock.now < began + 30


def test_a_keeper_that_was_replaced_is_no_copy_that_failed_once_more(tmp_path: Path) -> None:
    """At the last step its ranks attached twice, and a copy that was on its way was given up."""
    cluster = FakeCluster(TWO_NODES, [Fault("step 6", 0, "keeper", rank=0), Fault("step 6", 0, "copy", rank=0)])
    run = Run(tmp_path, cluster, checkpoint_every=50)
    run()
    check_complete(tmp_path, run)
    assert len(named(tmp_path, "keeper_lost")) == 1
    assert named(tmp_path, "snapshot_failed") == []


@pytest.mark.parametrize("how", ["killed", "fails"])
def test_a_driver_that_ends_while_a_step_is_restored_that_was_not_committed_leaves_it_to_the_next_one(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step before was given up for it, and this one was nobody's: all steps since the last checkpoint were lost."""
    cluster = FakeCluster(TWO_NODES, [Fault("step 5", 0, "die")])
    cluster.lag = 1
    run = Run(tmp_path, cluster, checkpoint_every=50)
    gather, restored = FakeRanks.gather, list[str]()

    def ends(ranks: FakeRanks, call: Any, *, what: str, **options: Any) -> Any:
        if what.startswith("restoring"):
            restored.append(what)
            raise SystemExit(9)
        return gather(ranks, call, what=what, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeRanks, "gather", ends)
        if how == "killed":
            patch.setattr(Saving, "last_words", lambda saving, **_: setattr(saving, "_unsaved", True))
        with pytest.raises(SystemExit):
            run()
    assert restored == ["restoring step 4 from memory"]
    assert [e["step"] for e in named(tmp_path, "snapshot")][-1] == 3, "no copy of step 4 was committed"
    cluster.workers, cluster.calls, cluster.closed = [], [], False
    again = Run(tmp_path, cluster, checkpoint_every=50)
    again.checkpoints.manifests = run.checkpoints.manifests
    again()
    check_complete(tmp_path, again)
    assert [(e["step"], e["steps_lost"], e["steps_redone"]) for e in named(tmp_path, "recovered")] == [(4, 0, 0)]


@pytest.mark.parametrize("driver", ["the same", "the next"])
def test_a_keeper_that_came_after_a_loss_holds_the_committed_step_and_knows_it(driver: str, tmp_path: Path) -> None:
    """It had every shard and no manifest: with the node before lost, too, the run fell to a checkpoint."""
    faults = [Fault("step 5", 0, "node", rank=3), Fault("step 5", 1, "node", rank=0)]
    cluster = FakeCluster(dict.fromkeys("abcd", 2), faults if driver == "the same" else faults[:1])
    run = Run(tmp_path, cluster, cp=(4, 4), checkpoint_every=50)
    if driver == "the same":
        run()
    else:
        cluster.faults.append(Fault("step 5", 1, "fatal", rank=0))
        killed(run)
        assert cluster.memory is not None
        cluster.memory.lose("a")
        cluster.dead_nodes.add("a")
        cluster.closed = False
        run = Run(tmp_path, cluster, cp=(4, 4), checkpoint_every=50)
        run()
    check_complete(tmp_path, run)
    assert [(e["source"], e["step"], e["steps_lost"]) for e in named(tmp_path, "recovered")] == [("memory", 4, 0)] * 2


def test_a_checkpoint_that_turns_out_damaged_does_not_keep_the_run_from_what_is_in_memory(tmp_path: Path) -> None:
    """Copies failed for a while, the ranks wrote step 4: step 1, in memory, was not looked at any more."""
    cluster = FakeCluster(TWO_NODES, [Fault("step 5", 0, "die")])
    run = Run(tmp_path, cluster, checkpoint_every=2)

    class Calls(list[str]):
        def append(self, text: str) -> None:
            super().append(text)
            assert cluster.memory is not None
            cluster.memory.full = {"step 2": 1000, "step 5": 0}.get(text, cluster.memory.full)

    def search() -> Newest:  # as the real one, which sets a damaged one aside
        run.checkpoints.manifests = {n: m for n, m in run.checkpoints.manifests.items() if m.step != 4}
        return FakeCheckpoints._search(run.checkpoints)

    cluster.calls = Calls()
    run.checkpoints._search = search  # type: ignore[method-assign]
    run()
    check_complete(tmp_path, run)
    (found,) = named(tmp_path, "recovered")
    assert (found["source"], found["step"], found["steps_lost"]) == ("memory", 1, 3)
    assert run.checkpoints.newest_step == 6
