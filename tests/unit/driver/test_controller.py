"""The state machine on a cluster without processes: scripted faults at every call, a clock that jumps."""

import dataclasses
import errno
import io
import os
import random
from pathlib import Path
from typing import Any

import pytest

from data_pipeline import StepSchedule
from raycp.config import ElasticConfig, FitConfig
from raycp.driver import checkpoints
from raycp.driver.cluster import NodeInfo
from raycp.driver.commits import EVENTS
from raycp.driver.controller import Controller, Outcome, RunState
from raycp.driver.display import Display
from raycp.driver.formation import Formation
from raycp.driver.record import RunRecord
from raycp.driver.saving import Saving
from raycp.driver.signals import StopSignal
from raycp.driver.worlds import World, Worlds
from raycp.errors import CheckpointError, StaleGenerationError, WorkerError
from raycp.events import EventLog, read_events
from raycp.plan import CostModel, GridChoice, RankGrid
from raycp.plan.resize import WorldLimits
from raycp.training.storage import PathStorage
from tests.specs import run_spec
from tests.unit.driver.fake_cluster import START, FakeCheckpoints, FakeCluster, FakeKeepers, Fault, Process, after

TOTAL = 6
SCHEDULE = StepSchedule(num_packs=8, global_batch=2, steps=TOTAL, family="f")
TWO_NODES = {"a": 2, "b": 2}


class Run:
    """One driver's run on a fake cluster."""

    def __init__(
        self,
        folder: Path,
        cluster: FakeCluster,
        *,
        size: int = 4,
        cp: tuple[int, int] = (1, 4),
        state_bytes: int = 1,
        **elastic: Any,
    ):
        settings = {"checkpoint_every": 3, "wait_for_capacity": 30.0} | elastic
        config = FitConfig(elastic=ElasticConfig(**settings))
        record = RunRecord(folder)
        record.open({}, resume="auto")
        self.cluster = cluster
        self.record = record
        self.events = EventLog(folder / "events.jsonl", generation=record.generation)
        self.checkpoints = FakeCheckpoints(folder, self.events)
        spec = run_spec(folder, run_id=record.run_id, config=config, total_steps=TOTAL)
        self.screen = io.StringIO()
        self.display = display = Display(total_steps=TOTAL, file=self.screen)
        self.stop = StopSignal(display.say)
        self.started: list[World] = []
        self.controller = Controller(
            spec=spec,
            worlds=Worlds(
                WorldLimits(cp=cp, dp=(1, 1), workers=(settings.get("min_workers", 1), size), wanted=(1, size)),
                grid_of=lambda dp, cp, cost: GridChoice(RankGrid(dp=dp, ring=cp), ()),
                cost_of=lambda node_ranks: CostModel().on_nodes(node_ranks),
                bytes_of=lambda grid, recompute: 1,
                recompute=False,
            ),
            schedule=SCHEDULE,
            runtime=cluster,
            record=record,
            events=self.events,
            checkpoints=self.checkpoints,
            secret=b"",
            state_bytes=state_bytes,
            display=display,
            stop=self.stop,
            started=self.started.append,
        )

    def __call__(self) -> Outcome:
        with self.display:  # tqdm stumbles over bars that are collected unclosed
            return self.controller.run()


def truth(steps: int | None = None) -> str:
    """The state after `steps` steps of an uninterrupted run, by default after all."""
    state = START
    for step in range(1, (TOTAL if steps is None else steps) + 1):
        state = after(state, step, SCHEDULE.pack_ids(step))
    return state


def steps(folder: Path) -> list[tuple[int, list[int]]]:
    return [(e["step"], e["pack_ids"]) for e in read_events(folder / "events.jsonl") if e["event"] == "step"]


def named(folder: Path, *names: str) -> list[dict[str, Any]]:
    return [e for e in read_events(folder / "events.jsonl") if e["event"] in names]


def check_complete(folder: Path, run: Run) -> None:
    """Every step once, in order, with its packs; the final state that of an uninterrupted run."""
    assert steps(folder) == [(s, list(SCHEDULE.pack_ids(s))) for s in range(1, TOTAL + 1)]
    assert run.cluster.exported == (TOTAL, truth())
    assert run.cluster.generations == sorted(set(run.cluster.generations))
    assert run.cluster.closed


def stop_at(run: Run, what: str) -> None:
    """A person asks the run to stop while `what` runs."""

    class Stop(list[str]):
        def append(self, text: str) -> None:
            super().append(text)
            if text == what:
                run.stop.requested = True

    run.cluster.calls = Stop()


def test_an_unbroken_run(tmp_path: Path) -> None:
    run = Run(tmp_path, FakeCluster(TWO_NODES))
    outcome = run()
    check_complete(tmp_path, run)
    assert outcome.status == "finished"
    assert named(tmp_path, "recovered", "resized", "worker_lost") == []
    assert [e["step"] for e in named(tmp_path, "checkpoint")] == [3, 6]


