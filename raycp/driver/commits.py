"""When a step counts: steps that ranks have reported, and the manifest that commits them.

Guarantees: a step's event is written once, in order, when the manifest that names every shard of its state is
recorded in the keepers' memory (with nothing in memory: when every rank has reported the step); the manifest carries
the events of the steps that it commits, so that another driver can write what this one could not; a driver whose run
was taken over by a newer one commits nothing. Costs, for a snapshot, some 30 bytes a rank to each keeper and a look at
whether the ranks' rows are those of the snapshot before; once per generation the whole manifest (75 KB for a rank of
900 tensors) and a check that the rows cover the state.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from raycp.errors import CheckpointError
from raycp.events import EventLog
from raycp.training.manifest import Manifest, ShardEntry, ShardRecord, coverage_problem

EVENTS = "step_events"
"""Key in `Manifest.extra`: the fields of the `step` events that a manifest commits."""


class Collected(Protocol):
    """A step whose shards are all in: see `raycp.driver.keepers`."""

    @property
    def step(self) -> int: ...
    @property
    def shards(self) -> Sequence[ShardRecord]: ...
    @property
    def bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...


class Memory(Protocol):
    """What this file needs of the keepers."""

    def expect(self, step: int) -> None: ...
    def poll(self, timeout: float = 0.0) -> Sequence[Collected]: ...
    def commit(self, manifest: Manifest) -> None: ...
    def abandon(self, step: int) -> None: ...


class Commits:
    """Steps between "reported" and "committed".

    Args:
        events: the log.
        memory: keepers; None: nothing is held in memory.
        manifest: (step, shards, extra) -> the manifest of a step.
        may_commit: raises if a newer driver or generation has taken over.
    """

    def __init__(
        self,
        events: EventLog,
        memory: Memory | None,
        *,
        manifest: Callable[[int, Sequence[ShardRecord], dict[str, Any]], Manifest],
        may_commit: Callable[[], None],
    ) -> None:
        self._events = events
        self._memory = memory
        self._manifest = manifest
        self._may_commit = may_commit
        self._reported: dict[int, dict[str, Any]] = {}
        self._stalls: dict[int, float] = {}
        self._expected: list[int] = []
        self._covered: list[tuple[ShardEntry, ...]] | None = None
        self.committed = max(events.losses(), default=0)
        self.newest: Manifest | None = None

    @property
    def known(self) -> list[int]:
        """Steps that were reported and are not committed yet."""
        return sorted(self._reported)

    def reported(self, step: int, fields: dict[str, Any], *, snapshot: bool, stall_seconds: float) -> None:
        """Every rank has reported `step`; `snapshot`: a copy of its state is on its way to the keepers."""
        if self._memory is None:
            self._may_commit()
            self._events.write_step(step, **fields)
            self.committed = max(self.committed, step)
            return
        self._stalls[step] = stall_seconds
        self._reported[step] = fields
        if snapshot:
            self.expect(step)

    def advance(self, timeout: float = 0.0) -> list[Manifest]:
        """Commits the steps whose copies have arrived; returns their manifests, oldest first. Looks after the keepers
        also where no copy is on its way.

        Raises:
            KeeperLost: a keeper is gone, or answers no more.
            CopyRefused: a copy will not be complete.
            StaleGenerationError: another driver has taken the run over.
        """
        if self._memory is None:
            return []
        made = []
        for found in sorted(self._memory.poll(timeout), key=lambda c: c.step):
            if found.step not in self._expected:  # of before a recovery
                continue
            made.append(self._take(found))
        return made

    @property
    def expected(self) -> tuple[int, ...]:
        """The steps whose copies are on their way."""
        return tuple(self._expected)

    @property
    def awaited(self) -> int | None:
        """The oldest step whose copy is on its way."""
        return min(self._expected, default=None)

    def expects(self, step: int) -> bool:
        """Whether a copy of `step` is on its way."""
        return step in self._expected

    def expect(self, step: int) -> None:
        """A copy of `step`, which was reported before, is on its way too."""
        assert self._memory is not None
        self._memory.expect(step)
        self._expected.append(step)

    def lost_copies(self, until: int | None = None) -> None:
        """Copies of steps up to `until` (None: of all) that are on their way do not arrive, since a keeper is lost or
        full: ranks need not wait for them, and the next snapshot commits these steps.
        """
        given_up = [s for s in self._expected if until is None or s <= until]
        told = given_up if until is None else [*given_up, until]
        if self._memory is not None and told:
            self._memory.abandon(max(told))
        self._expected = [s for s in self._expected if s not in given_up]

    def saved(self, step: int) -> None:
        """The state of `step` is on storage, written by the ranks: commits what was reported up to it."""
        self._may_commit()
        for done in [s for s in self.known if s <= step]:
            self._events.write_step(done, **self._reported.pop(done))
        if any(s <= step for s in self._expected):  # else later copies wait for their commits
            self.lost_copies(step)
        self._stalls = {s: v for s, v in self._stalls.items() if s > step}
        self.committed = max(self.committed, step)

    def extra(self, step: int) -> dict[str, Any]:
        """`Manifest.extra` of a manifest that commits what was reported up to `step`: events, for another driver."""
        return {EVENTS: [{"step": s, **f} for s, f in sorted(self._reported.items()) if s <= step]}

    def rewind(self, step: int) -> None:
        """The state was restored at `step`: what was reported, or committed, after it will be computed again."""
        self._reported = {s: f for s, f in self._reported.items() if s <= step}
        self._expected = []
        self.committed = step
        if self.newest is not None and self.newest.step > step:
            self.newest = None

    def confirm(self, manifest: Manifest) -> Manifest:
        """Commits the step of `manifest`, which is whole in memory, for this generation; returns its manifest. For
        before everything else in memory is given up for it: another driver finds no step that was not committed, and
        a keeper that came since knows of none that was.
        """
        if self._memory is None:
            return manifest
        mine = self._manifest(manifest.step, manifest.shards, self.extra(manifest.step))
        mine = replace(manifest, generation=mine.generation) if manifest.cursor else mine
        self._commit(mine)
        return mine

    def adopt(self, manifest: Manifest) -> None:
        """The state was restored from `manifest`, of memory or of a checkpoint: writes the events of its steps that are
        not in the log yet; what was reported, or committed, after it will be computed again.
        """
        fields = {int(e["step"]): e for e in manifest.extra.get(EVENTS, [])} | self._reported
        for step in sorted(fields):
            if step <= manifest.step:
                self._events.write_step(step, **{k: v for k, v in fields[step].items() if k != "step"})
        self._reported = {}
        self.newest = manifest
        self.rewind(manifest.step)

    def _coverage_problem(self, shards: Sequence[ShardRecord]) -> str:
        """As `coverage_problem`, which is asked once for the entries of a generation: they are the very same then."""
        entries, before = [s.entries for s in shards], self._covered
        if before is not None and len(before) == len(entries) and all(map(operator.is_, entries, before)):
            return ""
        problem = coverage_problem(shards)
        self._covered = None if problem else entries
        return problem

    def _commit(self, manifest: Manifest) -> None:
        assert self._memory is not None
        self._may_commit()
        self._memory.commit(manifest)
        self.newest = manifest  # also where its events cannot be written: the keepers hold nothing older any more
        for step in [s for s in self.known if s <= manifest.step]:
            self._events.write_step(step, **self._reported.pop(step))
        self.committed = max(self.committed, manifest.step)

    def _take(self, found: Collected) -> Manifest:
        problem = self._coverage_problem(found.shards)
        if problem:
            raise CheckpointError(
                f"the copies of step {found.step} do not make a whole state: {problem}",
                fix="this is a fault of raycp: please report it; the step before can be continued from",
            )
        manifest = self._manifest(found.step, found.shards, self.extra(found.step))
        self._commit(manifest)
        self._events.write(
            "snapshot",
            step=found.step,
            bytes=found.bytes,
            seconds=found.seconds,
            stall_seconds=self._stalls.pop(found.step, 0.0),
            path=None,
        )
        self._stalls = {s: v for s, v in self._stalls.items() if s > found.step}
        self._expected = [s for s in self._expected if s > found.step]
        return manifest
