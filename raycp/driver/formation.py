"""The ranks that run now: how a world is planned for the workers that are left, connected, and filled with state.

Guarantees: whatever failed while a world was formed, the next attempt starts under a higher generation, which the
record has on disk before any rank hears of it; ranks lie in the order of (node, accelerator id), the ranks of a CP
group on as few nodes as possible; the state comes from the newest complete source, memory before storage; what is
lost is killed before its place is given away, and keepers refuse what comes of an older generation. Costs 0.1 s for
groups, and the build and the copy of the model's shards.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from data_pipeline import Cursor, StepSchedule
from raycp.driver.checkpoints import Checkpoints
from raycp.driver.commits import Commits
from raycp.driver.copies import Room, budget_of, most_free, short_of_room
from raycp.driver.keepers import KeeperLost
from raycp.driver.membership import Member
from raycp.driver.placement import share_out
from raycp.driver.record import RunRecord
from raycp.driver.recovery import Incident, Phase, Repeaters, no_world, waiting, without_keeper
from raycp.driver.runtime import KeepersLike, RanksLike, Runtime
from raycp.driver.worlds import World, Worlds
from raycp.errors import ClusterError, WorkerError
from raycp.events import EventLog
from workers.messages import COLLECTIVE_TIMEOUT, Probe, Rendezvous, RunSpec
from workers.storage import storage_fix

PATIENCE = 10.0
"""Times `heartbeat_timeout` that a rank may be silent while it loads or writes files (some libraries hold the GIL), but
for one whose keeper sees that its process was stopped by a signal."""
SOME_PATIENCE = 3.0
"""As `PATIENCE`, where ranks meet and copy: they read no files, but may import what they had not needed before."""
FREEZE_SECONDS = 10.0
"""Least time that survivors get to come to rest: they may be inside a long kernel when a peer is lost."""

ANSWER_SECONDS = 2.0
"""How long a spare, or the keeper of a node whose ranks are lost, may take to answer before it counts as gone."""
HIRE_SECONDS = 3.0
"""How long a run that waits for no capacity looks for room for workers, where those that are left form no world."""
REPLACEMENTS = 5
"""How many keepers in a row may be lost while others are put in their places."""


class Source(NamedTuple):
    """Where the state of a world came from: "memory", "checkpoint" (with its path) or "start"."""

    step: int
    kind: str
    path: str | None


class Formation:
    """The current ranks of a run, and the way to the next ones.

    Args:
        spec: what the workers run.
        worlds: which worlds the run may have.
        schedule: turns a cursor into a step.
        runtime: workers, store, keepers, time.
        record: run.json, opened for this driver.
        events: the log.
        checkpoints: where state is on storage.
        secret: of the run; keepers talk to nobody else.
        say: shows a message to the person.
        started: is told, once, which world the run begins with.
        check_stop: called while nothing but waiting is done; raises if a person wants the run to stop.
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
        say: Callable[[str], None],
        started: Callable[[World], None],
        check_stop: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._elastic = spec.config.elastic
        self._worlds = worlds
        self._schedule = schedule
        self._runtime = runtime
        self._record = record
        self._events = events
        self._checkpoints = checkpoints
        self._secret = secret
        self._say = say
        self._started = started
        self._check_stop = check_stop
        self._fleet = runtime.fleet
        self._shared_memory = not spec.device.is_accelerator
        self._ranks: RanksLike | None = None
        self._workers: list[Any] = []
        self._world: World | None = None
        self._store: Any = None
        self._repeaters = Repeaters()
        self._judged: tuple[list[Probe], World | None] | None = None
        self._state_bytes, self._free = 0, dict[str, int]()
        self._alone = False
        self._short = frozenset[str]()
        self.room = Room.AMPLE
        self.memory: KeepersLike | None = None

    @property
    def ranks(self) -> RanksLike:
        """The ranks of the current generation."""
        assert self._ranks is not None, "no world was formed yet"
        return self._ranks

    @property
    def world(self) -> World:
        """The world that runs."""
        assert self._world is not None, "no world was formed yet"
        return self._world

    # -- the start, the end -----------------------------------------------------------------------------------------

    def place(self, *, state_bytes: int) -> None:
        """Starts the first workers, and a keeper on each of their nodes if the state fits into their memory.

        Raises:
            ClusterError: no room in time, or something is wrong on a node.
            Stopped: a person has stopped the run meanwhile.
        """
        (dp, cp), elastic = self._worlds.limits.wanted, self._elastic
        seconds = elastic.wait_for_capacity
        self._fleet.staff(dp * cp, spares=elastic.spares, cp=cp, timeout=seconds, check_stop=self._check_stop)
        held, probes = self._runtime.held(), [w.probe for w in self._fleet.workers]
        self._state_bytes = state_bytes
        self._free = {n: b + held.get(n, 0) for n, b in most_free(probes, {}).items()}
        takes = share_out(Counter(p.node_id for p in probes), dp * cp, cp=cp)
        assert takes is not None, "the fleet has them"
        if self._weigh(takes) is not Room.NONE or held:
            self.memory = self._runtime.keepers(self._fleet.nodes, generation=self._record.generation)

    def _weigh(self, takes: Mapping[str, int]) -> Room:
        """What the nodes of a world have room for, told where it has changed."""
        self._free = most_free([w.probe for w in self._fleet.workers], self._free)
        budget = budget_of(takes, self._free, self._state_bytes)
        if budget.room is not self.room and budget.message:
            self._say(budget.message)
        self.room = budget.room
        return self.room

    def close(self, *, keepers: bool) -> None:
        """Ends every worker and, with `keepers`, what is held in memory."""
        self._store = None
        self._fleet.close()
        if keepers and self.memory is not None:
            self.memory.close()

    # -- a world ----------------------------------------------------------------------------------------------------

    def form(self, incident: Incident, commits: Commits, *, first: bool) -> Source:
        """As `_form`; a keeper that is lost meanwhile, or storage that fails in a recovery, starts it again."""
        try:
            return self._form(incident, commits, first=first)
        except OSError as error:
            if first:
                raise
            raise WorkerError(
                f"while a world was formed: {error}",
                fix=storage_fix(error) or "look at the storage of output_dir and of the checkpoints",
                rank=None,
                node="the driver's",
                cause=str(error),
            ) from error
        except KeeperLost as lost:
            assert self.memory is not None
            self.memory.drop(lost.node_id)
            raise without_keeper(lost, "while a world was formed") from lost

    def _form(self, incident: Incident, commits: Commits, *, first: bool) -> Source:
        """Plans, connects, builds and restores a world; its phases are added to `incident`.

        Raises:
            WorkerError: a rank failed meanwhile; or no world is possible (`details["hopeless"]`).
        """
        clock = self._runtime.clock
        with incident.phase(Phase.PLAN, clock):
            placed = self._record.recall("node_ranks")
            if placed is not None:
                self._worlds.settle(placed)
            self._world = self._plan(incident, first=first)
            if placed is None:
                self._worlds.settle(self._record.remember("node_ranks", list(self._world.node_ranks)))
            if first:
                self._started(self._world)
            if self.memory is not None:
                self._weigh(self._world.takes)
        with incident.phase(Phase.REBUILD, clock):
            if not first:
                self._events.generation = self._record.raise_generation()
                self._fence_storage()
            self._appoint(self._world)
            self._connect(self._world)
        with incident.phase(Phase.RESTORE, clock):
            source = self._restore(self._world, commits)
        self._checkpoints.forget()
        return source

    def _fence_storage(self) -> None:
        """No driver or keeper of an older generation commits a checkpoint from now on. A storage that is away does not
        hold up a recovery: `commit` fences again, and readers compare generations.
        """
        try:
            self._checkpoints.fence(self._spec.run_id, self._record.generation)
        except OSError as error:
            self._say(f"checkpoint storage {self._checkpoints.root.where} does not take a write ({error}): going on")

    def _plan(self, incident: Incident, *, first: bool) -> World:
        """The world for the workers that are left; waits for more where the configuration says so (always for such that
        can be started at once), but not for a person who wants the run to stop.
        """
        elastic, wanted = self._elastic, self._worlds.limits.wanted
        least = wanted[0] * wanted[1] if elastic.on_loss == "wait" else 1
        shrinks = elastic.on_loss == "shrink"
        deadline = self._runtime.clock() + (HIRE_SECONDS if shrinks else elastic.wait_for_capacity)
        told = False
        self._fleet.drop_lost([w for w in self._fleet.workers if w not in self._workers], ANSWER_SECONDS)
        while True:
            probes = [w.probe for w in self._fleet.workers]
            world = self._worlds.choose(probes, shared_memory=self._shared_memory, first=first)
            if world is not None and world.grid.world_size >= least:
                return world
            keeps = least if world is not None else 0
            if self._runtime.clock() >= deadline and not (shrinks and self._fleet.warming):
                raise no_world(len(probes), incident, self._worlds.limits, elastic, keeps=keeps)
            self._check_stop()
            if not told:
                self._say(waiting(len(probes), elastic, keeps=keeps))
                told = True
            self._fleet.recruit(self._worlds.limits.workers[1])
            self._runtime.sleep(0.2)

    def _appoint(self, world: World) -> None:
        """Workers become ranks, in the order of their nodes; those that were ranks before come first on each node."""
        chosen: list[Any] = []
        for node_id, count in world.takes.items():
            there = [w for w in self._fleet.workers if w.probe.node_id == node_id]
            chosen += sorted(there, key=lambda w: w not in self._workers)[:count]
        self._workers = [w for w in self._fleet.workers if w in chosen]
        members = [Member(rank=r, actor=w.actor, probe=w.probe) for r, w in enumerate(self._workers)]
        self._ranks = self._runtime.ranks(members, self._record.generation, is_stopped=self._is_stopped)
        if self.memory is not None:
            self._add_keepers()
            self._assign(self.memory)

    def _assign(self, memory: KeepersLike) -> None:
        """Tells the keepers whose ranks they have, and where replicas go."""
        homes = [m.probe.node_id for m in self.ranks.members]
        self._alone = len(memory.addresses) == 1
        takes, self._free = Counter(homes), most_free([w.probe for w in self._fleet.workers], self._free)
        short = short_of_room(takes, self._free, self._state_bytes)
        if len(takes) == 1 and short and short != self._short:
            self._say(
                f"{len(short)} node(s) of spares take no replicas: {2 * self._state_bytes / 2**30:.1f} GiB do not fit"
            )
        self._short = short
        memory.assign(self._record.generation, homes, short)

    def _connect(self, world: World) -> None:
        self._store = self._runtime.open_store()  # held here only: dropping it frees whoever waits in it
        port = self._store.port
        keepers = self.memory.addresses if self.memory is not None else {}

        def join(member: Member) -> Any:
            return member.actor.join.remote(
                Rendezvous(
                    generation=self._record.generation,
                    rank=member.rank,
                    grid=world.grid,
                    cost=world.cost,
                    store_host=self._runtime.address,
                    store_port=port,
                    timeout=COLLECTIVE_TIMEOUT,
                    threads=max(1, member.probe.cpu_count // world.takes[member.probe.node_id]),
                    keeper=keepers.get(member.probe.node_id),
                    secret=self._secret,
                )
            )

        free = self.ranks.gather(join, what="connecting the workers", patience=SOME_PATIENCE, release=self._close_store)
        self._events.write("joined", free_bytes=free)

    def _close_store(self) -> None:
        """Frees every rank that waits in the store for one that does not come."""
        self._store = None

    def _restore(self, world: World, commits: Commits) -> Source:
        """Makes the model and fills it from the newest complete state: memory, storage, or its own weights."""
        generation = self._record.generation
        point = self.memory.newest(commits.known) if self.memory is not None else None
        manifest, found = None if point is None else point.manifest, None
        if manifest is None or manifest.step < self._checkpoints.stored_step():
            found = self._checkpoints.find()
            if manifest is None or (found.manifest is not None and found.manifest.step > manifest.step):
                point, manifest = None, found.manifest  # else it was damaged, and memory has what is newest
        self.ranks.gather(
            lambda m: m.actor.build.remote(generation, initialise=manifest is None, recompute=world.recompute),
            what="building the model",
            patience=PATIENCE,
        )
        if manifest is None:
            commits.rewind(0)
            return Source(0, "start", None)
        step = manifest.step
        if manifest.cursor:
            step = self._schedule.restore(Cursor.from_dict(manifest.cursor))
        if point is not None and self.memory is not None:
            memory, ranks = self.memory, self.ranks
            point = replace(point, manifest=commits.confirm(point.manifest))  # now: the rest in memory is given up
            memory.keep_only(point)
            ranks.gather(
                lambda m: m.actor.restore_memory.remote(generation, point, self._secret),
                what=f"restoring step {step} from memory",
                patience=SOME_PATIENCE,
                meanwhile=lambda: ranks.pass_over(memory.silent().values()),
            )
            commits.adopt(point.manifest)
            return Source(step, "memory", None)
        assert found is not None
        assert found.storage is not None
        path = found.storage.where
        self.ranks.gather(
            lambda m: m.actor.restore.remote(generation, path),
            what=f"loading the checkpoint of step {step}",
            patience=PATIENCE,
        )
        self._checkpoints.loaded(path, step)
        commits.adopt(manifest)
        return Source(step, "checkpoint", path)

    # -- when something is lost -------------------------------------------------------------------------------------

    def take_apart(self, error: WorkerError, incident: Incident, *, committed: int) -> None:
        """After a failure: whoever is left comes to rest, whoever is lost is fenced off."""
        clock = self._runtime.clock
        with incident.phase(Phase.FREEZE, clock):
            self._close_store()
            lost = set(self.ranks.freeze(max(FREEZE_SECONDS, self._elastic.heartbeat_timeout)))
            lost |= set(error.details.get("lost_ranks", ()))
            lost |= self._raised_again(error, committed)
        with incident.phase(Phase.FENCE, clock):
            gone = [w for r, w in enumerate(self._workers) if r in lost and w in self._fleet.workers]
            idle = [w for w in self._fleet.workers if w not in self._workers]
            self._fleet.drop_lost(idle, ANSWER_SECONDS)
            suspects = {w.probe.node_id for w in gone}
            suspects -= {w.probe.node_id for w in self._fleet.workers if w not in gone}
            silent = self.memory.unreachable(ANSWER_SECONDS, suspects) if self.memory is not None else ()
            for node_id in silent:
                assert self.memory is not None
                self.memory.drop(node_id)  # first, so that nobody waits for it to kill a process
            self._fleet.dismiss(gone, self._kill)
            for node_id in suspects & set(silent):
                self._fleet.avoid(node_id)  # Ray takes seconds to see that a node is gone, a minute for one cut off

    def _raised_again(self, error: WorkerError, committed: int) -> set[int]:
        """Ranks whose process raises again and again: it is given up, and with it whatever is wrong inside."""
        raised = [w for r, w in enumerate(self._workers) if r in error.details.get("raised_ranks", ())]
        again = self._repeaters.again(raised, of=len(self._workers), committed=committed)
        for worker in again:
            self._say(
                f"the process on node {worker.probe.address} (pid {worker.probe.pid}) has raised twice since step "
                f"{committed}: it is ended, and another one takes its place"
            )
        return {r for r, w in enumerate(self._workers) if w in again}

    def _is_stopped(self, member: Member) -> bool:
        probe = member.probe
        return self.memory is not None and self.memory.is_stopped(probe.node_id, probe.pid, probe.started)

    def _kill(self, node_id: str, pid: int, started: float) -> bool:
        return self.memory is not None and self.memory.kill_process(node_id, pid, started)

    def replace_keepers(self, lost: Sequence[KeeperLost], *, step: int) -> None:
        """Keepers are gone and their nodes are not: others take their places, and the ranks attach to them. Whatever
        else is lost meanwhile is replaced as well: the ranks hold the state, and keep it.

        Args:
            lost: what was lost.
            step: the newest committed one, for the events.

        Raises:
            WorkerError: a rank of such a node is gone too, or keepers are lost again and again.
        """
        assert self.memory is not None
        left, nodes = list(lost), set[str]()
        for _ in range(REPLACEMENTS):
            for one in left:
                nodes.add(one.node_id)
                self._events.write("keeper_lost", node=one.node_id, step=step)
                self._say(f"{one.message}: training goes on, and another keeper is started")
                self.memory.drop(one.node_id)
            try:
                self._add_keepers()
                self._assign(self.memory)
                break
            except KeeperLost as another:
                left = [another]
        else:
            raise without_keeper(left[0], "keepers are lost as soon as they start")
        self.attach([m.rank for m in self.ranks.members if m.probe.node_id in nodes])

    def attach(self, ranks: Sequence[int]) -> None:
        """These ranks send their copies to their node's keeper, from the next one on.

        Raises:
            WorkerError: one of them is gone.
        """
        assert self.memory is not None
        generation, addresses = self._record.generation, self.memory.addresses
        self.ranks.gather(
            lambda m: m.actor.attach.remote(generation, addresses[m.probe.node_id], self._secret),
            what="attaching to the keepers",
            only=ranks,
        )

    # -- when capacity comes ----------------------------------------------------------------------------------------

    def grow(self) -> None:
        """Brings missing workers and spares closer, beside the running job; never waits for them.

        Raises:
            KeeperLost: a keeper of a rank's node does not take the order that a spare's keeper is gone.
        """
        idle = [w for w in self._fleet.workers if w not in self._workers]
        lost = self._fleet.lost_idle(idle, self._elastic.heartbeat_timeout)
        if lost:
            self._idle_lost(lost)
        self._fleet.recruit(self._worlds.limits.workers[1] + self._elastic.spares)
        if self.memory is not None:
            for node in self._fleet.nodes:
                self.memory.begin(node)
            if self._alone and len(self.memory.addresses) > 1:
                self._assign(self.memory)  # replicas have a home again

    def _idle_lost(self, lost: Sequence[Any]) -> None:
        """Spares have ended, or do not answer; with them the keeper of their node, if the node is gone."""
        homes, silent = [m.probe.node_id for m in self.ranks.members], set[str]()
        if self.memory is not None:
            suspects = {w.probe.node_id for w in lost} - set(homes)
            silent = suspects & set(self.memory.unreachable(ANSWER_SECONDS, suspects))
            for node_id in silent:
                self.memory.drop(node_id)
        self._fleet.dismiss(lost, self._kill)
        for node_id in silent:
            self._fleet.avoid(node_id)
        if silent and self.memory is not None:
            self._assign(self.memory)

    def _add_keepers(self) -> None:
        """A keeper on every node of a rank; on the nodes of spares they start beside the run.

        Raises:
            WorkerError: one does not start: its node was lost meanwhile.
        """
        assert self.memory is not None
        homes = {m.probe.node_id for m in self.ranks.members}
        for node in self._fleet.nodes:
            try:
                if node.node_id in homes:
                    self.memory.add(node)
                else:
                    self.memory.begin(node)
            except ClusterError as error:
                raise WorkerError(
                    f"no keeper starts on the node of a rank: {error.message}",
                    fix=error.fix,
                    rank=None,
                    node=node.address,
                    node_id=node.node_id,
                    cause=error.message,
                ) from error

    def bigger(self) -> World | None:
        """A larger world that the workers which are ready could form, once none is on its way any more."""
        if self._fleet.warming:
            return None
        size = self.world.grid.world_size
        wanted = self._worlds.limits.wanted
        idle = [w for w in self._fleet.workers if w not in self._workers]
        if size >= wanted[0] * wanted[1]:  # spares stay spares, unless the world is smaller than was asked for
            idle = idle[self._elastic.spares :]
        if not idle:
            return None
        probes = [w.probe for w in self._fleet.workers if w in self._workers or w in idle]
        if self._judged is None or self._judged[0] != probes:  # planning takes seconds where the degrees are large
            self._judged = probes, self._worlds.choose(probes, shared_memory=self._shared_memory)
        world = self._judged[1]
        return world if world is not None and world.grid.world_size > size else None