def test_what_a_run_says_that_it_begins_with_is_the_world_of_its_placement(tmp_path: Path) -> None:
    """`run_started` had the grid that was chosen before anybody knew where the ranks would be."""
    run = Run(tmp_path, FakeCluster(TWO_NODES, [Fault("connecting", 0, "die")]))
    run()
    (world,) = run.started
    assert (world.grid.world_size, world.node_ranks, world.cost) == (4, (2, 2), CostModel().on_nodes((2, 2)))


@pytest.mark.parametrize("kind", ["die", "freeze", "node", "raise"])
@pytest.mark.parametrize(
    ("where", "at", "lost", "redone"),
    [
        ("connecting", 0, 0, 0),
        ("building", 0, 0, 0),
        ("step", 0, 0, 1),
        ("step", 3, 0, 1),
        ("step", 5, 0, 1),
        ("export", 0, 0, 0),
    ],
)
def test_whatever_is_lost_no_committed_step_is(
    kind: str, where: str, at: int, lost: int, redone: int, tmp_path: Path
) -> None:
    cluster = FakeCluster(TWO_NODES, [Fault(where, at, kind, rank=0)])
    run = Run(tmp_path, cluster)
    run()
    check_complete(tmp_path, run)
    found = named(tmp_path, "recovered")
    assert [(e["steps_lost"], e["steps_redone"]) for e in found] == [(lost, redone)]
    assert {"freeze", "fence", "plan", "rebuild", "restore"} <= set(found[0]["seconds"])
    assert len(named(tmp_path, "worker_lost")) == 1
    assert len(cluster.killed) == {"die": 1, "freeze": 1, "node": 2, "raise": 0}[kind]


@pytest.mark.parametrize("where", ["connecting", "building", "restoring"])
def test_a_second_fault_during_recovery_starts_it_again(where: str, tmp_path: Path) -> None:
    cluster = FakeCluster(
        {"a": 2, "b": 2, "c": 2}, [Fault("step", 2, "die"), Fault(where, 1 if where != "restoring" else 0, "die")]
    )
    run = Run(tmp_path, cluster)
    run()
    check_complete(tmp_path, run)
    (found,) = named(tmp_path, "recovered")
    assert len(found["causes"]) == 2
    assert found["steps_lost"] == 0
    assert len(named(tmp_path, "worker_lost")) == 2


def test_a_spare_takes_the_place_at_once_and_the_world_stays(tmp_path: Path) -> None:
    cluster = FakeCluster({"a": 2, "b": 3}, [Fault("step", 2, "die", rank=1)])
    run = Run(tmp_path, cluster, spares=1)
    run()
    check_complete(tmp_path, run)
    assert {e["grid"]["cp"] for e in named(tmp_path, "step", "recovered")} == {4}


def test_without_a_spare_the_world_shrinks_and_grows_back_without_losing_a_step(tmp_path: Path) -> None:
    cluster = FakeCluster(TWO_NODES, [Fault("step", 2, "node", rank=3)])
    cluster.late = {}
    run = Run(tmp_path, cluster)
    calls = cluster.calls

    class Late(list[str]):
        def append(self, what: str) -> None:
            super().append(what)
            if what == "step 4":
                cluster.room["c"] = 2

    cluster.calls = Late(calls)
    run()
    check_complete(tmp_path, run)
    assert [e["grid"]["cp"] for e in named(tmp_path, "step")] == [4, 4, 2, 2, 4, 4]
    (resized,) = named(tmp_path, "resized")
    assert (resized["steps_lost"], resized["steps_redone"], resized["source"]) == (0, 0, "memory")


def test_a_run_that_grows_does_not_stand_still_while_a_keeper_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster(TWO_NODES, [Fault("step", 2, "node", rank=3)])
    began: list[str] = []

    class Late(list[str]):
        def append(self, what: str) -> None:
            super().append(what)
            if what == "step 4":
                cluster.room["c"] = 2

    def waits(keepers: FakeKeepers, node: NodeInfo) -> None:
        raise AssertionError("training waited for a keeper to start")

    cluster.calls = Late(cluster.calls)
    run = Run(tmp_path, cluster)
    grow = Formation.grow

    def watched(formation: Formation) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(FakeKeepers, "add", waits)
            patch.setattr(FakeKeepers, "begin", lambda keepers, node: began.append(node.node_id))
            grow(formation)

    monkeypatch.setattr(Formation, "grow", watched)
    run()
    check_complete(tmp_path, run)
    assert "c" in began


