"""The event log: complete lines only, each step once, whatever a crash leaves behind."""

import json
import math
from pathlib import Path

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
