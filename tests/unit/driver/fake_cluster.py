"""A cluster without processes: workers, keepers, storage and a clock that the state machine cannot tell from real ones.

Training is a hash chain: the state after a step is a function of the state before and of the step's packs, so that a
step that is skipped, done twice or done from a wrong state shows in the final state. Every node has workers and a
keeper; a keeper's content dies with its node. Faults come from a script: at the n-th call of a kind, on some rank.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from raycp.driver.checkpoints import Checkpoints
from raycp.driver.cluster import NodeInfo
from raycp.driver.copies import replica_homes
from raycp.driver.keepers import CopyRefused, KeeperLost
from raycp.driver.membership import Member
from raycp.driver.stuck import stuck
from raycp.errors import CheckpointError, ClusterError, StaleGenerationError, WorkerError
from raycp.events import EventLog
from raycp.training.committed import Newest
from raycp.training.manifest import Manifest, ShardEntry, ShardRecord
from raycp.training.storage import Storage
from workers import progress as phases
from workers.memory_reader import MemoryPoint
from workers.messages import Probe, Rendezvous, StepReport, StepRequest
from workers.progress import COPY
from workers.wire import KeeperAddress

START = "start"
HEARTBEAT = 30.0
CALLS = {
    "connecting": phases.JOIN,
    "building": phases.BUILD,
    "restoring": phases.RECALL,
    "loading": phases.RESTORE,
    "attaching": phases.ATTACH,
    "step": phases.STEP,
    "evaluation": phases.EVAL,
    "copy": phases.SNAPSHOT,
    "checkpoint": phases.SAVE,
    "export": phases.EXPORT,
}
"""What the ranks call what the driver asks of them, by its first word."""


def after(state: str, step: int, pack_ids: Sequence[int]) -> str:
    """The state after one more step."""
    return hashlib.sha256(f"{state}/{step}/{list(pack_ids)}".encode()).hexdigest()[:16]


@dataclass
class Fault:
    """What happens at the `at`-th call (from 0) whose text contains `where`.

    `kind`: "die" (the rank's process), "node" (all processes of its node, and its keeper), "freeze" (silent until it is
    killed), "hang" (it answers and gets no further), "hang in copy" (the same, in its own part of the copy of its
    state), "raise" (an error of its own), "fatal" (one that comes again), "damaged" (what it
    read from storage), "keeper" (of its node), "keeper frozen" (silent until it is killed), "full" (the peer has no
    memory for a replica once), "copy" (its copies fail until it is attached to a keeper again).
    """

    where: str
    at: int
    kind: str
    rank: int = 0


class Clock:
    """Time that passes only where somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass(eq=False)
class Process:
    """A worker's process."""

    world: "FakeCluster"
    node_id: str
    pid: int
    alive: bool = True
    frozen: bool = False
    hangs: str = ""
    calls_done: Counter[str] = field(default_factory=Counter)
    uncopied: str = ""
    keeper: KeeperAddress | None = None
    copying: "Copy | None" = None
    generation: int = 0
    rank: int = -1
    state: str | None = None
    step_done: int = 0

    def accept(self, generation: int) -> None:
        if generation < self.generation:
            raise StaleGenerationError(f"{generation} < {self.generation}")

    def __getattr__(self, name: str) -> Any:
        method = getattr(type(self), f"do_{name}", None)
        if method is None:
            raise AttributeError(name)
        return SimpleNamespace(remote=lambda *a, **k: lambda: method(self, *a, **k))

    def do_join(self, rendezvous: Rendezvous) -> None:
        assert rendezvous.generation > self.generation, "a generation is used once"
        self.generation, self.rank, self.state = rendezvous.generation, rendezvous.rank, None
        self.keeper, self.copying, self.uncopied = rendezvous.keeper, None, ""

    def do_attach(self, generation: int, keeper: KeeperAddress, secret: bytes) -> None:
        self.accept(generation)
        self.keeper, self.copying, self.uncopied = keeper, None, ""

    def do_build(self, generation: int, *, initialise: bool, recompute: bool) -> None:
        self.accept(generation)
        self.state, self.step_done = (START, 0) if initialise else (None, 0)

    def do_restore(self, generation: int, path: str) -> None:
        self.accept(generation)
        self.step_done, self.state = self.world.disk[path]

    def do_restore_memory(self, generation: int, point: MemoryPoint, secret: bytes) -> None:
        self.accept(generation)
        self.step_done, self.state = point.manifest.step, self.world.states[point.manifest.step, point.manifest.shards]

    def do_step(self, request: StepRequest) -> StepReport:
        self.accept(request.generation)
        assert request.generation == self.generation
        assert self.state is not None
        assert self.copying is None, "the state changes while it is copied"
        assert request.step == self.step_done + 1, f"step {request.step} after {self.step_done}"
        self.state, self.step_done = after(self.state, request.step, request.pack_ids), request.step
        if request.snapshot:
            self.world.copy(self, request.step)
        return StepReport(
            generation=request.generation,
            step=request.step,
            rank=self.rank,
            loss_sum=float(request.step),
            weight=1.0,
            grad_norm=1.0,
            lr=0.1,
            tokens=8,
            targets=8,
            seconds=1.0,
            remote_blocks_held=0,
            copy_problem=self.uncopied,
        )

    def do_snapshot(self, generation: int, step: int) -> None:
        self.accept(generation)
        assert step == self.step_done
        self.world.copy(self, step)

    def do_save(self, generation: int, step: int, folder: str) -> ShardRecord:
        self.accept(generation)
        assert step == self.step_done
        assert self.state is not None
        self.world.disk[folder] = (step, self.state)
        return self.world.shard(self)

    def do_export(self, generation: int, checkpoint: str, out: str) -> str:
        self.accept(generation)
        self.world.exported = self.world.disk[checkpoint]
        Path(out).mkdir()
        return out