def test_a_fixed_degree_waits_for_capacity_and_gives_up_with_the_cause(tmp_path: Path) -> None:
    cluster = FakeCluster(TWO_NODES, [Fault("step", 2, "node", rank=3)])
    run = Run(tmp_path, cluster, cp=(4, 4), min_workers=4)
    before = cluster.clock.now
    with pytest.raises(WorkerError, match=r"2 healthy workers are left after waiting 30 s.*scripted"):
        run()
    assert cluster.clock.now - before > 30
    assert run.controller.state is RunState.FAILED
    assert run.record.status == "failed"
    assert max(step for step, _ in cluster.disk.values()) == 2, "what was committed in memory is on storage"

    cluster.dead_nodes.clear()
    again = Run(tmp_path, FakeCluster(TWO_NODES), cp=(4, 4), min_workers=4)
    again.cluster.disk = cluster.disk
    again.checkpoints.manifests = {
        where: run.controller._commits.newest for where in cluster.disk if run.controller._commits.newest
    }
    again()
    check_complete(tmp_path, again)


@pytest.mark.parametrize("lost", ["every worker", "a rank of a fixed degree"])
def test_a_run_that_never_waits_starts_workers_anew_where_their_nodes_have_room(lost: str, tmp_path: Path) -> None:
    """It ended although the same nodes could start the same workers again."""
    dead = range(4) if lost == "every worker" else [3]
    cluster = FakeCluster(TWO_NODES, [Fault("step", 2, "die", rank=rank) for rank in dead])
    run = Run(tmp_path, cluster, cp=(1, 4) if lost == "every worker" else (4, 4), on_loss="shrink")
    before = cluster.clock.now
    run()
    check_complete(tmp_path, run)
    assert cluster.clock.now - before < 30


def test_a_run_that_never_waits_ends_at_once_where_nothing_can_be_started(tmp_path: Path) -> None:
    cluster = FakeCluster(TWO_NODES, [Fault("step", 2, "node", rank=3)])
    run = Run(tmp_path, cluster, cp=(4, 4), on_loss="shrink", wait_for_capacity=600.0)
    before = cluster.clock.now
    with pytest.raises(WorkerError, match=r"2 healthy workers are left, and no world"):
        run()
    assert cluster.clock.now - before < 30


def test_a_fixed_degree_goes_on_when_capacity_comes_in_time(tmp_path: Path) -> None:
    cluster = FakeCluster(TWO_NODES, [Fault("step", 2, "node", rank=3)])
    run = Run(tmp_path, cluster, cp=(4, 4), on_loss="wait")
    slept = cluster.clock.sleep

    def sleep(seconds: float) -> None:
        slept(seconds)
        cluster.room["c"] = 2

    cluster.sleep = sleep
    run()
    check_complete(tmp_path, run)
    assert {e["grid"]["cp"] for e in named(tmp_path, "step")} == {4}


def test_three_failures_at_the_same_step_stop_with_the_cause(tmp_path: Path) -> None:
    faults = [Fault("step 4", n, "raise", rank=2) for n in range(3)]
    run = Run(tmp_path, FakeCluster(TWO_NODES, faults))
    with pytest.raises(WorkerError, match=r"3 failures in a row after step 3.*scripted"):
        run()
    assert len(named(tmp_path, "worker_lost")) == 3
    assert named(tmp_path, "run_failed")[0]["step"] == 3


def test_failures_with_progress_between_them_are_not_counted_together(tmp_path: Path) -> None:
    faults = [Fault(f"step {s}", n, "raise", rank=2) for s in range(1, 6) for n in range(2)]
    run = Run(tmp_path, FakeCluster(TWO_NODES, faults))
    run()
    check_complete(tmp_path, run)


@pytest.mark.parametrize(("kind", "on_loss"), [("fatal", "auto"), ("die", "stop")])
def test_what_must_not_be_retried_stops_at_once(kind: str, on_loss: str, tmp_path: Path) -> None:
    run = Run(tmp_path, FakeCluster(TWO_NODES, [Fault("step 4", 0, kind)]), on_loss=on_loss)
    with pytest.raises(WorkerError, match="step 4 failed"):
        run()
    assert named(tmp_path, "recovered") == []
    assert named(tmp_path, "run_failed")[0]["step"] == 3
    assert run.cluster.closed


class BadDevice(list[str]):
    """Calls of a cluster on which everything raises, from a step on, that one process does."""

    def __init__(self, cluster: FakeCluster, begin: str) -> None:
        super().__init__()
        self.cluster, self.begin, self.pid = cluster, begin, 0

    def append(self, what: str) -> None:
        super().append(what)
        if what == self.begin and not self.pid:
            self.pid = self.cluster.workers[1].probe.pid
        rank = next((r for r, w in enumerate(self.cluster.workers[:4]) if w.probe.pid == self.pid), None)
        if rank is not None:
            seen = sum(what in text for text in self) - 1
            self.cluster.faults.append(Fault(what, seen, "raise", rank=rank))


