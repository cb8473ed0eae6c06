"""Checkpoints that keepers write beside the run, while keepers are lost."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from raycp.driver.keeper_calls import KeeperLost
from raycp.errors import CheckpointError, ClusterError
from raycp.events import EventLog, read_events
from raycp.training.manifest import Manifest
from tests.unit.driver.fake_cluster import FakeCheckpoints


def manifest(step: int) -> Manifest:
    return Manifest(step=step, cursor={}, plan_hash="", generation=1, run_id="r", grid={}, shards=())


@dataclass
class Writers:
    """Keepers whose orders and writes end as the script says: an error, or None."""

    orders: list[BaseException | None] = field(default_factory=list)
    writes: list[BaseException | None] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    def persist(self, manifest: Manifest, folder: str, *, commit: bool = False) -> Any:
        self.asked.append(manifest.step)
        error = self.orders.pop(0) if self.orders else None
        if error is not None:
            raise error
        return self

    def poll(self) -> bool:
        error = self.writes.pop(0) if self.writes else None
        if error is not None:
            raise error
        return True

    def wait(self, timeout: float) -> bool:
        return self.poll()


def lost() -> KeeperLost:
    return KeeperLost("the keeper of node a is lost", node_id="a")


def failures(folder: Path) -> int:
    return sum(e["event"] == "checkpoint_failed" for e in read_events(folder / "events.jsonl"))


def make(folder: Path) -> FakeCheckpoints:
    return FakeCheckpoints(folder, EventLog(folder / "events.jsonl", generation=1))


def test_a_keeper_that_dies_while_it_writes_does_not_end_the_run(tmp_path: Path) -> None:
    """KeeperLost came out of the controller, and ended it."""
    checkpoints, writers = make(tmp_path), Writers(writes=[lost(), lost()])
    checkpoints.order(manifest(5), writers)
    for _ in range(3):
        checkpoints.advance(writers)
    assert writers.asked == [5, 5, 5]
    assert checkpoints.newest_step == 5
    assert failures(tmp_path) == 0


def test_the_newest_due_checkpoint_wins_over_one_whose_writer_died(tmp_path: Path) -> None:
    checkpoints, writers = make(tmp_path), Writers(writes=[None, lost()])
    checkpoints.order(manifest(5), writers)
    writers.writes = [lost()]
    checkpoints.order(manifest(10), writers)
    checkpoints.advance(writers)
    assert writers.asked == [5, 10]
    assert checkpoints.newest_step == 10


def test_a_step_that_no_keeper_holds_any_more_is_said_and_left_out(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    writers = Writers(orders=[CheckpointError("held by no keeper", fix="write a newer step")])
    checkpoints.order(manifest(5), writers)
    assert failures(tmp_path) == 1
    checkpoints.order(manifest(10), writers)
    checkpoints.advance(writers)
    assert checkpoints.newest_step == 10


def test_the_end_of_a_run_does_not_wait_for_a_step_that_nobody_holds(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    writers = Writers(orders=[CheckpointError("held by no keeper", fix="write a newer step")])
    assert not checkpoints.finish(manifest(6), writers, seconds=1e9)


def test_three_failures_in_a_row_end_the_run(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    error = CheckpointError("held by no keeper", fix="write a newer step")
    writers = Writers(orders=[error, error, error])
    checkpoints.order(manifest(5), writers)
    checkpoints.order(manifest(10), writers)
    with pytest.raises(ClusterError, match="3 checkpoints in a row"):
        checkpoints.order(manifest(15), writers)
