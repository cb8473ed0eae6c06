"""On a machine with torch_npu and without CANN, where `import torch` itself fails, a driver still works."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A Python path with a torch_npu that torch finds by itself and that does not load."""
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("raise ImportError('libhccl.so: no such file')\n")
    info = tmp_path / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    found = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    return found | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


def _run(code: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120)


def test_import_torch_fails_there_by_itself(environ: dict[str, str]) -> None:
    done = _run("import torch", environ)
    assert done.returncode
    assert "Failed to load the backend extension" in done.stderr


def test_the_driver_neither_fails_nor_loads_torch_npu(environ: dict[str, str]) -> None:
    code = (
        "import os, sys, raycp; raycp.fit; import torch; "
        "print(sys.modules.get('torch_npu'), os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD'))"
    )
    done = _run(code, environ)
    assert done.stdout.split() == ["None", "None"], done.stderr


def test_what_the_user_set_is_left_alone(environ: dict[str, str]) -> None:
    done = _run("import raycp; raycp.fit", environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"})
    assert "Failed to load the backend extension" in done.stderr


def test_a_user_who_wants_no_backend_has_none_of_transformers_either(environ: dict[str, str]) -> None:
    done = _run("import raycp; raycp.fit", environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert done.returncode == 0, done.stderr


def test_a_rank_is_imported_there(environ: dict[str, str]) -> None:
    done = _run("import workers.actor, sys; print(sys.modules['torch_npu'])", environ)
    assert done.stdout.split() == ["None"], done.stderr


def test_without_our_first_import_a_rank_is_not(environ: dict[str, str]) -> None:
    done = _run(
        "import sys, types; sys.modules['workers.plain'] = types.ModuleType('none'); import workers.actor", environ
    )
    assert "Failed to load the backend extension" in done.stderr


@pytest.mark.parametrize(("npu", "davinci", "blocked"), [(True, True, False), (False, True, True), (True, False, True)])
def test_who_may_load_torch_npu(
    environ: dict[str, str], tmp_path: Path, npu: bool, davinci: bool, blocked: bool
) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    (devices / "davinci_manager").touch()
    if davinci:
        (devices / "davinci0").touch()
    code = (
        "import os, pathlib, sys; from raycp.plain_torch import import_torch; "
        f"import_torch(npu={npu}, devices=pathlib.Path({str(devices)!r})); import torch; "
        "print('torch_npu' in sys.modules, os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD'))"
    )
    done = _run(code, environ)
    assert done.stdout.split() == [str(blocked), "None"], done.stderr


def test_a_rank_with_an_npu_is_told_why_torch_npu_does_not_load(environ: dict[str, str]) -> None:
    code = (
        "import workers.actor; from raycp.training.device import resolve_device, torch_device; "
        "torch_device(resolve_device('npu', [('here', {'NPU': 1.0})]))"
    )
    done = _run(code, environ)
    assert "torch_npu does not load: libhccl.so: no such file" in done.stderr