def test_a_process_whose_device_raises_in_whatever_it_does_is_replaced_by_the_idle_spare(tmp_path: Path) -> None:
    """The same process was used again, and the third failure ended the run while a spare was idle."""
    cluster = FakeCluster({"a": 3, "b": 2})
    calls = BadDevice(cluster, "step 3")
    cluster.calls = calls
    run = Run(tmp_path, cluster, spares=1)
    run()
    check_complete(tmp_path, run)
    assert cluster.killed == [calls.pid]
    assert "has raised twice since step 2" in run.screen.getvalue()
    assert {e["grid"]["cp"] for e in named(tmp_path, "step")} == {4}


def test_a_process_that_raised_once_is_used_again(tmp_path: Path) -> None:
    cluster = FakeCluster({"a": 3, "b": 2}, [Fault("step 3", 0, "raise"), Fault("step 5", 0, "raise")])
    run = Run(tmp_path, cluster, spares=1)
    run()
    check_complete(tmp_path, run)
    assert cluster.killed == []


def test_a_smaller_world_with_a_worker_of_no_use_is_not_planned_anew_in_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning takes more than a second at cp 64, and all ranks waited for it in each step."""
    cluster = FakeCluster({"a": 2, "b": 2}, [Fault("step 2", 0, "die")])
    cluster.recruit = lambda target: 0  # type: ignore[method-assign]
    run = Run(tmp_path, cluster)
    asked: list[int] = []
    plain = Worlds.choose

    def choose(self: Worlds, probes: Any, **how: Any) -> World | None:
        asked.append(len(probes))
        found = plain(self, probes, **how)
        return plain(self, probes[:2], **how) if len(probes) == 3 else found

    monkeypatch.setattr(Worlds, "choose", choose)
    run()
    check_complete(tmp_path, run)
    assert asked == [4, 3, 3], "the start, the recovery, and once for the idle one"


def test_a_rank_that_wakes_after_it_was_given_up_does_not_write_into_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 of every generation wrote to the same folder, and renamed it to the export itself."""
    told: list[Path] = []
    plain = Process.do_export

    def export(self: Process, generation: int, checkpoint: str, out: str) -> str:
        told.append(Path(out))
        self.alive = len(told) > 1  # the first one is lost in the middle
        return plain(self, generation, checkpoint, out)

    monkeypatch.setattr(Process, "do_export", export)
    run = Run(tmp_path, FakeCluster(TWO_NODES))
    outcome = run()
    check_complete(tmp_path, run)
    assert outcome.export == tmp_path / "export"
    assert len({*told, outcome.export}) == 3
    assert outcome.export.is_dir()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".export")] == []


def test_a_lost_keeper_is_replaced_and_costs_no_step(tmp_path: Path) -> None:
    cluster = FakeCluster(TWO_NODES, [Fault("step 3", 0, "keeper", rank=0)])
    run = Run(tmp_path, cluster)
    run()
    check_complete(tmp_path, run)
    assert len(named(tmp_path, "keeper_lost")) == 1
    assert named(tmp_path, "recovered", "worker_lost") == []
    assert "attaching to the keepers" in cluster.calls


def test_a_keeper_that_stands_still_costs_no_step(tmp_path: Path) -> None:
    """The run hung for ever: ranks waited inside the step for a keeper that was to be replaced after it."""
    cluster = FakeCluster(TWO_NODES, [Fault("step 3", 0, "keeper frozen", rank=0)])
    run = Run(tmp_path, cluster)
    run()
    check_complete(tmp_path, run)
    assert [e["node"] for e in named(tmp_path, "keeper_lost")] == ["a"]
    assert named(tmp_path, "recovered", "worker_lost") == []


def test_a_keeper_that_stands_still_while_a_step_before_a_resize_is_copied(tmp_path: Path) -> None:
    run = Run(tmp_path, FakeCluster(TWO_NODES, [Fault("copy of step 5", 0, "keeper frozen")]), snapshot_every=4)
    stop_at(run, "step 5")
    assert run().status == "stopped"
    assert [s for s, _ in steps(tmp_path)] == [1, 2, 3, 4, 5]
    assert len(named(tmp_path, "keeper_lost")) == 1


def test_a_stop_between_two_snapshots_does_not_wait_for_the_commit_of_the_first_for_ever(tmp_path: Path) -> None:
    """The copy of the last step waited for a commit that nobody made meanwhile."""
    run = Run(tmp_path, FakeCluster(TWO_NODES), snapshot_every=4, checkpoint_every=100)
    run.cluster.lag = 3
    stop_at(run, "step 5")
    assert run().status == "stopped"
    assert [s for s, _ in steps(tmp_path)] == [1, 2, 3, 4, 5]
    assert [e["step"] for e in named(tmp_path, "checkpoint")] == [5]


