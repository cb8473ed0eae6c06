"""The state machine of a run: place the workers, form a world, run the steps; when something is lost, form another.

Guarantees: a step's event is written once, when it is committed (`commits`); a checkpoint counts only when its manifest
is in place (`checkpoints`); a lost, frozen or raising rank interrupts the run for as long as the survivors need to come
to rest, to build new groups under a raised generation and to read the newest complete state out of memory; survivors
keep their process; three failures without a committed step between them end the run with the cause. Whatever ends
it, every actor of the run is gone before the error leaves `run`, what is committed is on storage, the record says
what failed, and the same command continues. Costs one message per rank and step (about a millisecond).
"""

import math
from collections.abc import Callable
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
from raycp.driver.runtime import Runtime
from raycp.driver.saving import Saving
from raycp.driver.signals import Stopped, StopSignal
from raycp.driver.worlds import World, Worlds
from raycp.errors import RaycpError, WorkerError
from raycp.events import EventLog, read_events
from raycp.training.export import publish, written_aside
from raycp.training.storage import Storage
from workers.messages import EvalReport, RunSpec, StepReport, StepRequest


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
        started: is told, once, which world the run begins with.
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
        started: Callable[[World], None],
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
            started=started,
            check_stop=stop.check,
        )
        self._saving = Saving(
            spec=spec,
            schedule=schedule,
            formation=self._formation,
            checkpoints=checkpoints,
            record=record,
            events=events,
            display=display,
            clock=runtime.clock,
        )
        self._attempted = 0
        self._evaluated = {int(e["step"]) for e in read_events(events.path) if e["event"] == "eval"}
        self.state = RunState.PLACING

    @property
    def generation(self) -> int:
        """Generation of the groups of this run; every message carries it."""
        return self._record.generation

    @property
    def _commits(self) -> Commits:
        return self._saving.commits

    @property
    def _gather(self) -> Any:
        return self._formation.ranks.gather

    def run(self) -> Outcome:
        """Runs to the end, or until a person stops the run.

        Raises:
            WorkerError: a rank died, raised or froze, and the run may not or cannot go on.
            ClusterError: the cluster cannot hold or connect the workers; storage that cannot be written.
        """
        try:
            outcome = self._to_an_end()
            self._enter(RunState.DONE, outcome.status)
            return outcome
        except BaseException as error:
            self._enter(RunState.FAILED, "failed")
            self._fail(error)
            raise
        finally:
            self._formation.close(keepers=self._saving.close())

    def _to_an_end(self) -> Outcome:
        incident: Incident | None = None
        try:
            self._enter(RunState.PLACING, "starting workers")
            self._formation.place(state_bytes=self._state_bytes)
            self._saving.begin()
            while True:
                try:
                    done = self._form(incident)
                    incident = None
                    done = self._train(done)
                    stopping = self._stop.requested  # it may be asked for between two looks
                    if stopping and max(self._checkpoints.newest_step, 0) < done:
                        self._saving.save_now(done)  # it was asked for since the last step
                    if done >= self._spec.total_steps or stopping:
                        self._saving.finished()
                        return self._finish(done)
                    incident = Incident(began=self._clock(), attempted=done)  # a larger world is possible
                except WorkerError as error:
                    incident = self._interrupted(error, incident)
        except Stopped:
            self._display.say("stopped while it waited for workers")
            self._last_words(stopped=not self._local)  # a local Ray ends with this process
            return self._finish(self._commits.committed, export=False)

    # -- a world, and the next one ----------------------------------------------------------------------------------

    def _form(self, incident: Incident | None) -> int:
        """Forms a world. Returns the steps that are done."""
        first = incident is None
        incident = incident or Incident(began=self._clock(), attempted=0)
        self._enter(RunState.CONNECTING if first else RunState.RECOVERING, "connecting" if first else "recovering")
        committed = self._commits.committed
        source = self._formation.form(incident, self._commits, first=first)
        if not first or source.kind != "start" or committed > 0:
            self._announce(incident, source, committed=committed, first=first)
        self._attempted = source.step
        self._display.resume(source.step)
        self._enter(RunState.RUNNING, "training")
        self._record.set_status("running")
        return source.step

    def _announce(self, incident: Incident, source: Source, *, committed: int, first: bool) -> None:
        """`committed`: the newest step that was, before the state was restored."""
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
            grid=self._saving.grid(),
            causes=[{"rank": r, "node": n, "cause": c} for r, n, c in incident.causes],
        )
        if first:
            self._display.say(self._continues(source, logged=committed))
            return
        g = self._formation.world.grid
        grid = f"dp {g.dp} x cp {g.cp} (ring {g.ring}, ulysses {g.ulysses})"
        self._display.say(human(incident, now=self._clock(), lost=lost, redone=redone, grid=grid))

    def _continues(self, source: Source, *, logged: int) -> str:
        """What the driver of a run that was begun before says first; `logged`: the newest step in the log."""
        if source.kind == "start":
            return (
                f"no copy in memory and no checkpoint of the {logged} logged steps was found in "
                f"{self._checkpoints.root.where}: they are computed again (if the checkpoints are elsewhere, stop, and "
                "set elastic.checkpoint_dir to that place)"
            )
        where = f"checkpoint {Path(source.path).name}" if source.path else "the memory of the cluster"
        again = f"; the logged steps after it, up to {logged}, are computed again" if logged > source.step else ""
        return f"continuing after step {source.step} (from {where}){again}"

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
        self._saving.interrupted()
        self._formation.take_apart(error, incident, committed=self._commits.committed)
        return incident

    # -- running ----------------------------------------------------------------------------------------------------

    def _train(self, done: int) -> int:
        """Runs steps until the end, a stop, or a larger world. Returns the steps that are done."""
        total = self._spec.total_steps
        if done >= total:  # its checkpoint was not committed when a rank, or the driver, was lost
            self._saving.save_now(done)
        elif self._stop.requested:  # while the world was formed
            return done
        self._evaluate_if_due(done)
        for step in range(done + 1, total + 1):
            self._one_step(step)
            last, stopping = step == total, self._stop.requested
            if last or stopping:
                self._saving.save_now(step)
            else:
                self._saving.after(step)
            self._saving.look_after()
            self._evaluate_if_due(step)
            if self._stop.requested and not last:
                return step
            try:
                self._formation.grow()
            except KeeperLost as lost:
                self._saving.let_go(lost)
            if not last and self._saving.may_resize and self._formation.bigger() is not None:
                self._saving.make_safe(step)
                return step
        return total

    def _one_step(self, step: int) -> None:
        total = self._spec.total_steps
        self._attempted = max(self._attempted, step)
        pack_ids = self._schedule.pack_ids(step)
        following = self._schedule.pack_ids(step + 1) if step < total else ()
        snapshot = self._saving.wants_copy(step)
        request = StepRequest(
            generation=self.generation, step=step, pack_ids=pack_ids, next_pack_ids=following, snapshot=snapshot
        )
        began = self._clock()
        reports: list[StepReport] = self._gather(
            lambda m: m.actor.step.remote(request), what=f"step {step}", meanwhile=self._saving.meanwhile
        )
        seconds = self._clock() - began
        self._time.in_steps[step] = seconds
        first, loss = reports[0], _mean(reports)
        fields: dict[str, Any] = {
            "loss": loss,
            "grad_norm": first.grad_norm,
            "lr": first.lr,
            "tokens": first.tokens,
            "targets": first.targets,
            "pack_ids": list(pack_ids),
            "seconds": seconds,
            "grid": self._saving.grid(),
            "remote_blocks_held": max(r.remote_blocks_held for r in reports),
            "data_seconds": max(r.data_seconds for r in reports),
        }
        stall = max(r.stall_seconds for r in reports)
        self._commits.reported(step, fields, snapshot=snapshot, stall_seconds=stall)
        self._saving.copy_problems = {r.rank: r.copy_problem for r in reports if r.copy_problem}
        rate, waited = first.tokens / max(seconds, 1e-9), fields["data_seconds"] / max(seconds, 1e-9)
        self._display.step(loss=loss, tokens_per_second=rate, lr=first.lr, data_share=waited)

    def _evaluate_if_due(self, step: int) -> None:
        """Once per step in the life of the run, also where a driver died between checkpoint and evaluation."""
        every = self._config.eval_every
        due = step in (0, self._spec.total_steps) or (every is not None and step % every == 0)
        if not due or self._spec.evaluation is None or step in self._evaluated:
            return
        self._display.phase("evaluating")
        generation = self.generation
        reports: list[EvalReport] = self._gather(
            lambda m: m.actor.evaluate.remote(generation, step),
            what=f"evaluation after step {step}",
            meanwhile=self._saving.meanwhile,
        )
        self._evaluated.add(step)
        self._events.write("eval", step=step, loss=_mean(reports), targets=reports[0].targets)
        self._display.phase("training")

    # -- the end ----------------------------------------------------------------------------------------------------

    def _finish(self, step: int, *, export: bool = True) -> Outcome:
        exported: Path | None = None
        checkpoint = self._checkpoints.newest
        local = Storage.of(checkpoint).local_path() if checkpoint is not None else None
        whole = step >= self._spec.total_steps and self._checkpoints.newest_step == step
        if export and whole and checkpoint is not None:
            exported = self._export(step, checkpoint)
        status = "finished" if exported is not None else "stopped"
        self._picture()
        now = self._clock()
        goodput = self._time.goodput(now, self._commits.committed)
        self._events.write("run_finished", steps=step, seconds=now - self._time.began, goodput=goodput, status=status)
        self._record.set_status(status, step=step)
        self._display.phase(status)
        return Outcome(status=status, checkpoint=local or checkpoint, export=exported, goodput=goodput)

    def _export(self, step: int, checkpoint: str) -> Path:
        """Rank 0 writes the trained model from the checkpoint of the last step."""
        out, generation = self._folder / "export", self.generation
        written = written_aside(out, generation)
        for again in (True, False):
            self._display.phase("exporting")
            try:
                self._gather(
                    lambda m: m.actor.export.remote(generation, checkpoint, str(written)),
                    what="export",
                    only=[0],
                    patience=PATIENCE,
                )
                break
            except WorkerError as error:
                if not again or not error.details.get("damaged"):
                    raise
                self._display.say(f"{error.details['cause']}: written again from the ranks, which hold that step")
                self._saving.save_by_ranks(step)
        self._record.check_current()
        return publish(written, out)

    def _picture(self) -> None:
        evals = {int(e["step"]): float(e["loss"]) for e in read_events(self._events.path) if e["event"] == "eval"}
        losses = self._events.losses()
        if losses and not draw_losses(losses, evals, self._folder / "loss.png"):
            self._display.say("loss.png was not drawn: pip install matplotlib")

    def _fail(self, error: BaseException) -> None:
        """Records the failure, and brings what is committed in memory to storage."""
        stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        unrecorded = f"the failure could not be recorded in {self._folder}"  # it is full, or another driver has the run
        if stopped:
            self._attempt(lambda: self._record.set_status("stopped", step=self._commits.committed), unrecorded)
        self._last_words(stopped=stopped)
        self._attempt(lambda: self._record_failure(error, stopped=stopped), unrecorded)

    def _last_words(self, *, stopped: bool) -> None:
        self._attempt(
            lambda: self._saving.last_words(stopped=stopped, local=self._local),
            "the last committed step could not be brought to storage",
        )

    def _attempt(self, body: Callable[[], None], problem: str) -> None:
        """Says `problem` if `body` fails: what ends the run is something else, and must be what is raised."""
        try:
            body()
        except (OSError, RaycpError) as second:
            self._display.say(f"{problem}: {second}")

    def _record_failure(self, error: BaseException, *, stopped: bool) -> None:
        step = self._commits.committed
        self._events.write(
            "run_failed",
            error=f"{type(error).__name__}: {error.message if isinstance(error, RaycpError) else error}",
            fix=error.fix if isinstance(error, RaycpError) else "",
            step=step,
        )
        self._record.set_status("stopped" if stopped else "failed", step=step)

    # -- small things -----------------------------------------------------------------------------------------------

    def _enter(self, state: RunState, text: str) -> None:
        self.state = state
        self._display.phase(text)


def _mean(reports: list[StepReport] | list[EvalReport]) -> float:
    """Loss over all ranks, summed in rank order."""
    weight = reports[0].weight
    return math.fsum(r.loss_sum for r in reports) / weight if weight > 0 else 0.0
