"""Rows out of memory into another world: the same, bit for bit, as out of a checkpoint."""

import threading
from pathlib import Path

import pytest
import torch

from raycp.errors import CheckpointError, StaleGenerationError
from raycp.training.checkpoint import CheckpointReader, commit, step_folder, write_shard
from raycp.training.sharding import row_range
from tests.snapshots import SECRET, SHAPES, Nodes, assert_holds, manifest_of, state_of, whole
from workers.memory_reader import MemoryReader

WORLDS = ("aabb", "aab", "ab", "aabb")


def test_worlds_4_3_2_4_read_what_the_one_before_wrote_as_from_a_checkpoint(tmp_path: Path) -> None:
    nodes = Nodes("ab", str(tmp_path / "memory"))
    for generation, (places, following) in enumerate(zip(WORLDS, (*WORLDS[1:], "a"), strict=True), 1):
        ranks = nodes.assign(places, generation=generation)
        world = len(places)
        ranks.snapshot(generation)
        assert ranks.wait() == [None] * world
        manifest = nodes.commit(generation, generation=generation)
        folder = step_folder(tmp_path / "disk", generation)
        shards = [
            write_shard(folder, rank, state_of(rank, world, generation), generation=generation) for rank in range(world)
        ]
        commit(folder, manifest_of(generation, shards, generation=generation))
        assert [s.crc32 for s in shards] == [s.crc32 for s in manifest.shards]
        disk, point = CheckpointReader(folder), nodes.point()
        for rank, place in enumerate(following):  # what each rank of the next world asks for
            memory = MemoryReader(point.manifest, point.holders, secret=SECRET, near=place)
            assert memory.names == disk.names
            for name, shape in SHAPES.items():
                start, stop = row_range(shape[0], rank, len(following))
                rows = memory.read(name, start, stop)
                assert rows.dtype == whole(name, generation).dtype
                assert torch.equal(rows, whole(name, generation)[start:stop])
                assert torch.equal(rows, disk.read(name, start, stop))
            memory.close()
        ranks.close()
    nodes.close()


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Nodes:
    nodes = Nodes("ab", str(tmp_path_factory.mktemp("checkpoints")))
    ranks = nodes.assign("aabb")
    for step in (1, 2):
        ranks.snapshot(step)
        ranks.wait()
        nodes.commit(step)
    ranks.close()
    return nodes


def test_planted_fault_a_manifest_with_shifted_rows_reads_otherwise(held: Nodes) -> None:
    import dataclasses

    point = held.point()
    first, second, *rest = point.manifest.shards
    swapped = dataclasses.replace(
        point.manifest,
        shards=(
            dataclasses.replace(first, file=second.file),
            dataclasses.replace(second, file=first.file),
            *rest,
        ),
    )
    reader = MemoryReader(swapped, point.holders, secret=SECRET, near="a")
    assert not torch.equal(reader.read("param/w"), whole("param/w", 2))


def test_any_rows_can_be_asked_for_and_no_others(held: Nodes) -> None:
    point = held.point()
    reader = MemoryReader(point.manifest, point.holders, secret=SECRET, near="b")
    for start, stop in ((0, 1003), (0, 0), (1003, 1003), (250, 252), (1, 1002), (700, 701)):
        assert torch.equal(reader.read("param/w", start, stop), whole("param/w", 2)[start:stop])
    for name, start, stop in (("param/x", 0, 1), ("param/w", 0, 1004), ("param/w", 5, 4), ("param/w", -1, 4)):
        with pytest.raises(CheckpointError):
            reader.read(name, start, stop)
    reader.close()
    reader.close()


def test_a_holder_that_is_gone_is_passed_over(tmp_path: Path) -> None:
    nodes = Nodes("ab", str(tmp_path))
    ranks = nodes.assign("aabb")
    ranks.snapshot(1)
    ranks.wait()
    nodes.commit(1)
    ranks.close()
    point = nodes.point()
    reader = MemoryReader(point.manifest, point.holders, secret=SECRET, near="a")
    assert torch.equal(reader.read("param/w", 0, 5), whole("param/w", 1)[:5])
    nodes.lose("a")  # in the middle of the reading
    assert torch.equal(reader.read("param/w"), whole("param/w", 1))
    assert_holds(point, 1, near="a")
    nodes.lose("b")
    with pytest.raises(CheckpointError, match=r"no keeper gives shard-g0001-0000..safetensors of step 1: node "):
        reader.read("param/w")
    with pytest.raises(CheckpointError, match="no holder is left"):
        reader.read("param/w")
    nodes.close()


def test_a_holder_that_stands_still_is_passed_over_as_soon_as_it_is_known_to(held: Nodes) -> None:
    """A rank waited two minutes for a keeper that was frozen while it read, though its silence was known."""
    point, silent = held.point(), held["a"].address()
    reader = MemoryReader(point.manifest, point.holders, secret=SECRET, near="a")
    assert torch.equal(reader.read("param/w", 0, 5), whole("param/w", 2)[:5])
    found: list[torch.Tensor] = []
    reading = threading.Thread(target=lambda: found.append(reader.read("param/w")))
    with held["a"]._changed:  # it answers nobody
        reading.start()
        reading.join(0.5)
        assert found == []
        assert reader.pass_over(silent)
        assert not reader.pass_over(silent), "it was told before"
        reading.join(5.0)
        assert torch.equal(found[0], whole("param/w", 2))
        assert torch.equal(reader.read("param/w", 3, 9), whole("param/w", 2)[3:9]), "nor is it asked again"
    reader.close()


def test_a_stranger_reads_nothing(held: Nodes) -> None:
    point = held.point()
    reader = MemoryReader(point.manifest, point.holders, secret=b"guess", near="a")
    with pytest.raises(CheckpointError, match="secret"):
        reader.read("param/w")


def test_no_bytes_outside_an_image_are_served(held: Nodes) -> None:
    from workers.wire import connect_tcp

    point = held.point()
    address = held["a"].address()
    shard = point.manifest.shards[0]
    connection = connect_tcp(address.host, address.port, SECRET)
    for start, stop in ((-1, 4), (0, shard.bytes + 1), (9, 8)):
        connection.send({"op": "read", "step": 2, "file": shard.file, "start": start, "stop": stop})
        assert "were asked for" in str(connection.receive(timeout=5)["refused"])
    for request in ({"op": "open"}, {}, {"op": "read"}, {"op": "sealed", "generation": 1, "step": 1, "entries": []}):
        connection.send(request)
        assert "refused" in connection.receive(timeout=5)
    connection.send({"op": "grant", "generation": 0, "rank": 0, "step": 3, "bytes": 9, "images": []})
    answer = connection.receive(timeout=5)
    assert answer["stale"]
    connection.close()
    assert issubclass(StaleGenerationError, Exception)
