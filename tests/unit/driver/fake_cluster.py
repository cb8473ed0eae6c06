"""A cluster without processes: workers, keepers, storage and a clock that the state machine cannot tell from real ones.

Training is a hash chain: the state after a step is a function of the state before and of the step's packs, so that a
step that is skipped, done twice or done from a wrong state shows in the final state. Every node has workers and a
keeper; a keeper's content dies with its node. Faults come from a script: at the n-th call of a kind, on some rank.
"""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from raycp.driver.checkpoints import Checkpoints
from raycp.driver.cluster import NodeInfo
from raycp.driver.keepers import KeeperLost
from raycp.driver.membership import Member
from raycp.errors import StaleGenerationError, WorkerError
from raycp.events import EventLog
from raycp.training.committed import Newest
from raycp.training.manifest import Manifest, ShardEntry, ShardRecord
from raycp.training.storage import Storage
from workers.memory_reader import MemoryPoint
from workers.messages import Probe, Rendezvous, StepReport, StepRequest
from workers.wire import KeeperAddress

START = "start"


def after(state: str, step: int, pack_ids: Sequence[int]) -> str:
    """The state after one more step."""
    return hashlib.sha256(f"{state}/{step}/{list(pack_ids)}".encode()).hexdigest()[:16]


@dataclass
class Fault:
    """What happens at the `at`-th call (from 0) whose text contains `where`.

    `kind`: "die" (the rank's process), "node" (all processes of its node, and its keeper), "freeze" (silent until it is
    killed), "raise" (an error of its own), "fatal" (one that comes again), "damaged" (what it
    read from storage), "keeper" (of its node), "copy" (its copies fail until it is attached to a keeper again).
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
    uncopied: str = ""
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
        self.uncopied = ""

    def do_attach(self, generation: int, keeper: KeeperAddress, secret: bytes) -> None:
        self.accept(generation)
        self.uncopied = ""

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
        assert request.step == self.step_done + 1, f"step {request.step} after {self.step_done}"
        self.state, self.step_done = after(self.state, request.step, request.pack_ids), request.step
        if request.snapshot and not self.uncopied:
            self.world.seal(self, request.step)
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
        self.world.seal(self, step)

    def do_save(self, generation: int, step: int, folder: str) -> ShardRecord:
        self.accept(generation)
        assert step == self.step_done
        assert self.state is not None
        self.world.disk[folder] = (step, self.state)
        return self.world.shard(self)

    def do_export(self, generation: int, checkpoint: str, out: str) -> str:
        self.accept(generation)
        self.world.exported = self.world.disk[checkpoint]
        return out


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
    """

    address = "10.0.0.1"
    local = False

    def __init__(
        self, nodes: dict[str, int], faults: Sequence[Fault] = (), late: dict[int, dict[str, int]] | None = None
    ) -> None:
        self.clock = Clock()
        self.sleep = self.clock.sleep
        self.room = dict(nodes)
        self.faults = list(faults)
        self.late = dict(late or {})
        self.calls: list[str] = []
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

    # -- the fleet --------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[NodeInfo]:
        names = sorted({w.probe.node_id for w in self.workers})
        return [NodeInfo(node_id=n, address=n, total={}, free={}) for n in names]

    def staff(self, workers: int, *, spares: int, cp: int, timeout: float) -> None:
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
                    host_memory=1 << 40,
                )
                self.workers.append(FakeWorker(Process(self, node_id, self._pid), probe))
                used, started = used + 1, started + 1
        self.workers.sort(key=lambda w: (w.probe.node_id, w.probe.pid))
        return started

    # -- the runtime ------------------------------------------------------------------------------------------------

    def ranks(self, members: Sequence[Member], generation: int, *, is_stopped: Callable[[Member], bool]) -> "FakeRanks":
        assert all(m.actor.alive for m in members), "a lost process is never a rank again"
        self.generations.append(generation)
        return FakeRanks(self, list(members), generation)

    def open_store(self) -> Any:
        return SimpleNamespace(port=1)

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

    @property
    def size(self) -> int:
        assert self.memory is not None
        return len(self.memory.node_of_rank)

    def seal(self, process: Process, step: int) -> None:
        assert self.memory is not None
        assert process.state is not None
        self.memory.seal(process, step)

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
        answers = []
        for member in chosen:
            process: Process = member.actor
            if process.alive and not process.frozen and member.rank not in raised:
                answers.append(call(member)())
        lost = [m.rank for m in chosen if not m.actor.alive or m.actor.frozen]
        if lost or raised:
            rank = lost[0] if lost else next(iter(raised))
            raise WorkerError(
                f"{what} failed: rank {rank}",
                rank=rank,
                node=self.members[rank].probe.node_id,
                cause="scripted",
                lost_ranks=lost,
                fatal=raised.get(rank) in ("fatal", "damaged"),
                damaged=raised.get(rank) == "damaged",
            )
        return answers

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
                case "copy":
                    member.actor.uncopied = "the keeper left: scripted"
                case "keeper":
                    if self.world.memory is not None:
                        self.world.memory.lose(member.probe.node_id)
                case _:
                    raised[member.rank] = fault.kind
        return raised

    def freeze(self, seconds: float) -> list[int]:
        return [m.rank for m in self.members if not m.actor.alive or m.actor.frozen]

    def abort(self, ranks: Sequence[int] | None = None) -> None:
        return


