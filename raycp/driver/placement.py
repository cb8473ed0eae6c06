"""Where ranks go: ranks per node, one placement group per node, and the order of ranks.

Guarantees: the ranks of one CP group lie on as few nodes as possible and next to each other; each rank owns one
accelerator (or CPU); ranks are ordered by (node, accelerator id), never by bundle or creation order; a placement group
never spans nodes, so that dropping a node drops one group and leaves the other actors where they are.
`allocate` and `order_ranks` are pure. Costs about 10 ms of scheduling per node.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from raycp.driver.cluster import NodeInfo
from raycp.errors import ClusterError
from workers.messages import Probe


@dataclass(frozen=True, kw_only=True)
class NodeShare:
    """How many ranks a node gets."""

    node: NodeInfo
    ranks: int


def slots(node: NodeInfo, resource: str | None, *, free: bool) -> int:
    """Ranks that a node can hold: one accelerator and one CPU each. `free`: of what is unused now."""
    have = node.free if free else node.total
    cpus = int(have.get("CPU", 0.0))
    return cpus if resource is None else min(cpus, int(have.get(resource, 0.0)))


def describe_slots(nodes: Sequence[NodeInfo], resource: str | None) -> str:
    """What each node offers, for an error message."""
    name = resource or "CPU"
    parts = [f"{n.address} ({n.node_id[:8]}): {n.total.get('CPU', 0):g} CPU" for n in nodes]
    if resource is not None:
        parts = [f"{p}, {n.total.get(name, 0):g} {name}" for p, n in zip(parts, nodes, strict=True)]
    return "; ".join(parts) or "no live node"


def allocate(nodes: Sequence[NodeInfo], workers: int, resource: str | None, *, cp: int) -> list[NodeShare] | None:
    """Ranks per node, in node order, or None if the free slots do not suffice; shared out as by `share_out`."""
    by_address = sorted(nodes, key=lambda n: (n.address, n.node_id))
    takes = share_out({n.node_id: slots(n, resource, free=True) for n in by_address}, workers, cp=cp)
    if takes is None:
        return None
    return [NodeShare(node=n, ranks=takes[n.node_id]) for n in by_address if takes.get(n.node_id)]


def share_out(room: Mapping[str, int], workers: int, *, cp: int) -> dict[str, int] | None:
    """How many ranks each node gets, or None if there is no room.

    Nodes with the most room come first, so that the fewest nodes are used; while another node is needed, a node
    gives a multiple of `cp` ranks if it can, so that a CP group is cut over nodes only where it must be.

    Args:
        room: {node: ranks that it can hold}; earlier nodes win ties.
        workers: ranks to place.
        cp: ranks of one CP group.
    """
    left = workers
    takes: dict[str, int] = {}
    for node in sorted(room, key=lambda n: -room[n]):
        take = min(room[node], left)
        if take < left and take >= cp:
            take -= take % cp
        takes[node] = take
        left -= take
    for node in takes:  # whole groups did not fit: fill up with what rounding left
        more = min(room[node] - takes[node], left)
        takes[node] += more
        left -= more
    return None if left else takes


def order_ranks(probes: Sequence[Probe], node_order: Sequence[str]) -> list[int]:
    """Indices of `probes` in rank order: by node (as in `node_order`), then accelerator id as a number."""
    place = {node_id: i for i, node_id in enumerate(node_order)}

    def key(index: int) -> tuple[int, tuple[int, ...], int]:
        probe = probes[index]
        ids = tuple(int(a) if a.isdigit() else 0 for a in probe.accelerators)
        return (place[probe.node_id], ids, index)

    return sorted(range(len(probes)), key=key)


class Reservation:
    """The placement groups of some workers: one per node."""

    def __init__(self, shares: Sequence[NodeShare], groups: Sequence[PlacementGroup]) -> None:
        self.shares = list(shares)
        self._groups = list(groups)
        self._waiting = [g.ready() for g in groups]

    @classmethod
    def begin(cls, shares: Sequence[NodeShare], resource: str | None) -> "Reservation":
        """Asks for every node's bundles; does not wait."""
        made: list[PlacementGroup] = []
        for share in shares:
            bundle = {"CPU": 1.0} if resource is None else {"CPU": 1.0, resource: 1.0}
            made.append(
                placement_group(
                    [dict(bundle)] * share.ranks,
                    strategy="STRICT_PACK",
                    bundle_label_selector=[{"ray.io/node-id": share.node.node_id}] * share.ranks,
                )
            )
        return cls(shares, made)

    @classmethod
    def make(
        cls,
        shares: Sequence[NodeShare],
        resource: str | None,
        *,
        timeout: float,
        check_stop: Callable[[], None] = lambda: None,
    ) -> "Reservation":
        """Reserves every node's bundles.

        Args:
            shares: which node gives how many.
            resource: of a bundle, beside a CPU.
            timeout: seconds to wait.
            check_stop: called about once a second meanwhile; what it raises ends this.

        Raises:
            ClusterError: a node could not give them within `timeout` seconds.
        """
        reservation = cls.begin(shares, resource)
        deadline = time.monotonic() + timeout
        try:
            while not reservation.ready(max(0.0, min(1.0, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    raise ClusterError(
                        f"the cluster did not give {sum(s.ranks for s in shares)} bundles of "
                        f"{resource or 'CPU'} within {timeout:.0f} s",
                        fix="wait until other jobs have ended, or ask for fewer workers",
                    )
                check_stop()
        except BaseException:
            reservation.release()
            raise
        return reservation

    def ready(self, timeout: float) -> bool:
        """Whether all bundles are there, after waiting `timeout` seconds at most."""
        if self._waiting:
            done, self._waiting = ray.wait(self._waiting, num_returns=len(self._waiting), timeout=timeout)
            ray.get(done)
        return not self._waiting

    def slots(self) -> list[tuple[NodeInfo, Any, int]]:
        """(node, placement group, bundle index) of every rank to be created."""
        return [
            (share.node, group, index)
            for share, group in zip(self.shares, self._groups, strict=True)
            for index in range(share.ranks)
        ]

    def release(self, nodes: Collection[str] | None = None) -> None:
        """Gives the bundles of these nodes (None: of all) back. Actors in them are killed by Ray."""
        kept = []
        for share, group in zip(self.shares, self._groups, strict=True):
            if nodes is not None and share.node.node_id not in nodes:
                kept.append((share, group))
                continue
            remove_placement_group(group)
        self.shares = [share for share, _ in kept]
        self._groups = [group for _, group in kept]
