"""How a person or a scheduler stops a run.

Guarantees: the first SIGINT (Ctrl-C) lets the current step end, saves a checkpoint and ends the run as "stopped", at
once where it only waits for workers (`Stopped`); a second one interrupts at once; SIGTERM ends the run at once through
the normal clean-up (no actor stays behind), with the record saying "stopped", and another one does not break that off.
Handlers are put back on exit; outside the main thread nothing is installed.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class Stopped(Exception):  # noqa: N818  (nothing has failed)
    """A person has asked the run to stop, which only waited."""


class StopSignal:
    """Context manager that turns signals into `requested`.

    Args:
        tell: shows a message to the person.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.requested = False
        self._terminated = False
        self._tell = tell
        self._old: dict[int, Any] = {}

    def check(self) -> None:
        """For whoever waits, about once a second.

        Raises:
            Stopped: a person has asked the run to stop.
        """
        if self.requested:
            raise Stopped

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._old[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
            self._old[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._terminate)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old.clear()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._tell("stopping after this step (press Ctrl-C again to stop at once)")

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if self._terminated:  # the first one's clean-up brings the state to safety: it is not broken off
            return
        self._terminated = True
        raise SystemExit(128 + number)
