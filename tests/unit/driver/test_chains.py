"""Runs that several drivers carry on, one after another: each is killed, terminated, stopped or meets random faults."""

import random
from pathlib import Path
from typing import Any

import pytest

from data_pipeline import StepSchedule
from raycp.driver.cluster import NodeInfo
from raycp.driver.saving import Saving
from raycp.errors import ClusterError, WorkerError
from tests.unit.driver import test_controller
from tests.unit.driver.fake_cluster import FakeCluster, FakeRanks, Fault
from tests.unit.driver.test_controller import Run, steps

TOTAL = 14
DRIVERS = 6
NODES = ({"a": 2, "b": 2}, {"a": 2, "b": 2, "c": 1}, {"a": 4}, {"a": 4, "b": 1})
WHERES = ("connecting", "building", "restoring", "step", "export", "copy", "attaching", "checkpoint", "loading")
KINDS = ("die", "freeze", "raise", "full", "copy")
"""Faults after which what is committed is still held, whatever the next one is."""
ENDS = (None, "terminated", "killed", "asked to stop")


class Killed(BaseException):
    """The driver is gone; what it would do at its end it does not do."""


class Driver:
    """One driver's part of a chain.

    Args:
        run: what it runs.
        how: what becomes of it, at its call number `at`.
    """

    def __init__(self, run: Run, how: str | None, at: int) -> None:
        self.run, self.how, self.at, self.calls = run, how, at, 0

    def __call__(self) -> str:
        gather, last_words, driver = FakeRanks.gather, Saving.last_words, self

        def counted(ranks: FakeRanks, call: Any, **options: Any) -> Any:
            driver.calls += 1
            if driver.calls == driver.at and driver.how == "terminated":
                raise SystemExit(143)
            if driver.calls == driver.at and driver.how == "killed":
                raise Killed
            if driver.calls == driver.at and driver.how == "asked to stop":
                driver.run.stop.requested = True
            return gather(ranks, call, **options)

        def words(saving: Saving, **options: Any) -> None:
            if driver.how == "killed" and driver.calls == driver.at:
                saving._unsaved = True
            else:
                last_words(saving, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeRanks, "gather", counted)
            patch.setattr(Saving, "last_words", words)
            try:
                return self.run().status
            except Killed:
                return "killed"
            except (SystemExit, WorkerError, ClusterError) as error:
                return type(error).__name__


def come_again(cluster: FakeCluster, nodes: dict[str, int]) -> None:
    """The next driver finds all nodes, and the keepers that nobody ended."""
    cluster.workers, cluster.calls, cluster.closed = [], [], False
    cluster.room, cluster.dead_nodes = dict(nodes), set()
    memory = cluster.memory
    if memory is None or memory.closed:
        cluster.memory = None
        return
    memory.copies, memory.ending, memory.awaited = [], [], []
    for node_id in nodes:
        if node_id not in memory.addresses:
            memory.add(NodeInfo(node_id=node_id, address=node_id, total={}, free={}))


def held(cluster: FakeCluster) -> int:
    """The newest step that another driver could continue from."""
    stored = max((step for step, _ in cluster.disk.values()), default=0)
    if cluster.memory is None or cluster.memory.closed:
        return stored
    point = cluster.memory.newest(())
    return max(stored, 0 if point is None else point.manifest.step)


@pytest.mark.parametrize("seeds", [range(at, at + 15) for at in range(0, 60, 15)])
def test_what_one_driver_has_committed_the_next_one_continues_from(
    seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second driver that ended early took the only copies with it; a stop during a resize left none."""
    schedule = StepSchedule(num_packs=2 * TOTAL + 2, global_batch=2, steps=TOTAL, family="f")
    monkeypatch.setattr(test_controller, "TOTAL", TOTAL)
    monkeypatch.setattr(test_controller, "SCHEDULE", schedule)
    for seed in seeds:
        chain(seed, tmp_path / str(seed))


def chain(seed: int, folder: Path) -> None:
    draw = random.Random(seed)
    nodes = draw.choice(NODES)
    cluster = FakeCluster(nodes, slow=draw.choice([0, 1, 3, 8]))
    cluster.lag, cluster.host_memory = draw.randrange(3), draw.choice([1 << 40, 60, 48, 48, 40, 30])
    settings: dict[str, Any] = {
        "snapshot_every": draw.choice([1, 1, 2, 3]),
        "checkpoint_every": draw.choice([1, 2, 3, 5, 50]),
        "on_loss": draw.choice(["auto", "shrink", "wait", "stop"]),
    }
    manifests: dict[str, Any] = {}
    folder.mkdir()
    for number in range(DRIVERS):
        last = number == DRIVERS - 1
        come_again(cluster, nodes)
        cluster.faults = (
            []
            if last
            else [
                Fault(draw.choice(WHERES), draw.randrange(8), draw.choice(KINDS), rank=draw.randrange(4))
                for _ in range(draw.randrange(3))
            ]
        )
        told = f"seed {seed}, driver {number}, {nodes}, {settings}, {cluster.faults}"
        run = Run(folder, cluster, state_bytes=12, **settings)
        run.checkpoints.manifests = manifests
        status = Driver(run, None if last else draw.choice(ENDS), draw.randrange(16))()
        run.events.close()
        done = [step for step, _ in steps(folder)]
        assert done == list(range(1, len(done) + 1)), told
        if status == "finished":
            test_controller.check_complete(folder, run)
            return
        if cluster.memory is not None:  # without copies steps are committed as they are reported, as told at the start
            assert held(cluster) >= len(done), f"{told}: {status}, {len(done)} steps are committed"
    raise AssertionError(f"seed {seed} did not finish")
