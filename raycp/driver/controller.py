"""The state machine of a run: place the workers, connect them, restore, run the steps, finish or fail.

Guarantees: a step's event is written once, after every rank has reported the step; a checkpoint counts only when its
manifest is in place, which the driver writes after every rank's shard is on disk; when anything fails, every actor of
the run is gone before the error leaves `run`, and the run's record says what failed; whatever ends the run, the same
command continues from the newest intact checkpoint. One failed generation ends the run here; recovering without
stopping enters through RECOVERING, with the generation raised and `ProcessGroups.rebuild` in place.
Costs one message per rank and step (about a millisecond).
"""

import math
import secrets
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist

from data_pipeline import Cursor, StepSchedule
from raycp.config import FitConfig
from raycp.driver.cluster import ClusterHandle, live_nodes
from raycp.driver.display import Display, draw_losses
from raycp.driver.membership import CONTROL, Member, Membership
from raycp.driver.placement import Reservation, allocate, describe_slots, order_ranks
from raycp.driver.probe import check_packages, raise_if_any
from raycp.driver.record import RunRecord
from raycp.driver.signals import StopSignal
from raycp.driver.store import open_store
from raycp.errors import ClusterError, Problem, RaycpError, WorkerError
from raycp.events import EventLog, read_events
from raycp.plan import RankGrid
from raycp.training.checkpoint import Manifest, commit, discard_uncommitted, newest, prune, step_folder
from workers.actor import TrainWorker
from workers.messages import EvalReport, Probe, Rendezvous, RunSpec, StepReport, StepRequest

COLLECTIVE_TIMEOUT = 1800.0
"""Seconds that one collective may wait: longer than the longest imbalance of a step. Faults are seen much earlier."""

PATIENCE = 10.0
"""Times `heartbeat_timeout` that a rank may be silent while it loads or writes files (some libraries hold the GIL)."""


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
    checkpoint: Path | None
    export: Path | None
    goodput: float = 1.0


@dataclass(kw_only=True)
class _Clock:
    """Wall time of this driver, and how much of it went into committed steps."""

    began: float = field(default_factory=time.monotonic)
    in_steps: float = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def goodput(self) -> float:
        return self.in_steps / self.seconds if self.seconds > 0 else 0.0


