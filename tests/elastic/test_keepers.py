"""Keepers on a real Ray cluster of three nodes (on one host): who outlives whom, who is found, who is refused."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from raycp.driver import keepers as module
from raycp.driver.cluster import NodeInfo, live_nodes
from raycp.driver.keeper_calls import find_keepers
from raycp.driver.keepers import Collected, KeeperLost, Keepers
from raycp.errors import CheckpointError, StaleGenerationError
from raycp.training.checkpoint import newest, step_folder
from tests import snapshots
from tests.elastic.leftovers import alive
from tests.snapshots import SECRET, SHAPES, Ranks, manifest_of
from workers.memory_reader import MemoryPoint

BIG = {"param/w": (8192, 1024), "param/x": (8192, 1024)}  # 64 MiB
ROOT = Path(__file__).parents[2]
DRIVER = """
import sys, time
import ray
from tests.elastic.test_keepers import commit, start
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
keepers, ranks = start(sys.argv[2], generation=1, ttl=float(sys.argv[3]), checkpoints=sys.argv[4])
for step in (1, 2):
    commit(keepers, ranks, step)
print("ready", flush=True)
time.sleep(600)
"""


def training_nodes() -> list[NodeInfo]:
    return [n for n in live_nodes() if n.total.get("CPU")]


def start(
    name: str,
    *,
    generation: int,
    ttl: float = 300.0,
    checkpoints: str = "/nowhere",
    unresponsive_after: float = module.ORDER_SECONDS,
) -> tuple[Keepers, Ranks]:
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
        unresponsive_after=unresponsive_after,
    )
    homes = [n.node_id for n in nodes for _ in range(2)]
    keepers.assign(generation, homes)
    return keepers, Ranks([keepers.addresses[h] for h in homes], generation=generation)


def collect(keepers: Keepers, step: int, timeout: float = 20.0) -> Collected:
    found = keepers.poll(timeout)
    assert [c.step for c in found] == [step]
    return found[0]


def commit(
    keepers: Keepers, ranks: Ranks, step: int, *, generation: int = 1, shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> Any:
    ranks.snapshot(step, shapes)
    keepers.expect(step)
    assert ranks.wait() == [None] * 4
    manifest = manifest_of(step, collect(keepers, step).shards, generation=generation)
    keepers.commit(manifest)
    return manifest


def assert_holds(point: MemoryPoint | None, step: int, near: str = "") -> None:
    assert point is not None
    snapshots.assert_holds(point, step, near=near)


def keeper_pids(name: str) -> dict[str, int]:
    """Processes of the keepers, by node id."""
    from ray._private.state import actors

    known = actors()
    return {n: int(known[h._actor_id.hex()]["Pid"]) for n, h in find_keepers(f"raycp-{name}").items()}


def ended(pids: dict[str, int], seconds: float = 10.0) -> bool:
    """Whether all these processes end in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids.values()):
            return True
        time.sleep(0.05)
    return False


