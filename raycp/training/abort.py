"""Frees a process from collectives of NCCL and HCCL whose peers are gone: every group at once, with a deadline.

Guarantees: all aborts start before any is waited for, since communicators that wait on each other deadlock when they
are aborted in turn (pytorch #119797); one that does not come back by the deadline is named, and then only the end of
the process frees the device, for which the caller replaces it. Costs a thread a group while it lasts, 0.5 s and 10 ms
for each kernel in flight (NVRx's figures for NCCL; not measured here).
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

DEADLINE = 5.0
"""Seconds for all groups together."""


class Abortable(Protocol):
    """What a back end has: `ProcessGroupNCCL.abort`, `ProcessGroupHCCL.abort`."""

    def abort(self) -> Any:
        """Ends every operation that waits; may hang."""
        ...


@dataclass(frozen=True)
class Aborted:
    """What came of it, by the names of the groups."""

    seconds: float
    stuck: tuple[str, ...] = ()
    """Not back by the deadline."""
    failed: tuple[tuple[str, str], ...] = ()
    """(name, error): raised, which frees nothing."""

    @property
    def clean(self) -> bool:
        """Whether the process can be used again; else it has to be replaced."""
        return not self.stuck and not self.failed


def abort_all(backends: Mapping[str, Abortable], *, deadline: float = DEADLINE) -> Aborted:
    """Aborts every back end; returns when all are done, or at the deadline.

    Args:
        backends: by name, for the report.
        deadline: seconds for all of them.
    """
    start = time.monotonic()
    failed: dict[str, str] = {}

    def run(name: str, backend: Abortable) -> None:
        try:
            backend.abort()
        except Exception as error:  # whatever it is, the report has it
            failed[name] = f"{type(error).__name__}: {error}"

    threads = {
        name: threading.Thread(target=run, args=(name, backend), name=f"abort {name}", daemon=True)
        for name, backend in backends.items()
    }
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(max(0.0, start + deadline - time.monotonic()))
    stuck = tuple(name for name, thread in threads.items() if thread.is_alive())
    return Aborted(time.monotonic() - start, stuck, tuple(failed.items()))
