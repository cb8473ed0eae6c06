"""Checkpoints on storage as the driver orders them: written by keepers beside the running job, or by the ranks.

Guarantees: one checkpoint is written at a time; it counts when its manifest is in place, which the driver writes after
every shard is durable; a write that fails is said within a step, never advances the newest checkpoint and does not end
the run while the state is safe in memory, unless it happens `MAX_FAILURES` times in a row or at the end. A checkpoint
that falls due while another is written waits for it, and the newest due one wins. Costs the training nothing but the
keepers' share of the machine (`stall_seconds` of the event is 0 then).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from raycp.driver.keeper_calls import KeeperLost
from raycp.errors import CheckpointError, ClusterError
from raycp.events import EventLog
from raycp.training.checkpoint import (
    Newest,
    commit,
    discard_uncommitted,
    newest,
    newest_committed,
    prune,
    step_folder,
)
from raycp.training.manifest import Manifest
from raycp.training.storage import Storage
from workers.storage import storage_fix

MAX_FAILURES = 3
"""Failed checkpoints in a row that the run goes on with."""


class Handle(Protocol):
    """A write in progress: see `raycp.driver.keepers.Keepers.persist`."""

    def poll(self) -> bool: ...
    def wait(self, timeout: float) -> bool: ...


class Writers(Protocol):
    """What this file needs of the keepers."""

    def persist(self, manifest: Manifest, folder: str, *, commit: bool = False) -> Handle: ...


@dataclass(frozen=True, kw_only=True)
class _Writing:
    manifest: Manifest
    folder: Storage
    handle: Handle
    began: float


class Checkpoints:
    """The checkpoints of one run.

    Args:
        root: folder of the step folders.
        keep: newest ones that are kept.
        events: the log.
        say: shows a message to the person.
    """

    def __init__(self, root: Storage, *, keep: int, events: EventLog, say: Callable[[str], None]) -> None:
        self.root = root
        self._keep = keep
        self._events = events
        self._say = say
        self._due: Manifest | None = None
        self._writing: _Writing | None = None
        self._failures = 0
        self._stored: int | None = None
        self.newest: str | None = None
        """Step folder of the newest checkpoint that this driver wrote or loaded."""
        self.newest_step = -1

    def find(self) -> Newest:
        """The newest intact checkpoint; damaged ones are set aside with a message, leftovers are deleted."""
        found = newest(self.root)
        discard_uncommitted(self.root)
        for message in found.messages:
            self._say(message)
        return found

    def stored_step(self) -> int:
        """The newest committed step, by its manifest alone; -1 if there is none. Storage is asked once: only the run's
        driver commits there, and a recovery from memory must not need it.
        """
        if self._stored is None:
            manifest = newest_committed(self.root)
            self._stored = -1 if manifest is None else manifest.step
        return max(self._stored, self.newest_step)

    def loaded(self, folder: str, step: int) -> None:
        """The run continues from this one."""
        self.newest, self.newest_step = folder, step

    # -- beside the run ---------------------------------------------------------------------------------------------

    def order(self, manifest: Manifest, writers: Writers) -> None:
        """The step of `manifest`, which is in memory, has to go to storage; returns at once."""
        self._due = manifest
        self.advance(writers)

    def advance(self, writers: Writers) -> None:
        """Looks after the write in progress, and begins the one that is due.

        Raises:
            ClusterError: `MAX_FAILURES` checkpoints in a row could not be written.
        """
        if self._writing is not None and self._finished(self._writing, timeout=None):
            self._writing = None
        if self._writing is None and self._due is not None:
            manifest, self._due = self._due, None
            folder = step_folder(self.root, manifest.step)
            try:
                handle = writers.persist(manifest, folder.where)
            except CheckpointError as error:  # its only holders were lost a moment ago
                self._failed(manifest, folder, error)
                return
            self._writing = _Writing(manifest=manifest, folder=folder, handle=handle, began=time.monotonic())

    def finish(self, manifest: Manifest, writers: Writers, *, seconds: float) -> bool:
        """Writes the step of `manifest` and waits until it is committed, `seconds` at most."""
        deadline = time.monotonic() + seconds
        if self.newest_step >= manifest.step:
            return True
        if self._writing is not None and self._writing.manifest.step == manifest.step:
            self._due = None
        else:
            self._due = manifest
        while time.monotonic() < deadline:
            if self._writing is not None and self._finished(self._writing, timeout=0.2):
                self._writing = None
                if self._due is None:
                    return self.newest_step >= manifest.step
            self.advance(writers)
            if self._writing is None and self._due is None:
                break
        return self.newest_step >= manifest.step

    def forget(self) -> None:
        """The ranks or keepers that wrote are gone: what is in progress will not be completed."""
        self._writing = self._due = None

    def _finished(self, writing: _Writing, *, timeout: float | None) -> bool:
        try:
            done = writing.handle.poll() if timeout is None else writing.handle.wait(timeout)
            if not done:
                return False
            self.commit(writing.manifest, began=writing.began, stall_seconds=0.0)
        except KeeperLost:  # nothing is wrong with the storage: another holder writes
            self._due = self._due or writing.manifest
        except (OSError, CheckpointError) as error:
            self._failed(writing.manifest, writing.folder, error)
        return True

    def _failed(self, manifest: Manifest, folder: Storage, error: Exception) -> None:
        self._failures += 1
        step, fix = manifest.step, storage_fix(error)
        self._events.write("checkpoint_failed", step=step, error=str(error), fix=fix, path=folder.where)
        self._say(
            f"the checkpoint of step {step} could not be written: {error}\n  fix: {fix or 'look at the storage'}; the "
            f"state is in memory, and the newest checkpoint is {self.newest or 'none yet'}"
        )
        if self._failures >= MAX_FAILURES:
            raise ClusterError(
                f"{self._failures} checkpoints in a row could not be written to {self.root.where}: {error}", fix=fix
            ) from error

    # -- by the ranks, or at the end --------------------------------------------------------------------------------

    def commit(self, manifest: Manifest, *, began: float, stall_seconds: float) -> None:
        """All shards of `manifest` are on storage: makes the step exist, and drops what is older than `keep`."""
        folder = step_folder(self.root, manifest.step)
        commit(folder, manifest, by=self._events.generation)  # it may be of the generation before a recovery
        self.newest, self.newest_step = folder.where, manifest.step
        self._failures = 0
        prune(self.root, keep=self._keep)
        self._events.write(
            "checkpoint",
            step=manifest.step,
            bytes=manifest.bytes,
            seconds=time.monotonic() - began,
            stall_seconds=stall_seconds,
            path=folder.where,
        )
