"""What the driver decides before it talks to Ray."""

import time
from pathlib import Path
from typing import Any

import pytest

from raycp.driver import cluster
from raycp.driver.cluster import connect, in_ray_job, resolve_output_dir, will_use_existing_cluster
from raycp.errors import ClusterError

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
    assert not will_use_existing_cluster({"RAY_ADDRESS": "local"})
    assert in_ray_job(JOB)
    assert not in_ray_job({})


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at '127.0.0.1:1'"),
        ("nonsense", "no Ray cluster answers at 'nonsense'"),
        ("http://127.0.0.1:8265", "no Ray cluster answers at 'http"),
        ("ray://127.0.0.1:10001", "is of Ray Client"),
    ],
)
def test_an_address_where_no_cluster_is_says_so_at_once(
    address: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself asks for minutes, and then ends the process."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    began = time.monotonic()
    with pytest.raises(ClusterError, match=words) as caught:
        connect(workers=1)
    assert time.monotonic() - began < 5
    assert caught.value.fix


def test_a_local_ray_that_cannot_start_says_what_to_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    with pytest.raises(ClusterError, match="AF_UNIX path length") as caught:
        connect(workers=1)
    assert "RAY_TMPDIR" in caught.value.fix


@pytest.mark.parametrize("npus", [0, 12])
def test_a_local_ray_is_told_of_the_npus_that_it_may_not_find(npus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CANN's `acl` module, on a node of more than ten, Ray counted ten or none."""
    told: dict[str, Any] = {}

    def init(**settings: Any) -> None:
        told.update(settings)
        raise RuntimeError("enough")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "local_accelerators", lambda: {"NPU": npus, "GPU": 1})
    monkeypatch.setattr(cluster.ray, "init", init)
    with pytest.raises(ClusterError, match="enough"):
        connect(workers=1)
    assert told["resources"] == ({"NPU": 12.0} if npus else {})
