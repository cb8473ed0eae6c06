"""Checkpoints on storage as the driver orders them: written by keepers beside the running job, or by the ranks.

Guarantees: one checkpoint is written at a time; it counts when its manifest is in place, which the driver writes after
every shard is durable; a write that fails is said within a step, never advances the newest checkpoint and does not end
the run while the state is safe in memory, unless it happens `MAX_FAILURES` times in a row or at the end; one that takes
longer than any storage would (`_hangs`) has failed. A checkpoint
that falls due while another is written, or whose writers were lost, is made up for as soon as it can be: of the newest
step that is in memory then, since keepers hold no older one for certain. Costs the training nothing but the
keepers' share of the machine, a call to them, and `LOOK_SECONDS` at most: what storage takes to commit a step and to
drop an old one passes in a thread (`stall_seconds` of the event is what the training waited).
"""

import errno
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from raycp.driver.keeper_calls import KeeperLost
from raycp.errors import CheckpointError, ClusterError, StaleGenerationError
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
from raycp.training.latest import fence
from raycp.training.manifest import Manifest
from raycp.training.storage import Storage
from workers.storage import storage_fix

MAX_FAILURES = 3
"""Failed checkpoints in a row that the run goes on with."""
FENCE_SECONDS = 10.0
"""How long a recovery waits for the storage to take the new generation."""
PATIENCE_SECONDS = 300.0
"""How long a write may take at least before it is given up."""
LONGER = 4.0
"""And so many times the longest one before."""
SLOWEST = 10e6
"""And as long as a keeper takes at so many bytes a second."""


class Handle(Protocol):
    """A write in progress: see `raycp.driver.keepers.Keepers.persist`."""

    @property
    def writers(self) -> int: ...
    def poll(self) -> bool: ...
    def wait(self, timeout: float) -> bool: ...


class Writers(Protocol):
    """What this file needs of the keepers."""

    def persist(self, manifest: Manifest, folder: str, *, commit: bool = False) -> Handle: ...


LOOK_SECONDS = 0.05
"""How long the training waits for a commit on storage: most take less, and count at once then."""


@dataclass(kw_only=True)
class _Writing:
    manifest: Manifest
    folder: Storage
    handle: Handle
    began: float
    stall: float = 0.0
    late: bool = False
    commit: "_Commit | None" = None