@dataclass(eq=False, kw_only=True)
class Copy:
    """The state of a rank on its way to the keeper of its node."""

    process: Process
    keeper: KeeperAddress | None
    generation: int
    rank: int
    step: int
    state: str
    record: ShardRecord


@dataclass(eq=False)
class FakeWorker:
    """A process as the fleet hands it out."""

    actor: Process
    probe: Probe


class FakeCluster:
    """Nodes, processes, keepers, disk and the script of faults; also the `Runtime` and the fleet of the controller.

    Args:
        nodes: {node id: slots}.
        faults: the script.
        late: {call number: {node id: slots}}: capacity that appears later, at that `gather`.
        slow: looks of the driver that a write to storage takes.

    Attributes:
        lag: looks of the driver for which a copy is on its way.
        hung: {what: seconds until a rank that hung in it was found}.
        host_memory: bytes that a worker finds free.
    """

    address = "10.0.0.1"
    local = False

    def __init__(
        self,
        nodes: dict[str, int],
        faults: Sequence[Fault] = (),
        late: dict[int, dict[str, int]] | None = None,
        slow: int = 0,
    ) -> None:
        self.clock = Clock()
        self.sleep = self.clock.sleep
        self.room = dict(nodes)
        self.faults = list(faults)
        self.late = dict(late or {})
        self.calls: list[str] = []
        self.lag = 0
        self.hung: dict[str, float] = {}
        self.size = 0
        self.host_memory = 1 << 40
        self.slow = slow
        self.fleet = self
        self.workers: list[FakeWorker] = []
        self.dead_nodes: set[str] = set()
        self.killed: list[int] = []
        self.disk: dict[str, tuple[int, str]] = {}
        self.states: dict[tuple[int, tuple[ShardRecord, ...]], str] = {}
        self.exported: tuple[int, str] | None = None
        self.memory: FakeKeepers | None = None
        self.generations: list[int] = []
        self.closed = False
        self._pid = 100
        self.warming = False
        self.memory_of: dict[str, int] = {}

    # -- the fleet --------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[NodeInfo]:
        names = sorted({w.probe.node_id for w in self.workers})
        return [NodeInfo(node_id=n, address=n, total={}, free={}) for n in names]

    def staff(self, workers: int, *, spares: int, cp: int, timeout: float, check_stop: Callable[[], None]) -> None:
        check_stop()
        self._start(workers + spares)
        assert len(self.workers) >= workers

    def recruit(self, target: int) -> int:
        return self._start(target - len(self.workers))

    def dismiss(self, workers: Sequence[FakeWorker], kill: Callable[[str, int, float], bool]) -> None:
        for worker in workers:
            self.workers.remove(worker)
            kill(worker.probe.node_id, worker.probe.pid, 0.0)
            worker.actor.alive = False
            self.killed.append(worker.probe.pid)

    def drop_lost(self, among: Sequence[FakeWorker], seconds: float) -> None:
        self.workers = [w for w in self.workers if w not in among or (w.actor.alive and not w.actor.frozen)]

    def avoid(self, node_id: str) -> None:
        assert all(w.probe.node_id != node_id for w in self.workers), "workers there are in use"

    def lost_idle(self, among: Sequence[FakeWorker], seconds: float) -> list[FakeWorker]:
        return [w for w in among if not w.actor.alive or w.actor.frozen]

    def close(self) -> None:
        self.closed = True

    def _start(self, count: int) -> int:
        started = 0
        for node_id, slots in sorted(self.room.items()):
            used = sum(w.probe.node_id == node_id for w in self.workers)
            while used < slots and started < count and node_id not in self.dead_nodes:
                self._pid += 1
                probe = Probe(
                    node_id=node_id,
                    address=node_id,
                    pid=self._pid,
                    accelerators=(),
                    cpu_count=1,
                    memory=1 << 40,
                    host_memory=self.memory_of.get(node_id, self.host_memory),
                )
                self.workers.append(FakeWorker(Process(self, node_id, self._pid), probe))
                used, started = used + 1, started + 1
        self.workers.sort(key=lambda w: (w.probe.node_id, w.probe.pid))
        return started

    # -- the runtime ------------------------------------------------------------------------------------------------

    def ranks(self, members: Sequence[Member], generation: int, *, is_stopped: Callable[[Member], bool]) -> "FakeRanks":
        assert all(m.actor.alive for m in members), "a lost process is never a rank again"
        self.generations.append(generation)
        self.size = len(members)
        return FakeRanks(self, list(members), generation)

    def open_store(self) -> Any:
        return SimpleNamespace(port=1)

    def held(self) -> dict[str, int]:
        return {} if self.memory is None else {n: 1000 * len(slots) for n, slots in self.memory.held.items() if slots}

    def keepers(self, nodes: Sequence[NodeInfo], *, generation: int) -> "FakeKeepers":
        if self.memory is None:
            self.memory = FakeKeepers(self)
        for node in nodes:
            if node.node_id not in self.memory.addresses:
                self.memory.add(node)
        return self.memory

    # -- state ------------------------------------------------------------------------------------------------------

    def shard(self, process: Process) -> ShardRecord:
        size = self.size
        entry = ShardEntry(name="w", shape=(size,), dtype="float32", start=process.rank, stop=process.rank + 1)
        file = f"shard-g{process.generation:04d}-{process.rank:05d}"
        return ShardRecord(file=file, bytes=4, crc32=process.generation, entries=(entry,))

    def copy(self, process: Process, step: int) -> None:
        assert self.memory is not None
        assert process.state is not None
        if not process.uncopied:
            process.copying = Copy(
                process=process,
                keeper=process.keeper,
                generation=process.generation,
                rank=process.rank,
                step=step,
                state=process.state,
                record=self.shard(process),
            )
            self.memory.copies.append(process.copying)
            self.memory.settle()

    def lose_node(self, node_id: str) -> None:
        self.dead_nodes.add(node_id)
        for worker in self.workers:
            if worker.probe.node_id == node_id:
                worker.actor.alive = False
        if self.memory is not None:
            self.memory.lose(node_id)


