"""Checkpoints that keepers write beside the run, while keepers are lost."""

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from raycp.driver import checkpoints as module
from raycp.driver.checkpoints import Checkpoints
from raycp.driver.keeper_calls import KeeperLost
from raycp.errors import CheckpointError, ClusterError, StaleGenerationError
from raycp.events import EventLog, read_events
from raycp.training.manifest import Manifest
from raycp.training.storage import Storage
from tests.unit.driver.fake_cluster import FakeCheckpoints


def manifest(step: int) -> Manifest:
    return Manifest(step=step, cursor={}, plan_hash="", generation=1, run_id="r", grid={}, shards=())


@dataclass
class Writers:
    """Keepers whose orders and writes end as the script says: an error, or None; a write takes `busy` looks."""

    orders: list[BaseException | None] = field(default_factory=list)
    writes: list[BaseException | None] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    busy: int = 0
    writers: int = 2

    def persist(self, manifest: Manifest, folder: str, *, commit: bool = False) -> Any:
        self.asked.append(manifest.step)
        error = self.orders.pop(0) if self.orders else None
        if error is not None:
            raise error
        return self

    def poll(self) -> bool:
        self.busy -= 1
        if self.busy >= 0:
            return False
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


def order(checkpoints: Checkpoints, writers: Writers, step: int) -> None:
    """A checkpoint of `step` is due, and the step is in memory."""
    checkpoints.want(step)
    checkpoints.advance(writers, manifest(step))


def test_a_keeper_that_dies_while_it_writes_does_not_end_the_run(tmp_path: Path) -> None:
    """KeeperLost came out of the controller, and ended it."""
    checkpoints, writers = make(tmp_path), Writers(writes=[lost(), lost()])
    order(checkpoints, writers, 5)
    for _ in range(3):
        checkpoints.advance(writers, manifest(5))
    assert writers.asked == [5, 5, 5]
    assert checkpoints.newest_step == 5
    assert failures(tmp_path) == 0


def test_a_checkpoint_whose_writer_died_is_made_up_for_by_the_newest_step(tmp_path: Path) -> None:
    checkpoints, writers = make(tmp_path), Writers(writes=[lost()])
    order(checkpoints, writers, 5)
    checkpoints.advance(writers, manifest(7))
    checkpoints.advance(writers, manifest(8))
    assert writers.asked == [5, 7]
    assert checkpoints.newest_step == 7


def test_a_checkpoint_that_falls_due_while_another_is_written_is_of_a_step_that_is_still_held(tmp_path: Path) -> None:
    """It was of the step at which it fell due: keepers had given that back, and each of them was a failure."""
    checkpoints, writers = make(tmp_path), Writers(busy=2)
    order(checkpoints, writers, 5)
    order(checkpoints, writers, 10)
    checkpoints.advance(writers, manifest(11))
    checkpoints.advance(writers, manifest(12))
    checkpoints.advance(writers, manifest(13))
    assert writers.asked == [5, 12]
    assert checkpoints.newest_step == 12


def test_a_checkpoint_that_a_recovery_broke_off_is_made_up_for(tmp_path: Path) -> None:
    """It was dropped without a word, and the next one came a whole checkpoint_every later."""
    checkpoints, writers = make(tmp_path), Writers(busy=1)
    order(checkpoints, writers, 5)
    checkpoints.forget()
    checkpoints.advance(writers, manifest(4))
    assert writers.asked == [5], "the state may have been restored from before it"
    checkpoints.advance(writers, manifest(6))
    assert writers.asked == [5, 6]


def test_a_step_that_no_keeper_holds_any_more_is_said_and_the_next_one_is_written(tmp_path: Path) -> None:
    """The next checkpoint came a whole checkpoint_every later; three keepers that were slow to answer ended the run."""
    checkpoints = make(tmp_path)
    writers = Writers(orders=[CheckpointError("held by no keeper", fix="write a newer step")] * 3)
    order(checkpoints, writers, 5)
    for step in (5, 6, 6, 7):
        checkpoints.advance(writers, manifest(step))
    assert failures(tmp_path) == 3
    assert writers.asked == [5, 6, 7], "each step once: nobody is asked again for what is not held"
    checkpoints.advance(writers, manifest(8))
    checkpoints.advance(writers, manifest(8))
    assert checkpoints.newest_step == 8