def test_a_node_short_of_memory_for_a_moment_does_not_end_the_run(tmp_path: Path) -> None:
    """It ended with "step 3 has no replica", although every rank was well."""
    cluster = FakeCluster(TWO_NODES, [Fault("step 3", 0, "full"), Fault("step 6", 0, "die", rank=2)])
    run = Run(tmp_path, cluster, checkpoint_every=100)
    run()
    check_complete(tmp_path, run)
    (failed,) = named(tmp_path, "snapshot_failed")
    assert (failed["rank"], failed["node"], failed["step"]) == (None, "a", 2)
    assert "step 3 has no replica: no memory; the next copy is tried all the same" in run.screen.getvalue()
    (found,) = named(tmp_path, "recovered")
    assert (found["source"], found["steps_lost"]) == ("memory", 0)


def test_copies_that_never_arrive_though_every_keeper_answers_do_not_hang_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, FakeCluster(TWO_NODES), checkpoint_every=100, heartbeat_timeout=1.0)
    run.cluster.lag = 10**9
    run()
    check_complete(tmp_path, run)
    failed = named(tmp_path, "snapshot_failed")
    assert failed
    assert "did not arrive within" in failed[0]["cause"]
    assert "the next copy is tried all the same" in run.screen.getvalue()


@pytest.mark.parametrize("second", ["keeper", "keeper frozen"])
def test_both_keepers_lost_at_once_cost_no_step(second: str, tmp_path: Path) -> None:
    """The second one ended the run, while all ranks were well and held the state."""
    faults = [Fault("step 3", 0, "keeper", rank=0), Fault("step 3", 0, second, rank=2)]
    run = Run(tmp_path, FakeCluster(TWO_NODES, faults))
    run()
    check_complete(tmp_path, run)
    assert sorted(e["node"] for e in named(tmp_path, "keeper_lost")) == ["a", "b"]
    assert named(tmp_path, "recovered", "worker_lost") == []


def test_a_keeper_lost_while_another_is_replaced_is_replaced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, FakeCluster(TWO_NODES, [Fault("step 3", 0, "keeper", rank=0)]))
    assign, calls = FakeKeepers.assign, []

    def lost_meanwhile(keepers: FakeKeepers, generation: int, node_of_rank: Any, short: Any) -> None:
        calls.append(generation)
        if len(calls) == 2:
            keepers.lose("b")
        assign(keepers, generation, node_of_rank, short)

    monkeypatch.setattr(FakeKeepers, "assign", lost_meanwhile)
    run()
    check_complete(tmp_path, run)
    assert [e["node"] for e in named(tmp_path, "keeper_lost")] == ["a", "b"]
    assert named(tmp_path, "recovered", "worker_lost") == []


def test_keepers_that_are_lost_as_soon_as_they_start_end_the_run_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, FakeCluster(TWO_NODES, [Fault("step 3", 0, "keeper", rank=0)]))
    add = FakeKeepers.add

    def dies(keepers: FakeKeepers, node: NodeInfo) -> None:
        add(keepers, node)
        if "step 3" in run.cluster.calls:
            keepers.lose(node.node_id)

    monkeypatch.setattr(FakeKeepers, "add", dies)
    with pytest.raises(WorkerError, match=r"keeper.* of a does not answer"):
        run()
    assert named(tmp_path, "run_failed")[0]["step"] == 2


def test_storage_that_is_full_does_not_hold_up_a_recovery_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """latest.json could not be written, and the run ended with all its state in memory."""
    run = Run(tmp_path, FakeCluster(TWO_NODES, [Fault("step 4", 0, "die")]))

    def full(storage: Any, name: str, chunks: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{storage.where}/{name}")

    monkeypatch.setattr(PathStorage, "write", full)
    run()
    check_complete(tmp_path, run)
    assert [e["steps_lost"] for e in named(tmp_path, "recovered")] == [0]
    assert "does not take a write" in run.screen.getvalue()


def test_storage_that_cannot_be_listed_does_not_hold_up_a_recovery_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, FakeCluster(TWO_NODES, [Fault("step 2", 0, "die")]))
    asked: list[int] = []

    def away(root: Any) -> None:
        asked.append(1)
        if len(asked) > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), root.where)

    monkeypatch.setattr(checkpoints, "newest_committed", away)
    run()
    check_complete(tmp_path, run)


@pytest.mark.parametrize("times", [1, 9])
def test_storage_that_fails_while_a_checkpoint_is_looked_for_is_asked_again_and_then_named(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [Fault("step 6", 0, "node", rank=0), Fault("step 6", 0, "node", rank=3)]
    run = Run(tmp_path, FakeCluster({"a": 2, "b": 2, "c": 4}, faults))
    find, failures = run.checkpoints.find, [times]

    def away() -> Any:
        failures[0] -= 1
        if "step 6" in run.cluster.calls and failures[0] >= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "/checkpoints")
        return find()

    monkeypatch.setattr(run.checkpoints, "find", away)
    failures[0] += 1  # at the start
    if times == 1:
        run()
        check_complete(tmp_path, run)
    else:
        with pytest.raises(WorkerError, match="Input/output error"):
            run()


