"""When a step counts: its event is written once, when its manifest is recorded."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raycp.driver import commits as commits_module
from raycp.driver.commits import EVENTS, Commits
from raycp.errors import CheckpointError, StaleGenerationError
from raycp.events import EventLog, read_events
from raycp.training.manifest import Manifest, ShardEntry, ShardRecord


def shard(start: int, stop: int) -> ShardRecord:
    """Rows [start, stop) of a tensor of 4 rows."""
    entry = ShardEntry(name="w", shape=(4,), dtype="float32", start=start, stop=stop)
    return ShardRecord(file=f"shard-{start}", bytes=8, crc32=0, entries=(entry,))


class Memory:
    """Keepers that collect what the test says."""

    def __init__(self, shards: tuple[ShardRecord, ...] | None = None) -> None:
        self.shards = (shard(0, 4),) if shards is None else shards
        self.expected: list[int] = []
        self.ready: list[int] = []
        self.manifests: list[Manifest] = []

    def expect(self, step: int) -> None:
        self.expected.append(step)

    def poll(self, timeout: float = 0.0) -> list[Any]:
        found, self.ready = self.ready, []
        return [SimpleNamespace(step=s, shards=self.shards, bytes=8, seconds=0.5) for s in found]

    def commit(self, manifest: Manifest) -> None:
        self.manifests.append(manifest)


def manifest(step: int, shards: Sequence[ShardRecord], extra: dict[str, Any]) -> Manifest:
    return Manifest(
        step=step,
        cursor={"at": step},
        plan_hash="p",
        generation=1,
        run_id="r",
        grid={},
        shards=tuple(shards),
        extra=extra,
    )


def made(folder: Path, memory: Memory | None, may_commit: Any = lambda: None) -> Commits:
    return Commits(EventLog(folder / "events.jsonl", generation=1), memory, manifest=manifest, may_commit=may_commit)


def written(folder: Path) -> list[int]:
    return [e["step"] for e in read_events(folder / "events.jsonl") if e["event"] == "step"]


def report(commits: Commits, step: int, *, snapshot: bool = True) -> None:
    commits.reported(step, {"loss": float(step)}, snapshot=snapshot, stall_seconds=0.25)


def test_a_step_is_written_when_its_copy_is_committed_and_not_before(tmp_path: Path) -> None:
    memory = Memory()
    commits = made(tmp_path, memory)
    report(commits, 1)
    assert (written(tmp_path), commits.committed, commits.known) == ([], 0, [1])
    memory.ready = [1]
    assert [m.step for m in commits.advance()] == [1]
    assert (written(tmp_path), commits.committed, commits.known) == ([1], 1, [])
    (event,) = [e for e in read_events(tmp_path / "events.jsonl") if e["event"] == "snapshot"]
    assert (event["bytes"], event["stall_seconds"]) == (8, 0.25)


def test_a_copy_commits_the_steps_since_the_one_before_and_carries_their_events(tmp_path: Path) -> None:
    memory = Memory()
    commits = made(tmp_path, memory)
    for step in (1, 2, 3):
        report(commits, step, snapshot=step == 3)
    memory.ready = [3]
    commits.advance()
    assert written(tmp_path) == [1, 2, 3]
    assert [e["step"] for e in memory.manifests[0].extra[EVENTS]] == [1, 2, 3]


def test_what_another_driver_could_not_write_is_written_from_the_manifest(tmp_path: Path) -> None:
    commits = made(tmp_path, Memory())
    commits.adopt(manifest(2, (), {EVENTS: [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]}))
    assert (written(tmp_path), commits.committed) == ([1, 2], 2)
    commits.adopt(manifest(2, (), {EVENTS: [{"step": 1, "loss": 9.0}, {"step": 2, "loss": 9.0}]}))
    assert written(tmp_path) == [1, 2], "once each"


def test_a_step_that_is_whole_on_all_ranks_is_committed_before_it_is_restored(tmp_path: Path) -> None:
    memory = Memory()
    commits = made(tmp_path, memory)
    report(commits, 1)
    whole = Manifest(step=1, cursor={}, plan_hash="", generation=1, run_id="r", grid={}, shards=())
    confirmed = commits.confirm(whole)
    assert (written(tmp_path), commits.committed, commits.newest) == ([1], 1, confirmed)
    assert memory.manifests == [confirmed]
    assert (confirmed.cursor, [e["step"] for e in confirmed.extra[EVENTS]]) == ({"at": 1}, [1])
    commits.adopt(confirmed)
    assert (written(tmp_path), memory.manifests) == ([1], [confirmed])


def test_a_committed_step_is_committed_for_the_generation_that_restores_it_as_it_is_otherwise(tmp_path: Path) -> None:
    memory = Memory()
    commits = made(tmp_path, memory)
    before = Manifest(step=7, cursor={"at": 3}, plan_hash="q", generation=0, run_id="r", grid={"dp": 2}, shards=())
    confirmed = commits.confirm(before)
    assert memory.manifests == [confirmed] == [replace(before, generation=1)]
    assert (commits.newest, commits.committed, written(tmp_path)) == (confirmed, 7, [])
    assert made(tmp_path, None).confirm(before) is before


def test_after_a_rewind_a_late_copy_of_the_lost_world_commits_nothing(tmp_path: Path) -> None:
    memory = Memory()
    commits = made(tmp_path, memory)
    report(commits, 1)
    memory.ready = [1]
    commits.advance()
    report(commits, 2)
    commits.rewind(1)
    memory.ready = [2]
    assert commits.advance() == []
    report(commits, 2)
    memory.ready = [2]
    commits.advance()
    assert written(tmp_path) == [1, 2]


def test_nothing_is_committed_once_another_driver_has_the_run(tmp_path: Path) -> None:
    def taken() -> None:
        raise StaleGenerationError("another driver")

    memory = Memory()
    commits = made(tmp_path, memory, taken)
    report(commits, 1)
    memory.ready = [1]
    with pytest.raises(StaleGenerationError):
        commits.advance()
    assert (written(tmp_path), memory.manifests) == ([], [])
    with pytest.raises(StaleGenerationError):
        report(made(tmp_path, None, taken), 1)
    assert written(tmp_path) == []


def test_without_memory_a_step_counts_when_it_is_reported(tmp_path: Path) -> None:
    commits = made(tmp_path, None)
    report(commits, 1)
    assert (written(tmp_path), commits.committed) == ([1], 1)


@pytest.mark.parametrize("shards", [(), (shard(0, 3),), (shard(0, 3), shard(2, 4))])
def test_copies_that_do_not_make_a_whole_state_are_not_committed(
    shards: tuple[ShardRecord, ...], tmp_path: Path
) -> None:
    memory = Memory(shards)
    commits = made(tmp_path, memory)
    report(commits, 1)
    memory.ready = [1]
    with pytest.raises(CheckpointError, match="do not make a whole state"):
        commits.advance()
    assert (written(tmp_path), memory.manifests) == ([], [])


def test_rows_are_checked_once_for_the_same_entries_and_again_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.2 s of each step at 128 ranks, which all of them waited for."""
    asked: list[int] = []
    plain = commits_module.coverage_problem
    monkeypatch.setattr(commits_module, "coverage_problem", lambda shards: asked.append(1) or plain(shards))
    memory = Memory()
    commits = made(tmp_path, memory)
    for step in (1, 2, 3):
        report(commits, step)
        memory.ready = [step]
        memory.shards = tuple(replace(s, crc32=step) for s in memory.shards)
        commits.advance()
    assert (written(tmp_path), len(asked)) == ([1, 2, 3], 1)
    report(commits, 4)
    memory.ready, memory.shards = [4], (shard(0, 3),)
    with pytest.raises(CheckpointError, match="do not make a whole state"):
        commits.advance()


@pytest.mark.parametrize("keepers", [True, False])
def test_a_long_run_whose_state_is_not_copied_does_not_note_each_step(keepers: bool, tmp_path: Path) -> None:
    """The stall of each step was kept for the life of the run, to be written with a copy that never came."""
    commits = made(tmp_path, Memory() if keepers else None)
    for step in range(1, 11):
        report(commits, step, snapshot=False)
        if step % 5 == 0:
            commits.saved(step)
    assert written(tmp_path) == list(range(1, 11))
    assert commits._stalls == {}