def first_driver(address: str, name: str, *, ttl: float, checkpoints: str) -> subprocess.Popen[str]:
    """A driver of its own, which has committed steps 1 and 2."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, address, name, str(ttl), checkpoints],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def replace(keepers: Keepers, node_id: str, ranks: Ranks, *, copies: int) -> Ranks:
    """Another keeper on a node, and the ranks attached anew when it has so many copies of what the other node's ranks
    had sent before.
    """
    ranks.close()
    homes = [n.node_id for n in training_nodes()[:2] for _ in range(2)]
    keepers.add(next(n for n in training_nodes() if n.node_id == node_id))
    keepers.assign(1, homes)
    deadline = time.monotonic() + 20
    while len(keepers._inventories()[node_id].shards) < copies:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return Ranks([keepers.addresses[h] for h in homes])


def lost(keepers: Keepers, seconds: float) -> KeeperLost:
    with pytest.raises(KeeperLost) as caught:
        keepers.poll(seconds)
    return caught.value


def test_steps_are_collected_committed_and_read_back(three_nodes: Cluster) -> None:
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
    pids = keeper_pids("plain")
    assert set(pids) == set(keepers.addresses)
    for pid in pids.values():
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    for address in keepers.addresses.values():
        assert address.host == live_nodes()[0].address
    assert set(keepers.held_bytes().values()) == {2 * sum(s.bytes for s in manifest.shards)}
    keepers.close()
    keepers.close()
    assert ended(pids)
    assert keeper_pids("plain") == {}
    ranks.close()


def test_keepers_outlive_a_killed_driver_and_the_next_one_finds_the_newest_step(
    three_nodes: Cluster, tmp_path: Path
) -> None:
    process = first_driver(three_nodes.address, "orphan", ttl=300.0, checkpoints=str(tmp_path))
    pids = keeper_pids("orphan")
    assert len(pids) == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(2.0)
    keepers, ranks = start("orphan", generation=2)
    assert keeper_pids("orphan") == pids
    point = keepers.newest()
    assert_holds(point, 2)
    keepers.keep_only(point)
    assert_holds(keepers.newest(), 2)
    commit(keepers, ranks, 3, generation=2)
    assert_holds(keepers.newest(), 3)
    keepers.keep_only(None)
    assert keepers.newest() is None
    deadline = time.monotonic() + 20.0
    while any(keepers.held_bytes().values()) and time.monotonic() < deadline:  # one that is read goes then
        time.sleep(0.1)
    assert set(keepers.held_bytes().values()) == {0}
    keepers.close()
    assert ended(pids)
    ranks.close()


def test_the_generation_fence_refuses_a_driver_that_comes_back(three_nodes: Cluster) -> None:
    zombie, old_ranks = start("fence", generation=1)
    manifest = commit(zombie, old_ranks, 1)
    old_ranks.snapshot(2)
    old_ranks.wait()
    zombie.expect(2)
    keepers, ranks = start("fence", generation=2)
    for refused in (
        lambda: zombie.commit(manifest),
        lambda: zombie.assign(1, [*keepers.addresses]),
        lambda: Keepers.start(
            training_nodes()[:2],
            run_id="fence",
            namespace="raycp-fence",
            secret=SECRET,
            generation=1,
            ttl=300.0,
            checkpoints="/nowhere",
        ),
    ):
        with pytest.raises(StaleGenerationError, match="generation 1 was fenced off: generation 2"):
            refused()
    with pytest.raises(StaleGenerationError):
        zombie.keep_only(None)
    with pytest.raises(StaleGenerationError):
        zombie.persist(manifest, "/nowhere")
    assert not zombie.kill_process(next(iter(keepers.addresses)), os.getpid(), psutil.Process().create_time())
    zombie.close()  # ends nothing
    old_ranks.snapshot(3)
    assert all(old_ranks.wait())
    deadline = time.monotonic() + 10.0  # it was complete before the fence, and counts once it is as safe as step 1
    while (point := keepers.newest()) is not None and point.manifest.step < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert_holds(keepers.newest(), 2)
    commit(keepers, ranks, 3, generation=2)
    assert_holds(keepers.newest(), 3)
    keepers.close()
    for some in (ranks, old_ranks):
        some.close()


def test_a_killed_keeper_is_lost_and_another_one_takes_its_place(three_nodes: Cluster) -> None:
    keepers, ranks = start("lost", generation=1)
    commit(keepers, ranks, 1)
    victim = next(iter(keepers.addresses))
    pids = keeper_pids("lost")
    os.kill(pids[victim], signal.SIGKILL)
    keepers.expect(2)
    began = time.monotonic()
    error = lost(keepers, 20.0)
    assert time.monotonic() - began < 5
    assert error.node_id == victim
    keepers.drop(victim)
    assert_holds(keepers.newest(), 1)  # its replicas are on the other node
    keepers.add(next(n for n in training_nodes() if n.node_id == victim))
    homes = [n.node_id for n in training_nodes()[:2] for _ in range(2)]
    keepers.assign(1, homes)  # the same generation: the ranks go on
    ranks.close()
    ranks = Ranks([keepers.addresses[h] for h in homes])
    ranks.snapshot(2)
    assert ranks.wait() == [None] * 4
    assert len(collect(keepers, 2).shards) == 4
    keepers.close()
    ranks.close()


def test_a_new_keeper_knows_that_the_step_whose_replicas_it_takes_over_is_committed(three_nodes: Cluster) -> None:
    """It waited for that commit before it took replicas of the next step, and ranks stood in the copy for ever."""
    keepers, ranks = start("joined", generation=1)
    commit(keepers, ranks, 1)
    victim = next(iter(keepers.addresses))
    os.kill(keeper_pids("joined")[victim], signal.SIGKILL)
    keepers.drop(victim)
    ranks = replace(keepers, victim, ranks, copies=2)
    for step in (2, 3):
        commit(keepers, ranks, step)
    assert_holds(keepers.newest(), 3)
    keepers.close()
    ranks.close()


def test_a_new_keeper_knows_which_steps_were_given_up_before_it_came(three_nodes: Cluster) -> None:
    """Another way into the same wait: the step that was given up with the old keeper was copied to the new one."""
    keepers, ranks = start("given-up", generation=1)
    commit(keepers, ranks, 1)
    victim = next(iter(keepers.addresses))
    ranks.snapshot(2)
    keepers.expect(2)
    assert ranks.wait() == [None] * 4
    os.kill(keeper_pids("given-up")[victim], signal.SIGKILL)
    keepers.drop(victim)
    keepers.abandon(2)
    ranks = replace(keepers, victim, ranks, copies=4)
    for step in (3, 4):
        commit(keepers, ranks, step)
    assert_holds(keepers.newest(), 4)
    keepers.close()
    ranks.close()


def test_a_dead_keeper_without_a_step_in_flight_is_noticed_by_the_beat(three_nodes: Cluster) -> None:
    keepers, ranks = start("beat", generation=1)
    victim = list(keepers.addresses)[1]
    keepers.beat()
    assert keepers.poll(0.2) == []
    os.kill(keeper_pids("beat")[victim], signal.SIGKILL)

    def run() -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            keepers.beat()
            keepers.poll(0.1)

    with pytest.raises(KeeperLost, match=victim[:8]):
        run()
    keepers.close()
    ranks.close()


def test_a_frozen_keeper_is_lost_too(three_nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ORDER_SECONDS", 1.0)
    monkeypatch.setattr(module, "POLL_SECONDS", 1.0)
    keepers, ranks = start("frozen", generation=1, unresponsive_after=2.0)
    commit(keepers, ranks, 1)
    victim = next(iter(keepers.addresses))
    pid = keeper_pids("frozen")[victim]
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    assert not keepers.kill_process(victim, os.getpid(), 0.0)
    assert time.monotonic() - began < 2
    keepers.expect(2)
    assert lost(keepers, 20.0).node_id == victim
    assert time.monotonic() - began < 8
    keepers.drop(victim)
    assert_holds(keepers.newest(), 1)
    keepers.close()
    assert ended({victim: pid})
    ranks.close()


def test_a_process_of_a_node_is_killed_by_id_and_start(three_nodes: Cluster) -> None:
    keepers, ranks = start("kill", generation=1)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = psutil.Process(process.pid).create_time()
    os.kill(process.pid, signal.SIGSTOP)
    node_id = next(iter(keepers.addresses))
    assert not keepers.kill_process(node_id, process.pid, started - 60)
    assert not keepers.kill_process("no such node", process.pid, started)
    began = time.monotonic()
    assert keepers.kill_process(node_id, process.pid, started)
    assert process.wait(5) == -signal.SIGKILL
    assert time.monotonic() - began < 2
    keepers.close()
    ranks.close()


def test_a_step_goes_to_storage_beside_the_run(three_nodes: Cluster, tmp_path: Path) -> None:
    keepers, ranks = start("disk", generation=1)
    manifest = commit(keepers, ranks, 1)
    flush = keepers.persist(manifest, str(step_folder(tmp_path, 1)), commit=True)
    commit(keepers, ranks, 2)
    manifest = commit(keepers, ranks, 3)
    assert flush.wait(20.0)
    assert newest(tmp_path).manifest is not None
    assert newest(tmp_path).manifest.step == 1  # type: ignore[union-attr]
    (tmp_path / "file").write_text("in the way")
    flush = keepers.persist(manifest, str(tmp_path / "file" / "step"))
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        flush.wait(20.0)
    victim, other = keepers.addresses
    keepers.drop(victim)
    flush = keepers.persist(manifest, str(step_folder(tmp_path, 3)), commit=True)  # the replicas are written
    assert flush.wait(20.0)
    assert newest(tmp_path).manifest == manifest
    keepers.drop(other)
    with pytest.raises(CheckpointError, match="held by no keeper"):
        keepers.persist(manifest, str(step_folder(tmp_path, 3)))
    keepers.close()
    ranks.close()


def test_a_keeper_lost_before_it_has_written_is_told(three_nodes: Cluster, tmp_path: Path) -> None:
    keepers, ranks = start("torn", generation=1)
    manifest = commit(keepers, ranks, 1, shapes=BIG)
    pids = keeper_pids("torn")
    flush = keepers.persist(manifest, str(step_folder(tmp_path, 1)), commit=True)
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(KeeperLost):
        flush.wait(20.0)
    assert newest(tmp_path).manifest is None
    keepers.close()
    ranks.close()


def test_without_a_driver_the_step_is_written_and_the_keepers_end(three_nodes: Cluster, tmp_path: Path) -> None:
    process = first_driver(three_nodes.address, "expire", ttl=3.0, checkpoints=str(tmp_path))
    pids = keeper_pids("expire")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert ended(pids, 60.0)
    found = newest(tmp_path)
    assert found.manifest is not None
    assert found.manifest.step == 2
    assert found.messages == ()
    deadline = time.monotonic() + 30.0
    while keeper_pids("expire") and time.monotonic() < deadline:  # Ray forgets them a moment later
        time.sleep(0.1)
    assert keeper_pids("expire") == {}


def test_keepers_that_another_driver_found_have_its_time_and_its_folder(three_nodes: Cluster, tmp_path: Path) -> None:
    """They lived on for the time of the first command, and wrote to its folder."""
    process = first_driver(three_nodes.address, "told", ttl=300.0, checkpoints=str(tmp_path / "old"))
    pids = keeper_pids("told")
    process.send_signal(signal.SIGKILL)
    process.wait()
    keepers, ranks = start("told", generation=2, ttl=3.0, checkpoints=str(tmp_path / "new"))
    assert keeper_pids("told") == pids
    ranks.close()
    del keepers  # nobody speaks to them any more
    assert ended(pids, 60.0)
    found = newest(tmp_path / "new").manifest
    assert found is not None
    assert found.step == 2
    assert not (tmp_path / "old").exists()


def test_a_keeper_on_a_node_that_came_starts_while_nobody_waits(three_nodes: Cluster) -> None:
    keepers, ranks = start("begin", generation=1)
    came, later = next(n for n in live_nodes() if n.node_id not in keepers.addresses), time.monotonic() + 60.0
    while came.node_id not in keepers.addresses:
        began = time.monotonic()
        keepers.begin(came)
        assert time.monotonic() - began < 0.5
        assert time.monotonic() < later
        time.sleep(0.05)
    commit(keepers, ranks, 1)
    keepers.drop(came.node_id)
    deadline = time.monotonic() + 30.0
    while came.node_id in find_keepers("raycp-begin") and time.monotonic() < deadline:
        time.sleep(0.05)
    keepers.begin(came)
    keepers.add(came)  # waits for the one that was begun, where a second one would find the name taken
    assert keepers.addresses[came.node_id].node_id == came.node_id
    pids = keeper_pids("begin")
    assert len(pids) == 3
    keepers.close()
    assert ended(pids)
    ranks.close()


def test_a_node_lost_with_its_raylet_leaves_its_replicas(three_nodes: Cluster) -> None:
    extra = three_nodes.add_node(num_cpus=2)
    nodes = training_nodes()
    gone = next(n for n in nodes if n.node_id == extra.node_id)
    stays = next(n for n in nodes if n.node_id != extra.node_id)
    keepers = Keepers.start(
        [stays, gone],
        run_id="raylet",
        namespace="raycp-raylet",
        secret=SECRET,
        generation=1,
        ttl=300.0,
        checkpoints="/nowhere",
    )
    homes = [stays.node_id, stays.node_id, gone.node_id, gone.node_id]
    keepers.assign(1, homes)
    ranks = Ranks([keepers.addresses[h] for h in homes])
    commit(keepers, ranks, 1)
    pids = keeper_pids("raylet")
    os.kill(extra.all_processes["raylet"][0].process.pid, signal.SIGKILL)
    keepers.expect(2)
    error = lost(keepers, 60.0)
    assert error.node_id == gone.node_id
    assert ended({"": pids[gone.node_id]})
    keepers.drop(gone.node_id)
    assert_holds(keepers.newest(), 1, near=stays.node_id)
    keepers.assign(2, [stays.node_id] * 2)
    alone = Ranks([keepers.addresses[stays.node_id]] * 2, generation=2)
    alone.snapshot(2)
    keepers.expect(2)
    assert alone.wait() == [None, None]
    keepers.commit(manifest_of(2, collect(keepers, 2).shards, generation=2))
    assert_holds(keepers.newest(), 2)
    keepers.close()
    assert ended(pids)
    for some in (ranks, alone):
        some.close()
    three_nodes.remove_node(extra, allow_graceful=False)