def test_a_copy_that_was_not_made_is_told_and_tried_again_and_a_later_loss_costs_no_more_than_ever(
    tmp_path: Path,
) -> None:
    """No step was committed any more, and nobody said so: the next loss took all of them."""
    cluster = FakeCluster(TWO_NODES, [Fault("step 3", 0, "copy", rank=1), Fault("step 6", 0, "die", rank=2)])
    run = Run(tmp_path, cluster, checkpoint_every=100)
    run()
    check_complete(tmp_path, run)
    (failed,) = named(tmp_path, "snapshot_failed")
    assert (failed["rank"], failed["cause"], failed["step"]) == (1, "the keeper left: scripted", 2)
    assert "the copy of rank 1 in memory was not made, and is tried again: the keeper left" in run.screen.getvalue()
    assert "attaching to the keepers" in cluster.calls
    assert named(tmp_path, "keeper_lost") == []
    (found,) = named(tmp_path, "recovered")
    assert (found["source"], found["step"], found["steps_lost"], found["steps_redone"]) == ("memory", 5, 0, 1)


def test_both_nodes_of_a_pair_lost_go_back_to_the_checkpoint_and_say_how_many_steps(tmp_path: Path) -> None:
    cluster = FakeCluster(
        {"a": 2, "b": 2, "c": 4}, [Fault("step 6", 0, "node", rank=0), Fault("step 6", 0, "node", rank=3)]
    )
    run = Run(tmp_path, cluster)
    run()
    check_complete(tmp_path, run)
    (found,) = named(tmp_path, "recovered")
    assert (found["source"], found["step"], found["steps_lost"], found["steps_redone"]) == ("checkpoint", 3, 2, 3)


def test_steps_lost_once_are_not_lost_again_by_the_next_fault(tmp_path: Path) -> None:
    """After a fall from step 4 to the start every fault up to step 4 counted them again; three ended the run."""
    cluster = FakeCluster({"a": 2, "b": 2, "c": 2})
    run = Run(tmp_path, cluster, checkpoint_every=100)

    class Calls(list[str]):
        def append(self, what: str) -> None:
            super().append(what)
            memory, again = cluster.memory, self.count(what)
            if what == "step 5" and again == 1 and memory is not None:
                memory.held = {name: {} for name in memory.held}
                cluster.faults.append(Fault("step 5", 0, "die"))
            if what in ("step 1", "step 2", "step 3") and again == 2:
                cluster.faults.append(Fault(what, 1, "raise", rank=len(self) % 2))

    cluster.calls = Calls()
    run()
    check_complete(tmp_path, run)
    found = named(tmp_path, "recovered")
    assert [e["steps_lost"] for e in found] == [4, 0, 0, 0]
    assert [e["steps_redone"] for e in found] == [5, 1, 1, 1]


