"""What `fit` finds out about its arguments by itself, before anything is started."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import raycp
from raycp.preflight import _would_read, check_kinds

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"seq_length": 8}, ["config is a dict", "raycp.FitConfig"]),
        (
            raycp.FitConfig(parallel={"cp": 2}, optim=None),  # type: ignore[arg-type]
            ["config.parallel is a dict", "raycp.ParallelConfig", "config.optim is a NoneType"],
        ),
    ],
)
def test_a_part_of_another_type_is_a_problem_not_a_crash(config: Any, words: list[str]) -> None:
    with pytest.raises(raycp.ConfigError) as caught:
        check_kinds(config)
    for word in words:
        assert word in str(caught.value)


def test_a_configuration_of_the_right_types_passes() -> None:
    check_kinds(raycp.FitConfig())


@pytest.mark.parametrize(
    ("source", "output", "inside"),
    [
        ("", "", True),
        ("", "runs/one", True),
        ("rows", "runs", False),
        ("runs/*.jsonl", "runs", True),
        ("runs/*.json", "runs", True),
        ("runs/*.parquet", "runs", False),
        ("runs/train-*.jsonl", "runs", False),
        ("*/*.jsonl", "runs", True),
        ("*.jsonl", "runs", False),
        ("**/*.jsonl", "runs", True),
        ("**/*.parquet", "runs", False),
        ("rows/**/*.jsonl", "runs", False),
        ("runs/rows.jsonl", "runs", False),
    ],
)
def test_data_that_would_take_in_what_the_run_writes_is_seen(
    tmp_path: Path, source: str, output: str, inside: bool
) -> None:
    (tmp_path / "rows").mkdir()
    assert _would_read(str(tmp_path / source), tmp_path / output) is inside


@pytest.mark.parametrize("name", ["workers/__init__.py", "workers.py", "data_pipeline/__init__.py"])
def test_a_users_own_package_of_our_name_is_named(tmp_path: Path, name: str) -> None:
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("")
    script = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import raycp; raycp.fit"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "raycp.errors.ConfigError" in done.stderr
    assert f"{tmp_path / name.split('/')[0]} shadows raycp's package" in done.stderr
    assert "fix: rename it" in done.stderr
