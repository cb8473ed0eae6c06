"""How far the making of parts is, also of those that other processes make.

Guarantees: a process that makes a part says so at most once a second, in a small file beside the part, wherever that
is: no connection, no actor, nothing to recover. What is shown never goes back, and is right at the end of a part.
Cost: a write per second and part; whoever looks spends at most a twentieth of its time on it.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

Inside = Callable[[int, int, int], None]
"""Takes the number of a part, and its rows and bytes that were read."""
Progress = Callable[[int, float], None]
"""Takes the number of rows done and the share of all bytes, 0 to 1."""

_NAME = "progress"
_SECONDS = 1.0
_LOOKS_SHARE = 20


class ProgressFile:
    """The file that says how far this process is with a part; an `Inside`, and a context manager.

    Args:
        folder: where the part is written meanwhile, named ".part-NUMBER.anything".
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        self._last = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, number: int, rows: int, num_bytes: int) -> None:
        """Writes it, if the last time is long enough ago."""
        if time.monotonic() - self._last >= _SECONDS:
            self._path.write_text(f"{number} {rows} {num_bytes} .", "utf-8")
            self._last = time.monotonic()

    def close(self) -> None:
        """Removes it."""
        self._path.unlink(missing_ok=True)


class Meter:
    """Turns batches and parts into calls of a `Progress`.

    Args:
        sizes: bytes of all parts by number.
        done: (number, rows) of those that are there already.
        progress: what to call.
        folder: where parts are made.
    """

    def __init__(
        self, sizes: dict[int, int], done: Iterable[tuple[int, int]], progress: Progress, folder: Path
    ) -> None:
        self._sizes, self._progress, self._folder = sizes, progress, folder
        self._inside: dict[int, tuple[int, int]] = {}
        self._rows = dict(done)
        self._next_look = 0.0
        self._shown = (0, 0.0)

    def inside(self, number: int, rows: int, num_bytes: int) -> None:
        """A part that this process makes goes on."""
        self._inside[number] = (rows, num_bytes)
        self._show()

    def done(self, number: int, rows: int) -> None:
        """A part is there."""
        self._rows[number] = rows
        self._show()

    def look(self) -> None:
        """Looks at the parts that other processes make."""
        began = time.monotonic()
        if began < self._next_look:
            return
        for path in self._folder.glob(f".part-*/{_NAME}"):
            try:
                words = path.read_text("utf-8").split()
            except OSError:
                continue  # that part is there now
            if len(words) == 4:  # else it is being written
                self._inside[int(words[0])] = (int(words[1]), int(words[2]))
        self._next_look = time.monotonic() + _LOOKS_SHARE * (time.monotonic() - began)
        self._show()

    def _show(self) -> None:
        going = {number: at for number, at in self._inside.items() if number not in self._rows}
        rows = sum(self._rows.values()) + sum(rows for rows, _ in going.values())
        size = sum(self._sizes[n] for n in self._rows) + sum(num_bytes for _, num_bytes in going.values())
        now = (max(self._shown[0], rows), max(self._shown[1], size / max(1, sum(self._sizes.values()))))
        if now != self._shown:
            self._shown = now
            self._progress(*now)
