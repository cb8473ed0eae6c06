"""The append-only event log of a run, `events.jsonl`: one JSON object a line, the truth about what happened.

Guarantees: every line has `time` (seconds since the epoch), `event` and `generation`; a line is on disk (fsync) when
`write` returns, and not in the log when it raises; a line torn by a crash is cut off when the log is next opened, and
skipped by readers; a `step` event is written at most once per step, whatever is computed again after a failure. Costs
one fsync per event, and some 100 bytes of memory per step. Imports neither torch nor ray.
"""

from __future__ import annotations

import contextlib
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
        self._losses = {int(e["step"]): float(e["loss"]) for e in read_events(self.path) if e["event"] == "step"}
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)  # less the umask
        self._refused: tuple[int, bytes] | None = None

    def write(self, event: str, **fields: Any) -> dict[str, Any]:
        """Appends one event and returns it. Numbers that are not finite are written as strings (JSON has none).

        Raises:
            OSError: the file system does not take the line; it is not in the log then.
        """
        line: dict[str, Any] = {"time": time.time(), "event": event, "generation": self.generation, **fields}
        self._append((json.dumps(_plain(line), allow_nan=False) + "\n").encode())
        return line

    def _append(self, line: bytes) -> None:
        """All of it, or nothing: what is refused must not come with the next line, after it was written anew."""
        self._cut_refused()
        length = os.fstat(self._file).st_size
        try:
            left = memoryview(line)
            while left:  # a disk that is full takes a part, and says why with the rest
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)
        except BaseException:
            self._refused = length, line
            with contextlib.suppress(OSError):  # then before the next line
                self._cut_refused()
            raise

    def _cut_refused(self) -> None:
        """Takes back what is there of a line that was refused, unless another driver has gone on in its place."""
        if self._refused is not None:
            length, line = self._refused
            if line.startswith(os.pread(self._file, len(line) + 1, length)):
                os.ftruncate(self._file, length)
            self._refused = None

    def write_step(self, step: int, *, loss: float, **fields: Any) -> bool:
        """Writes the `step` event unless this step already has one; tells whether it wrote.

        A step that is computed again after a failure is the same step: its packs were counted once.
        """
        if step in self._losses:
            return False
        self.write("step", step=step, loss=loss, **fields)
        self._losses[step] = float(loss)
        return True

    def losses(self) -> dict[int, float]:
        """{step: loss} of all steps written so far, those of earlier drivers of the run included."""
        return dict(sorted(self._losses.items()))

    def close(self) -> None:
        os.close(self._file)


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
