"""The benchmarks: counted bars hold in reduced form, their checks notice faults, and every command runs."""

import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from benchmarks import balance, bytes, overlap
from benchmarks.packs import corpus_pack, equal_pack, uniform_pack
from benchmarks.report import Report
from raycp.plan import AttentionPlan, RankGrid

ROOT = Path(__file__).resolve().parents[2]


def test_packs_fill_the_row_and_repeat() -> None:
    for pack in (
        corpus_pack(8192, 3, cap=2048),
        uniform_pack(8192, 3, shortest=128, longest=512),
        equal_pack(8192, 7),
    ):
        assert pack[-1] == 8192
        assert all(a < b for a, b in zip([0, *pack], pack, strict=False))
    assert corpus_pack(8192, 3, cap=2048) == corpus_pack(8192, 3, cap=2048) != corpus_pack(8192, 4, cap=2048)
    capped = corpus_pack(131_072, 3, cap=512)
    assert max(b - a for a, b in zip([0, *capped], capped, strict=False)) == 512


def test_balance_is_within_its_bars() -> None:
    found = [balance.balance_of(balance.plan_of(corpus_pack(131_072, n, cap=32_768), 8)) for n in range(10)]
    assert mean(b.work for b in found) <= 1.03
    assert max(b.work for b in found) <= 1.08
    assert max(b.tokens for b in found) <= 1.02
    assert mean(b.rows for b in found) <= 0.26
    assert mean(b.busiest_rows for b in found) <= 0.34
    assert balance.balance_of(balance.plan_of([131_072], 8)).rows <= 0.75


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_other_layouts_miss_these_bars(layout: str) -> None:
    ends = corpus_pack(131_072, 0, cap=32_768)
    plan = AttentionPlan.build(ends, RankGrid(1, 8), layout=layout, algorithm="ring", num_heads=8, num_kv_heads=2)
    found = balance.balance_of(plan)
    assert found.work > 1.08 or found.rows > 0.34


@pytest.mark.parametrize(("algorithm", "grid"), bytes.GRIDS, ids=str)
@pytest.mark.parametrize("choices", [{}, {"mask": "full"}, {"sliding_window": 40}], ids=["causal", "full", "window"])
def test_bytes_are_those_of_the_plan(algorithm: str, grid: RankGrid, choices: dict[str, object]) -> None:
    plan = bytes.plan_of(equal_pack(257, 3), algorithm, grid, layout="zigzag", **choices)
    traffic = bytes.traffic_of(plan)
    assert traffic.as_planned
    assert traffic.forward > 0


def test_allgather_moves_what_is_needed() -> None:
    for layout in ("contiguous", "zigzag", "balanced"):
        for window in (None, 64):
            plan = bytes.plan_of(
                corpus_pack(1024, 2, cap=700), "allgather", RankGrid(1, 4), layout=layout, sliding_window=window
            )
            assert bytes.traffic_of(plan).forward == bytes.needed_bytes(plan)


class _Generous(AttentionPlan):
    """Planted fault: says that four bytes more move."""

    def bytes_moved(self, cp_rank: int, **options: object) -> int:
        return super().bytes_moved(cp_rank, **options) + 4  # type: ignore[arg-type]


def test_a_wrong_count_is_noticed() -> None:
    plan = bytes.plan_of([60, 100], "ring", RankGrid(1, 3), layout="zigzag")
    wrong = _Generous(**{name: getattr(plan, name) for name in plan.__dataclass_fields__ if name != "_cache"})
    assert bytes.traffic_of(plan).as_planned
    assert not bytes.traffic_of(wrong).as_planned


def test_needless_rows_are_noticed() -> None:
    causal, full = (
        bytes.plan_of([60, 100], "allgather", RankGrid(1, 3), layout="contiguous", mask=mask)
        for mask in ("causal", "full")
    )
    assert bytes.traffic_of(full).forward > 1.01 * bytes.needed_bytes(causal)


def test_delay_is_hidden_and_seen_where_nothing_hides_it() -> None:
    block = 0.05
    plan = overlap.plan_of(64, 4)
    kernel = overlap.TimedKernel(block, sum(s.area for s in plan.program(0).steps[0].slices))
    forward, backward, slow, slow_backward = overlap.measure(plan, kernel, 0.8 * block, 1)
    assert slow / forward < 1.2
    assert slow_backward / backward < 1.2
    late = 3 * block  # planted fault: no schedule can hide messages that take three blocks
    forward, _, slow, _ = overlap.measure(plan, kernel, late, 1)
    assert slow / forward > 1.5


def test_a_missed_bar_is_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    report.at_most("good", 1.0, 1.0)
    report.at_least("good too", 1.0, 1.0)
    assert report.end() == 0
    report.at_most("bad", 1.1, 1.0)
    assert report.end() == 1
    assert "bad: 1.1 (bar <= 1) FAIL" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "balance",
        "bytes",
        "overlap",
        "attention_speed",
        "scaling",
        "end_to_end",
        "auto_regret",
        "detection",
        "snapshot",
        "packing",
        "preparing",
        "data_wait",
    ],
)
def test_every_command_runs(name: str, tmp_path: Path) -> None:
    more = ["--picture", str(tmp_path / "scaling.svg")] if name == "scaling" else []
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--quick", *more],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    assert "bars missed" in done.stdout, done.stderr
    assert done.stdout.startswith(f"command: python -m benchmarks.{name} --quick")
