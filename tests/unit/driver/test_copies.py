"""Which step the keepers hold whole, where replicas go, what it costs: pure functions."""

import dataclasses

import pytest

from raycp.driver.copies import Room, budget_of, most_free, newest_point, replica_homes, short_of_room, snapshot_budget
from raycp.training.manifest import Manifest, ShardEntry, ShardRecord, shard_file
from tests.snapshots import manifest_of
from workers.keeper import HeldShard, Inventory
from workers.messages import Probe
from workers.wire import KeeperAddress

A, B, C = (KeeperAddress(node_id=n, host="h", port=i, unix=n) for i, n in enumerate("abc"))


def record(rank: int, world: int = 2, *, generation: int = 1, crc32: int = 7) -> ShardRecord:
    entry = ShardEntry(name="w", shape=(world, 3), dtype="float32", start=rank, stop=rank + 1)
    return ShardRecord(file=shard_file(generation, rank), bytes=100, crc32=crc32, entries=(entry,))


def shard(rank: int, step: int, *, replica: bool = False, generation: int = 1, crc32: int = 7) -> HeldShard:
    return HeldShard(
        step=step,
        generation=generation,
        rank=rank,
        replica=replica,
        replicated=True,
        record=record(rank, generation=generation, crc32=crc32),
    )


def committed(step: int, *, generation: int = 1) -> Manifest:
    return manifest_of(step, [record(r, generation=generation) for r in range(2)], generation=generation)


def inventory(*shards: HeldShard, manifests: tuple[Manifest, ...] = ()) -> Inventory:
    return Inventory(generation=1, shards=shards, manifests=manifests, bytes=0)


def test_nothing_is_held() -> None:
    assert newest_point({}, run_id="run") is None
    assert newest_point({A: inventory(), B: inventory()}, run_id="run") is None
    assert newest_point({A: inventory(manifests=(committed(3),))}, run_id="run") is None


def test_the_newest_committed_step_with_the_original_first_among_its_holders() -> None:
    held = {
        A: inventory(shard(0, 3), shard(1, 3, replica=True), shard(0, 2), manifests=(committed(2), committed(3))),
        B: inventory(shard(1, 3), shard(0, 3, replica=True), shard(1, 2), manifests=(committed(2),)),
    }
    point = newest_point(held, run_id="run")
    assert point is not None
    assert point.manifest == committed(3)
    assert point.holders == {shard_file(1, 0): [A, B], shard_file(1, 1): [B, A]}


def test_a_lost_node_is_made_up_for_by_its_replicas_and_both_of_a_pair_by_an_older_step() -> None:
    a = inventory(shard(0, 3), shard(1, 3, replica=True), manifests=(committed(2), committed(3)))
    point = newest_point({A: a}, run_id="run")
    assert point is not None
    assert point.holders == {shard_file(1, 0): [A], shard_file(1, 1): [A]}
    torn = inventory(shard(0, 3), shard(0, 2), shard(1, 2, replica=True), manifests=(committed(2), committed(3)))
    older = newest_point({A: torn}, run_id="run")
    assert older is not None
    assert older.manifest == committed(2)
    assert newest_point({A: inventory(shard(0, 3), manifests=(committed(3),))}, run_id="run") is None


def test_a_complete_step_counts_although_nobody_committed_it() -> None:
    held = {A: inventory(shard(0, 4), shard(0, 3), manifests=(committed(3),)), B: inventory(shard(1, 4), shard(1, 3))}
    point = newest_point(held, run_id="run")
    assert point is not None
    made = dataclasses.replace(committed(4), cursor={}, grid={}, extra={})
    assert point.manifest == made
    without = newest_point(held, run_id="run", known=())
    assert without is not None
    assert without.manifest == committed(3)
    assert newest_point(held, run_id="run", known=(4,)) == point
    half = {A: held[A], B: inventory(shard(1, 3))}
    older = newest_point(half, run_id="run")
    assert older is not None
    assert older.manifest.step == 3


def test_a_step_that_was_not_committed_counts_once_it_is_as_safe_as_the_one_that_is_given_up_for_it() -> None:
    """Its replicas were on their way; the loss of a second node took it, and the committed one was gone."""
    there = {
        A: [shard(0, 3), shard(1, 3, replica=True), shard(0, 4)],
        B: [shard(1, 3), shard(0, 3, replica=True), shard(1, 4), shard(0, 4, replica=True)],
    }

    def newest() -> int:
        held = {keeper: inventory(*shards, manifests=(committed(3),)) for keeper, shards in there.items()}
        point = newest_point(held, run_id="run", known=(4,))
        assert point is not None
        return point.manifest.step

    assert newest() == 3
    there[A].append(shard(1, 4, replica=True))
    assert newest() == 4
    del there[B]
    assert newest() == 4, "the committed one has one home left, too"