@dataclass(eq=False)
class FakeKeepers:
    """Keepers with one replica on the next node; a step is held until a newer one is committed."""

    world: FakeCluster
    addresses: dict[str, KeeperAddress] = field(default_factory=dict)
    node_of_rank: list[str] = field(default_factory=list)
    generation: int = 0
    held: dict[str, dict[tuple[int, int, int], ShardRecord]] = field(default_factory=dict)
    manifests: dict[int, Manifest] = field(default_factory=dict)
    awaited: list[tuple[int, int]] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    closed: bool = False

    def add(self, node: NodeInfo) -> None:
        self.addresses[node.node_id] = KeeperAddress(node_id=node.node_id, host="", port=1, unix="")
        self.held.setdefault(node.node_id, {})

    def begin(self, node: NodeInfo) -> None:
        if node.node_id not in self.addresses:
            self.add(node)

    def drop(self, node_id: str) -> None:
        self.addresses.pop(node_id, None)
        self.gone = [n for n in self.gone if n != node_id]

    def lose(self, node_id: str) -> None:
        self.held[node_id] = {}
        self.gone.append(node_id)

    def assign(self, generation: int, node_of_rank: Sequence[str]) -> None:
        assert generation >= self.generation
        self.generation, self.node_of_rank = generation, list(node_of_rank)

    def seal(self, process: Process, step: int) -> None:
        if process.generation < self.generation:
            return  # a zombie: refused
        nodes = [n for n in sorted(self.addresses) if n not in self.gone]
        if process.node_id not in nodes:
            return
        peer = nodes[(nodes.index(process.node_id) + 1) % len(nodes)]
        record = self.world.shard(process)
        for node_id in {process.node_id, peer}:
            self.held[node_id][step, process.generation, process.rank] = record
        shards = self._shards(step, process.generation)
        if shards is not None:
            assert process.state is not None
            self.world.states[step, shards] = process.state

    def expect(self, step: int) -> None:
        self.awaited.append((step, self.generation))

    def poll(self, timeout: float = 0.0) -> list[Any]:
        if self.gone:
            node_id = self.gone[0]
            raise KeeperLost(f"the keeper of {node_id} is gone", node_id=node_id)
        self.world.sleep(timeout)
        found = []
        for step, generation in list(self.awaited):
            shards = self._shards(step, generation)
            if shards is not None:
                self.awaited.remove((step, generation))
                found.append(SimpleNamespace(step=step, shards=shards, bytes=4, seconds=0.1))
        return found

    def commit(self, manifest: Manifest) -> None:
        self.manifests[manifest.step] = manifest
        for slots in self.held.values():
            for key in [k for k in slots if k[0] < manifest.step]:
                del slots[key]

    def abandon(self, step: int) -> None:
        self.awaited = [(s, generation) for s, generation in self.awaited if s > step]

    def newest(self, known: Sequence[int]) -> MemoryPoint | None:
        found: list[Manifest] = []
        for step, generation in {(s, g) for slots in self.held.values() for s, g, _ in slots}:
            shards = self._shards(step, generation)
            if shards is None:
                continue
            manifest = self.manifests.get(step)
            if manifest is not None and manifest.shards == shards:
                found.append(manifest)
            elif step in known:
                found.append(
                    Manifest(
                        step=step, cursor={}, plan_hash="", generation=generation, run_id="", grid={}, shards=shards
                    )
                )
        best = max(found, key=lambda m: (m.step, m.generation), default=None)
        return None if best is None else MemoryPoint(manifest=best, holders={})

    def _shards(self, step: int, generation: int) -> tuple[ShardRecord, ...] | None:
        records = {}
        for slots in self.held.values():
            for (s, g, rank), record in slots.items():
                if (s, g) == (step, generation):
                    records[rank] = record
        if not records:
            return None
        size = next(iter(records.values())).entries[0].shape[0]
        return tuple(records[r] for r in sorted(records)) if sorted(records) == list(range(size)) else None

    def keep_only(self, point: MemoryPoint) -> None:
        for slots in self.held.values():
            for key in [k for k in slots if k[0] != point.manifest.step or k[1] != point.manifest.generation]:
                del slots[key]

    def persist(self, manifest: Manifest, folder: str, *, commit: bool = False) -> Any:
        self.world.disk[folder] = (manifest.step, self.world.states[manifest.step, manifest.shards])
        return SimpleNamespace(poll=lambda: True, wait=lambda timeout: True)

    def unreachable(self, seconds: float, suspects: Collection[str] = ()) -> list[str]:
        return [n for n in self.addresses if n in self.gone]

    def kill_process(self, node_id: str, pid: int, started: float) -> bool:
        return node_id in self.addresses

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

    def find(self) -> Newest:
        if not self.manifests:
            return Newest(None, None, ())
        where, manifest = max(self.manifests.items(), key=lambda x: x[1].step)
        return Newest(Storage.of(where), manifest, ())

    def commit(self, manifest: Manifest, *, began: float, stall_seconds: float) -> None:
        where = self.root.child(f"step-{manifest.step:08d}").where
        self.manifests[where] = manifest
        self.newest, self.newest_step = where, manifest.step
        self._events.write("checkpoint", step=manifest.step, path=where)
