"""Keepers with real sockets, real memory and real processes, without Ray."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from raycp.driver.copies import newest_point
from raycp.errors import CheckpointError, ClusterError, StaleGenerationError
from raycp.training.checkpoint import newest, step_folder, verify
from raycp.training.manifest import ShardSum, layout_sum, shard_file
from raycp.training.state import State
from tests.snapshots import SECRET, SHAPES, Nodes, Ranks, assert_holds, child, kill, manifest_of, state_of
from workers import exchange, keeper, slots, wire
from workers.keeper import Keeper
from workers.processes import is_stopped, kill_process
from workers.snapshot import SnapshotWriter
from workers.wire import KeeperAddress

BIG = {"param/w": (4096, 512), "param/x": (4096, 512)}  # 16 MiB


class Hooked(dict):  # type: ignore[type-arg]
    """A state that lets something happen in the middle of its copy."""

    def __init__(self, state: State, happen: Callable[[], None]) -> None:
        super().__init__(state)
        self.happen, self.asked = happen, 0

    def __getitem__(self, name: str) -> Any:
        self.asked += 1
        if self.asked == len(self) // 2 + 1:
            self.happen()
        return super().__getitem__(name)


def snapshot_in_a_process(address: KeeperAddress, step: int, number: int, rank: int, world: int) -> None:
    """Copies step - 1, then dies (or stops) in the middle of the next one."""
    writer = SnapshotWriter(address, secret=SECRET, generation=1, rank=rank)

    def happen() -> None:
        os.kill(os.getpid(), number)
        time.sleep(1)  # a signal stops the other threads a little later

    writer.begin(step, Hooked(state_of(rank, world, step), happen))
    writer.wait()
    os._exit(0 if writer.problem is None else 1)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes("ab", str(tmp_path / "checkpoints"))
    yield made
    made.close()


def step(nodes: Nodes, ranks: Ranks, number: int, *, generation: int = 1) -> Any:
    ranks.snapshot(number)
    assert ranks.wait() == [None] * len(ranks.writers)
    return nodes.commit(number, generation=generation)


def eventually(true: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


def held(k: Keeper) -> set[tuple[int, int, bool]]:
    """(rank, step, replica) of what a keeper has."""
    return {(s.rank, s.step, s.replica) for s in k.inventory().shards}


def test_a_keeper_loads_neither_torch_nor_ray() -> None:
    code = "import sys, workers.keeper; print([m for m in ('torch', 'ray', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_step_is_on_two_nodes_and_only_the_newest_two_stay(nodes: Nodes) -> None:
    ranks = nodes.assign("aabb")
    for number in range(1, 6):
        manifest = step(nodes, ranks, number)
        point = nodes.point()
        assert point.manifest == manifest
        assert all(len(homes) == 2 for homes in point.holders.values())
        assert_holds(point, number, near="ab"[number % 2])
    assert held(nodes["a"]) == {(0, 5, False), (1, 5, False), (2, 5, True), (3, 5, True)}
    state = sum(s.bytes for s in manifest.shards)
    assert [k.inventory().bytes for k in nodes.keepers.values()] == [2 * state] * 2
    ranks.close()


def test_a_keeper_takes_a_commit_as_a_change_of_one_that_it_has_and_says_if_it_has_not(nodes: Nodes) -> None:
    ranks = nodes.assign("aabb")
    first = step(nodes, ranks, 1)
    ranks.snapshot(2)
    assert ranks.wait() == [None] * 4
    known = {s.file: layout_sum(s.entries) for s in first.shards}
    told = [t for k in "ab" for t in nodes[k].collect(1, 2, 10, known) or []]
    assert [type(t) for t in told] == [ShardSum] * 4
    second = manifest_of(2, [t.of(s) for t, s in zip(told, first.shards, strict=True)])  # type: ignore[union-attr]
    change = second.since(first)
    assert change is not None
    later = replace(change, base=(1, 9))
    assert nodes["a"].commit(later) is False
    assert held(nodes["a"]) == {(r, n, r > 1) for r in range(4) for n in (1, 2)}, "nothing was given up for it"
    assert [nodes[k].commit(change) for k in "ab"] == [True, True]
    assert nodes.point().manifest == second
    assert_holds(nodes.point(), 2, near="a")
    ranks.close()


def test_one_node_alone_needs_no_replica(tmp_path: Path) -> None:
    nodes = Nodes("a", str(tmp_path))
    ranks = nodes.assign("aa")
    step(nodes, ranks, 1)
    assert_holds(nodes.point(), 1)
    ranks.close()
    nodes.close()


def test_planted_fault_a_missing_replica_is_not_collected(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange.Exchange, "_replicate", lambda self, slot: None)
    ranks = nodes.assign("aabb")
    ranks.snapshot(1)
    ranks.wait()
    assert nodes["a"].collect(1, 1, 0.5) is None
    ranks.close()


def test_a_step_counts_only_when_all_ranks_of_the_node_have_sealed_it(nodes: Nodes) -> None:
    ranks = nodes.assign("aabb")
    ranks.writers[0].begin(1, state_of(0, 4, 1))
    assert ranks.writers[0].wait() >= 0
    assert nodes["a"].collect(1, 1, 0.3) is None
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(nodes["a"].collect(1, 1, 10)))
    waiting.start()
    ranks.writers[1].begin(1, state_of(1, 4, 1))
    waiting.join()
    assert [r.file for r in answers[0]] == [shard_file(1, 0), shard_file(1, 1)]
    ranks.close()


def test_the_next_copy_waits_for_the_commit_and_the_one_after_overwrites_the_older(nodes: Nodes) -> None:
    ranks = nodes.assign("ab")
    step(nodes, ranks, 1)
    ranks.snapshot(2)
    assert ranks.wait() == [None, None]
    shards = nodes.collect(2)
    ranks.writers[0].begin(3, state_of(0, 2, 3))
    time.sleep(0.3)
    assert (0, 1, False) in held(nodes["a"])  # still the newest committed one
    waited = threading.Thread(target=ranks.wait)
    waited.start()
    assert waited.is_alive()
    assert_holds(nodes.point(), 2)  # complete, though not committed
    for k in nodes.keepers.values():
        k.commit(manifest_of(2, shards))
    waited.join(5)
    assert not waited.is_alive()
    assert eventually(lambda: held(nodes["a"]) >= {(0, 2, False), (0, 3, False)})
    ranks.close()


def test_planted_fault_a_slot_that_is_granted_too_early_loses_the_step(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots.SlotTable, "_is_newest", lambda self, slot: False)
    ranks = nodes.assign("aabb")
    ranks.snapshot(1)
    ranks.wait()
    with pytest.raises(AssertionError):
        step_two_and_die(nodes, ranks)
    ranks.close()


def step_two_and_die(nodes: Nodes, ranks: Ranks) -> None:
    nodes.commit(1)
    ranks.writers[0].begin(2, Hooked(state_of(0, 4, 2), ranks.writers[0].close))
    ranks.writers[0].wait()
    assert_holds(nodes.point(), 1)


@pytest.mark.parametrize("places", ["ab", "aa"])
def test_a_rank_killed_inside_its_copy_leaves_the_step_before_whole(nodes: Nodes, places: str) -> None:
    ranks = nodes.assign(places)
    step(nodes, ranks, 1)
    step(nodes, ranks, 2)
    ranks.writers[1].close()
    time.sleep(0.1)
    process = child(snapshot_in_a_process, nodes[places[1]].address(), 3, signal.SIGKILL, 1, 2)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert_holds(nodes.point(), 2)
    assert nodes[places[1]].collect(1, 3, 0.2) is None
    # the copy that was abandoned holds no memory, and a new rank starts over
    ranks = nodes.assign(places, generation=2)
    step(nodes, ranks, 3, generation=2)
    assert_holds(nodes.point(), 3)
    ranks.close()


def test_a_zombie_that_wakes_inside_its_copy_writes_into_nothing(nodes: Nodes) -> None:
    ranks = nodes.assign("ab")
    step(nodes, ranks, 1)
    ranks.close()
    process = child(snapshot_in_a_process, nodes["a"].address(), 2, signal.SIGSTOP, 0, 2)
    assert process.pid is not None
    proc = psutil.Process(process.pid)
    assert eventually(lambda: proc.status() == psutil.STATUS_STOPPED, 60)
    ranks = nodes.assign("ab", generation=2)
    step(nodes, ranks, 2, generation=2)
    os.kill(process.pid, signal.SIGCONT)
    process.join(20)
    assert process.exitcode == 1  # it was told
    assert_holds(nodes.point(), 2)
    ranks.close()


def test_everything_of_an_older_generation_is_refused(nodes: Nodes) -> None:
    ranks = nodes.assign("aabb")
    manifest = step(nodes, ranks, 1)
    ranks.snapshot(2)
    ranks.wait()
    shards = nodes.collect(2)
    for k in nodes.keepers.values():
        k.fence(2)
        k.fence(2)
    a = nodes["a"]
    for refused in (
        lambda: a.fence(1),
        lambda: a.assign(1, [0], None),
        lambda: a.collect(1, 2, 1.0),
        lambda: a.commit(manifest_of(2, shards)),
        lambda: a.beat(1),
        lambda: a.keep_only(1, 1, [], by=1),
        lambda: a.kill(os.getpid(), 0.0, by=1),
        lambda: a.pin(1, [], order="o", by=1),
        lambda: a.persist(manifest, "/nowhere", [], commit=True, order="o", by=1),
        lambda: a.close(by=1),
    ):
        with pytest.raises(StaleGenerationError, match="generation 1 was fenced off: generation 2"):
            refused()
    for writer in ranks.writers:
        writer.begin(3, state_of(0, 4, 3))
    assert all(problem for problem in ranks.wait())  # cut off, in the middle of its wait or before
    late = SnapshotWriter(a.address(), secret=SECRET, generation=1, rank=0)
    late.begin(3, state_of(0, 4, 3))
    late.wait()
    late.close()
    assert "generation 1 was fenced off" in str(late.problem)
    assert_holds(nodes.point(), 2)  # what was sealed before the fence counts: nothing is redone
    for k in nodes.keepers.values():
        k.keep_only(1, 1, [s.file for s in manifest.shards], by=2)
    assert_holds(nodes.point(), 1)
    ranks.close()


def test_planted_fault_a_stale_step_is_seen_as_such(nodes: Nodes) -> None:
    ranks = nodes.assign("aabb")
    step(nodes, ranks, 1)
    point = nodes.point()
    step(nodes, ranks, 2)
    step(nodes, ranks, 3)
    with pytest.raises(CheckpointError, match="is not held here"):
        assert_holds(point, 1)
    with pytest.raises(AssertionError):
        assert_holds(nodes.point(), 1)
    ranks.close()


def test_a_replica_of_an_older_generation_is_refused_by_its_keeper(nodes: Nodes) -> None:
    ranks = nodes.assign("ab")
    nodes["b"].fence(2)  # a newer driver reached only this one
    ranks.writers[0].begin(1, state_of(0, 2, 1))
    ranks.writers[0].wait()
    assert nodes["a"].collect(1, 1, 0.7) is None
    assert held(nodes["b"]) == set()
    ranks.close()


def test_a_peer_lost_inside_the_stream_costs_the_wait_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes("abc", str(tmp_path))
    ranks = nodes.assign("aac")  # a -> c
    step_one = step(nodes, ranks, 1)
    whole_file = wire.Connection.send_file
    broke = threading.Event()

    def broken(self: wire.Connection, descriptor: int, start: int, count: int) -> None:
        if broke.is_set():
            whole_file(self, descriptor, start, count)
        else:
            whole_file(self, descriptor, start, count // 2)
            broke.set()
            nodes["c"]._exchange.close()

    monkeypatch.setattr(wire.Connection, "send_file", broken)
    ranks.writers[0].begin(2, state_of(0, 3, 2))
    ranks.writers[1].begin(2, state_of(1, 3, 2))
    assert broke.wait(10)
    nodes.lose("c")
    assert [w.wait() >= 0 and w.problem for w in ranks.writers[:2]] == [None, None]
    assert nodes["a"].collect(1, 2, 0.5) is None
    a, b = nodes["a"], nodes["b"]
    a.assign(1, [0, 1], b.address(), [a.address(), b.address()])
    found = a.collect(1, 2, 10)
    assert found is not None
    assert len(found) == 2
    assert held(b) >= {(0, 2, True), (1, 2, True)}
    assert step_one.step == 1
    ranks.close()
    nodes.close()


def test_a_frozen_peer_does_not_hold_up_the_next_one(tmp_path: Path) -> None:
    nodes = Nodes("ab", str(tmp_path))
    silent = wire.listen_tcp("127.0.0.1")  # connects, and never says a word
    a, b = nodes["a"], nodes["b"]
    frozen = KeeperAddress(node_id="z", host="127.0.0.1", port=silent.getsockname()[1], unix="")
    a.assign(1, [0], frozen, [])
    writer = SnapshotWriter(a.address(), secret=SECRET, generation=1, rank=0)
    writer.begin(1, state_of(0, 1, 1))
    writer.wait()
    assert a.collect(1, 1, 0.3) is None
    began = time.monotonic()
    a.assign(1, [0], b.address(), [])
    assert a.collect(1, 1, 30) is not None
    assert time.monotonic() - began < 2
    silent.close()
    writer.close()
    nodes.close()


def test_a_peer_that_only_this_keeper_cannot_reach_is_told_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy was tried again for ever, and the ranks waited for it inside a step."""
    monkeypatch.setattr(exchange, "UNREACHED_SECONDS", 0.3)
    monkeypatch.setattr(exchange, "RETRY_SECONDS", 0.01)
    nodes = Nodes("ab", str(tmp_path))
    nobody = wire.listen_tcp("127.0.0.1")
    away = KeeperAddress(node_id="z", host="127.0.0.1", port=nobody.getsockname()[1], unix="")
    nobody.close()
    a = nodes["a"]
    nodes["b"].assign(1, [], None, [])
    a.assign(1, [0], away, [])
    writer = SnapshotWriter(a.address(), secret=SECRET, generation=1, rank=0)
    for number, least in ((1, 0.3), (2, 0.0)):  # the next copy is tried once, and does not wait again
        began = time.monotonic()
        writer.begin(number, state_of(0, 1, number))
        with pytest.raises(
            ClusterError, match=rf"step {number} has no replica: the keeper of node z cannot be reached"
        ):
            a.collect(1, number, 10)
        assert least <= time.monotonic() - began < 5
        for one in nodes.keepers.values():
            one.abandon(1, number)
    a.assign(1, [0], nodes["b"].address(), [])
    writer.begin(3, state_of(0, 1, 3))
    assert a.collect(1, 3, 10) is not None
    assert writer.problem is None
    writer.close()
    nodes.close()


