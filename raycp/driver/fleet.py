"""The worker processes of a run: placed, probed, warm; some of them are ranks, the others are spares.

Guarantees: a process belongs to this run from its probe to its dismissal and never moves; each owns one accelerator (or
CPU) of a placement group that lies on one node; new ones start and import beside the running job (`recruit` never
waits); what is lost is killed by pid on its node before its place is given away. Costs one Ray actor per worker and
spare, and a look at the cluster per second while workers are missing.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from raycp.driver.blame import cause_of, unwrap
from raycp.driver.cluster import ClusterHandle, NodeInfo, live_nodes
from raycp.driver.membership import CONTROL
from raycp.driver.placement import Reservation, allocate, describe_slots, order_ranks, slots
from raycp.driver.probe import check_packages, raise_if_any
from raycp.errors import ClusterError, Problem, RaycpError
from raycp.training.vendor import process_environment
from workers.actor import TrainWorker
from workers.messages import COLLECTIVE_TIMEOUT, Probe, RunSpec

LOOK_SECONDS = 1.0
"""Time between two looks at the cluster while workers are missing, and at an idle worker."""
WARM_SECONDS = 300.0
"""How long a new worker may take to start and import."""
SOON_SECONDS = 60.0
"""How long a new worker counts as one that will be ready soon, which a resize waits for."""
AVOID_SECONDS = 30.0
"""How long nobody is hired on a node that was silent, unless Ray sees its end earlier."""
START_ATTEMPTS = 3
"""How often the first workers are started again where one of them dies."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Worker:
    """One process: its actor, what it said about itself, and the bundle that it holds."""

    actor: Any
    probe: Probe
    seat: "Seat"


@dataclass(frozen=True, kw_only=True, eq=False)
class Seat:
    """One bundle of a placement group."""

    node: NodeInfo
    group: Any
    index: int


@dataclass(kw_only=True, eq=False)
class _Recruit:
    seat: Seat
    actor: Any
    probe: Any
    since: float


@dataclass(kw_only=True, eq=False)
class _Pending:
    reservation: Reservation
    since: float


