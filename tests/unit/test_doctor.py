"""`raycp doctor` on this machine, and on machines that a folder of device files imitates."""

import importlib.metadata
from pathlib import Path

import pytest

from raycp import doctor
from raycp.cli import main
from raycp.doctor import examine, release


@pytest.fixture
def no_devices(tmp_path: Path) -> Path:
    return tmp_path


def test_a_plain_cpu_machine(no_devices: Path) -> None:
    report = examine("auto", environ={}, devices=no_devices)
    found = dict(report.found)
    assert found["device"] == "cpu"
    assert found["attention"] == "CpuFlashKernel on cpu"
    assert "torch 2." in found["packages"]
    assert found["device files"] == "0 NPU (davinci*), 0 GPU (nvidia*)"
    assert not [p for p in report.problems if "shm" not in p.message]


def test_a_device_that_is_wanted_and_missing(no_devices: Path) -> None:
    report = examine("npu", environ={}, devices=no_devices)
    messages = [p.message for p in report.problems]
    assert any("has no file of one" in m for m in messages)
    assert any("ASCEND_HOME_PATH is not set" in m for m in messages)
    assert any("torch_npu is not installed" in m for m in messages)
    assert all(p.fix for p in report.problems)
    lines = [finding for subject, finding in report.found if subject == "ranks get"]
    assert any(line.startswith("HCCL_CONNECT_TIMEOUT=") for line in lines)


def test_npu_files_without_torch_npu_are_a_problem_and_not_a_cpu(tmp_path: Path) -> None:
    for name in ("davinci0", "davinci15", "davinci_manager"):
        (tmp_path / name).touch()
    report = examine("auto", environ={"ASCEND_HOME_PATH": str(tmp_path)}, devices=tmp_path)
    found = dict(report.found)
    assert found["device"] == "npu"
    assert found["device files"].startswith("2 NPU")
    assert "attention" not in found
    assert any("torch_npu does not load" in p.message for p in report.problems)


def test_cann_says_its_version(tmp_path: Path) -> None:
    info = tmp_path / "aarch64-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir()
    info.write_text("package_name=Ascend-cann-toolkit\nversion=8.5.0\n")
    found = dict(examine("npu", environ={"ASCEND_HOME_PATH": str(tmp_path)}, devices=tmp_path).found)
    assert found["CANN"] == f"{tmp_path}, version 8.5.0"


def test_packages_that_do_not_belong_together(no_devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0+cpu", "torch_npu": "2.9.0.post1"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    report = doctor.Report()
    doctor._packages(report)
    (problem,) = report.problems
    assert problem.message == "torch_npu 2.9.0.post1 is not of torch 2.13.0+cpu"
    assert problem.fix == "install torch_npu==2.13.0"


def test_releases() -> None:
    assert [release(v) for v in ("2.13.0.post1", "2.13.0+cpu", "2.12.0rc1", "")] == ["2.13.0", "2.13.0", "2.12.0", ""]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "npu"]) == 1
    out = capsys.readouterr().out
    assert "problem 1: " in out
    assert "  fix: " in out
    assert main(["doctor", "--device", "cpu"]) == 0
    assert "no problem found" in capsys.readouterr().out


def test_a_cluster_that_is_not_named(no_devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    report = examine("cpu", cluster=True, environ={}, devices=no_devices)
    assert [p.message for p in report.problems if "Ray" in p.message] == ["no Ray cluster is named"]
