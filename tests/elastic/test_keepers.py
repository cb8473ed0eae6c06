"""Keepers on a real Ray cluster of three nodes (on one host): who outlives whom, who is found, who is refused."""

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from raycp.driver.cluster import NodeInfo, live_nodes
from raycp.driver.keepers import Collected, Keepers
from tests.snapshots import SECRET, SHAPES, Ranks, manifest_of, whole
from workers.memory_reader import MemoryPoint, MemoryReader

DRIVER = """
import sys, time
import ray
from raycp.driver.cluster import live_nodes
from tests.elastic.test_keepers import commit, start, training_nodes
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
keepers, ranks = start(sys.argv[2], generation=1, ttl=float(sys.argv[3]))
for step in (1, 2):
    commit(keepers, ranks, step)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=2)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


def training_nodes() -> list[NodeInfo]:
    return [n for n in live_nodes() if n.total.get("CPU")]


def start(name: str, *, generation: int, ttl: float = 300.0, checkpoints: str = "/nowhere") -> tuple[Keepers, Ranks]:
    """Two ranks on each of two nodes, and their keepers."""
    nodes = training_nodes()[:2]
    keepers = Keepers.start(
        nodes,
        run_id=name,
        namespace=f"raycp-{name}",
        secret=SECRET,
        generation=generation,
        ttl=ttl,
        checkpoints=checkpoints,
    )
    homes = [n.node_id for n in nodes for _ in range(2)]
    keepers.assign(generation, homes)
    return keepers, Ranks([keepers.addresses[h] for h in homes], generation=generation)


def collect(keepers: Keepers, step: int, timeout: float = 20.0) -> Collected:
    found = keepers.poll(timeout)
    assert [c.step for c in found] == [step]
    return found[0]


def commit(keepers: Keepers, ranks: Ranks, step: int, *, generation: int = 1) -> Any:
    ranks.snapshot(step)
    keepers.expect(step)
    assert ranks.wait() == [None] * 4
    manifest = manifest_of(step, collect(keepers, step).shards, generation=generation)
    keepers.commit(manifest)
    return manifest


def assert_holds(point: MemoryPoint | None, step: int, near: str = "") -> None:
    assert point is not None
    assert point.manifest.step == step
    reader = MemoryReader(point.manifest, point.holders, secret=SECRET, near=near)
    for name in SHAPES:
        assert torch.equal(reader.read(name), whole(name, step))
    reader.close()


def keeper_pids(name: str) -> dict[str, int]:
    """By node id."""
    from ray.util.state import list_actors

    return {
        a.name.removeprefix("keeper-"): int(a.pid)
        for a in list_actors(detail=True, limit=1000)
        if a.ray_namespace == f"raycp-{name}" and a.state == "ALIVE"
    }


def test_steps_are_collected_committed_and_read_back(cluster: Cluster) -> None:
    keepers, ranks = start("plain", generation=1)
    for step in (1, 2, 3):
        manifest = commit(keepers, ranks, step)
    point = keepers.newest()
    assert point is not None
    assert point.manifest == manifest
    assert {len(homes) for homes in point.holders.values()} == {2}
    for near in keepers.addresses:
        assert_holds(point, 3, near)
    assert keepers.poll(0.0) == []
    keepers.close()