class Controller:
    """One run, from placing to its end.

    Args:
        spec: what the workers run.
        grid: dp x ring x ulysses.
        schedule: which packs each step takes.
        cluster: the Ray cluster in use.
        record: run.json, opened for this driver.
        events: the log, of the record's generation.
        display: bar and messages.
        stop: tells when a person asked the run to stop.
    """

    def __init__(
        self,
        *,
        spec: RunSpec,
        grid: RankGrid,
        schedule: StepSchedule,
        cluster: ClusterHandle,
        record: RunRecord,
        events: EventLog,
        display: Display,
        stop: StopSignal,
    ) -> None:
        self._spec = spec
        self._config: FitConfig = spec.config
        self._grid = grid
        self._schedule = schedule
        self._cluster = cluster
        self._record = record
        self._events = events
        self._display = display
        self._stop = stop
        self._folder = Path(spec.output_dir)
        self._clock = _Clock()
        self._checkpoint: Path | None = None
        self._store: dist.TCPStore | None = None
        self._evaluated = {int(e["step"]) for e in read_events(events.path) if e["event"] == "eval"}
        self.state = RunState.PLACING

    @property
    def generation(self) -> int:
        """Generation of the groups of this run; every message carries it."""
        return self._record.generation

    def run(self) -> Outcome:
        """Runs to the end.

        Raises:
            WorkerError: a rank died, raised or froze.
            ClusterError: the cluster cannot hold or connect the workers.
        """
        reservation: Reservation | None = None
        membership: Membership | None = None
        actors: list[Any] = []
        step = 0
        try:
            self._enter(RunState.PLACING, "starting workers")
            reservation = self._reserve()
            actors = self._start(reservation)
            membership = self._probe(reservation, actors)
            self._enter(RunState.CONNECTING, "connecting")
            self._connect(membership)
            self._enter(RunState.RESTORING, "loading the model")
            step = self._build_and_restore(membership)
            self._enter(RunState.RUNNING, "training")
            self._record.set_status("running")
            step = self._steps(membership, step)
            outcome = self._finish(membership, step)
            self._enter(RunState.DONE, outcome.status)
            return outcome
        except BaseException as error:
            self._enter(RunState.FAILED, "failed")
            self._note_failure(error, self._last_step(step))
            raise
        finally:
            if membership is not None and self.state is RunState.FAILED:
                membership.abort()
            for actor in actors:
                ray.kill(actor, no_restart=True)
            if reservation is not None:
                reservation.release()

    # -- placing ----------------------------------------------------------------------------------------------------

    def _reserve(self) -> Reservation:
        workers, resource = self._grid.world_size, self._spec.device.ray_resource
        deadline = time.monotonic() + self._config.elastic.wait_for_capacity
        told = False
        while True:
            nodes = live_nodes()
            shares = allocate(nodes, workers, resource, cp=self._grid.cp)
            if shares is not None:
                left = max(deadline - time.monotonic(), 5.0)
                try:
                    return Reservation.make(shares, resource, timeout=min(left, 60.0))
                except ClusterError:  # another job was faster
                    if time.monotonic() >= deadline:
                        raise
            if time.monotonic() >= deadline:
                raise ClusterError(
                    f"no room for {workers} workers ({resource or 'CPU'} each) within "
                    f"{self._config.elastic.wait_for_capacity:.0f} s; nodes: {describe_slots(nodes, resource)}",
                    fix="wait until other jobs end, ask for fewer workers, or raise elastic.wait_for_capacity",
                )
            if not told:
                self._display.say(f"waiting for {workers} free {resource or 'CPU'} slots (used by other jobs now)")
                told = True
            time.sleep(1.0)

    def _start(self, reservation: Reservation) -> list[Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if not self._cluster.started_here:  # a local Ray imports from the driver's own folders
            check_packages([share.node for share in reservation.shares])
        resource = self._spec.device.ray_resource
        remote = ray.remote(concurrency_groups={CONTROL: 2}, max_restarts=0, max_task_retries=0)(TrainWorker)
        accelerator: dict[str, Any] = {}
        if resource == "GPU":
            accelerator = {"num_gpus": 1}
        elif resource is not None:
            accelerator = {"resources": {resource: 1}}
        return [
            remote.options(
                num_cpus=1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
                **accelerator,
            ).remote(self._spec)
            for _, group, index in reservation.slots()
        ]

    def _probe(self, reservation: Reservation, actors: list[Any]) -> Membership:
        nonce = secrets.token_hex(16)
        path = self._folder / ".raycp" / f"nonce-{self.generation}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(nonce)
        try:
            probes: list[Probe] = ray.get(
                [a.probe.remote(str(path), nonce) for a in actors], timeout=self._config.elastic.wait_for_capacity + 120
            )
        except ray.exceptions.RayError as error:
            raise ClusterError(
                f"a worker did not start: {error}",
                fix="look at the node's log (memory, Python environment); then run the same command again",
            ) from error
        finally:
            path.unlink(missing_ok=True)
        raise_if_any(
            [
                Problem(f"node {p.address} ({p.node_id[:8]}): {text}", fix)
                for p in {(p.node_id): p for p in probes}.values()
                for text, fix in p.problems
            ]
        )
        order = order_ranks(probes, [share.node.node_id for share in reservation.shares])
        members = [Member(rank=r, actor=actors[i], probe=probes[i]) for r, i in enumerate(order)]
        return Membership(
            members,
            generation=self.generation,
            unresponsive_after=self._config.elastic.heartbeat_timeout,
            watch=self._display.inside,
        )

    # -- connecting and restoring -----------------------------------------------------------------------------------

    def _connect(self, membership: Membership) -> None:
        self._store = open_store(self._cluster.driver_address)
        per_node: dict[str, int] = {}
        for member in membership.members:
            per_node[member.probe.node_id] = per_node.get(member.probe.node_id, 0) + 1

        def join(member: Member) -> Any:
            assert self._store is not None
            return member.actor.join.remote(
                Rendezvous(
                    generation=self.generation,
                    rank=member.rank,
                    grid=self._grid,
                    store_host=self._cluster.driver_address,
                    store_port=self._store.port,
                    timeout=COLLECTIVE_TIMEOUT,
                    threads=max(1, member.probe.cpu_count // per_node[member.probe.node_id]),
                )
            )

        membership.gather(join, what="connecting the workers", patience=PATIENCE)

    def _build_and_restore(self, membership: Membership) -> int:
        """Makes the model and fills it: from the newest intact checkpoint if there is one, else from its own weights.

        Returns:
            The steps that are done.
        """
        began = time.monotonic()
        found = newest(self._folder / "checkpoints")
        discard_uncommitted(self._folder / "checkpoints")
        for message in found.messages:
            self._display.say(message)
        fresh = found.manifest is None
        membership.gather(
            lambda m: m.actor.build.remote(self.generation, initialise=fresh),
            what="building the model",
            patience=PATIENCE,
        )
        if found.manifest is None or found.path is None:
            return 0
        step = self._schedule.restore(Cursor.from_dict(found.manifest.cursor))
        path = str(found.path)
        membership.gather(
            lambda m: m.actor.restore.remote(self.generation, path),
            what=f"loading the checkpoint of step {step}",
            patience=PATIENCE,
        )
        self._checkpoint = found.path
        self._display.resume(step)
        redone = max(self._last_step(0) - step, 0)
        self._events.write(
            "recovered",
            step=step,
            seconds={"restore": time.monotonic() - began},
            steps_lost=redone,
            steps_redone=redone,
            source="checkpoint",
            path=path,
            grid=self._grid_dict(),
        )
        self._display.say(f"continuing after step {step} (checkpoint {found.path.name})")
        return step

    # -- running ----------------------------------------------------------------------------------------------------

    def _steps(self, membership: Membership, done: int) -> int:
        total, elastic = self._spec.total_steps, self._config.elastic
        self._evaluate_if_due(membership, done)
        for step in range(done + 1, total + 1):
            self._one_step(membership, step)
            last = step == total
            stopping = self._stop.requested
            if step % elastic.checkpoint_every == 0 or last or stopping:
                self._save(membership, step)
            self._evaluate_if_due(membership, step)
            if stopping and not last:
                return step
        return total

    def _one_step(self, membership: Membership, step: int) -> None:
        pack_ids = self._schedule.pack_ids(step)
        following = self._schedule.pack_ids(step + 1) if step < self._spec.total_steps else ()
        request = StepRequest(generation=self.generation, step=step, pack_ids=pack_ids, next_pack_ids=following)
        began = time.monotonic()
        reports: list[StepReport] = membership.gather(lambda m: m.actor.step.remote(request), what=f"step {step}")
        seconds = time.monotonic() - began
        first = reports[0]
        loss = _mean(reports)
        self._clock.in_steps += seconds
        self._events.write_step(
            step,
            loss=loss,
            grad_norm=first.grad_norm,
            lr=first.lr,
            tokens=first.tokens,
            targets=first.targets,
            pack_ids=list(pack_ids),
            seconds=seconds,
            grid=self._grid_dict(),
            remote_blocks_held=max(r.remote_blocks_held for r in reports),
        )
        self._display.step(loss=loss, tokens_per_second=first.tokens / seconds, lr=first.lr)

    def _evaluate_if_due(self, membership: Membership, step: int) -> None:
        """Once per step in the life of the run, also where a driver died between checkpoint and evaluation."""
        every = self._config.eval_every
        due = step in (0, self._spec.total_steps) or (every is not None and step % every == 0)
        if due and self._spec.evaluation is not None and step not in self._evaluated:
            self._evaluate(membership, step)

    def _evaluate(self, membership: Membership, step: int) -> None:
        self._display.phase("evaluating")
        reports: list[EvalReport] = membership.gather(
            lambda m: m.actor.evaluate.remote(self.generation, step), what=f"evaluation after step {step}"
        )
        self._evaluated.add(step)
        self._events.write("eval", step=step, loss=_mean(reports), targets=reports[0].targets)
        self._display.phase("training")

    def _save(self, membership: Membership, step: int) -> None:
        began = time.monotonic()
        self._display.phase("saving")
        folder = step_folder(self._folder / "checkpoints", step)
        shards = membership.gather(
            lambda m: m.actor.save.remote(self.generation, step, str(folder)),
            what=f"checkpoint of step {step}",
            patience=PATIENCE,
        )
        cursor = self._schedule.cursor(step)
        manifest = Manifest(
            step=step,
            cursor=cursor.to_dict(),
            plan_hash=cursor.plan_hash,
            generation=self.generation,
            run_id=self._spec.run_id,
            grid=self._grid_dict(),
            fingerprint={"model": self._spec.model_fingerprint, "data": self._spec.train.fingerprint},
            shards=tuple(shards),
        )
        self._checkpoint = commit(folder, manifest)
        prune(self._folder / "checkpoints", keep=self._config.elastic.keep)
        seconds = time.monotonic() - began
        self._events.write(
            "checkpoint",
            step=step,
            bytes=manifest.bytes,
            seconds=seconds,
            stall_seconds=seconds,
            path=str(self._checkpoint),
        )
        self._display.phase("training")

    # -- the end ----------------------------------------------------------------------------------------------------

    def _finish(self, membership: Membership, step: int) -> Outcome:
        export: Path | None = None
        if step >= self._spec.total_steps and self._checkpoint is not None:
            self._display.phase("exporting")
            out, checkpoint = str(self._folder / "export"), str(self._checkpoint)
            membership.gather(
                lambda m: m.actor.export.remote(self.generation, checkpoint, out),
                what="export",
                only=[0],
                patience=PATIENCE,
            )
            export = Path(out)
        status = "finished" if export is not None else "stopped"
        self._picture()
        self._events.write(
            "run_finished", steps=step, seconds=self._clock.seconds, goodput=self._clock.goodput, status=status
        )
        self._record.set_status(status, step=step)
        self._display.phase(status)
        return Outcome(status=status, checkpoint=self._checkpoint, export=export, goodput=self._clock.goodput)

    def _picture(self) -> None:
        evals = {int(e["step"]): float(e["loss"]) for e in read_events(self._events.path) if e["event"] == "eval"}
        losses = self._events.losses()
        if losses and not draw_losses(losses, evals, self._folder / "loss.png"):
            self._display.say("loss.png was not drawn: pip install matplotlib")

    def _note_failure(self, error: BaseException, step: int) -> None:
        try:
            self._record_failure(error, step)
        except OSError as second:  # a full disk: what is raised must be the first error
            self._display.say(f"the failure could not be recorded in {self._folder}: {second}")

    def _record_failure(self, error: BaseException, step: int) -> None:
        if isinstance(error, WorkerError):
            d = error.details
            self._events.write("worker_lost", rank=d["rank"], node=d["node"], cause=d["cause"], step=step)
        stopped = isinstance(error, KeyboardInterrupt | SystemExit)
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

    def _last_step(self, default: int) -> int:
        return max(self._events.losses(), default=default)

    def _grid_dict(self) -> dict[str, int]:
        g = self._grid
        return {"dp": g.dp, "ring": g.ring, "ulysses": g.ulysses, "cp": g.cp, "window": g.window}


def _mean(reports: list[StepReport] | list[EvalReport]) -> float:
    """Loss over all ranks, summed in rank order."""
    weight = reports[0].weight
    return math.fsum(r.loss_sum for r in reports) / weight if weight > 0 else 0.0
