"""The picture of a plan: a PNG that can be read back, drawn from samples that are the plan's own."""

import dataclasses
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from raycp.errors import PlanError
from raycp.plan import AttentionPlan, RankGrid
from raycp.plan.draw import POINTS, _View

pytest.importorskip("matplotlib")


def plan_of(ends: list[int], grid: RankGrid | None = None, **more: object) -> AttentionPlan:
    return AttentionPlan.build(ends, grid or RankGrid(1, 3), num_heads=4, num_kv_heads=2, **more)  # type: ignore[arg-type]


def size_of(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


@pytest.mark.parametrize(
    "plan",
    [
        plan_of([40, 41, 100], layout="zigzag"),
        plan_of([5], mask="full"),
        plan_of([3000, 9000], RankGrid(2, 2, 2), sliding_window=500),
        plan_of([1]),
        plan_of([50_000, 131_072], RankGrid(1, 20)),
    ],
    ids=["zigzag", "full", "ulysses", "one token", "long, many ranks"],
)
def test_a_png_is_written(plan: AttentionPlan, tmp_path: Path) -> None:
    target = plan.draw(tmp_path / "pack.png")
    assert target == tmp_path / "pack.png"
    width, height = size_of(target)
    assert width > height > 800


def check_view(plan: AttentionPlan, view: _View) -> None:
    owner = np.empty(plan.pack_length, dtype=np.int64)
    for rank in range(plan.grid.cp):
        owner[plan.token_index(rank)] = rank // plan.grid.ulysses
    assert np.array_equal(view.owner, owner[view.position])
    document = np.searchsorted(plan.doc_ends, view.position, side="right")
    distance = view.position[:, None] - view.position[None, :]
    seen = document[:, None] == document[None, :]
    if plan.mask == "causal":
        seen &= distance >= 0
    if plan.sliding_window is not None:
        seen &= distance < plan.sliding_window
    assert np.array_equal(view.seen, seen)


@pytest.mark.parametrize("length", [100, 50_000])
@pytest.mark.parametrize(
    "more", [{}, {"mask": "full"}, {"sliding_window": 20}, {"layout": "zigzag", "grid": RankGrid(1, 2, 2)}]
)
def test_samples_are_the_plans(length: int, more: dict[str, object]) -> None:
    plan = plan_of([length // 3, length // 2, length], **more)  # type: ignore[arg-type]
    view = _View(plan, plan._shards())
    assert len(view.position) == min(length, POINTS)
    check_view(plan, view)
    other = dataclasses.replace(plan, doc_ends=(length // 4, length // 2, length))
    with pytest.raises(AssertionError):
        check_view(other, view)


def test_without_matplotlib_or_tokens_there_is_an_error_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlanError, match="no picture"):
        plan_of([]).draw(tmp_path / "x.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlanError, match="needs matplotlib") as error:
        plan_of([5]).draw(tmp_path / "x.png")
    assert "pip install" in error.value.fix
    assert not (tmp_path / "x.png").exists()
