"""The state machine of a run: place the workers, form a world, run the steps; when something is lost, form another.

Guarantees: a step's event is written once, when it is committed (`commits`); a checkpoint counts only when its manifest
is in place (`checkpoints`); a lost, frozen or raising rank interrupts the run for as long as the survivors need to come
to rest, to build new groups under a raised generation and to read the newest complete state out of memory; survivors
keep their process; three failures without a committed step between them end the run with the cause. Whatever ends
it, every actor of the run is gone before the error leaves `run`, what is committed is on storage, the record says
what failed, and the same command continues. Costs one message per rank and step (about a millisecond).
"""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from data_pipeline import StepSchedule
from raycp.config import FitConfig
from raycp.driver.checkpoints import Checkpoints
from raycp.driver.commits import Commits
from raycp.driver.display import Display, draw_losses
from raycp.driver.formation import PATIENCE, Formation, Source
from raycp.driver.keepers import KeeperLost
from raycp.driver.record import RunRecord
from raycp.driver.recovery import Incident, Strikes, human
from raycp.driver.runtime import KeepersLike, Runtime
from raycp.driver.signals import StopSignal
from raycp.driver.worlds import Worlds
from raycp.errors import RaycpError, WorkerError
from raycp.events import EventLog, read_events
from raycp.training.checkpoint import step_folder
from raycp.training.manifest import Manifest, ShardRecord
from raycp.training.storage import Storage
from workers.messages import EvalReport, RunSpec, StepReport, StepRequest

COMMIT_SECONDS = 60.0
"""How long the end of a run, or a resize, waits for the last copies in memory before the ranks write themselves."""
LAST_SECONDS = 3.0
"""How long a run that failed waits for the copies of its last step."""
FLUSH_SECONDS = 60.0
"""How long a run that failed waits for keepers to bring the last committed step to storage."""


class RunState(Enum):
    """Where a run is."""

    PLACING = "placing"
    CONNECTING = "connecting"
    RESTORING = "restoring"
    RUNNING = "running"
    RECOVERING = "recovering"
    DONE = "done"
    FAILED = "failed"


@dataclass(kw_only=True)
class Outcome:
    """How a run ended, if it did not raise."""

    status: str
    checkpoint: Path | str | None
    export: Path | None
    goodput: float = 1.0


@dataclass(kw_only=True)
class _Time:
    """Time of this driver, and how much of it went into committed steps."""

    began: float
    in_steps: dict[int, float] = field(default_factory=dict)

    def goodput(self, now: float, committed: int) -> float:
        useful = sum(seconds for step, seconds in self.in_steps.items() if step <= committed)
        return useful / (now - self.began) if now > self.began else 0.0