def test_a_step_that_the_keepers_wrote_and_the_driver_did_not_is_in_the_log_after_a_start_from_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver was killed between the commit and the event; the log had steps 1, 2, 3, 5 and 6."""
    cluster = FakeCluster(TWO_NODES)
    run = Run(tmp_path, cluster)
    commit = FakeKeepers.commit

    def killed(keepers: FakeKeepers, manifest: Any) -> None:
        commit(keepers, manifest)
        if manifest.step == 4:
            raise SystemExit(143)

    with monkeypatch.context() as patch:
        patch.setattr(FakeKeepers, "commit", killed)
        with pytest.raises(SystemExit):
            run()
    assert [s for s, _ in steps(tmp_path)] == [1, 2, 3]
    assert cluster.memory is not None
    manifest = cluster.memory.manifests[4]  # as the keepers write it after keeper_ttl
    where = run.checkpoints.root.child("step-00000004").where
    other = FakeCluster(TWO_NODES)
    other.disk = cluster.disk | {where: (4, cluster.states[4, manifest.shards])}
    again = Run(tmp_path, other)
    again.checkpoints.manifests = {**run.checkpoints.manifests, where: manifest}
    again()
    check_complete(tmp_path, again)


def test_what_ranks_write_carries_the_events_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(TWO_NODES)
    run = Run(tmp_path, cluster, checkpoint_every=2, snapshot_every=2)
    with monkeypatch.context() as patch:
        patch.setattr(Saving, "save_now", lambda saving, step: saving.save_by_ranks(step))
        run()
    (manifest,) = [m for m in run.checkpoints.manifests.values() if m.step == TOTAL]
    assert [e["step"] for e in manifest.extra[EVENTS]][-1] == TOTAL


def test_checkpoints_that_take_longer_than_checkpoint_every_steps_are_no_failures(tmp_path: Path) -> None:
    """Each one that fell due meanwhile was looked for in vain: three of them ended the run."""
    run = Run(tmp_path, FakeCluster(TWO_NODES, slow=4), checkpoint_every=2)
    run()
    check_complete(tmp_path, run)
    assert named(tmp_path, "checkpoint_failed") == []
    saved = [e["step"] for e in named(tmp_path, "checkpoint")]
    assert saved == sorted(set(saved))
    assert len(saved) > 1


def test_a_checkpoint_that_a_fault_broke_off_is_made_up_for(tmp_path: Path) -> None:
    run = Run(tmp_path, FakeCluster(TWO_NODES, [Fault("step 4", 0, "die")], slow=4), checkpoint_every=3)
    run()
    check_complete(tmp_path, run)
    first, last = [e["step"] for e in named(tmp_path, "checkpoint")]
    assert (first in (3, 4), last) == (True, TOTAL)


def test_another_driver_that_took_over_ends_this_one_before_it_commits(tmp_path: Path) -> None:
    cluster = FakeCluster(TWO_NODES)
    run = Run(tmp_path, cluster)
    taken: list[int] = []

    class Takeover(list[str]):
        def append(self, what: str) -> None:
            super().append(what)
            if what == "step 3":
                other = RunRecord(tmp_path)
                other.open({}, resume="auto")
                taken.append(other.generation)

    cluster.calls = Takeover()
    with pytest.raises(StaleGenerationError, match="another driver has taken the run over"):
        run()
    assert [s for s, _ in steps(tmp_path)] == [1, 2]
    assert RunRecord(tmp_path).peek("generation") == str(taken[0])


def test_a_person_stops_the_run_and_the_same_command_goes_on(tmp_path: Path) -> None:
    cluster = FakeCluster(TWO_NODES)
    run = Run(tmp_path, cluster)
    stop_at(run, "step 2")
    assert run().status == "stopped"
    assert [s for s, _ in steps(tmp_path)] == [1, 2]
    again = Run(tmp_path, FakeCluster({"a": 3}), size=3)
    again.cluster.disk, again.checkpoints.manifests = cluster.disk, run.checkpoints.manifests
    again()
    check_complete(tmp_path, again)


@pytest.mark.parametrize("seed", range(120))
def test_random_faults_leave_an_exact_run_or_a_clear_end(seed: int, tmp_path: Path) -> None:
    """Every step once, and the state exact; or an error that names the cause, and nothing half done."""
    draw = random.Random(seed)
    kinds = ["die", "freeze", "raise", "keeper", "node", "keeper frozen", "full"]
    wheres = ["connecting", "building", "restoring", "step", "export", "copy", "attaching"]
    faults = [
        Fault(draw.choice(wheres), draw.randrange(6), draw.choice(kinds), rank=draw.randrange(4))
        for _ in range(draw.randrange(1, 7))
    ]
    cluster = FakeCluster({"a": 2, "b": 2, "c": draw.randrange(1, 3)}, faults)
    cluster.late = {draw.randrange(10, 30): {"d": 2}}
    cluster.lag = draw.randrange(4)
    run = Run(tmp_path, cluster, spares=draw.randrange(2), snapshot_every=draw.choice([1, 1, 2, 3]))
    try:
        run()
    except WorkerError:
        committed = [s for s, _ in steps(tmp_path)]
        assert committed == list(range(1, len(committed) + 1))
        assert named(tmp_path, "run_failed")
        return
    check_complete(tmp_path, run)
    assert all(pid not in [w.probe.pid for w in cluster.workers] for pid in cluster.killed)


def test_the_comparison_sees_a_step_that_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the state is restored, and the run goes on one step later than it should."""
    from raycp.driver import formation

    real = formation.Formation._restore
    monkeypatch.setattr(
        formation.Formation,
        "_restore",
        lambda self, world, commits: (s := real(self, world, commits))._replace(step=s.step + (s.kind == "memory")),
    )
    run = Run(tmp_path, FakeCluster(TWO_NODES, [Fault("step 4", 0, "die")]))
    with pytest.raises(AssertionError, match=r"step 5 after 3"):
        run()


def test_a_disk_that_is_full_does_not_hide_why_the_run_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, FakeCluster(TWO_NODES, [Fault("step 4", 0, "fatal")]))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run.controller, "_record_failure", full)
    with pytest.raises(WorkerError, match="step 4 failed"):
        run()
    assert "could not be recorded" in run.screen.getvalue()