def test_ranks_whose_copy_waits_for_a_commit_are_freed_when_a_keeper_dies(tmp_path: Path) -> None:
    """Step 1 is whole and not committed yet, step 2 waits for that, and then one keeper dies: nobody is to wait on."""
    nodes = Nodes("ab", str(tmp_path))
    ranks = nodes.assign("ab")
    ranks.snapshot(1)
    assert ranks.wait() == [None, None]
    ranks.snapshot(2)
    nodes.lose("a")
    assert ranks.writers[0].wait(5.0) < 5.0
    assert ranks.writers[0].problem is not None
    assert ranks.writers[1].wait(0.3) >= 0.3
    nodes["b"].abandon(1, 2)
    assert ranks.writers[1].wait(5.0) < 5.0
    assert ranks.writers[1].problem is None
    ranks.close()
    nodes.close()


def test_a_peer_without_memory_for_a_moment_takes_the_next_copy(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "RETRY_SECONDS", 0.01)
    ranks = nodes.assign("ab")
    reserve = slots.Image.reserve

    def full(image: slots.Image) -> None:
        if threading.current_thread().name.startswith("raycp-cluster"):  # replicas come by TCP
            raise OSError(errno.ENOMEM, "64 bytes of memory are needed, 0 are left")
        reserve(image)

    with monkeypatch.context() as patch:
        patch.setattr(slots.Image, "reserve", full)
        ranks.snapshot(1)
        assert ranks.wait() == [None, None]
        for name in "ab":
            with pytest.raises(ClusterError, match=r"step 1 has no replica: .*memory are needed"):
                nodes[name].collect(1, 1, 10)
    for name in "ab":
        nodes[name].abandon(1, 1)
    ranks.snapshot(2)
    assert ranks.wait() == [None, None]
    assert nodes.commit(2).step == 2
    ranks.close()


