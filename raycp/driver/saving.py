"""From "every rank has reported the step" to "its state is in memory on two nodes" to "it is on storage".

Guarantees: copies in memory are committed as they arrive, also inside the next step; checkpoints are ordered from them
and never waited for, but at the end, at a stop and before a resize; what copies cannot bring to safety the ranks write
to storage themselves; a keeper that is lost or answers no more is let go at once, since ranks may wait for it inside
the step, and replaced at the step's end; when a run fails, the newest committed step
goes to storage, and if it could not, the keepers keep it. Costs nothing beside `commits` and `checkpoints`.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from data_pipeline import StepSchedule
from raycp.driver.checkpoints import Checkpoints
from raycp.driver.commits import Commits
from raycp.driver.copies import Room
from raycp.driver.display import Display
from raycp.driver.formation import PATIENCE, Formation
from raycp.driver.keepers import CopyRefused, KeeperLost
from raycp.driver.record import RunRecord
from raycp.driver.runtime import KeepersLike
from raycp.errors import CheckpointError
from raycp.events import EventLog
from raycp.training.checkpoint import step_folder
from raycp.training.manifest import Manifest, ShardRecord
from workers.messages import RunSpec

BEATS = 4
"""Words of the driver to a keeper within `heartbeat_timeout`."""
COMMIT_SECONDS = 60.0
"""How long the end of a run, or a resize, waits for the last copies in memory before the ranks write themselves."""
LAST_SECONDS = 3.0
"""How long a run that failed waits for the copies of its last step."""
FLUSH_SECONDS = 60.0
"""How long a run that failed waits for keepers to bring the last committed step to storage."""


class Saving:
    """Where the state of the steps of one run is, and gets to.

    Args:
        spec: what the workers run.
        schedule: gives the cursor of a step.
        formation: ranks and keepers.
        checkpoints: on storage.
        record: run.json, opened for this driver.
        events: the log.
        display: bar and messages.
        clock: seconds.

    Attributes:
        commits: steps between "reported" and "committed".
        copy_problems: {rank: why its last copy was not made}, as reported with the last step.
    """

    def __init__(
        self,
        *,
        spec: RunSpec,
        schedule: StepSchedule,
        formation: Formation,
        checkpoints: Checkpoints,
        record: RunRecord,
        events: EventLog,
        display: Display,
        clock: Callable[[], float],
    ) -> None:
        self._spec = spec
        self._elastic = spec.config.elastic
        self._schedule = schedule
        self._formation = formation
        self._checkpoints = checkpoints
        self._record = record
        self._events = events
        self._display = display
        self._clock = clock
        self._lost: list[KeeperLost] = []
        self._refusal = ""
        self._failing = False
        self._awaited: tuple[int | None, float] = (None, 0.0)
        self._beats: _Beats | None = None
        self._unsaved = True
        self.copy_problems: dict[int, str] = {}
        self.commits = Commits(events, None, manifest=self.manifest, may_commit=record.check_current)

    def begin(self) -> None:
        """The workers are placed, and with them the keepers, if there are any."""
        memory = self._formation.memory
        if memory is not None:
            every = min(self._elastic.keeper_ttl / 10, self._elastic.heartbeat_timeout / BEATS)
            self._beats = _Beats(memory, every=every)
            self.commits = Commits(self._events, memory, manifest=self.manifest, may_commit=self._record.check_current)

    @property
    def _copies(self) -> bool:
        """Whether steps are copied to the keepers at all."""
        return self._formation.memory is not None and self._formation.room is not Room.NONE

    def _writing(self) -> bool:
        """Whether the keepers write a checkpoint, or will once a copy that is on its way has arrived."""
        due, newest = self._checkpoints.due, self.commits.newest
        there = -1 if newest is None else newest.step
        return self._checkpoints.writing or (due is not None and due <= max(there, *self.commits.expected, -1))

    def wants_copy(self, step: int) -> bool:
        """Whether the state after `step` is copied to the keepers."""
        due = step % self._elastic.snapshot_every == 0 or self._is_saved(step) or step == self._spec.total_steps
        return due and self._copies and not (self._formation.room is Room.TIGHT and self._writing())

    @property
    def may_resize(self) -> bool:
        """Whether `make_safe` would not wait for storage."""
        return self._formation.room is not Room.TIGHT or not self._checkpoints.writing

    def after(self, step: int) -> None:
        """`step` was reported and is neither the last one nor one to stop at: a checkpoint of it may be due."""
        if not self._is_saved(step):
            return
        late = self._failing and self.commits.committed < step - self._elastic.checkpoint_every
        if not self._copies or late:
            self.save_by_ranks(step)  # nothing is in memory, or copies fail again and again
        else:
            self._checkpoints.want(step)

    def _is_saved(self, step: int) -> bool:
        """Whether a checkpoint of `step` is wanted."""
        return step % self._elastic.checkpoint_every == 0

    def interrupted(self) -> None:
        """A failure: another world will be formed, with keepers for it."""
        self._lost, self.copy_problems = [], {}

    def meanwhile(self) -> None:
        """While a step runs: commits what has arrived of the step before, orders a checkpoint that is due."""
        self._take()
        if self._formation.memory is not None:
            self._checkpoints.advance(self._formation.memory, self.commits.newest)

    def look_after(self) -> None:
        """Commits what has arrived, orders and watches checkpoints, replaces a lost keeper."""
        if self._formation.memory is None:
            return
        self.meanwhile()
        if self._lost:
            self._replace()
        elif self.copy_problems:
            self._copies_failed(self.copy_problems)

    def let_go(self, lost: KeeperLost) -> None:
        """A keeper is lost, or stands still: nobody waits for it any more. `look_after` puts another in its place."""
        memory = self._formation.memory
        if memory is not None:
            keeper = memory.addresses.get(lost.node_id)
            if keeper is not None:  # the ranks first: Ray takes seconds to end a process that is stopped
                self._formation.ranks.let_go(keeper)
            memory.drop(lost.node_id)  # before the other keepers, which are waited for, hear of it
        self.commits.lost_copies()
        self._lost.append(lost)
        self._failing = True

    def _take(self, timeout: float = 0.0) -> None:
        """Commits what has arrived, or arrives within `timeout` seconds; gives up what will not."""
        try:
            if self.commits.advance(timeout):
                self._refusal, self._failing = "", False
        except KeeperLost as lost:
            self.let_go(lost)
        except CopyRefused as refused:
            self._refused(refused)
        self._give_up_what_is_late()

    def _give_up_what_is_late(self) -> None:
        """A copy that does not arrive, though every keeper answers, holds up the ones after it, and the ranks."""
        step, limit = self.commits.awaited, PATIENCE * self._elastic.heartbeat_timeout
        if step != self._awaited[0]:
            self._awaited = step, self._clock()
        elif step is not None and self._clock() - self._awaited[1] > limit:
            self._refused(
                CopyRefused(
                    f"the copy of step {step} did not arrive within {limit:.0f} s",
                    fix="look at the keepers' logs; raise elastic.heartbeat_timeout if copies take that long",
                    step=step,
                    node_id=None,
                )
            )

    def _flush(self, step: int, seconds: float) -> None:
        """Waits until `step` is committed or will not be, `seconds` at most."""
        deadline = self._clock() + seconds
        while self.commits.committed < step and self.commits.expects(step) and self._clock() < deadline:
            self._take(0.2)

    def _replace(self) -> None:
        lost, self._lost = self._lost, []
        self._formation.replace_keepers(lost, step=self.commits.committed)
        self.commits.lost_copies()
        gone = {one.node_id for one in lost}  # the problems of their ranks were this, and are mended
        mended = {m.rank for m in self._formation.ranks.members if m.probe.node_id in gone}
        self.copy_problems = {r: why for r, why in self.copy_problems.items() if r not in mended}

    def _refused(self, refused: CopyRefused) -> None:
        """The node of a copy's second home is short of memory, or not reached from the first one, or nobody knows."""
        d, self._failing = refused.details, True
        self._events.write(
            "snapshot_failed", rank=None, node=d["node_id"], cause=refused.message, step=self.commits.committed
        )
        if self._refusal != refused.message:
            self._refusal = refused.message
            self._display.say(f"{refused.message}; the next copy is tried all the same")
        self.commits.lost_copies(int(d["step"]))

    def _copies_failed(self, problems: dict[int, str]) -> None:
        """Copies of some ranks were not made, though no keeper is known to be lost: they begin anew."""
        self.copy_problems, self._failing = {}, True
        for rank, problem in problems.items():
            self._events.write("snapshot_failed", rank=rank, cause=problem, step=self.commits.committed)
            self._display.say(f"the copy of rank {rank} in memory was not made, and is tried again: {problem}")
        self._formation.attach(list(problems))
        self.commits.lost_copies()

    def make_safe(self, step: int) -> None:
        """Brings the state of `step`, which is in the ranks, to where another world can take it from."""
        if self._formation.memory is not None:
            generation = self._record.generation
            if step not in self.commits.known and self.commits.committed < step:
                raise AssertionError(f"step {step} was never reported")
            if self._lost:
                self._replace()
            elif self.copy_problems:
                self._copies_failed(self.copy_problems)
            if self._formation.room is Room.TIGHT:
                self._checkpoints.settle(meanwhile=self._take)
            if self._copies and self.commits.committed < step and not self.commits.expects(step):
                self._formation.ranks.gather(  # it waits for the commit of the copy before
                    lambda m: m.actor.snapshot.remote(generation, step),
                    what=f"copy of step {step}",
                    meanwhile=self.meanwhile,
                )
                if not self._lost:
                    self.commits.expect(step)
            self._flush(step, COMMIT_SECONDS)
            if self._lost:
                self._replace()
            if self.commits.committed >= step:
                return
        self.save_by_ranks(step)

    def save_now(self, step: int) -> None:
        """A checkpoint of `step` is on storage when this returns."""
        self._display.phase("saving")
        self.make_safe(step)
        manifest = self.commits.newest
        if self._formation.memory is not None and manifest is not None and manifest.step == step:
            written = self._checkpoints.finish(
                manifest,
                self._formation.memory,
                seconds=PATIENCE * self._elastic.heartbeat_timeout,
                meanwhile=self._take,
            )
            if not written:
                self.save_by_ranks(step)
        elif self._checkpoints.newest_step < step:
            self.save_by_ranks(step)
        self._display.phase("training")

    def save_by_ranks(self, step: int) -> None:
        began = self._clock()
        self._display.phase("saving")
        folder = step_folder(self._checkpoints.root, step).where
        generation = self._record.generation
        shards = self._formation.ranks.gather(
            lambda m: m.actor.save.remote(generation, step, folder),
            what=f"checkpoint of step {step}",
            patience=PATIENCE,
        )
        self._record.check_current()
        manifest = self.manifest(step, shards, self.commits.extra(step))
        self._checkpoints.commit(manifest, began=began, stall_seconds=self._clock() - began)
        self.commits.saved(step)
        if self._formation.memory is not None and not self._copies:
            self._give_back(self._formation.memory)
        self._display.phase("training")

    def _give_back(self, memory: KeepersLike) -> None:
        """What is held is of a world whose nodes had room for it, and older than the newest checkpoint."""
        try:
            memory.keep_only(None)
        except KeeperLost as lost:
            self.let_go(lost)

    # -- the end ----------------------------------------------------------------------------------------------------

    def last_words(self, *, stopped: bool, local: bool) -> None:
        """The run ends by an error or a signal: brings what is committed in memory to storage.

        Args:
            stopped: by a signal: keepers write without being waited for.
            local: the cluster ends with this process.
        """
        memory = self._formation.memory
        if memory is None:
            return
        if self.commits.known and not stopped:
            self._flush(max(self.commits.known), LAST_SECONDS)
        manifest, stored = self.commits.newest, self._checkpoints.newest_step
        if manifest is None:  # nothing was restored yet: what an earlier driver left is all that there is
            point = memory.newest(())
            manifest = None if point is None else point.manifest
            stored = stored if manifest is None else self._checkpoints.stored_step()
        if manifest is None or manifest.step <= stored:
            self._unsaved = False
            return
        try:
            handle = self._persist(memory, manifest)
        except CheckpointError:
            # This driver ended inside a commit: the keepers have a newer step, and this one no more.
            point = memory.newest(())
            if point is None:
                raise
            handle = self._persist(memory, point.manifest)
        if stopped and local:  # a scheduler gives three seconds, and this Ray ends with the driver
            handle.wait(2.0)
        elif not stopped:
            self._unsaved = not handle.wait(FLUSH_SECONDS)

    def _persist(self, memory: KeepersLike, manifest: Manifest) -> Any:
        return memory.persist(manifest, step_folder(self._checkpoints.root, manifest.step).where, commit=True)

    def finished(self) -> None:
        """The run ends with a world: what is in memory may go, if storage has it."""
        newest = self.commits.newest
        self._unsaved = newest is not None and newest.step > self._checkpoints.newest_step

    def close(self) -> bool:
        """Ends the beats; tells whether the keepers may end too: only where it is known that storage has what they
        hold.
        """
        if self._beats is not None:
            self._beats.stop()
        return not self._unsaved

    # -- small things -----------------------------------------------------------------------------------------------

    def manifest(self, step: int, shards: Sequence[ShardRecord], extra: dict[str, Any]) -> Manifest:
        cursor = self._schedule.cursor(step)
        return Manifest(
            step=step,
            cursor=cursor.to_dict(),
            plan_hash=cursor.plan_hash,
            generation=self._record.generation,
            run_id=self._spec.run_id,
            grid=self.grid(),
            fingerprint={"model": self._spec.model_fingerprint, "data": self._spec.train.fingerprint},
            shards=tuple(shards),
            extra=extra,
        )

    def grid(self) -> dict[str, int]:
        """The world's shape, as events have it."""
        g = self._formation.world.grid
        return {"dp": g.dp, "ring": g.ring, "ulysses": g.ulysses, "cp": g.cp, "window": g.window}


class _Beats:
    """A thread that tells the keepers that their driver lives."""

    def __init__(self, memory: KeepersLike, *, every: float) -> None:
        self._stop = threading.Event()
        self._memory = memory
        self._every = every
        threading.Thread(target=self._run, name="raycp-beats", daemon=True).start()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self._memory.beat()

    def stop(self) -> None:
        self._stop.set()