class FakeRanks:
    """The membership: runs calls in rank order, and lets the script's faults happen."""

    def __init__(self, world: FakeCluster, members: list[Member], generation: int) -> None:
        self.world = world
        self.members = members
        self.generation = generation

    def gather(
        self,
        call: Callable[[Member], Any],
        *,
        what: str,
        only: Sequence[int] | None = None,
        patience: float = 1.0,
        meanwhile: Callable[[], None] | None = None,
        release: Callable[[], None] | None = None,
    ) -> list[Any]:
        world = self.world
        number = len(world.calls)
        world.calls.append(what)
        for node_id, slots in world.late.pop(number, {}).items():
            world.room[node_id] = slots
            world.dead_nodes.discard(node_id)
        chosen = [m for m in self.members if only is None or m.rank in only]
        raised = self._strike(what)
        if meanwhile is not None and number % 2:
            meanwhile()
        hangs = {m.rank: m.actor.hangs for m in chosen if m.actor.alive and m.actor.hangs}
        fails = raised or any(not m.actor.alive or m.actor.frozen or m.actor.hangs == "hang" for m in chosen)
        if what.startswith("step") and not fails:
            self._wait_for_copies(chosen, what, meanwhile)
        answers = []
        for member in chosen:
            process: Process = member.actor
            waits = what.startswith("step") and process.copying is not None  # a peer is lost: it gets no further
            if process.alive and not process.frozen and member.rank not in {*raised, *hangs} and not waits:
                answers.append(call(member)())
                process.calls_done[CALLS[what.split()[0]]] += 1
        if what.startswith("copy") and not fails:
            self._wait_for_copies(chosen, what, meanwhile)
        lost = [m.rank for m in chosen if not m.actor.alive or m.actor.frozen]
        if hangs and not lost and not raised:
            self._look_for(hangs, what, patience, meanwhile)
            lost = list(hangs)
        if lost or raised:
            rank = lost[0] if lost else next(iter(raised))
            raise WorkerError(
                f"{what} failed: rank {rank}",
                rank=rank,
                node=self.members[rank].probe.node_id,
                cause="scripted",
                lost_ranks=lost,
                raised_ranks=sorted(raised),
                fatal=raised.get(rank) in ("fatal", "damaged"),
                damaged=raised.get(rank) == "damaged",
            )
        return answers

    def _look_for(
        self, hangs: dict[int, str], what: str, patience: float, meanwhile: Callable[[], None] | None
    ) -> None:
        """Until the rules find every rank that hangs, and nobody else."""
        began, call = self.world.clock.now, CALLS[what.split()[0]]
        found: set[int] = set()
        while found != set(hangs):
            self.world.sleep(1.0)
            if meanwhile is not None:
                meanwhile()
            running = self.world.clock.now - began
            assert running < 3600, f"{what}: nobody sees that ranks {sorted(hangs)} hang"
            beats = {
                rank: {
                    "call": call,
                    "phase": COPY if kind == "hang in copy" else call,
                    "idle_seconds": running,
                    "longest": 0.1,
                    "calls_done": self.members[rank].actor.calls_done[call],
                    "call_seconds": running,
                }
                for rank, kind in hangs.items()
                if rank not in found
            }
            found |= set(stuck(beats, patience=patience, heartbeat=HEARTBEAT, running=running))
        self.world.hung[what] = self.world.clock.now - began

    def _wait_for_copies(self, chosen: Sequence[Member], what: str, meanwhile: Callable[[], None] | None) -> None:
        """As a rank before its update: until its copy is made, or is known not to be."""
        memory = self.world.memory
        for _ in range(20):
            if memory is not None:
                memory.settle()
            if all(m.actor.copying is None or m.actor.hangs for m in chosen):
                return
            if meanwhile is None:
                break
            meanwhile()
            self.world.sleep(1.0)
        raise AssertionError(f"{what}: a rank waits for ever for its copy, and the run with it")

    def _strike(self, what: str) -> dict[int, str]:
        raised: dict[int, str] = {}
        for fault in list(self.world.faults):
            seen = sum(fault.where in text for text in self.world.calls) - 1
            if fault.where not in what or seen != fault.at:
                continue
            self.world.faults.remove(fault)
            member = self.members[fault.rank % len(self.members)]
            match fault.kind:
                case "die":
                    member.actor.alive = False
                case "node":
                    self.world.lose_node(member.probe.node_id)
                case "freeze":
                    member.actor.frozen = True
                case "hang" | "hang in copy":
                    member.actor.hangs = fault.kind
                case "copy":
                    member.actor.uncopied = "the keeper left: scripted"
                case "keeper":
                    if self.world.memory is not None:
                        self.world.memory.lose(member.probe.node_id)
                case "keeper frozen":
                    if self.world.memory is not None and member.probe.node_id in self.world.memory.addresses:
                        self.world.memory.frozen[member.probe.node_id] = 3
                case "full":
                    if self.world.memory is not None:
                        self.world.memory.full += 1
                case _:
                    raised[member.rank] = fault.kind
        return raised

    def let_go(self, keeper: KeeperAddress) -> None:
        for member in self.members:
            process: Process = member.actor
            if process.alive and not process.frozen and process.keeper == keeper:
                process.copying, process.uncopied = None, "the writer was closed"

    def pass_over(self, keepers: Iterable[KeeperAddress]) -> None:
        """What is read here comes at once."""

    def freeze(self, seconds: float) -> list[int]:
        return [m.rank for m in self.members if not m.actor.alive or m.actor.frozen or m.actor.hangs]

    def abort(self, ranks: Sequence[int] | None = None) -> None:
        return