def test_a_step_whose_event_could_not_be_written_goes_to_storage_and_is_logged_by_the_next_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step before was asked for, which the keepers had let go: nothing was written, and a local Ray lost it all."""
    cluster = FakeCluster(TWO_NODES)
    run = Run(tmp_path, cluster, checkpoint_every=50)
    write_step = EventLog.write_step

    def full(log: EventLog, step: int, **fields: Any) -> bool:
        if step == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_step(log, step, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(EventLog, "write_step", full)
        with pytest.raises(OSError, match="No space"):
            run()
    assert cluster.memory is not None
    assert max(step for step, _ in cluster.disk.values()) == 4
    assert cluster.memory.closed, "all of it is on storage"
    again = Run(tmp_path, FakeCluster(TWO_NODES), checkpoint_every=50)
    again.cluster.disk = cluster.disk
    again.checkpoints.manifests = dict.fromkeys(cluster.disk, cluster.memory.manifests[4])
    again()
    check_complete(tmp_path, again)


def test_keepers_stay_when_what_they_hold_could_not_be_brought_to_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk at the end of a failed run took the newest step with it: the keepers ended all the same."""
    cluster = FakeCluster(TWO_NODES, [Fault("step 3", 0, "fatal")])
    run = Run(tmp_path, cluster)

    def full(self: FakeKeepers, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FakeKeepers, "persist", full)
    with pytest.raises(WorkerError, match="step 3 failed"):
        run()
    assert "could not be brought to storage" in run.screen.getvalue()
    assert cluster.memory is not None
    assert not cluster.memory.closed


def test_keepers_end_with_a_run_that_failed_and_is_on_storage(tmp_path: Path) -> None:
    cluster = FakeCluster(TWO_NODES, [Fault("step 3", 0, "fatal")])
    with pytest.raises(WorkerError, match="step 3 failed"):
        Run(tmp_path, cluster)()
    assert cluster.memory is not None
    assert cluster.memory.closed


def test_a_newer_step_on_storage_is_taken_before_an_older_one_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster(TWO_NODES, [Fault("step 3", 0, "fatal")])
    run = Run(tmp_path, cluster)
    with pytest.raises(WorkerError):
        run()
    assert cluster.memory is not None
    cluster.memory.closed, cluster.workers = False, []
    (where, (step, _)) = max(cluster.disk.items(), key=lambda x: x[1][0])
    assert step == 2
    cluster.disk[where] = (4, truth(4))
    again = Run(tmp_path, cluster)
    manifest = run.controller._commits.newest
    assert manifest is not None
    again.checkpoints.manifests = {where: dataclasses.replace(manifest, step=4, cursor=SCHEDULE.cursor(4).to_dict())}
    monkeypatch.setattr(again.checkpoints, "stored_step", lambda: 4)
    again()
    assert named(tmp_path, "recovered")[-1]["source"] == "checkpoint"
    assert again.cluster.exported == (TOTAL, truth())


def test_a_rank_lost_while_the_last_step_is_saved_does_not_export_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was restored from memory, nothing was left to do, and the checkpoint of step 3 was exported as the result."""
    persist = FakeKeepers.persist

    def refuses(keepers: FakeKeepers, manifest: Any, folder: str, *, commit: bool = False) -> Any:
        if manifest.step < TOTAL:
            return persist(keepers, manifest, folder, commit=commit)
        monkeypatch.setattr(FakeKeepers, "persist", persist)
        raise CheckpointError("held by no keeper", fix="write a newer step")

    monkeypatch.setattr(FakeKeepers, "persist", refuses)
    run = Run(tmp_path, FakeCluster(TWO_NODES, [Fault(f"checkpoint of step {TOTAL}", 0, "die")]))
    assert run().status == "finished"
    check_complete(tmp_path, run)
    assert [e["source"] for e in named(tmp_path, "recovered")] == ["memory"]


def test_a_driver_that_finds_the_last_step_in_memory_saves_and_exports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said "stopped", and ended the keepers with the only copy."""
    cluster = FakeCluster(TWO_NODES)
    run = Run(tmp_path, cluster)

    def killed(saving: Saving, step: int) -> None:
        saving.make_safe(step)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Saving, "save_now", killed)
        patch.setattr(Saving, "last_words", lambda saving, **_: setattr(saving, "_unsaved", True))
        with pytest.raises(KeyboardInterrupt):
            run()
    cluster.workers, cluster.closed = [], False
    again = Run(tmp_path, cluster)
    again.checkpoints.manifests = run.checkpoints.manifests
    assert again().status == "finished"
    check_complete(tmp_path, again)


def test_a_last_checkpoint_that_is_damaged_is_written_again_and_not_exported(tmp_path: Path) -> None:
    """The ranks hold the last step still; what was exported was not compared with its checksums."""
    run = Run(tmp_path, FakeCluster(TWO_NODES, [Fault("export", 0, "damaged", rank=0)]))
    assert run().status == "finished"
    check_complete(tmp_path, run)
    assert [e["step"] for e in named(tmp_path, "checkpoint")].count(TOTAL) == 2
    assert named(tmp_path, "worker_lost", "recovered") == []


def test_a_checkpoint_that_stays_damaged_ends_the_run(tmp_path: Path) -> None:
    faults = [Fault("export", 0, "damaged", rank=0), Fault("export", 1, "damaged", rank=0)]
    run = Run(tmp_path, FakeCluster(TWO_NODES, faults))
    with pytest.raises(WorkerError):
        run()
    assert run.controller.state is RunState.FAILED