class Controller:
    """One run, from placing to its end.

    Args:
        spec: what the workers run.
        worlds: which worlds it may have.
        schedule: which packs each step takes.
        runtime: workers, store, keepers, time.
        record: run.json, opened for this driver.
        events: the log, of the record's generation.
        checkpoints: where state goes on storage.
        secret: of the run; keepers talk to nobody else.
        state_bytes: of the whole training state, which is kept in memory too where it fits.
        display: bar and messages.
        stop: tells when a person asked the run to stop.
    """

    def __init__(
        self,
        *,
        spec: RunSpec,
        worlds: Worlds,
        schedule: StepSchedule,
        runtime: Runtime,
        record: RunRecord,
        events: EventLog,
        checkpoints: Checkpoints,
        secret: bytes,
        state_bytes: int,
        display: Display,
        stop: StopSignal,
    ) -> None:
        self._spec = spec
        self._config: FitConfig = spec.config
        self._elastic = spec.config.elastic
        self._schedule = schedule
        self._clock = runtime.clock
        self._local = runtime.local
        self._record = record
        self._events = events
        self._checkpoints = checkpoints
        self._state_bytes = state_bytes
        self._display = display
        self._stop = stop
        self._folder = Path(spec.output_dir)
        self._time = _Time(began=runtime.clock())
        self._strikes = Strikes()
        self._formation = Formation(
            spec=spec,
            worlds=worlds,
            schedule=schedule,
            runtime=runtime,
            record=record,
            events=events,
            checkpoints=checkpoints,
            secret=secret,
            say=display.say,
        )
        self._beats: _Beats | None = None
        self._commits = Commits(events, None, manifest=self._manifest, may_commit=record.check_current)
        self._lost_keeper: KeeperLost | None = None
        self._attempted = 0
        self._due: set[int] = set()
        self._evaluated = {int(e["step"]) for e in read_events(events.path) if e["event"] == "eval"}
        self.state = RunState.PLACING

    @property
    def generation(self) -> int:
        """Generation of the groups of this run; every message carries it."""
        return self._record.generation

    @property
    def _memory(self) -> KeepersLike | None:
        return self._formation.memory

    @property
    def _gather(self) -> Any:
        return self._formation.ranks.gather

    def run(self) -> Outcome:
        """Runs to the end.

        Raises:
            WorkerError: a rank died, raised or froze, and the run may not or cannot go on.
            ClusterError: the cluster cannot hold or connect the workers; storage that cannot be written.
        """
        incident: Incident | None = None
        try:
            self._enter(RunState.PLACING, "starting workers")
            self._place()
            while True:
                try:
                    done = self._form(incident)
                    incident = None
                    done = self._train(done)
                    if done >= self._spec.total_steps or self._stop.requested:
                        outcome = self._finish(done)
                        self._enter(RunState.DONE, outcome.status)
                        return outcome
                    incident = Incident(began=self._clock(), attempted=done)  # a larger world is possible
                except WorkerError as error:
                    incident = self._interrupted(error, incident)
        except BaseException as error:
            self._enter(RunState.FAILED, "failed")
            self._fail(error)
            raise
        finally:
            if self._beats is not None:
                self._beats.stop()
            self._formation.close(keepers=self._ends_keepers())

    # -- a world, and the next one ----------------------------------------------------------------------------------

    def _place(self) -> None:
        self._formation.place(state_bytes=self._state_bytes)
        if self._memory is not None:
            self._beats = _Beats(self._memory, every=self._elastic.keeper_ttl / 10)
            self._commits = Commits(
                self._events, self._memory, manifest=self._manifest, may_commit=self._record.check_current
            )

    def _form(self, incident: Incident | None) -> int:
        """Forms a world. Returns the steps that are done."""
        first = incident is None
        incident = incident or Incident(began=self._clock(), attempted=0)
        self._enter(RunState.CONNECTING if first else RunState.RECOVERING, "connecting" if first else "recovering")
        source = self._formation.form(incident, self._commits, first=first)
        if not first or source.kind != "start":
            self._announce(incident, source, first=first)
        self._display.resume(source.step)
        self._enter(RunState.RUNNING, "training")
        self._record.set_status("running")
        return source.step

    def _announce(self, incident: Incident, source: Source, *, first: bool) -> None:
        committed = max(self._events.losses(), default=0)
        lost = max(committed - source.step, 0)
        redone = max(max(incident.attempted, committed) - source.step, 0)
        resized = incident.error is None and not first
        self._events.write(
            "resized" if resized else "recovered",
            step=source.step,
            seconds=dict(incident.seconds),
            steps_lost=lost,
            steps_redone=redone,
            source=source.kind,
            path=source.path,
            grid=self._grid_dict(),
            causes=[{"rank": r, "node": n, "cause": c} for r, n, c in incident.causes],
        )
        if first:
            where = f"checkpoint {Path(source.path).name}" if source.path else "the memory of the cluster"
            self._display.say(f"continuing after step {source.step} (from {where})")
            return
        g = self._formation.world.grid
        grid = f"dp {g.dp} x cp {g.cp} (ring {g.ring}, ulysses {g.ulysses})"
        self._display.say(human(incident, now=self._clock(), lost=lost, redone=redone, grid=grid))

    def _interrupted(self, error: WorkerError, incident: Incident | None) -> Incident:
        """Takes in a failure.

        Raises:
            WorkerError: the run may not, or cannot, go on.
        """
        d = error.details
        self._events.write(
            "worker_lost", rank=d.get("rank"), node=d.get("node"), cause=d.get("cause"), step=self._attempted
        )
        self._enter(RunState.RECOVERING, "recovering")
        if d.get("hopeless"):
            raise error
        self._strikes.failed(error, committed=self._commits.committed, on_loss=self._elastic.on_loss)
        if incident is None or incident.error is None:
            attempted = self._attempted if incident is None else incident.attempted
            incident = Incident(began=self._clock(), attempted=attempted, error=error)
        incident.note(error)
        self._lost_keeper = None
        self._formation.take_apart(error, incident)
        return incident

    # -- running ----------------------------------------------------------------------------------------------------

    def _train(self, done: int) -> int:
        """Runs steps until the end, a stop, or a larger world. Returns the steps that are done."""
        total = self._spec.total_steps
        self._evaluate_if_due(done)
        for step in range(done + 1, total + 1):
            self._one_step(step)
            last, stopping = step == total, self._stop.requested
            due = step % self._elastic.checkpoint_every == 0
            if last or stopping:
                self._save_now(step)
            elif due and self._memory is None:
                self._save_by_ranks(step)
            elif due:
                self._due.add(step)
            self._look_after_memory()
            self._evaluate_if_due(step)
            if stopping and not last:
                return step
            self._formation.grow()
            if not last and self._formation.bigger() is not None:
                self._make_safe(step)
                return step
        return total

    def _one_step(self, step: int) -> None:
        total, elastic = self._spec.total_steps, self._elastic
        self._attempted = max(self._attempted, step)
        pack_ids = self._schedule.pack_ids(step)
        following = self._schedule.pack_ids(step + 1) if step < total else ()
        snapshot = self._memory is not None and (
            step % elastic.snapshot_every == 0 or step % elastic.checkpoint_every == 0 or step == total
        )
        request = StepRequest(
            generation=self.generation, step=step, pack_ids=pack_ids, next_pack_ids=following, snapshot=snapshot
        )
        began = self._clock()
        reports: list[StepReport] = self._gather(
            lambda m: m.actor.step.remote(request), what=f"step {step}", meanwhile=self._meanwhile
        )
        seconds = self._clock() - began
        self._time.in_steps[step] = seconds
        first, loss = reports[0], _mean(reports)
        fields = {
            "loss": loss,
            "grad_norm": first.grad_norm,
            "lr": first.lr,
            "tokens": first.tokens,
            "targets": first.targets,
            "pack_ids": list(pack_ids),
            "seconds": seconds,
            "grid": self._grid_dict(),
            "remote_blocks_held": max(r.remote_blocks_held for r in reports),
        }
        stall = max(r.stall_seconds for r in reports)
        self._commits.reported(step, fields, snapshot=snapshot, stall_seconds=stall)
        self._display.step(loss=loss, tokens_per_second=first.tokens / max(seconds, 1e-9), lr=first.lr)

    def _meanwhile(self) -> None:
        """While a step runs: commits what has arrived of the step before."""
        if self._lost_keeper is None:
            try:
                for manifest in self._commits.advance():
                    self._order_if_due(manifest)
            except KeeperLost as lost:  # replaced when the step is done, if it was not a whole node
                self._lost_keeper = lost

    def _look_after_memory(self) -> None:
        """Commits what has arrived, orders and watches checkpoints, replaces a lost keeper."""
        if self._memory is None:
            return
        self._meanwhile()
        if self._lost_keeper is not None:
            self._keeper_lost(self._lost_keeper)
        self._checkpoints.advance(self._memory)

    def _keeper_lost(self, lost: KeeperLost) -> None:
        self._lost_keeper = None
        self._events.write("keeper_lost", node=lost.node_id, step=self._commits.committed)
        self._formation.replace_keeper(lost)
        self._commits.lost_copies()

    def _order_if_due(self, manifest: Manifest) -> None:
        assert self._memory is not None
        if any(step <= manifest.step for step in self._due):
            self._due = {s for s in self._due if s > manifest.step}
            self._checkpoints.order(manifest, self._memory)

    def _make_safe(self, step: int) -> None:
        """Brings the state of `step`, which is in the ranks, to where another world can take it from."""
        if self._memory is not None:
            generation = self.generation
            if step not in self._commits.known and self._commits.committed < step:
                raise AssertionError(f"step {step} was never reported")
            if self._commits.committed < step and not self._commits.expects(step):
                self._gather(lambda m: m.actor.snapshot.remote(generation, step), what=f"copy of step {step}")
                self._commits.expect(step)
            try:
                for manifest in self._commits.flush(step, COMMIT_SECONDS):
                    self._order_if_due(manifest)
            except KeeperLost as lost:
                self._keeper_lost(lost)
            if self._commits.committed >= step:
                return
        self._save_by_ranks(step)

    def _save_now(self, step: int) -> None:
        """A checkpoint of `step` is on storage when this returns."""
        self._display.phase("saving")
        self._make_safe(step)
        manifest = self._commits.newest
        if self._memory is not None and manifest is not None and manifest.step == step:
            self._due.clear()
            written = self._checkpoints.finish(
                manifest, self._memory, seconds=PATIENCE * self._elastic.heartbeat_timeout
            )
            if not written:
                self._save_by_ranks(step)
        elif self._checkpoints.newest_step < step:
            self._save_by_ranks(step)
        self._display.phase("training")

    def _save_by_ranks(self, step: int) -> None:
        began = self._clock()
        self._display.phase("saving")
        folder = step_folder(self._checkpoints.root, step).where
        generation = self.generation
        shards = self._gather(
            lambda m: m.actor.save.remote(generation, step, folder),
            what=f"checkpoint of step {step}",
            patience=PATIENCE,
        )
        self._record.check_current()
        manifest = self._manifest(step, shards, {})
        self._checkpoints.commit(manifest, began=began, stall_seconds=self._clock() - began)
        self._commits.saved(step)
        self._display.phase("training")

    def _evaluate_if_due(self, step: int) -> None:
        """Once per step in the life of the run, also where a driver died between checkpoint and evaluation."""
        every = self._config.eval_every
        due = step in (0, self._spec.total_steps) or (every is not None and step % every == 0)
        if not due or self._spec.evaluation is None or step in self._evaluated:
            return
        self._display.phase("evaluating")
        generation = self.generation
        reports: list[EvalReport] = self._gather(
            lambda m: m.actor.evaluate.remote(generation, step), what=f"evaluation after step {step}"
        )
        self._evaluated.add(step)
        self._events.write("eval", step=step, loss=_mean(reports), targets=reports[0].targets)
        self._display.phase("training")

    # -- the end ----------------------------------------------------------------------------------------------------

    def _finish(self, step: int) -> Outcome:
        export: Path | None = None
        checkpoint = self._checkpoints.newest
        local = Storage.of(checkpoint).local_path() if checkpoint is not None else None
        if step >= self._spec.total_steps and checkpoint is not None:
            self._display.phase("exporting")
            out, generation = str(self._folder / "export"), self.generation
            self._gather(
                lambda m: m.actor.export.remote(generation, checkpoint, out),
                what="export",
                only=[0],
                patience=PATIENCE,
            )
            export = Path(out)
        status = "finished" if export is not None else "stopped"
        self._picture()
        now = self._clock()
        goodput = self._time.goodput(now, self._commits.committed)
        self._events.write("run_finished", steps=step, seconds=now - self._time.began, goodput=goodput, status=status)
        self._record.set_status(status, step=step)
        self._display.phase(status)
        return Outcome(status=status, checkpoint=local or checkpoint, export=export, goodput=goodput)

    def _picture(self) -> None:
        evals = {int(e["step"]): float(e["loss"]) for e in read_events(self._events.path) if e["event"] == "eval"}
        losses = self._events.losses()
        if losses and not draw_losses(losses, evals, self._folder / "loss.png"):
            self._display.say("loss.png was not drawn: pip install matplotlib")

    def _fail(self, error: BaseException) -> None:
        """Records the failure, and brings what is committed in memory to storage."""
        stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        try:
            if stopped:
                self._record.set_status("stopped", step=self._commits.committed)
            if self._memory is not None and self._commits.known and not stopped:
                self._commits.flush(max(self._commits.known), LAST_SECONDS)
            manifest = self._commits.newest
            if self._memory is not None and manifest is not None and manifest.step > self._checkpoints.newest_step:
                folder = step_folder(self._checkpoints.root, manifest.step).where
                handle = self._memory.persist(manifest, folder, commit=True)
                if not stopped:
                    handle.wait(FLUSH_SECONDS)
                elif self._local:  # a scheduler gives three seconds, and this Ray ends with the driver
                    handle.wait(2.0)
        except (OSError, RaycpError) as second:  # what is raised must be the first error
            self._display.say(f"the last committed step could not be brought to storage: {second}")
        try:
            self._record_failure(error, stopped=stopped)
        except (OSError, RaycpError) as second:  # a full disk, or another driver has the run
            self._display.say(f"the failure could not be recorded in {self._folder}: {second}")

    def _record_failure(self, error: BaseException, *, stopped: bool) -> None:
        step = self._commits.committed
        self._events.write(
            "run_failed",
            error=f"{type(error).__name__}: {error.message if isinstance(error, RaycpError) else error}",
            fix=error.fix if isinstance(error, RaycpError) else "",
            step=step,
        )
        self._record.set_status("stopped" if stopped else "failed", step=step)

    def _ends_keepers(self) -> bool:
        """After SIGTERM keepers of a cluster go on writing, and end by their time-to-live; else they end now."""
        return self.state is RunState.DONE or self._record.status != "stopped" or self._local

    # -- small things -----------------------------------------------------------------------------------------------

    def _enter(self, state: RunState, text: str) -> None:
        self.state = state
        self._display.phase(text)

    def _manifest(self, step: int, shards: Sequence[ShardRecord], extra: dict[str, Any]) -> Manifest:
        cursor = self._schedule.cursor(step)
        return Manifest(
            step=step,
            cursor=cursor.to_dict(),
            plan_hash=cursor.plan_hash,
            generation=self.generation,
            run_id=self._spec.run_id,
            grid=self._grid_dict(),
            fingerprint={"model": self._spec.model_fingerprint, "data": self._spec.train.fingerprint},
            shards=tuple(shards),
            extra=extra,
        )

    def _grid_dict(self) -> dict[str, int]:
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


def _mean(reports: list[StepReport] | list[EvalReport]) -> float:
    """Loss over all ranks, summed in rank order."""
    weight = reports[0].weight
    return math.fsum(r.loss_sum for r in reports) / weight if weight > 0 else 0.0