class _Commit:
    """A commit on storage, in a thread: no other process can be asked to end one that hangs, so it is a daemon.

    Args:
        body: what it does.
        by: generation of whoever commits.
    """

    def __init__(self, body: Callable[[], None], *, by: int) -> None:
        self.by = by
        self._body = body
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="raycp-commit", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._body()
        except BaseException as error:  # raised again by `wait`, where somebody is
            self._error = error

    def wait(self, timeout: float | None) -> bool:
        """Whether it is done, after `timeout` seconds at most; raises what it raised."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True


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
        self._due: int | None = None
        self._writing: _Writing | None = None
        self._failures = 0
        self._longest = 0.0
        self._stored: int | None = None
        self.newest: str | None = None
        """Step folder of the newest checkpoint that this driver wrote or loaded."""
        self.newest_step = -1

    def find(self) -> Newest:
        """The newest intact checkpoint; damaged ones are set aside with a message, leftovers are deleted."""
        while self._writing is not None and self._writing.commit is not None:  # else its files would be discarded
            self._writing = None if self._settled(self._writing, self._writing.commit, timeout=None) else self._writing
        found = self._search()
        self._stored = -1 if found.manifest is None else found.manifest.step
        if self._stored < self.newest_step:  # the one that was thought to be there is not
            self.newest, self.newest_step = None if found.storage is None else found.storage.where, self._stored
        for message in found.messages:
            self._say(message)
        return found

    def _search(self) -> Newest:
        found = newest(self.root)
        discard_uncommitted(self.root)
        return found

    def stored_step(self) -> int:
        """The newest committed step, by its manifest alone; -1 if there is none. Storage is asked once: only the run's
        driver commits there, and a recovery from memory must not need it.
        """
        if self.newest_step >= 0:
            return self.newest_step
        if self._stored is None:
            manifest = newest_committed(self.root)
            self._stored = -1 if manifest is None else manifest.step
        return self._stored

    def loaded(self, folder: str, step: int) -> None:
        """The run continues from this one."""
        self.newest, self.newest_step = folder, step

    def fence(self, run_id: str, generation: int) -> None:
        """As `latest.fence`, but waits no longer than `FENCE_SECONDS`.

        Raises:
            OSError: the storage refused, or does not answer.
        """
        order = _Commit(lambda: fence(self.root, run_id, generation), by=generation)
        if not order.wait(FENCE_SECONDS):
            raise TimeoutError(errno.ETIMEDOUT, f"no answer within {FENCE_SECONDS:.0f} s")

    # -- beside the run ---------------------------------------------------------------------------------------------

    @property
    def writing(self) -> bool:
        """Whether keepers write, and hold what they write."""
        return self._writing is not None and self._writing.commit is None

    @property
    def due(self) -> int | None:
        """The step of which, or after which, a checkpoint is due that was not begun."""
        return self._due

    def settle(self, *, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Waits until the write in progress is done, or given up; `meanwhile` is called about five times a second."""
        while self._writing is not None and self.writing:
            meanwhile()
            if self._finished(self._writing, timeout=0.2):
                self._writing = None

    def want(self, step: int) -> None:
        """A checkpoint of `step`, or of a later one, is due."""
        self._due = step if self._due is None else min(self._due, step)

    def advance(self, writers: Writers, newest: Manifest | None) -> None:
        """Looks after the write in progress, and begins the one that is due.

        Args:
            writers: the keepers.
            newest: the newest step that is committed in memory: no other is held there for certain.

        Raises:
            ClusterError: `MAX_FAILURES` checkpoints in a row could not be written.
        """
        if self._writing is not None and self._finished(self._writing, timeout=None):
            self._writing = None
        if self._due is not None and self._due <= self.newest_step:
            self._due = None
        if self._writing is None and self._due is not None and newest is not None and newest.step >= self._due:
            self._begin(newest, writers)

    def finish(
        self, manifest: Manifest, writers: Writers, *, seconds: float, meanwhile: Callable[[], object] = lambda: None
    ) -> bool:
        """Writes the step of `manifest`, the newest in memory, and waits until it is committed: `seconds` at most, but
        for keepers that write as long as storage may take (`_hangs`).

        Args:
            manifest: of the step.
            writers: the keepers.
            seconds: to wait.
            meanwhile: called about five times a second.
        """
        deadline = time.monotonic() + seconds
        while self.newest_step < manifest.step and (self.writing or time.monotonic() < deadline):
            meanwhile()
            if self._writing is None and not self._begin(manifest, writers):
                break
            writing = self._writing
            if writing is not None and self._finished(writing, timeout=0.2):
                self._writing = None
                if writing.manifest.step == manifest.step and self._due is None:
                    break
        return self.newest_step >= manifest.step

    def forget(self) -> None:
        """Ranks or keepers that wrote are gone: what is in progress is due again, unless all of it is written."""
        if self._writing is not None and self._writing.commit is None:
            self.want(self._writing.manifest.step)
            self._writing = None

    def _begin(self, manifest: Manifest, writers: Writers) -> bool:
        self._due = None
        folder, began = step_folder(self.root, manifest.step), time.monotonic()
        try:
            handle = writers.persist(manifest, folder.where)
        except CheckpointError as error:  # its holders do not answer: nothing is wrong with the storage
            self._tell_failed(manifest, folder, error)
            self.want(manifest.step + 1)
            return False
        stall = time.monotonic() - began
        self._writing = _Writing(manifest=manifest, folder=folder, handle=handle, began=began, stall=stall)
        return True

    def _finished(self, writing: _Writing, *, timeout: float | None) -> bool:
        try:
            if writing.commit is None:
                if not (writing.handle.poll() if timeout is None else writing.handle.wait(timeout)):
                    return self._hangs(writing)
                writing.commit = self._begin_commit(writing.manifest)
        except KeeperLost:  # nothing is wrong with the storage: another holder writes
            self.want(writing.manifest.step)
            return True
        except (OSError, CheckpointError) as error:
            self._failed(writing.manifest, writing.folder, error)
            return True
        return self._settled(writing, writing.commit, timeout=LOOK_SECONDS if timeout is None else timeout)

    def _begin_commit(self, manifest: Manifest) -> _Commit:
        by = self._events.generation  # the step may be of the generation before a recovery
        return _Commit(lambda: self._store(manifest, by=by), by=by)

    def _settled(self, writing: _Writing, commit: _Commit, *, timeout: float | None) -> bool:
        """Whether the commit has ended, one way or the other, after `timeout` seconds at most."""
        began = time.monotonic()
        try:
            done = commit.wait(timeout)
        except StaleGenerationError:
            if commit.by >= self._events.generation:
                raise
            writing.commit = self._begin_commit(writing.manifest)  # a recovery has fenced off what its driver began
            return False
        except (OSError, CheckpointError) as error:
            self._failed(writing.manifest, writing.folder, error)
            return True
        finally:
            writing.stall += time.monotonic() - began
        if done:
            self._longest = max(self._longest, time.monotonic() - writing.began)
            self._note(writing.manifest, began=writing.began, stall_seconds=writing.stall)
        else:
            self._hangs(writing)
        return done

    def _hangs(self, writing: _Writing) -> bool:
        """Whether a write is given up: it takes longer than any storage would. A commit that hangs is only told, since
        its thread cannot be ended, and nothing waits for it.

        Raises:
            ClusterError: `MAX_FAILURES` checkpoints in a row could not be written.
        """
        took, manifest = time.monotonic() - writing.began, writing.manifest
        at_slowest = manifest.bytes / (SLOWEST * max(writing.handle.writers, 1))
        limit = max(PATIENCE_SECONDS, LONGER * self._longest, at_slowest)
        if writing.late or took <= limit:
            return False
        writing.late = True
        error = TimeoutError(errno.ETIMEDOUT, f"the storage has not taken it in {took:.0f} s")
        if writing.commit is None:
            self._failed(manifest, writing.folder, error)
            return True
        self._tell_failed(manifest, writing.folder, error)
        return False

    def _failed(self, manifest: Manifest, folder: Storage, error: Exception) -> None:
        self._failures += 1
        fix = self._tell_failed(manifest, folder, error)
        if self._failures >= MAX_FAILURES:
            raise ClusterError(
                f"{self._failures} checkpoints in a row could not be written to {self.root.where}: {error}", fix=fix
            ) from error

    def _tell_failed(self, manifest: Manifest, folder: Storage, error: Exception) -> str:
        """Returns what to do about it."""
        step, fix = manifest.step, storage_fix(error)
        self._events.write("checkpoint_failed", step=step, error=str(error), fix=fix, path=folder.where)
        self._say(
            f"the checkpoint of step {step} could not be written: {error}\n  fix: {fix or 'look at the storage'}; the "
            f"state is in memory, and the newest checkpoint is {self.newest or 'none yet'}"
        )
        return fix

    # -- by the ranks, or at the end --------------------------------------------------------------------------------

    def commit(self, manifest: Manifest, *, began: float, stall_seconds: float) -> None:
        """All shards of `manifest` are on storage: makes the step exist, and drops what is older than `keep`."""
        here = time.monotonic()
        self._store(manifest, by=self._events.generation)
        if self.writing and self._writing is not None and self._writing.manifest.step <= manifest.step:
            self._writing = None  # nobody needs the older one, and its files were pruned
        self._note(manifest, began=began, stall_seconds=stall_seconds + time.monotonic() - here)

    def _store(self, manifest: Manifest, *, by: int) -> None:
        """What storage has to do; from any thread."""
        commit(step_folder(self.root, manifest.step), manifest, by=by)
        prune(self.root, keep=self._keep)

    def _note(self, manifest: Manifest, *, began: float, stall_seconds: float) -> None:
        folder = step_folder(self.root, manifest.step)
        if manifest.step > self.newest_step:  # keepers may have been slower than the ranks with a later one
            self.newest, self.newest_step = folder.where, manifest.step
        self._failures = 0
        self._events.write(
            "checkpoint",
            step=manifest.step,
            bytes=manifest.bytes,
            seconds=time.monotonic() - began,
            stall_seconds=stall_seconds,
            path=folder.where,
        )
