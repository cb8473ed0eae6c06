"""The append-only event log of a run, `events.jsonl`: one JSON object a line, the truth about what happened.

Guarantees: every line has `time` (seconds since the epoch), `event` and `generation`; a line is on disk (fsync) when
`write` returns; a line torn by a crash is cut off when the log is next opened, and skipped by readers; a `step` event
is written at most once per step, whatever is computed again after a failure. Costs one fsync per event.
Imports neither torch nor ray.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class EventLog:
    """Writer of one run's log. One driver at a time owns it.

    Args:
        path: the file; made if it does not exist.
        generation: number that every event carries; raised by each driver start and each rebuild of the groups.
    """

    def __init__(self, path: Path | str, *, generation: int) -> None:
        self.path = Path(path)
        self.generation = generation
        _cut_torn_tail(self.path)
        self._steps = {e["step"]: e for e in read_events(self.path) if e["event"] == "step"}
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, event: str, **fields: Any) -> dict[str, Any]:
        """Appends one event and returns it. Numbers that are not finite are written as strings (JSON has none)."""
        line: dict[str, Any] = {"time": time.time(), "event": event, "generation": self.generation, **fields}
        self._file.write(json.dumps(_plain(line), allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        return line

    def write_step(self, step: int, **fields: Any) -> bool:
        """Writes the `step` event unless this step already has one; tells whether it wrote.

        A step that is computed again after a failure is the same step: its packs were counted once.
        """
        if step in self._steps:
            return False
        self._steps[step] = self.write("step", step=step, **fields)
        return True

    def losses(self) -> dict[int, float]:
        """{step: loss} of all steps written so far, those of earlier drivers of the run included."""
        return {s: float(e["loss"]) for s, e in sorted(self._steps.items())}

    def steps(self) -> dict[int, dict[str, Any]]:
        """{step: its `step` event}."""
        return dict(sorted(self._steps.items()))

    def close(self) -> None:
        self._file.close()


def read_events(path: Path | str) -> Iterator[dict[str, Any]]:
    """Yields the events of a log, oldest first; nothing if the file does not exist; a torn last line is left out."""
    file = Path(path)
    if not file.exists():
        return
    with file.open("rb") as lines:
        for raw in lines:
            if not raw.endswith(b"\n"):
                return
            yield json.loads(raw)


def _cut_torn_tail(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        step = 1 << 16
        start = max(0, size - step)
        while True:
            file.seek(start)
            cut = file.read(size - start).rfind(b"\n")
            if cut >= 0 or start == 0:
                break
            start = max(0, start - step)
        keep = start + cut + 1
        if keep != size:
            file.truncate(keep)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value
