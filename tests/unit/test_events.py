"""The event log: complete lines only, each step once, whatever a crash leaves behind."""

import errno
import json
import math
import os
import resource
import signal
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raycp.events import EventLog, read_events


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_every_event_has_time_name_and_generation(path: Path) -> None:
    log = EventLog(path, generation=4)
    log.write("run_started", run_id="r", config={"lr": 1e-5})
    log.close()
    (event,) = read_events(path)
    assert (event["event"], event["generation"], event["run_id"]) == ("run_started", 4, "r")
    assert event["time"] > 1.7e9


def test_a_step_is_written_once_even_by_a_later_driver(path: Path) -> None:
    first = EventLog(path, generation=1)
    assert first.write_step(1, loss=2.0, pack_ids=[0])
    assert not first.write_step(1, loss=9.0, pack_ids=[0])
    first.close()
    second = EventLog(path, generation=2)
    assert not second.write_step(1, loss=9.0, pack_ids=[0])
    assert second.write_step(2, loss=1.5, pack_ids=[1])
    assert second.losses() == {1: 2.0, 2: 1.5}
    second.close()
    assert [e["step"] for e in read_events(path)] == [1, 2]


def test_plain_write_does_not_count_steps(path: Path) -> None:
    """The planted fault: a driver that uses `write` for steps counts one twice, and the reader shows it."""
    log = EventLog(path, generation=1)
    log.write("step", step=1, loss=2.0)
    log.write("step", step=1, loss=2.0)
    log.close()
    assert [e["step"] for e in read_events(path)] == [1, 1]


@pytest.mark.parametrize("torn", [b"{", b'{"event": "step", "st', b"x" * 200_000], ids=["brace", "half", "long"])
def test_a_torn_last_line_is_skipped_by_readers_and_cut_by_the_next_writer(path: Path, torn: bytes) -> None:
    log = EventLog(path, generation=1)
    log.write_step(1, loss=2.0)
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert [e["step"] for e in read_events(path)] == [1]
    EventLog(path, generation=2).close()
    assert path.read_bytes() == whole


def test_a_file_of_one_torn_line_becomes_empty(path: Path) -> None:
    path.write_bytes(b'{"event"')
    log = EventLog(path, generation=1)
    assert path.read_bytes() == b""
    log.close()


def test_numbers_that_are_not_finite_stay_json(path: Path) -> None:
    log = EventLog(path, generation=1)
    log.write("run_failed", loss=math.nan, norms=[math.inf, 1.0], path=path)
    log.close()
    (event,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (event["loss"], event["norms"], event["path"]) == ("nan", ["inf", 1.0], str(path))


def test_no_file_has_no_events(path: Path) -> None:
    assert list(read_events(path)) == []


@contextmanager
def room_for(path: Path, size: int) -> Iterator[None]:
    """The file system takes so many more bytes of the file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("room", [0, 10, 40], ids=["nothing", "a part", "most of it"])
def test_a_line_that_a_full_disk_refused_does_not_come_with_the_next_one(path: Path, room: int) -> None:
    """It stayed in a buffer: when the step was written anew, it was in the log twice."""
    log = EventLog(path, generation=1)
    log.write_step(4, loss=1.0)
    whole = path.read_bytes()
    with room_for(path, room), pytest.raises(OSError, match="File too large"):
        log.write_step(5, loss=2.0)
    assert path.read_bytes() == whole
    assert log.losses() == {4: 1.0}
    log.write("worker_lost")
    assert log.write_step(5, loss=2.0)
    log.close()
    assert [(e["event"], e.get("step")) for e in read_events(path)] == [
        ("step", 4),
        ("worker_lost", None),
        ("step", 5),
    ]


def failing(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def refuses(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for name in names:
        monkeypatch.setattr(os, name, refuses)


def test_a_line_whose_sync_failed_is_not_in_the_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(path, generation=1)
    with monkeypatch.context() as patch:
        failing(patch, "fsync")
        with pytest.raises(OSError, match="Input/output"):
            log.write_step(1, loss=2.0)
    assert path.read_bytes() == b""
    assert log.write_step(1, loss=2.0)
    assert [e["step"] for e in read_events(path)] == [1]


def test_what_could_not_be_taken_back_is_before_the_next_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(path, generation=1)
    with monkeypatch.context() as patch, room_for(path, 10):
        failing(patch, "ftruncate")
        with pytest.raises(OSError, match="File too large"):
            log.write_step(1, loss=2.0)
    assert path.stat().st_size == 10
    assert log.write_step(1, loss=2.0)
    assert [e["step"] for e in read_events(path)] == [1]


def test_a_driver_that_comes_back_does_not_cut_off_what_another_one_wrote(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a line to take back, where lines of the driver that took over are now."""
    old = EventLog(path, generation=1)
    with monkeypatch.context() as patch, room_for(path, 10):
        failing(patch, "ftruncate")
        with pytest.raises(OSError, match="File too large"):
            old.write_step(1, loss=2.0)
    new = EventLog(path, generation=2)
    new.write_step(1, loss=2.0)
    old.write("worker_lost")
    assert [(e["event"], e["generation"]) for e in read_events(path)] == [("step", 2), ("worker_lost", 1)]


def test_a_long_run_does_not_hold_what_its_events_say(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """11 KB a step at a global batch of 256, in every driver and for the life of the run."""
    log = EventLog(path, generation=1)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    tracemalloc.start()
    try:
        for step in range(1000):
            log.write_step(step, loss=1.0 + step, pack_ids=list(range(1000 * step, 1000 * step + 256)))
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(log.losses()) == 1000
    assert grown < 500_000