def test_the_end_of_a_run_does_not_wait_for_a_step_that_nobody_holds(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    writers = Writers(orders=[CheckpointError("held by no keeper", fix="write a newer step")])
    assert not checkpoints.finish(manifest(6), writers, seconds=1e9)


def test_three_failures_in_a_row_end_the_run(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    writers = Writers(writes=[OSError(errno.ENOSPC, "No space left on device")] * 3)
    order(checkpoints, writers, 5)
    order(checkpoints, writers, 10)
    order(checkpoints, writers, 15)
    with pytest.raises(ClusterError, match="3 checkpoints in a row"):
        checkpoints.advance(writers, manifest(15))


def slow_storage(monkeypatch: pytest.MonkeyPatch, seconds: float, errors: list[BaseException | None]) -> list[int]:
    """Commits take that long, and end as the script says. Generations that have committed are appended."""
    stored: list[int] = []

    def commit(folder: Storage, manifest: Manifest, *, by: int) -> None:
        time.sleep(seconds)
        error = errors.pop(0) if errors else None
        if error is not None:
            raise error
        stored.append(by)

    monkeypatch.setattr(module, "commit", commit)
    monkeypatch.setattr(module, "prune", lambda root, keep: time.sleep(seconds))
    return stored


def real(folder: Path, generation: int = 1) -> tuple[Checkpoints, EventLog]:
    events = EventLog(folder / "events.jsonl", generation=generation)
    return Checkpoints(Storage.of(folder / "checkpoints"), keep=3, events=events, say=lambda text: None), events


def advance_until(checkpoints: Checkpoints, writers: Writers, done: Callable[[], bool]) -> float:
    """Steps of 10 ms. Returns the longest time that one of them stood still."""
    longest, deadline = 0.0, time.monotonic() + 20
    while not done() and time.monotonic() < deadline:
        time.sleep(0.01)
        began = time.monotonic()
        checkpoints.advance(writers, None)
        longest = max(longest, time.monotonic() - began)
    assert done()
    return longest


def test_a_storage_that_takes_long_to_commit_and_to_drop_an_old_step_does_not_hold_up_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1000 shards at 50 ms a request were 12 s between two steps, and the event said that nobody waited."""
    slow_storage(monkeypatch, 1.0, [])
    checkpoints, _ = real(tmp_path)
    began = time.monotonic()
    order(checkpoints, Writers(), 5)
    checkpoints.advance(Writers(), None)
    assert time.monotonic() - began < 0.7
    assert checkpoints.newest_step == -1
    assert advance_until(checkpoints, Writers(), lambda: checkpoints.newest_step == 5) < 0.7
    (event,) = [e for e in read_events(tmp_path / "events.jsonl") if e["event"] == "checkpoint"]
    assert event["seconds"] >= 2.0
    assert 0.04 <= event["stall_seconds"] <= event["seconds"]


def test_a_commit_that_fails_in_its_thread_is_said_in_the_next_step_and_advances_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_storage(monkeypatch, 0.2, [OSError(errno.ENOSPC, "No space left on device")])
    checkpoints, _ = real(tmp_path)
    order(checkpoints, Writers(), 5)
    advance_until(checkpoints, Writers(), lambda: failures(tmp_path) == 1)
    assert (checkpoints.newest, checkpoints.newest_step) == (None, -1)


def test_a_commit_that_a_recovery_overtakes_counts_in_the_next_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = slow_storage(monkeypatch, 0.2, [StaleGenerationError("fenced off", fix="none")])
    checkpoints, events = real(tmp_path)
    order(checkpoints, Writers(), 5)
    checkpoints.advance(Writers(), None)
    events.generation = 2
    checkpoints.forget()
    advance_until(checkpoints, Writers(), lambda: checkpoints.newest_step == 5)
    assert stored == [2]
    assert failures(tmp_path) == 0


def test_a_commit_of_a_driver_that_was_taken_over_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_storage(monkeypatch, 0.0, [StaleGenerationError("fenced off", fix="none")])
    checkpoints, _ = real(tmp_path)
    order(checkpoints, Writers(), 5)
    with pytest.raises(StaleGenerationError):
        checkpoints.advance(Writers(), None)


def test_a_start_from_storage_waits_for_the_commit_that_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files have no manifest yet: they would be deleted as leftovers."""
    stored = slow_storage(monkeypatch, 0.3, [])
    checkpoints, _ = real(tmp_path)
    order(checkpoints, Writers(), 5)
    checkpoints.advance(Writers(), None)
    assert checkpoints.newest_step == -1
    checkpoints.forget()
    checkpoints.find()
    assert stored == [1]
    assert [e["step"] for e in read_events(tmp_path / "events.jsonl") if e["event"] == "checkpoint"] == [5]


def test_a_damaged_newest_checkpoint_is_not_taken_for_newer_than_memory_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = make(tmp_path)
    monkeypatch.setattr("raycp.driver.checkpoints.newest_committed", lambda root: manifest(5))
    assert checkpoints.stored_step() == 5
    checkpoints.loaded("step-00000003", 3)  # 5 was damaged
    assert checkpoints.stored_step() == 3


def test_a_write_that_takes_longer_than_any_storage_is_given_up_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount whose server was away: no checkpoint was made any more, and nobody said so."""
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.2)
    checkpoints, writers = make(tmp_path), Writers(busy=10**9)
    order(checkpoints, writers, 5)
    checkpoints.advance(writers, manifest(6))
    assert failures(tmp_path) == 0
    time.sleep(0.3)
    checkpoints.advance(writers, manifest(7))
    assert not checkpoints.writing
    (event,) = [e for e in read_events(tmp_path / "events.jsonl") if e["event"] == "checkpoint_failed"]
    assert (event["step"], "whether the storage answers" in event["fix"]) == (5, True)
    writers.busy = 0
    order(checkpoints, writers, 10)
    checkpoints.advance(writers, manifest(10))
    assert checkpoints.newest_step == 10


def test_a_storage_that_was_slow_once_may_be_so_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.5)
    checkpoints, writers = make(tmp_path), Writers()
    order(checkpoints, writers, 5)
    time.sleep(0.3)
    checkpoints.advance(writers, manifest(5))
    assert checkpoints.newest_step == 5
    writers.busy = 1
    order(checkpoints, writers, 10)
    time.sleep(0.8)  # more than 0.5, and less than four times 0.3
    for _ in range(2):
        checkpoints.advance(writers, manifest(10))
    assert (checkpoints.newest_step, failures(tmp_path)) == (10, 0)


def test_a_commit_that_hangs_is_told_once_and_still_counts_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.2)
    slow_storage(monkeypatch, 1.0, [])
    checkpoints, _ = real(tmp_path)
    order(checkpoints, Writers(), 5)
    advance_until(checkpoints, Writers(), lambda: checkpoints.newest_step == 5)
    assert failures(tmp_path) == 1


def test_an_older_commit_that_ends_after_the_ranks_wrote_a_newer_step_does_not_set_the_newest_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_storage(monkeypatch, 0.3, [])
    checkpoints, _ = real(tmp_path)
    order(checkpoints, Writers(), 5)
    checkpoints.advance(Writers(), None)
    assert checkpoints.newest_step == -1
    checkpoints.commit(manifest(10), began=time.monotonic(), stall_seconds=0.0)
    advance_until(checkpoints, Writers(), lambda: failures(tmp_path) > 0 or checkpoints._writing is None)
    assert checkpoints.newest_step == 10


def test_the_end_of_a_run_waits_for_keepers_that_still_write(tmp_path: Path) -> None:
    """After 300 s the ranks wrote all of a big model a second time, beside the keepers."""
    checkpoints, writers = make(tmp_path), Writers(busy=3)
    assert checkpoints.finish(manifest(6), writers, seconds=0.0) is False, "nothing was begun in time"
    order(checkpoints, writers, 6)
    assert checkpoints.finish(manifest(6), writers, seconds=0.0)


def test_storage_that_does_not_answer_holds_up_no_recovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence of the new generation was written by the driver's own thread, on a mount that hung."""
    monkeypatch.setattr(module, "FENCE_SECONDS", 0.2)
    checkpoints, _ = real(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    os.mkfifo(tmp_path / "checkpoints" / "latest.json")
    began = time.monotonic()
    with pytest.raises(OSError, match="no answer within"):
        checkpoints.fence("r", 2)
    assert time.monotonic() - began < 5.0
