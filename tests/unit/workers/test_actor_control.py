"""What a rank does at an order of the driver that comes while its own thread waits."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from raycp.errors import CheckpointError, WorkerError
from tests.snapshots import SECRET, Nodes, state_of
from tests.specs import run_spec
from workers import progress as phases
from workers.actor import TrainWorker
from workers.failure import is_communication
from workers.memory_reader import MemoryReader
from workers.snapshot import SnapshotWriter

GENERATION = 1


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes("a", str(tmp_path / "checkpoints"))
    made.assign("a").close()
    yield made
    made.close()


@pytest.fixture
def worker(nodes: Nodes, tmp_path: Path) -> Iterator[TrainWorker]:
    """A rank that waits for its keeper: the copy of step 2, since step 1 is not committed."""
    spec = run_spec(tmp_path)
    made = TrainWorker(spec)
    groups = SimpleNamespace(rendezvous=SimpleNamespace(generation=GENERATION, rank=0), abort=lambda: 0)
    made._groups = groups  # type: ignore[assignment]  # what control calls ask of them
    made._snapshots = writer = SnapshotWriter(nodes["a"].address(), secret=SECRET, generation=GENERATION, rank=0)
    writer.begin(1, state_of(0, 1, 1))
    writer.wait()
    writer.begin(2, state_of(0, 1, 2))
    assert writer.wait(0.2) > 0.15
    yield made
    writer.close()


def test_a_rank_that_waits_for_a_keeper_lets_go_of_it_when_it_is_told_to(worker: TrainWorker, nodes: Nodes) -> None:
    """It waited until Ray had ended the keeper, which takes five seconds for a stopped process."""
    writer = worker._require(worker._snapshots)
    threading.Timer(0.2, worker.let_go, (GENERATION, nodes["a"].address())).start()
    assert writer.wait() < 3
    assert writer.problem is not None


def test_a_rank_that_reads_from_a_keeper_asks_another_one_and_keeps_its_own(worker: TrainWorker, nodes: Nodes) -> None:
    keeper, writer = nodes["a"].address(), worker._require(worker._snapshots)
    point = nodes.point()
    worker._reader = reader = MemoryReader(point.manifest, point.holders, secret=SECRET, near="a")
    assert not worker.let_go(GENERATION + 1, keeper)
    assert worker.let_go(GENERATION, keeper)
    with pytest.raises(CheckpointError, match="known to be silent"):
        reader.read(next(iter(reader.names)))
    assert writer.problem is None
    reader.close()


@pytest.mark.parametrize("late", ["older generation", "newer generation", "keeper before this one", "no keeper"])
def test_an_order_that_comes_late_does_nothing(late: str, worker: TrainWorker, nodes: Nodes) -> None:
    keeper = nodes["a"].address()
    generation = GENERATION + {"older generation": -1, "newer generation": 1}.get(late, 0)
    if late == "keeper before this one":
        keeper = replace(keeper, unix="raycp-another", port=1)
    writer = worker._require(worker._snapshots)
    if late == "no keeper":
        worker._snapshots = None
    assert not worker.let_go(generation, keeper)
    assert writer.wait(0.3) > 0.25
    assert writer.problem is None


@pytest.mark.parametrize("call", [phases.BUILD, phases.RESTORE, phases.SAVE, phases.EXPORT])
def test_a_rank_that_reads_or_writes_files_stops_when_another_rank_is_lost(call: str, worker: TrainWorker) -> None:
    """It went on to the end of its file, missed the freeze, and was replaced as well."""

    threading.Timer(0.1, worker.abort, (GENERATION,)).start()
    began = time.monotonic()

    def read() -> None:
        with worker._progress.during(call, GENERATION):
            for _ in range(1000):
                worker._progress.piece()
                time.sleep(0.01)

    with pytest.raises(WorkerError, match="was given up") as caught:
        read()
    assert time.monotonic() - began < 3
    assert is_communication(caught.value), "a consequence of a failure elsewhere"
    worker._guard(call, GENERATION + 1, worker._progress.piece)


def test_a_rank_whose_export_failed_can_still_write_its_state(
    worker: TrainWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint was damaged on storage: it is written again from the ranks, and exported."""
    monkeypatch.setattr("workers.actor.failure_of", lambda error, **_: error)

    def export() -> None:
        raise CheckpointError("planted: it is damaged", fix="")

    with pytest.raises(CheckpointError, match="planted"):
        worker._guard(phases.EXPORT, GENERATION, export)
    worker._guard(phases.SAVE, GENERATION, worker._progress.piece)
