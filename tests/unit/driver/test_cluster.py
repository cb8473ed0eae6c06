"""What the driver decides before it talks to Ray."""

from pathlib import Path
from typing import Any

import pytest

from raycp.driver.cluster import in_ray_job, resolve_output_dir, will_use_existing_cluster

JOB = {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}


def test_absolute_output_is_kept_everywhere(tmp_path: Path) -> None:
    for environ in ({}, JOB, {"RAYCP_HOME": "/elsewhere"}):
        assert resolve_output_dir(tmp_path / "run", environ) == (tmp_path / "run", [])


def test_relative_output_is_taken_from_the_working_folder_outside_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_output_dir("runs/one", {})[0] == tmp_path / "runs" / "one"


def test_relative_output_inside_a_job_is_refused_without_a_home() -> None:
    folder, problems = resolve_output_dir("runs/one", JOB)
    assert folder is None
    assert "runs/one" in problems[0].message
    assert "RAYCP_HOME" in problems[0].fix


def test_relative_output_inside_a_job_lies_under_the_home(tmp_path: Path) -> None:
    folder, problems = resolve_output_dir("runs/one", JOB | {"RAYCP_HOME": str(tmp_path)})
    assert folder == tmp_path / "runs" / "one"
    assert problems == []


@pytest.mark.parametrize("given", [None, 3, ""])
def test_output_that_is_no_path_is_a_problem_not_a_crash(given: Any) -> None:
    folder, problems = resolve_output_dir(given, {})
    assert folder is None
    assert "is not a path" in problems[0].message


def test_which_cluster_is_used() -> None:
    assert not will_use_existing_cluster({})
    assert will_use_existing_cluster(JOB)
    assert will_use_existing_cluster({"RAY_ADDRESS": "10.0.0.1:6379"})
    assert in_ray_job(JOB)
    assert not in_ray_job({})
