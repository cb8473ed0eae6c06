"""Each algorithm through a whole run: the losses of a ring, whatever splits the packs."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import raycp
from raycp.errors import PlanError
from raycp.events import read_events
from tests.elastic import runs

STEPS = 3
Run = tuple[dict[int, float], dict[str, Any]]


def run(what: dict[str, Any], folder: Path, workers: int, **parallel: Any) -> Run:
    """Losses, and the `run_started` event, of a short run on one pack's ranks."""
    config = dataclasses.replace(
        runs.config(workers=workers), steps=STEPS, parallel=raycp.ParallelConfig(cp=workers, **parallel)
    )
    result = raycp.fit(**what, output_dir=folder, config=config)
    assert result.steps == STEPS
    return result.losses, next(e for e in read_events(result.events_path) if e["event"] == "run_started")


@pytest.fixture(scope="module")
def what(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return runs.make_folder(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def ring(what: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return run(what, tmp_path_factory.mktemp("ring") / "run", 2, algorithm="ring")[0]


@pytest.mark.parametrize(
    ("workers", "parallel", "shape"),
    [
        pytest.param(2, {"algorithm": "ulysses"}, (1, 2), id="ulysses"),
        pytest.param(4, {"algorithm": "hybrid"}, (2, 2), id="hybrid", marks=pytest.mark.slow),
        pytest.param(2, {"algorithm": "allgather", "layout": "zigzag"}, (2, 1), id="gather", marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_a_ring(
    what: dict[str, Any],
    ring: dict[int, float],
    tmp_path: Path,
    workers: int,
    parallel: dict[str, Any],
    shape: tuple[int, int],
) -> None:
    losses, started = run(what, tmp_path / "run", workers, **parallel)
    assert (started["grid"]["ring"], started["grid"]["ulysses"]) == shape
    assert f"ring {shape[0]} x ulysses {shape[1]}" in started["grid_reason"]
    assert losses == pytest.approx(ring, rel=1e-5, abs=0)
    assert losses != pytest.approx({step: loss * (1 + 1e-4) for step, loss in ring.items()}, rel=1e-5, abs=0)


def test_more_ulysses_ranks_than_heads_are_refused_before_anything_starts(what: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="4 query heads"):
        run(what, tmp_path / "run", 8, algorithm="ulysses")
    assert not (tmp_path / "run").exists()
