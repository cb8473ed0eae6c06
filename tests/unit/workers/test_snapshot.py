"""The rank's side of a snapshot: the right bytes, out of the way of the step, whatever happens to the keeper."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from raycp.config import OptimConfig
from raycp.training.checkpoint import write_shard
from raycp.training.manifest import shard_file
from raycp.training.optim import build_optimizer
from raycp.training.state import export_state, import_state
from tests.snapshots import SECRET, SHAPES, Nodes, manifest_of, state_of, whole
from workers import exchange
from workers.memory_reader import MemoryReader
from workers.snapshot import SnapshotWriter
from workers.wire import KeeperAddress


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes("a", str(tmp_path / "checkpoints"))
    yield made
    made.close()


@pytest.fixture
def writer(nodes: Nodes) -> Iterator[SnapshotWriter]:
    nodes.assign("a").close()
    made = SnapshotWriter(nodes["a"].address(), secret=SECRET, generation=1, rank=0)
    yield made
    made.close()


def image_of(nodes: Nodes, step: int) -> bytes:
    slot = nodes["a"]._exchange.table.find(step, shard_file(1, 0))
    assert slot is not None
    return bytes(slot.image.view)


def test_an_image_is_the_file_that_a_checkpoint_would_hold(
    nodes: Nodes, writer: SnapshotWriter, tmp_path: Path
) -> None:
    state = state_of(1, 3, 7)
    writer.begin(7, state)
    assert writer.wait() >= 0
    (record,) = nodes.collect(7)
    expected = write_shard(tmp_path / "step", 0, state, generation=1)
    assert image_of(nodes, 7) == (tmp_path / "step" / expected.file).read_bytes()
    assert (record.file, record.bytes, record.crc32) == (expected.file, expected.bytes, expected.crc32)
    assert set(record.entries) == set(expected.entries)
    assert writer.bytes == expected.bytes
    assert writer.problem is None


def test_rows_that_are_not_contiguous_and_a_rank_without_rows(nodes: Nodes, writer: SnapshotWriter) -> None:
    state = state_of(0, 1, 1)
    span, rows = state["param/w"]
    state["param/w"] = (span, rows.t().contiguous().t())
    assert not state["param/w"][1].is_contiguous()
    writer.begin(1, state)
    writer.wait()
    reader = MemoryReader(nodes.commit(1), nodes.point().holders, secret=SECRET, near="a")
    assert torch.equal(reader.read("param/w"), whole("param/w", 1))
    writer.begin(2, {})
    writer.wait()
    assert nodes.collect(2)[0].entries == ()


def test_the_state_of_a_real_model_and_optimizer_comes_back_bit_for_bit(nodes: Nodes, writer: SnapshotWriter) -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))
        optimizer = build_optimizer(module, OptimConfig())
        for _ in range(seed):
            module(torch.randn(4, 8)).sum().backward()
            optimizer.step()
        return module, optimizer

    module, optimizer = make(3)
    writer.begin(3, export_state(module, optimizer))
    writer.wait()
    expected = {name: rows.clone() for name, (_, rows) in export_state(module, optimizer).items()}
    module(torch.randn(4, 8)).sum().backward()
    optimizer.step()  # changes the parameters after `wait`: the image stays
    reader = MemoryReader(nodes.commit(3), nodes.point().holders, secret=SECRET, near="a")
    other, its_optimizer = make(1)
    import_state(other, its_optimizer, reader.read)
    found = {name: rows for name, (_, rows) in export_state(other, its_optimizer).items()}
    assert found.keys() == expected.keys()
    assert len(expected) == 13
    for name, rows in expected.items():
        assert torch.equal(found[name], rows), name


def test_planted_fault_changing_the_state_before_wait_is_seen(nodes: Nodes, writer: SnapshotWriter) -> None:
    state = state_of(0, 1, 1)
    gate = threading.Event()

    class Slow(dict):  # type: ignore[type-arg]
        def __getitem__(self, name: str) -> object:
            gate.wait(10)
            return super().__getitem__(name)

    writer.begin(1, Slow(state))
    state["param/w"][1].add_(1)
    gate.set()
    writer.wait()
    reader = MemoryReader(nodes.commit(1), nodes.point().holders, secret=SECRET, near="a")
    assert not torch.equal(reader.read("param/w"), whole("param/w", 1))


def test_begin_returns_at_once_and_wait_tells_the_stall(nodes: Nodes, writer: SnapshotWriter) -> None:
    gate = threading.Event()

    class Slow(dict):  # type: ignore[type-arg]
        def __getitem__(self, name: str) -> object:
            gate.wait(10)
            return super().__getitem__(name)

    began = time.perf_counter()
    writer.begin(1, Slow(state_of(0, 1, 1)))
    assert time.perf_counter() - began < 0.1
    threading.Timer(0.3, gate.set).start()
    assert 0.2 < writer.wait() < 5
    assert writer.wait() < 0.1
    nodes.commit(1)


def test_the_second_image_of_a_size_is_used_again_and_maps_do_not_pile_up(nodes: Nodes, writer: SnapshotWriter) -> None:
    for step in range(1, 8):
        writer.begin(step, state_of(0, 1, step))
        writer.wait()
        nodes.commit(step)
    assert len(writer._images) == 2
    shapes = {"param/w": (5, 5)}  # the optimizer's state is new after the first step
    for step in range(8, 11):
        writer.begin(step, state_of(0, 1, step, shapes))
        writer.wait()
        nodes.commit(step)
    assert len(writer._images) == 2
    writer.close()
    assert writer.wait() < 5
    deadline = time.monotonic() + 5
    while writer._images and time.monotonic() < deadline:
        time.sleep(0.01)
    assert writer._images == {}


def test_no_keeper_is_a_problem_and_no_error_of_the_step() -> None:
    nowhere = KeeperAddress(node_id="gone", host="127.0.0.1", port=1, unix="raycp-nobody-listens")
    writer = SnapshotWriter(nowhere, secret=SECRET, generation=1, rank=0)
    writer.begin(1, state_of(0, 1, 1))
    assert writer.wait() < 5
    assert writer.problem is not None
    assert writer.problem.startswith("the keeper of node gone: ConnectionRefusedError")
    writer.begin(2, state_of(0, 1, 2))
    assert writer.wait() < 1
    writer.close()


def test_a_wrong_secret_is_a_problem(nodes: Nodes) -> None:
    writer = SnapshotWriter(nodes["a"].address(), secret=b"guess", generation=1, rank=0)
    writer.begin(1, state_of(0, 1, 1))
    writer.wait()
    assert "secret" in str(writer.problem)
    writer.close()


def test_a_keeper_lost_while_a_copy_waits_frees_the_rank(nodes: Nodes, writer: SnapshotWriter) -> None:
    writer.begin(1, state_of(0, 1, 1))
    writer.wait()
    writer.begin(2, state_of(0, 1, 2))  # waits: step 1 is not committed
    threading.Timer(0.2, nodes["a"]._close).start()
    assert 0.1 < writer.wait() < 5
    assert writer.problem is not None


def test_close_frees_whoever_waits_at_any_time(nodes: Nodes, writer: SnapshotWriter) -> None:
    writer.begin(1, state_of(0, 1, 1))
    writer.wait()
    writer.begin(2, state_of(0, 1, 2))
    threading.Timer(0.2, writer.close).start()
    assert 0.1 < writer.wait() < 5
    assert writer.problem is not None
    writer.close()
    again = SnapshotWriter(nodes["a"].address(), secret=SECRET, generation=1, rank=0)
    again.close()
    again.begin(1, state_of(0, 1, 1))
    assert again.wait() < 5
    assert again.problem == "the writer was closed"


def test_a_closed_writer_stops_inside_its_copy(nodes: Nodes, writer: SnapshotWriter) -> None:
    gate = threading.Event()
    asked: list[str] = []

    class Slow(dict):  # type: ignore[type-arg]
        def __getitem__(self, name: str) -> object:
            asked.append(name)
            gate.wait(10)
            return super().__getitem__(name)

    writer.begin(1, Slow(state_of(0, 1, 1)))
    time.sleep(0.1)
    writer.close()
    gate.set()
    assert writer.wait() < 5
    assert len(asked) < len(SHAPES)
    assert nodes["a"].inventory().shards == ()


def test_a_state_that_makes_no_sense_is_a_problem_and_shown(
    nodes: Nodes, writer: SnapshotWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(args.exc_type))
    state = state_of(0, 1, 1)
    state["param/b"] = (state["param/b"][0], state["param/b"][1].to(torch.complex64))
    writer.begin(1, state)
    assert writer.wait() < 5
    deadline = time.monotonic() + 5
    while not shown and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "the copy failed: KeyError" in str(writer.problem)
    assert shown == [KeyError]


def test_the_manifest_of_a_snapshot_reads_like_that_of_a_checkpoint(nodes: Nodes, writer: SnapshotWriter) -> None:
    writer.begin(1, state_of(0, 1, 1))
    writer.wait()
    manifest = manifest_of(1, nodes.collect(1))
    assert type(manifest).from_bytes(manifest.to_bytes()) == manifest
    assert exchange.REFUSALS > 1
