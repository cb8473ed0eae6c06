"""Our calls of Ascend's attention ops against the real torch_npu, in a process of its own; `inside/` has the tests.

Skipped with the reason where the wheel cannot be had or gcc is missing, and failed there with --require-torch-npu (CI).
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.device import torch_npu_here as here

FILES = {
    "contract_llama": 2,
    "contract_device": 6,
    "contract_schemas": 20,
    "contract_golden": 20,
    "contract_exactness": 60,
}
"""Files below `inside`, and how many tests each has at least."""
STUBS = {"aclInit", "aclrtMalloc", "aclrtGetDeviceCount", "rtKernelLaunch", "MsprofRegisterCallback"}


@pytest.fixture(scope="module")
def package(request: pytest.FixtureRequest) -> Path:
    try:
        return here.install()
    except here.NotHereError as reason:
        return _missing(request, reason)


@pytest.fixture(scope="module")
def stubs(request: pytest.FixtureRequest, package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stubs")
    try:
        names = here.build_stubs(package, folder)
    except here.NotHereError as reason:
        return _missing(request, reason)
    assert set(names) >= STUBS
    return folder


def _missing(request: pytest.FixtureRequest, reason: here.NotHereError) -> Path:
    if request.config.getoption("--require-torch-npu"):
        pytest.fail(f"the contract with torch_npu was not tested: {reason}")
    pytest.skip(f"the contract with torch_npu is not tested: {reason}")


@pytest.fixture(scope="module")
def report(package: Path, stubs: Path) -> dict[str, list[ET.Element]]:
    """The results of the inner run: test cases by file."""
    out = stubs / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "python_files=contract_*.py"]
    command += ["--junit-xml", str(out), str(Path(__file__).parent / "inside")]
    done = subprocess.run(
        command, cwd=here.ROOT, env=here.environment(package, stubs), capture_output=True, text=True, timeout=280
    )
    assert out.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, list[ET.Element]] = {}
    for case in ET.parse(out).iter("testcase"):
        found.setdefault(case.attrib["classname"].rsplit(".", 1)[-1], []).append(case)
    return found


@pytest.mark.parametrize("name", list(FILES))
def test_contract(name: str, report: dict[str, list[ET.Element]]) -> None:
    cases = report.get(name, [])
    bad = [
        f"{case.attrib['name']}: {result.tag}: {(result.text or result.attrib.get('message', ''))[-1500:]}"
        for case in cases
        for result in case
        if result.tag in ("failure", "error", "skipped")
    ]
    assert not bad, "\n".join(bad)
    assert len(cases) >= FILES[name]


def test_this_process_is_left_alone() -> None:
    assert "torch_npu" not in sys.modules


def test_a_machine_without_the_wheel_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(here, "ROOT", tmp_path)
    monkeypatch.setattr(here, "version", lambda: "0.0.1.nowhere")
    with pytest.raises(here.NotHereError, match=r"torch-npu==0\.0\.1\.nowhere"):
        here.install()
    assert list((tmp_path / "build").glob("*")) == [] if (tmp_path / "build").exists() else True


@pytest.mark.parametrize(("flags", "code", "word"), [((), 0, "skipped"), (("--require-torch-npu",), 1, "error")])
def test_without_gcc_it_is_skipped_visibly_and_fails_in_ci(
    package: Path, tmp_path: Path, flags: tuple[str, ...], code: int, word: str
) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"{Path(__file__)}::test_contract", *flags]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=here.ROOT, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout
    assert "tested: no gcc on this machine" in done.stdout
    assert f"{len(FILES)} {word}" in done.stdout


def test_ci_requires_it() -> None:
    assert "make test TEST_FLAGS=--require-torch-npu" in (here.ROOT / ".ci" / "run").read_text()


def test_a_machine_without_gcc_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(here.NotHereError, match="no gcc"):
        here.build_stubs(tmp_path, tmp_path)