def test_two_versions_of_a_shard_are_no_step() -> None:
    held = {A: inventory(shard(0, 4), shard(1, 4, replica=True)), B: inventory(shard(1, 4, crc32=8))}
    assert newest_point(held, run_id="run") is None


def test_a_shard_with_another_checksum_than_the_manifest_says_does_not_count() -> None:
    held = {A: inventory(shard(0, 3, crc32=9), shard(1, 3), manifests=(committed(3),))}
    assert newest_point(held, run_id="run") is None


def test_a_later_generation_is_newer_whatever_its_step() -> None:
    held = {
        A: inventory(
            shard(0, 9),
            shard(1, 9),
            shard(0, 5, generation=2),
            shard(1, 5, generation=2),
            manifests=(committed(9), committed(5, generation=2)),
        )
    }
    point = newest_point(held, run_id="run")
    assert point is not None
    assert point.manifest.age == (2, 5)


def test_a_step_that_a_newer_generation_took_over_keeps_its_shards() -> None:
    taken = dataclasses.replace(committed(3), generation=2)
    point = newest_point({A: inventory(shard(0, 3), shard(1, 3), manifests=(taken,))}, run_id="run")
    assert point is not None
    assert point.manifest == taken


@pytest.mark.parametrize(
    ("with_ranks", "nodes", "homes"),
    [
        ("ab", "ab", {"a": "b", "b": "a"}),
        ("bca", "abc", {"b": "c", "c": "a", "a": "b"}),
        ("a", "a", {"a": None}),
        ("b", "abc", {"a": None, "b": "a", "c": None}),
        ("ab", "abc", {"a": "b", "b": "a", "c": None}),
        ("", "ab", {"a": None, "b": None}),
    ],
)
def test_replicas_go_to_the_next_node_with_ranks(with_ranks: str, nodes: str, homes: dict[str, str | None]) -> None:
    assert replica_homes(list(with_ranks), list(nodes)) == homes


def test_the_budget_counts_five_images_a_rank_on_several_nodes_and_three_on_one() -> None:
    gib = 2**30
    several = snapshot_budget(8 * gib, ranks_on_node=2, world=4, nodes=2, available=20 * gib)
    assert (several.image, several.needed, several.room, several.message) == (2 * gib, 20 * gib, Room.AMPLE, "")
    alone = snapshot_budget(8 * gib, ranks_on_node=4, world=4, nodes=1, available=24 * gib)
    assert (alone.needed, alone.room) == (24 * gib, Room.AMPLE)
    assert snapshot_budget(10, ranks_on_node=1, world=3, nodes=1, available=100).image == 4


def test_over_the_budget_the_interval_grows_and_then_copies_are_left_out_and_both_say_why() -> None:
    """Copies were left out wherever the fifth image did not fit."""
    gib = 2**30
    tight = snapshot_budget(8 * gib, ranks_on_node=2, world=4, nodes=2, available=20 * gib - 1)
    assert tight.room is Room.TIGHT
    assert "need 20.0 GiB on a node with 2 rank(s) (5 x 2.00 GiB for each)" in tight.message
    assert "there is room for 4, so no copy is made while a checkpoint is written" in tight.message
    assert snapshot_budget(8 * gib, ranks_on_node=2, world=4, nodes=2, available=16 * gib).room is Room.TIGHT
    none = snapshot_budget(8 * gib, ranks_on_node=2, world=4, nodes=2, available=16 * gib - 1)
    assert none.room is Room.NONE
    assert "elastic.checkpoint_every" in none.message


def test_memory_of_a_node_is_what_was_found_free_there_before_the_run_took_any() -> None:
    """Workers that came later found the run's own copies there, and for want of memory no more were made."""
    free = most_free([probe("a", 100), probe("a", 10), probe("b", 60)], {})
    assert free == {"a": 100, "b": 60}
    free = most_free([probe("a", 30), probe("c", 5)], free)
    assert free == {"a": 100, "b": 60, "c": 5}
    assert budget_of({"a": 1, "b": 1, "c": 0}, free, 2).available == 30


def probe(node_id: str, free: int) -> Probe:
    return Probe(node_id=node_id, address=node_id, pid=1, accelerators=(), cpu_count=1, memory=1, host_memory=free)


def test_which_nodes_of_spares_are_short_of_room() -> None:
    free = {"a": 0, "b": 48, "c": 47, "d": 1000}
    assert short_of_room({"a": 4, "d": 0}, free, 12) == {"c"}
    assert replica_homes(["a"], ["a", "b", "c"], {"b"}) == {"a": "c", "b": None, "c": None}
    assert replica_homes(["a", "b"], ["a", "b", "c"], {"b"})["a"] == "b", "a rank's node was weighed with its world"