def test_a_committed_step_gets_its_second_home_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "AGAIN_SECONDS", 0.1)
    nodes = Nodes("abc", str(tmp_path))
    ranks = nodes.assign("abc")  # a -> b -> c -> a
    step(nodes, ranks, 1)
    ranks.close()
    nodes.lose("b")
    assert held(nodes["c"]) == {(2, 1, False), (1, 1, True)}
    nodes.assign("ac", generation=2).close()
    # rank 0's replica died with b, and rank 1 has only its replica on c
    assert eventually(lambda: held(nodes["c"]) == {(2, 1, False), (1, 1, True), (0, 1, True)})
    assert eventually(lambda: held(nodes["a"]) == {(0, 1, False), (2, 1, True), (1, 1, True)})
    nodes.lose("c")
    assert_holds(nodes.point(), 1)
    nodes.close()


@pytest.mark.parametrize("how", ["another driver", "no driver"])
def test_a_keeper_that_came_after_a_commit_knows_the_step_once_it_is_committed_for_its_generation(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It held every shard and no manifest: its copies counted for nobody, and were written nowhere."""
    monkeypatch.setattr(exchange, "AGAIN_SECONDS", 0.1)
    nodes = Nodes("ab", str(tmp_path / "checkpoints"))
    ranks = nodes.assign("aabb")
    manifest = step(nodes, ranks, 3)
    ranks.close()
    nodes.lose("b")
    nodes.add("c")
    nodes.assign("aacc", generation=2).close()
    again = replace(manifest, generation=2)
    for k in nodes.keepers.values():
        assert k.commit(again)
        k.keep_only(*again.age, [s.file for s in again.shards], by=2)
    assert eventually(lambda: len(held(nodes["c"])) == 4)
    nodes.lose("a")
    if how == "another driver":
        point = newest_point({nodes["c"].address(): nodes["c"].inventory()}, run_id="run", known=())
        assert point is not None
        assert_holds(point, 3)
    else:
        nodes["c"]._flush()
        assert newest(tmp_path / "checkpoints").manifest == again
    nodes.close()


def test_a_replica_on_its_way_outlives_the_commit_of_its_step_for_a_newer_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken back in the middle, and sent a second time."""
    monkeypatch.setattr(exchange, "AGAIN_SECONDS", 0.1)
    nodes = Nodes("ab", str(tmp_path))
    ranks = nodes.assign("aa")
    manifest = step(nodes, ranks, 3)
    ranks.close()
    nodes.lose("b")
    nodes.add("c")
    began, go = threading.Event(), threading.Event()
    receive_into, sends = wire.Connection.receive_into, []

    def slow(connection: wire.Connection, target: memoryview, seen: Any = None) -> None:
        if seen is not None:
            sends.append(len(target))
            began.set()
            go.wait(10)
        receive_into(connection, target, seen)

    monkeypatch.setattr(wire.Connection, "receive_into", slow)
    nodes.assign("aa", generation=2).close()
    assert began.wait(10)
    again = replace(manifest, generation=2)
    for k in nodes.keepers.values():
        assert k.commit(again)
        k.keep_only(*again.age, [s.file for s in again.shards], by=2)
    go.set()
    assert eventually(lambda: len(held(nodes["c"])) == 2)
    assert len(sends) == 2, "each once"
    nodes.close()


def flip(k: Keeper, step: int, file: str) -> None:
    slot = k._exchange.table.find(step, file)
    assert slot is not None
    slot.image.view[slot.image.size // 2] ^= 1


def test_a_flipped_byte_is_found_and_the_other_copy_is_used(nodes: Nodes) -> None:
    ranks = nodes.assign("aabb")
    manifest = step(nodes, ranks, 1)
    ranks.close()
    flip(nodes["a"], 1, manifest.shards[0].file)
    for k in nodes.keepers.values():
        k.fence(2)  # what is read after a fault was compared after it
    point = nodes.point()
    assert_holds(point, 1, near="a")
    assert (0, 1, False) not in held(nodes["a"])  # dropped
    flip(nodes["b"], 1, manifest.shards[0].file)
    nodes["b"].fence(3)
    with pytest.raises(CheckpointError, match="damaged in memory"):
        assert_holds(point, 1, near="a")


def test_planted_fault_without_the_comparison_a_flipped_byte_is_read(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = nodes.assign("aabb")
    manifest = step(nodes, ranks, 1)
    ranks.close()
    monkeypatch.setattr(exchange.Exchange, "check", lambda self, slot: None)
    flip(nodes["a"], 1, manifest.shards[0].file)
    with pytest.raises(AssertionError):
        assert_holds(nodes.point(), 1, near="a")


def test_a_byte_flipped_on_the_way_is_sent_again(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_file = wire.Connection.send_file
    flips = [1]

    def flipping(self: wire.Connection, descriptor: int, start: int, count: int) -> None:
        if flips:
            flips.pop()
            self.send_bytes(memoryview(bytes(count)))
        else:
            whole_file(self, descriptor, start, count)

    monkeypatch.setattr(wire.Connection, "send_file", flipping)
    ranks = nodes.assign("ab")
    ranks.writers[0].begin(1, state_of(0, 2, 1))
    ranks.writers[0].wait()
    assert nodes["a"].collect(1, 1, 10) is not None
    assert flips == []
    ranks.close()


def test_an_image_that_changed_after_its_checksum_is_never_complete(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "RETRY_SECONDS", 0.01)
    send = exchange.Exchange._send

    def damaged(self: exchange.Exchange, slot: slots.Slot, peer: KeeperAddress, generation: int) -> None:
        slot.image.view[slot.image.size // 2] ^= 1
        try:
            send(self, slot, peer, generation)
        finally:
            slot.image.view[slot.image.size // 2] ^= 1

    monkeypatch.setattr(exchange.Exchange, "_send", damaged)
    ranks = nodes.assign("ab")
    ranks.writers[0].begin(1, state_of(0, 2, 1))
    ranks.writers[0].wait()
    with pytest.raises(ClusterError, match="came with checksum"):
        nodes["a"].collect(1, 1, 10)
    ranks.close()


def test_a_full_node_is_told_to_the_rank_and_the_driver(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "RETRY_SECONDS", 0.01)
    ranks = nodes.assign("ab")
    monkeypatch.setattr(slots, "host_memory", lambda: (0, 0))
    ranks.snapshot(1)
    problems = ranks.wait()
    assert all(p is not None and "bytes of memory are needed, 0 are left" in p for p in problems)
    ranks.close()


# -- storage ----------------------------------------------------------------------------------------------------


def test_a_step_is_written_beside_the_run_and_is_an_ordinary_checkpoint(nodes: Nodes, tmp_path: Path) -> None:
    ranks = nodes.assign("aabb")
    manifest = step(nodes, ranks, 1)
    folder = step_folder(tmp_path / "checkpoints", 1)
    parts = {"a": [s.file for s in manifest.shards[:2]], "b": [s.file for s in manifest.shards[2:]]}
    for name, files in parts.items():
        assert nodes[name].pin(1, files, order="o", by=1) == []
    assert nodes["a"].pin(1, ["other"], order="o", by=1) == ["other"]
    for number in (2, 3, 4):  # the run goes on meanwhile
        step(nodes, ranks, number)
    for name, files in parts.items():
        nodes[name].persist(manifest, str(folder), files, commit=True, order="o", by=1)
    assert verify(folder) == manifest
    assert newest(tmp_path / "checkpoints").manifest == manifest
    step(nodes, ranks, 5)
    state = sum(s.bytes for s in manifest.shards)
    assert [k.inventory().bytes for k in nodes.keepers.values()] == [2 * state] * 2  # the third images are gone
    with pytest.raises(CheckpointError, match="is not held on node a"):
        nodes["a"].persist(manifest, str(folder), parts["a"], commit=False, order="o", by=1)
    ranks.close()


def test_an_order_to_write_that_ends_leaves_what_another_one_for_the_same_step_has_pinned(
    nodes: Nodes, tmp_path: Path
) -> None:
    """A checkpoint was ordered again after a recovery, while slow storage still wrote the first order: the end of that
    one gave the images back, and the checkpoint failed.
    """
    ranks = nodes.assign("ab")
    manifest = step(nodes, ranks, 1)
    folder, files = str(step_folder(tmp_path, 1)), [manifest.shards[0].file]
    for order in ("first", "second", "third"):
        assert nodes["a"].pin(1, files, order=order, by=1) == []
    nodes["a"].persist(manifest, folder, files, commit=False, order="first", by=1)
    nodes["a"].unpin("third", by=1)
    for number in (2, 3):  # the run goes on
        step(nodes, ranks, number)
    nodes["a"].persist(manifest, folder, files, commit=False, order="second", by=1)
    state = sum(s.bytes for s in manifest.shards)
    assert nodes["a"].inventory().bytes == 2 * state  # nothing is pinned any more
    assert nodes["a"].pin(3, [files[0]], order="third", by=1) == files, "a late order holds nothing for ever"
    ranks.close()


def test_a_damaged_image_makes_no_file(nodes: Nodes, tmp_path: Path) -> None:
    ranks = nodes.assign("ab")
    manifest = step(nodes, ranks, 1)
    file = manifest.shards[0].file
    flip(nodes["a"], 1, file)
    with pytest.raises(CheckpointError, match="was damaged in memory"):
        nodes["a"].persist(manifest, str(tmp_path / "out"), [file], commit=True, order="o", by=1)
    assert list((tmp_path / "out").iterdir()) == []
    ranks.close()


def test_storage_that_refuses_is_an_error_with_its_number(nodes: Nodes, tmp_path: Path) -> None:
    ranks = nodes.assign("ab")
    manifest = step(nodes, ranks, 1)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        nodes["a"].persist(manifest, str(tmp_path / "file"), [manifest.shards[0].file], commit=True, order="o", by=1)
    assert_holds(nodes.point(), 1)
    step(nodes, ranks, 2)
    ranks.close()


def test_without_a_driver_the_newest_step_is_written_and_memory_given_back(tmp_path: Path) -> None:
    nodes = Nodes("ab", str(tmp_path), ttl=1.0)
    ranks = nodes.assign("aabb")
    step(nodes, ranks, 1)
    manifest = step(nodes, ranks, 2)
    ranks.snapshot(3)  # nobody commits it
    assert eventually(lambda: sorted(nodes.ended) == ["a", "b"], 15)
    assert newest(tmp_path).manifest == manifest
    assert all(k._exchange.table.bytes == 0 for k in nodes.keepers.values())
    ranks.close()


def test_without_a_driver_and_without_one_node_its_replicas_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "GRACE_SECONDS", 0.3)
    nodes = Nodes("ab", str(tmp_path), ttl=1.0)
    ranks = nodes.assign("aabb")
    manifest = step(nodes, ranks, 1)
    nodes.lose("b")
    assert eventually(lambda: nodes.ended == ["a"], 15)
    assert newest(tmp_path).manifest == manifest
    ranks.close()


def test_a_driver_that_beats_keeps_them_and_storage_that_is_newer_stays(tmp_path: Path) -> None:
    nodes = Nodes("a", str(tmp_path), ttl=1.0)
    ranks = nodes.assign("a")
    manifest = step(nodes, ranks, 1)
    for _ in range(15):
        nodes["a"].beat(1)
        time.sleep(0.1)
    assert nodes.ended == []
    nodes["a"].persist(manifest, str(step_folder(tmp_path, 1)), [manifest.shards[0].file], commit=True, order="o", by=1)
    written = (step_folder(tmp_path, 1) / manifest.shards[0].file).stat().st_mtime_ns
    assert eventually(lambda: nodes.ended == ["a"], 10)
    assert (step_folder(tmp_path, 1) / manifest.shards[0].file).stat().st_mtime_ns == written
    ranks.close()


def test_a_storage_that_fails_is_asked_again(tmp_path: Path) -> None:
    nodes = Nodes("a", str(tmp_path / "checkpoints"), ttl=1.0)
    (tmp_path / "checkpoints").write_text("in the way")
    ranks = nodes.assign("a")
    manifest = step(nodes, ranks, 1)
    time.sleep(1.6)
    assert nodes.ended == []
    (tmp_path / "checkpoints").unlink()
    assert eventually(lambda: nodes.ended == ["a"], 10)
    assert newest(tmp_path / "checkpoints").manifest == manifest
    ranks.close()


def test_a_keeper_that_another_driver_found_goes_by_what_that_one_says(tmp_path: Path) -> None:
    """It kept the time and the folder of the first command, whatever the second one said."""
    nodes = Nodes("a", str(tmp_path / "old"))
    ranks = nodes.assign("a")
    manifest = step(nodes, ranks, 1)
    nodes["a"].take_over(2, ttl=1.0, checkpoints=str(tmp_path / "new"))
    with pytest.raises(StaleGenerationError):
        nodes["a"].take_over(1, ttl=300.0, checkpoints=str(tmp_path / "old"))
    assert eventually(lambda: nodes.ended == ["a"], 10)
    assert newest(tmp_path / "new").manifest == manifest
    assert not (tmp_path / "old").exists()
    ranks.close()


# -- processes --------------------------------------------------------------------------------------------------


def test_a_process_is_killed_by_id_and_start_and_no_other(nodes: Nodes) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = psutil.Process(process.pid).create_time()
    assert not kill_process(process.pid, started - 100)  # the id came again
    assert process.poll() is None
    assert not kill_process(1, started)
    assert not kill_process(os.getpid(), psutil.Process().create_time())
    os.kill(process.pid, signal.SIGSTOP)
    assert nodes["a"].kill(process.pid, started, by=1)
    assert process.wait(5) == -signal.SIGKILL
    assert not nodes["a"].kill(process.pid, started, by=1)


def test_a_process_that_was_stopped_is_told_from_one_that_is_silent() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = psutil.Process(process.pid).create_time()
    assert not is_stopped(process.pid, started)
    os.kill(process.pid, signal.SIGSTOP)
    assert eventually(lambda: is_stopped(process.pid, started))
    assert not is_stopped(process.pid, started - 100)  # the id came again
    process.kill()
    process.wait()
    assert not is_stopped(process.pid, started)


def test_nothing_is_left_when_keepers_end(tmp_path: Path) -> None:
    def threads() -> int:
        return sum(t.name.startswith("raycp") for t in threading.enumerate())

    left, before = threads(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        nodes = Nodes("ab", str(tmp_path))
        ranks = nodes.assign("aabb")
        step(nodes, ranks, 1)
        ranks.close()
        nodes.close()
        nodes.close()
    assert eventually(lambda: threads() <= left)
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_keeper_killed_gives_all_its_memory_back(tmp_path: Path) -> None:
    process = child(keep_and_wait, str(tmp_path))
    assert eventually((tmp_path / "ready").exists, 60)
    shared = psutil.Process(process.pid).memory_info().shared
    assert shared > 16 << 20
    kill(process)
    assert not psutil.pid_exists(process.pid)


def keep_and_wait(folder: str) -> None:
    nodes = Nodes("a", folder)
    ranks = nodes.assign("a")
    ranks.snapshot(1, BIG)
    ranks.wait()
    nodes.commit(1)
    Path(folder, "ready").touch()
    time.sleep(600)


def test_shapes_leave_ranks_without_rows_of_a_tensor() -> None:
    assert "param/b" not in state_of(3, 4, 1)
    assert set(state_of(0, 4, 1)) == set(SHAPES)