class Fleet:
    """The workers of a run on Ray.

    Args:
        spec: what they run.
        cluster: in use.
        say: shows a message to the person.
    """

    def __init__(self, spec: RunSpec, cluster: ClusterHandle, say: Callable[[str], None]) -> None:
        self._spec = spec
        self._cluster = cluster
        self._say = say
        self._resource = spec.device.ray_resource
        self._workers: list[Worker] = []
        self._seats: list[Seat] = []
        self._recruits: list[_Recruit] = []
        self._pending: list[_Pending] = []
        self._reservations: list[Reservation] = []
        self._refused: set[str] = set()
        self._unfit: set[Seat] = set()
        self._avoided: dict[str, float] = {}
        self._idle: dict[Worker, tuple[Any, float]] = {}
        self._looked = 0.0
        folder = Path(spec.output_dir) / ".raycp"
        folder.mkdir(parents=True, exist_ok=True)
        self._nonce = secrets.token_hex(16)
        self._nonce_path = folder / f"nonce-{self._nonce[:8]}"
        self._nonce_path.write_text(self._nonce)

    @property
    def workers(self) -> list[Worker]:
        """Healthy processes, ordered by (node, accelerator id)."""
        return list(self._workers)

    @property
    def warming(self) -> bool:
        """Whether new processes are on their way, and may be ready soon."""
        soon = time.monotonic() - SOON_SECONDS
        return any(r.since > soon for r in self._recruits) or any(p.since > soon for p in self._pending)

    @property
    def nodes(self) -> list[NodeInfo]:
        """Nodes that have workers or will have them, in order."""
        found = {s.node.node_id: s.node for s in [w.seat for w in self._workers] + [r.seat for r in self._recruits]}
        return sorted(found.values(), key=lambda n: (n.address, n.node_id))

    # -- the start --------------------------------------------------------------------------------------------------

    def staff(
        self, workers: int, *, spares: int, cp: int, timeout: float, check_stop: Callable[[], None] = lambda: None
    ) -> None:
        """Places and probes the first workers, and spares where there is room for them.

        Args:
            workers: how many there have to be.
            spares: how many more are wanted.
            cp: ranks of one pack, which are kept on as few nodes as possible.
            timeout: seconds to wait for room.
            check_stop: called about once a second meanwhile; what it raises ends this.

        Raises:
            ClusterError: no room in time, or something is wrong on a node: all of it in one report.
        """
        reservation = self._reserve(workers, spares, cp, timeout, check_stop)
        self._add(reservation)
        if not self._cluster.started_here:  # a local Ray imports from the driver's own folders
            check_packages([share.node for share in reservation.shares])
        for seat in self._seats:
            self._hire(seat)
        for attempt in range(1, START_ATTEMPTS + 1):
            failure = self._first_probes(time.monotonic() + timeout + 120, check_stop)
            raise_if_any([p for q in {w.probe.node_id: w.probe for w in self._workers}.values() for p in _problems(q)])
            if len(self._workers) >= workers:
                break
            if attempt == START_ATTEMPTS or not isinstance(failure, ray.exceptions.RayActorError):
                raise ClusterError(
                    f"a worker did not start: {failure}",
                    fix="look at the node's log (memory, Python environment); then run the same command again",
                ) from failure
            self._say(f"a worker died while it started; starting another one ({cause_of(failure)})")
            self._fill_up(workers, cp=cp, timeout=timeout, check_stop=check_stop)
        self._sort()

    def _first_probes(self, deadline: float, check_stop: Callable[[], None]) -> BaseException | None:
        """Waits for all that were hired; those that are ready become workers. The first failure, if there is one."""
        failure: BaseException | None = None
        while self._recruits:
            check_stop()
            ray.wait([r.probe for r in self._recruits], num_returns=1, timeout=LOOK_SECONDS)
            alive = {n.node_id for n in live_nodes()}
            for recruit in list(self._recruits):
                done, _ = ray.wait([recruit.probe], timeout=0)
                gone = recruit.seat.node.node_id not in alive
                if not (done or gone or time.monotonic() > deadline):
                    continue
                self._recruits.remove(recruit)
                try:
                    probe: Probe = ray.get(recruit.probe, timeout=0)
                    self._workers.append(Worker(actor=recruit.actor, probe=probe, seat=recruit.seat))
                except (ray.exceptions.RayError, RaycpError) as error:
                    lost = ray.exceptions.ActorUnavailableError("its node has died", None) if gone else error
                    failure = failure or unwrap(lost)
                    ray.kill(recruit.actor, no_restart=True)
        return failure

    def _fill_up(self, workers: int, *, cp: int, timeout: float, check_stop: Callable[[], None]) -> None:
        """Hires again where somebody died, and elsewhere where a node did."""
        self._forget_dead({n.node_id for n in live_nodes()})
        taken = {w.seat for w in self._workers}
        free = [s for s in self._seats if s not in taken]
        missing = workers - len(self._workers) - len(free)
        if missing > 0:
            free += self._add(self._reserve(missing, 0, cp, timeout, check_stop))
        for seat in free:
            self._hire(seat)

    def _reserve(
        self, workers: int, spares: int, cp: int, timeout: float, check_stop: Callable[[], None]
    ) -> Reservation:
        deadline = time.monotonic() + timeout
        told = False
        while True:
            check_stop()
            nodes = live_nodes()
            shares = allocate(nodes, workers + spares, self._resource, cp=cp) if spares else None
            shares = shares or allocate(nodes, workers, self._resource, cp=cp)
            if shares is not None:
                left = max(deadline - time.monotonic(), 5.0)
                try:
                    return Reservation.make(shares, self._resource, timeout=min(left, 60.0), check_stop=check_stop)
                except ClusterError:  # another job was faster
                    if time.monotonic() >= deadline:
                        raise
            if time.monotonic() >= deadline:
                raise ClusterError(
                    f"no room for {workers} workers ({self._resource or 'CPU'} each) within {timeout:.0f} s; nodes: "
                    f"{describe_slots(nodes, self._resource)}",
                    fix="wait until other jobs end, ask for fewer workers, or raise elastic.wait_for_capacity",
                )
            if not told:
                self._say(f"waiting for {workers} free {self._resource or 'CPU'} slots (used by other jobs now)")
                told = True
            time.sleep(1.0)

    # -- beside the running job -------------------------------------------------------------------------------------

    def recruit(self, target: int) -> int:
        """Brings the number of workers towards `target`, without waiting; call it often.

        Returns:
            How many new workers became ready in this call.
        """
        ready = self._collect()
        missing = (
            target
            - len(self._workers)
            - len(self._recruits)
            - sum(sum(s.ranks for s in p.reservation.shares) for p in self._pending)
        )
        now = time.monotonic()
        if (missing <= 0 and not self._recruits and not self._pending) or now - self._looked < LOOK_SECONDS:
            return ready
        self._looked = now
        alive = live_nodes()
        self._forget_dead({n.node_id for n in alive})  # also where somebody was hired meanwhile: call again
        self._avoided = {n: until for n, until in self._avoided.items() if until > now}
        nodes = [n for n in alive if n.node_id not in self._refused]
        if self._workers:  # else any node will do
            nodes = [n for n in nodes if n.node_id not in self._avoided]
        if missing <= 0:
            return ready
        taken = {w.seat for w in self._workers} | {r.seat for r in self._recruits} | self._unfit
        usable = {n.node_id for n in nodes}
        for seat in [s for s in self._seats if s not in taken and s.node.node_id in usable][:missing]:
            self._hire(seat)
            missing -= 1
        room = {n.node_id: slots(n, self._resource, free=True) for n in nodes}
        wanted = min(missing, sum(room.values()))
        shares = allocate(nodes, wanted, self._resource, cp=1) if wanted > 0 else None
        if shares is not None:
            reservation = Reservation.begin(shares, self._resource)
            self._pending.append(_Pending(reservation=reservation, since=now))
        return ready

    def _collect(self) -> int:
        now = time.monotonic()
        for pending in list(self._pending):
            if pending.reservation.ready(0.0):
                self._pending.remove(pending)
                for seat in self._add(pending.reservation):
                    self._hire(seat)
            elif now - pending.since > WARM_SECONDS:
                self._pending.remove(pending)
                pending.reservation.release()
        ready = 0
        for recruit in list(self._recruits):
            done, _ = ray.wait([recruit.probe], timeout=0)
            if not done and now - recruit.since < WARM_SECONDS:
                continue
            self._recruits.remove(recruit)
            ready += self._admit(recruit) if done else 0
            if not done:
                ray.kill(recruit.actor, no_restart=True)
        if ready:
            self._sort()
        return ready

    def _admit(self, recruit: _Recruit) -> int:
        try:
            probe: Probe = ray.get(recruit.probe)
        except (ray.exceptions.RayError, RaycpError) as error:
            self._say(f"a new worker on node {recruit.seat.node.address} did not start: {error}")
            return 0
        problems = _problems(probe)
        if problems:
            if probe.unfit:  # its bundle stays ours, so that nobody is given that device again
                self._unfit.add(recruit.seat)
            else:
                self._refused.add(probe.node_id)
            self._say(
                f"{'device' if probe.unfit else 'node'} not used:\n"
                + "\n".join(f"  {p.message}\n  fix: {p.fix}" for p in problems)
            )
            ray.kill(recruit.actor, no_restart=True)
            return 0
        self._workers.append(Worker(actor=recruit.actor, probe=probe, seat=recruit.seat))
        return 1

    def _hire(self, seat: Seat) -> None:
        actor = self._start(seat)
        probe = actor.probe.remote(str(self._nonce_path), self._nonce)
        self._recruits.append(_Recruit(seat=seat, actor=actor, probe=probe, since=time.monotonic()))

    def lost_idle(self, among: Sequence[Worker], seconds: float) -> list[Worker]:
        """Which of these idle workers have ended, or were silent for `seconds`; never waits, call it often."""
        now = time.monotonic()
        self._idle = {w: asked for w, asked in self._idle.items() if w in among}
        lost: list[Worker] = []
        for worker in among:
            asked = self._idle.get(worker)
            if asked is not None:
                reference, since = asked
                done, _ = ray.wait([reference], timeout=0)
                if (done and _raises(reference)) or (not done and now - since > seconds):
                    lost.append(worker)
                if not done or now - since < LOOK_SECONDS:
                    continue
            self._idle[worker] = (worker.actor.progress.options(concurrency_group=CONTROL).remote(), now)
        return lost

    def drop_lost(self, among: Sequence[Worker], seconds: float) -> None:
        """Lets go of those idle workers that do not answer within `seconds`: nobody waits for a spare, so nobody sees
        its end.
        """
        asked = {w.actor.progress.options(concurrency_group=CONTROL).remote(): w for w in among if w in self._workers}
        if asked:
            ray.wait(list(asked), num_returns=len(asked), timeout=seconds)
        for reference, worker in asked.items():
            try:
                ray.get(reference, timeout=0)
            except ray.exceptions.RayError:
                self._workers.remove(worker)
                ray.kill(worker.actor, no_restart=True)

    # -- the end ----------------------------------------------------------------------------------------------------

    def dismiss(self, workers: Sequence[Worker], kill: Callable[[str, int, float], bool]) -> None:
        """Ends processes that are lost, or in doubt: by pid on their node first, since Ray takes seconds for a
        stopped one, and waits for nobody.

        Args:
            workers: whom.
            kill: (node id, pid, start time of the process) -> whether it was killed.
        """
        for worker in workers:
            self._workers.remove(worker)
            kill(worker.probe.node_id, worker.probe.pid, worker.probe.started)
            ray.kill(worker.actor, no_restart=True)
        if workers:
            self._forget_dead({n.node_id for n in live_nodes()})

    def avoid(self, node_id: str) -> None:
        """Gives up the seats of a node that is silent, and hires nobody there for a while."""
        self._avoided[node_id] = time.monotonic() + AVOID_SECONDS
        self._forget_dead({s.node.node_id for s in self._seats} - {node_id})

    def close(self) -> None:
        """Ends every process and gives all bundles back."""
        for actor in [w.actor for w in self._workers] + [r.actor for r in self._recruits]:
            ray.kill(actor, no_restart=True)
        for reservation in [*self._reservations, *(p.reservation for p in self._pending)]:
            reservation.release()
        self._workers, self._recruits, self._seats = [], [], []
        self._reservations, self._pending = [], []
        self._nonce_path.unlink(missing_ok=True)

    def _forget_dead(self, alive: set[str]) -> None:
        for pending in [p for p in self._pending if any(s.node.node_id not in alive for s in p.reservation.shares)]:
            self._pending.remove(pending)
            pending.reservation.release()
        dead = {s.node.node_id for s in self._seats} - alive
        if not dead:
            return
        self._seats = [s for s in self._seats if s.node.node_id not in dead]
        self._recruits = [r for r in self._recruits if r.seat.node.node_id not in dead]
        for reservation in self._reservations:
            reservation.release(dead)
        self._reservations = [r for r in self._reservations if r.shares]

    # -- small things -----------------------------------------------------------------------------------------------

    def _add(self, reservation: Reservation) -> list[Seat]:
        self._reservations.append(reservation)
        made = [Seat(node=node, group=group, index=index) for node, group, index in reservation.slots()]
        self._seats += made
        return made

    def _start(self, seat: Seat) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote = ray.remote(concurrency_groups={CONTROL: 2}, max_restarts=0, max_task_retries=0)(TrainWorker)
        accelerator: dict[str, Any] = {}
        if self._resource == "GPU":
            accelerator = {"num_gpus": 1}
        elif self._resource is not None:
            accelerator = {"resources": {self._resource: 1}}
        if self._spec.device.is_accelerator:
            variables = process_environment(self._spec.device, timeout=COLLECTIVE_TIMEOUT)
            accelerator["runtime_env"] = {"env_vars": variables}
        return remote.options(
            num_cpus=1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=seat.group, placement_group_bundle_index=seat.index
            ),
            **accelerator,
        ).remote(self._spec)

    def _sort(self) -> None:
        nodes = [n.node_id for n in self.nodes]
        order = order_ranks([w.probe for w in self._workers], nodes)
        self._workers = [self._workers[i] for i in order]


def _raises(reference: Any) -> bool:
    try:
        ray.get(reference, timeout=0)
    except ray.exceptions.RayError:
        return True
    return False


def _problems(probe: Probe) -> list[Problem]:
    where = f"node {probe.address} ({probe.node_id[:8]})"
    return [Problem(f"{where}: {text}", fix) for text, fix in probe.problems]
