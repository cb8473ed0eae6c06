"""Copies of the state in memory, decided: which node keeps whose replicas, which step is held whole, what it all costs.

Guarantees: functions of what the keepers report; nothing here asks anybody. Costs nothing worth measuring.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from raycp.training.manifest import Manifest, ShardRecord, ShardSum, coverage_problem, layout_sum, shard_file
from workers.keeper import Inventory
from workers.memory_reader import MemoryPoint
from workers.messages import Probe
from workers.wire import KeeperAddress

SHARE_OF_HOST = 0.5
"""Of the free memory of a node: what copies may take."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """A step that all keepers hold: it may be committed.

    Attributes:
        step: optimizer steps done.
        shards: of all ranks, in rank order.
        bytes: of all images.
        seconds: from `expect` to the last keeper's answer.
    """

    step: int
    shards: tuple[ShardRecord, ...]
    bytes: int
    seconds: float


class Layouts:
    """The entries of the shards of one generation, which stay the same from step to step: each travels once."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, ShardRecord]] = {}

    def sums(self, generation: int, ranks: Sequence[int]) -> dict[str, int]:
        """By file, of those that are known: checksum of the entries."""
        files = [shard_file(generation, rank) for rank in ranks]
        return {file: self._known[file][0] for file in files if file in self._known}

    def whole(self, told: ShardRecord | ShardSum) -> ShardRecord:
        """The record that a keeper told, with its entries."""
        if isinstance(told, ShardSum):
            return told.of(self._known[told.file][1])
        self._known[told.file] = layout_sum(told.entries), told
        return told


def newest_point(
    held: Mapping[KeeperAddress, Inventory], *, run_id: str, known: Collection[int] | None = None
) -> MemoryPoint | None:
    """The newest step of which every row is held.

    Args:
        held: what each keeper has.
        run_id: of the run.
        known: never committed steps that may count, since the driver has their reports; None: all of them.

    Committed steps count by their manifest. A step that was never committed counts if all its shards are there and
    cover every row: the driver died, or the keepers of a node, before the commit; `cursor`, `grid` and `extra` of its
    manifest are empty then. It does not count while it is held by fewer keepers than the newest committed one, which is
    given up for it: a second loss would take both. Newer is what has the greater (generation, step).
    """
    homes: dict[tuple[int, str, int], list[KeeperAddress]] = {}
    loose: dict[tuple[int, int], dict[str, set[ShardRecord]]] = {}
    manifests: dict[tuple[int, int], Manifest] = {}
    for address, inventory in held.items():
        manifests |= {m.age: m for m in inventory.manifests}
        for shard in inventory.shards:
            home = homes.setdefault((shard.step, shard.record.file, shard.record.crc32), [])
            home.insert(len(home) if shard.replica else 0, address)
            files = loose.setdefault((shard.generation, shard.step), {})
            files.setdefault(shard.record.file, set()).add(shard.record)
    committed = set(manifests)
    newest = manifests[max(manifests)] if manifests else None
    for (generation, step), files in loose.items():
        records = [record for found in files.values() for record in found]
        if known is not None and step not in known:
            continue
        if (generation, step) in committed or len(records) > len(files) or coverage_problem(records):
            continue
        manifests[generation, step] = Manifest(
            step=step,
            generation=generation,
            run_id=run_id,
            cursor={},
            grid={},
            plan_hash="" if newest is None else newest.plan_hash,
            fingerprint={} if newest is None else newest.fingerprint,
            shards=tuple(sorted(records, key=lambda r: r.file)),
        )
    whole = []
    for age in sorted(manifests, reverse=True):
        manifest = manifests[age]
        holders = {s.file: homes.get((manifest.step, s.file, s.crc32), []) for s in manifest.shards}
        if all(holders.values()):
            whole.append(MemoryPoint(manifest=manifest, holders=holders))
    safe = next((p.homes for p in whole if p.manifest.age in committed), 0)
    return next((p for p in whole if p.manifest.age in committed or p.homes >= safe), None)


