"""A rank without a model: the real counters, calls that work or hang, and a control thread that goes on answering."""

import os
import time
from pathlib import Path
from typing import Any

from workers.progress import ALONE, MEET, Progress


class Hang:
    """A read that never returns and holds no interpreter, as of storage that answers no more: of a pipe.

    Args:
        folder: where pipes are made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self) -> None:
        pipe = self._folder / f"pipe-{os.getpid()}"
        os.mkfifo(pipe)
        pipe.read_bytes()
        pipe.unlink()

    def end(self) -> None:
        """Frees every process that hangs there."""
        for pipe in self._folder.glob("pipe-*"):
            pipe.write_bytes(b"")


class SmallRank:
    """What a driver asks of a rank."""

    def __init__(self, folder: str, rank: int) -> None:
        self._rank = rank
        self._hang = Hang(Path(folder))
        self._progress = Progress()

    def work(self, call: str, seconds: float, hangs: int | None) -> None:
        """A piece of work every tenth of a second; then rank `hangs` hangs, and others wait for it if they have to."""
        with self._progress.during(call):
            for _ in range(round(10 * seconds)):
                time.sleep(0.1)
                self._progress.move()
            if hangs == self._rank:
                self._hang()
            elif hangs is not None and call not in ALONE:
                self._progress.enter(MEET)
                self._hang()

    def late(self, call: str, hangs: int) -> None:
        """Rank `hangs` hangs before its counters say that the call has begun."""
        if hangs == self._rank:
            self._hang()
        self.work(call, 0.2, None)

    def progress(self) -> dict[str, Any]:
        return self._progress.snapshot()

    def abort(self, generation: int) -> int:
        return 0