Key = tuple[int, int, int]
"""(step, generation, rank) of an image."""


@dataclass(eq=False)
class FakeKeepers:
    """Keepers with one replica on the next node. As the real ones: an image waits for the commit of the one before, a
    frozen keeper answers nothing and frees nobody, not even when it is dropped (Ray takes seconds to end it), one that
    is lost is told where it is asked.

    Attributes:
        frozen: {node: looks until its silence is noticed}.
        ending: keepers that were dropped while they were frozen.
        full: so many of the next replicas are refused.
        told: {node: manifests that its keeper heard of}.
    """

    world: FakeCluster
    addresses: dict[str, KeeperAddress] = field(default_factory=dict)
    node_of_rank: list[str] = field(default_factory=list)
    peers: dict[str, str | None] = field(default_factory=dict)
    generation: int = 0
    held: dict[str, dict[Key, ShardRecord]] = field(default_factory=dict)
    home: dict[Key, str] = field(default_factory=dict)
    manifests: dict[int, Manifest] = field(default_factory=dict)
    told: dict[str, list[Manifest]] = field(default_factory=dict)
    committed: tuple[int, int] = (-1, -1)
    abandoned: tuple[int, int] = (-1, -1)
    awaited: list[tuple[int, int]] = field(default_factory=list)
    looks: dict[tuple[int, int], int] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    refused: set[Key] = field(default_factory=set)
    gone: list[str] = field(default_factory=list)
    frozen: dict[str, int] = field(default_factory=dict)
    ending: list[KeeperAddress] = field(default_factory=list)
    full: int = 0
    made: int = 0
    closed: bool = False

    def add(self, node: NodeInfo) -> None:
        if node.node_id in self.world.dead_nodes:
            raise ClusterError(f"the keeper on node {node.node_id} does not start", node_id=node.node_id)
        if node.node_id not in self.addresses:
            self.made += 1
            self.addresses[node.node_id] = KeeperAddress(node_id=node.node_id, host="", port=self.made, unix="")
            self.held[node.node_id], self.told[node.node_id] = {}, []

    def begin(self, node: NodeInfo) -> None:
        if node.node_id not in self.world.dead_nodes:
            self.add(node)

    def drop(self, node_id: str) -> None:
        address = self.addresses.pop(node_id, None)
        if self.frozen.pop(node_id, None) is not None and address is not None:
            self.ending.append(address)
        self.held[node_id] = {}
        self.gone = [n for n in self.gone if n != node_id]
        self.settle()

    def lose(self, node_id: str) -> None:
        if node_id in self.addresses:
            self.frozen.pop(node_id, None)
            self.held[node_id] = {}
            self.gone.append(node_id)

    def answers(self, node_id: str) -> bool:
        return node_id in self.addresses and node_id not in self.gone and node_id not in self.frozen

    def silent(self) -> dict[str, KeeperAddress]:
        return {n: a for n, a in self.addresses.items() if n in self.frozen}

    def assign(self, generation: int, node_of_rank: Sequence[str], short: Collection[str] = ()) -> None:
        assert generation >= self.generation
        for node_id in [*self.addresses, *node_of_rank]:
            if not self.answers(node_id):
                raise KeeperLost(f"the keeper of {node_id} does not answer", node_id=node_id)
        newest = self.manifests.get(self.committed[1])
        if generation > self.generation:
            self.awaited = []
        elif newest is not None and newest.generation == generation:
            self.told |= {n: [newest] for n in self.addresses if newest not in self.told[n]}
        self.generation, self.node_of_rank = generation, list(node_of_rank)
        self.peers = replica_homes(list(dict.fromkeys(node_of_rank)), list(self.addresses), short)
        self.settle()
        for node_id in self.addresses:
            for key in list(self.held[node_id]):
                home = self.home[key]
                if home == node_id or key not in self.held.get(home, {}):
                    self._replicate(key, node_id)

    # -- copies -----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Whatever can move moves."""
        for copy in list(self.copies):
            node_id = copy.process.node_id
            if copy.generation < self.generation or copy is not copy.process.copying:
                self.copies.remove(copy)  # a zombie: refused
            elif copy.keeper in self.ending:
                continue
            elif node_id in self.gone or copy.keeper is None or copy.keeper != self.addresses.get(node_id):
                copy.process.copying, copy.process.uncopied = None, "the keeper left"
                self.copies.remove(copy)
            elif node_id not in self.frozen and not self._waits(copy):
                copy.process.copying = None
                self.copies.remove(copy)
                self._seal(copy)

    def _waits(self, copy: Copy) -> bool:
        """Whether an image of an earlier step waits for its commit."""
        return any(
            (generation, rank) == (copy.generation, copy.rank)
            and step < copy.step
            and (generation, step) > max(self.committed, self.abandoned)
            for step, generation, rank in self.held[copy.process.node_id]
        )

    def _seal(self, copy: Copy) -> None:
        key = copy.step, copy.generation, copy.rank
        self.home[key] = copy.process.node_id
        self.held[copy.process.node_id][key] = copy.record
        if self.full:
            self.full -= 1
            self.refused.add(key)
        else:
            self._replicate(key, copy.process.node_id)
        shards = self._shards(copy.step, copy.generation, [*self.addresses])
        if shards is not None:
            self.world.states[copy.step, shards] = copy.state

    def _replicate(self, key: Key, node_id: str) -> None:
        peer = self.peers.get(node_id)
        if peer is not None and self.answers(peer) and self.answers(node_id):
            self.held[peer][key] = self.held[node_id][key]
            self.refused.discard(key)

    def _complete(self, step: int, generation: int) -> tuple[ShardRecord, ...] | None:
        """The shards, if every keeper has those of its ranks, and its peer has them too."""
        for rank, node_id in enumerate(self.node_of_rank):
            key, peer = (step, generation, rank), self.peers.get(node_id)
            if not self.answers(node_id) or key not in self.held[node_id]:
                return None
            if peer is not None and key not in self.held.get(peer, {}):
                return None
        return self._shards(step, generation, list(self.addresses))

    def expect(self, step: int) -> None:
        self.awaited.append((step, self.generation))

    def poll(self, timeout: float = 0.0) -> list[Any]:
        self.world.sleep(timeout)
        for node_id in [n for n in self.frozen if n in self.addresses]:
            self.frozen[node_id] -= 1
        silent = [*self.gone, *(n for n, looks in self.frozen.items() if looks <= 0)]
        if silent:
            raise KeeperLost(f"the keeper of {silent[0]} is lost", node_id=silent[0])
        self.settle()
        found = []
        for step, generation in list(self.awaited):
            refused = [k for k in self.refused if k[:2] == (step, generation)]
            if refused:
                raise CopyRefused(
                    f"step {step} has no replica: no memory", step=step, node_id=self.node_of_rank[refused[0][2]]
                )
            shards = self._complete(step, generation)
            if shards is not None:
                self.looks[step, generation] = self.looks.get((step, generation), 0) + 1
            if shards is not None and self.looks[step, generation] > self.world.lag:
                self.awaited.remove((step, generation))
                found.append(SimpleNamespace(step=step, shards=shards, bytes=4, seconds=0.1))
        return found

    def commit(self, manifest: Manifest) -> None:
        if self.addresses and not any(self.answers(n) for n in self.addresses):
            node_id = next(iter(self.addresses))
            raise KeeperLost(f"the keeper of {node_id} does not answer", node_id=node_id)
        self.manifests[manifest.step] = manifest
        self.committed = manifest.age
        for node_id in filter(self.answers, self.addresses):
            self.told[node_id] = [*[m for m in self.told.get(node_id, []) if m.age != manifest.age][-1:], manifest]
        files = {s.file for s in manifest.shards}
        for slots in self.held.values():
            for key in [k for k in slots if (k[1], k[0]) <= manifest.age]:
                if key[0] != manifest.step or slots[key].file not in files:
                    del slots[key]
        self.settle()

    def abandon(self, step: int) -> None:
        self.awaited = [(s, generation) for s, generation in self.awaited if s > step]
        self.abandoned = max(self.abandoned, (self.generation, step))
        self.settle()

    # -- recovery, storage ------------------------------------------------------------------------------------------

    def newest(self, known: Sequence[int]) -> MemoryPoint | None:
        found: list[Manifest] = []
        nodes = [n for n in self.addresses if self.answers(n)]
        for step, generation in {(s, g) for n in nodes for s, g, _ in self.held[n]}:
            shards = self._shards(step, generation, nodes)
            if shards is None:
                continue
            told = [m for n in nodes for m in self.told[n] if m.step == step and m.shards == shards]
            if told:
                found.append(max(told, key=lambda m: m.age))
            elif step in known:
                found.append(
                    Manifest(
                        step=step, cursor={}, plan_hash="", generation=generation, run_id="", grid={}, shards=shards
                    )
                )
        best = max(found, key=lambda m: m.age, default=None)
        return None if best is None else MemoryPoint(manifest=best, holders={})

    def _shards(self, step: int, generation: int, nodes: Sequence[str]) -> tuple[ShardRecord, ...] | None:
        records = {}
        for node_id in nodes:
            for (s, g, rank), record in self.held[node_id].items():
                if (s, g) == (step, generation):
                    records[rank] = record
        if not records:
            return None
        size = next(iter(records.values())).entries[0].shape[0]
        return tuple(records[r] for r in sorted(records)) if sorted(records) == list(range(size)) else None

    def keep_only(self, point: MemoryPoint | None) -> None:
        if point is None:
            self.held, self.committed = {n: {} for n in self.addresses}, (-1, -1)
            self.told = {n: [] for n in self.addresses}
            return
        files = {s.file for s in point.manifest.shards}
        for node_id, slots in self.held.items():
            if node_id in self.addresses and not self.answers(node_id):
                raise KeeperLost(f"the keeper of {node_id} does not answer", node_id=node_id)
            for key in [k for k in slots if k[0] != point.manifest.step or slots[k].file not in files]:
                del slots[key]
        self.committed = point.manifest.age
        self.told = {n: [m for m in told if m.age == self.committed] for n, told in self.told.items()}

    def persist(self, manifest: Manifest, folder: str, *, commit: bool = False) -> Any:
        there = {
            r.file
            for n in self.addresses
            if self.answers(n)
            for (s, _, _), r in self.held[n].items()
            if s == manifest.step
        }
        for shard in manifest.shards:
            if shard.file not in there:
                raise CheckpointError(
                    f"{shard.file} of step {manifest.step} is held by no keeper", fix="write a newer step"
                )
        left = [self.world.slow]

        def poll() -> bool:
            left[0] -= 1
            if left[0] < 0:
                self.world.disk[folder] = (manifest.step, self.world.states[manifest.step, manifest.shards])
            return left[0] < 0

        def wait(timeout: float) -> bool:
            self.world.sleep(timeout if left[0] >= 0 else 0.0)
            return poll()

        if commit:  # whoever ordered that does not look
            while not poll():
                pass
        return SimpleNamespace(writers=2, poll=poll, wait=wait)

    def unreachable(self, seconds: float, suspects: Collection[str] = ()) -> list[str]:
        return [n for n in self.addresses if n in self.gone or (n in suspects and n in self.frozen)]

    def kill_process(self, node_id: str, pid: int, started: float) -> bool:
        return self.answers(node_id)

    def is_stopped(self, node_id: str, pid: int, started: float) -> bool:
        return any(w.probe.pid == pid and w.actor.frozen for w in self.world.workers)

    def beat(self) -> None:
        return

    def close(self) -> None:
        self.closed = True


class FakeCheckpoints(Checkpoints):
    """Checkpoints without files: the manifests that were committed, in memory."""

    def __init__(self, folder: Path, events: EventLog) -> None:
        super().__init__(Storage.of(folder / "checkpoints"), keep=3, events=events, say=lambda text: None)
        self.manifests: dict[str, Manifest] = {}

    def _search(self) -> Newest:
        if not self.manifests:
            return Newest(None, None, ())
        where, manifest = max(self.manifests.items(), key=lambda x: x[1].step)
        return Newest(Storage.of(where), manifest, ())

    def _store(self, manifest: Manifest, *, by: int) -> None:
        self.manifests[self.root.child(f"step-{manifest.step:08d}").where] = manifest