def replica_homes(
    nodes_with_ranks: Sequence[str], nodes: Sequence[str], short: Collection[str] = ()
) -> dict[str, str | None]:
    """Where each node's replicas go: the next node with ranks; another node if only one has ranks.

    Args:
        nodes_with_ranks: node ids, in rank order.
        nodes: all nodes that have a keeper.
        short: nodes without ranks that lack the memory for replicas (`short_of_room`).
    """
    homes: dict[str, str | None] = dict.fromkeys(nodes)
    for index, node_id in enumerate(nodes_with_ranks):
        after = nodes_with_ranks[(index + 1) % len(nodes_with_ranks)]
        others = (n for n in sorted(nodes) if n != node_id and n not in short)
        homes[node_id] = after if after != node_id else next(others, None)
    return homes


class Room(Enum):
    """What a world's nodes have memory for."""

    AMPLE = "ample"
    """Copies of every step, also while a checkpoint is written."""
    TIGHT = "tight"
    """Copies, but none while a checkpoint is written: the interval between them grows by that time."""
    NONE = "none"
    """No copies: steps are saved by checkpoints only."""


@dataclass(frozen=True, kw_only=True)
class SnapshotBudget:
    """What snapshots cost a node.

    Attributes:
        image: bytes of one rank's image.
        needed: bytes of all images that the fullest node may hold at once, if copies are made of every step.
        available: bytes that it may use.
        room: what follows from it.
        message: the same in words, where the room is not ample; else "".
    """

    image: int
    needed: int
    available: int
    room: Room
    message: str


def snapshot_budget(state_bytes: int, ranks_on_node: int, world: int, nodes: int, available: int) -> SnapshotBudget:
    """Whether a node has memory for its share of the copies.

    For each rank: two own images (the committed one and the next), one more while a checkpoint is written, and, with
    several nodes, two replicas of a rank of the node before.

    Args:
        state_bytes: of the whole training state (parameters and moments), once.
        ranks_on_node: most ranks of one node.
        world: ranks of the run.
        nodes: nodes with ranks.
        available: bytes of the node that copies may take.
    """
    image = -(-state_bytes // world)
    images = 5 if nodes > 1 else 3
    needed, least = (n * ranks_on_node * image for n in (images, images - 1))
    room, follows = Room.AMPLE, ""
    if needed > available >= least:
        room, follows = (
            Room.TIGHT,
            f"there is room for {images - 1}, so no copy is made while a checkpoint is written, and the interval "
            "between copies grows by that time; a fault meanwhile costs the steps since the last one",
        )
    elif needed > available:
        room, follows = (
            Room.NONE,
            "steps are saved by checkpoints only, every elastic.checkpoint_every steps",
        )
    message = follows and (
        f"copies of the state in memory need {needed / 2**30:.1f} GiB on a node with {ranks_on_node} rank(s) "
        f"({images} x {image / 2**30:.2f} GiB for each), {available / 2**30:.1f} GiB are free: {follows}"
    )
    return SnapshotBudget(image=image, needed=needed, available=available, room=room, message=message)


def budget_of(takes: Mapping[str, int], free: Mapping[str, int], state_bytes: int) -> SnapshotBudget:
    """As `snapshot_budget`, for a world.

    Args:
        takes: {node id: ranks there}.
        free: {node id: bytes} that were free there before the run took any.
        state_bytes: of the whole training state.
    """
    ranks = {node_id: count for node_id, count in takes.items() if count}
    available = int(SHARE_OF_HOST * min(free[node_id] for node_id in ranks))
    return snapshot_budget(state_bytes, max(ranks.values()), sum(ranks.values()), len(ranks), available)


def short_of_room(takes: Mapping[str, int], free: Mapping[str, int], state_bytes: int) -> frozenset[str]:
    """Nodes without ranks, those of spares, that lack the memory for two replicas of each rank of a run that has all
    its ranks on one node. Arguments as for `budget_of`.
    """
    beside = {node_id: there for node_id, there in free.items() if not takes.get(node_id)}
    return frozenset(node_id for node_id, there in beside.items() if SHARE_OF_HOST * there < 2 * state_bytes)


def most_free(probes: Sequence[Probe], known: Mapping[str, int]) -> dict[str, int]:
    """{node id: bytes}: the most that a worker found free there when it started, and that was known before: one that
    comes later finds the run itself there, and its copies.
    """
    free = dict(known)
    for probe in probes:
        free[probe.node_id] = max(probe.host_memory, free.get(probe.node_id, 0))
    return free
