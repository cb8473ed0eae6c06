"""The real torch_npu on a machine without CANN: its wheel in a folder of its own, and stubs for what CANN would bring.

Guarantees: the environment of the tests is left alone, since torch_npu breaks every `import torch` where CANN is
missing (torch loads it by itself): the wheel lies in build/ and is on the path of subprocesses only. Costs a download
of 44 MB and 10 s once, 1 s for the stubs, and 2-3 s an import.

The stubs are shared objects with the names that the wheel's libraries ask for. They hold every C symbol that nobody
else defines; each returns 0, except those whose answer is read (number of devices, name of the chip, last error).
"""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SONAMES = ("libhccl", "libascendcl", "libacl_op_compiler", "libge_runner", "libgraph", "libacl_tdt_channel")
BODIES = {
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *count) { *count = 0; return 0; }",
    "aclrtGetSocName": 'const char *aclrtGetSocName(void) { return "Ascend910B3"; }',
    "aclGetRecentErrMsg": 'const char *aclGetRecentErrMsg(void) { return ""; }',
}


class NotHereError(Exception):
    """Why the real torch_npu cannot be imported on this machine."""


def version() -> str:
    """What pyproject.toml pins for Ascend machines."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = project["optional-dependencies"]["npu"]
    return str(requirement.partition("==")[2])


def install() -> Path:
    """The folder that holds torch_npu; fetched by pip where it is missing.

    Raises:
        NotHereError: pip has no wheel for this Python and machine, or no network.
    """
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    folder = ROOT / "build" / f"torch_npu-{version()}-{tag}-{os.uname().machine}"
    if (folder / "torch_npu" / "version.py").exists():
        return folder
    aside = folder.with_name(f"{folder.name}.{os.getpid()}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--target", str(aside), f"torch-npu=={version()}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        if done.returncode:
            raise NotHereError(f"pip does not install torch-npu=={version()}: {done.stderr.strip()[-300:]}")
        if not folder.exists():
            aside.rename(folder)
    except (OSError, subprocess.TimeoutExpired) as error:
        if (folder / "torch_npu" / "version.py").exists():  # another process was faster
            return folder
        raise NotHereError(f"torch-npu=={version()} was not fetched: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def build_stubs(package: Path, folder: Path) -> list[str]:
    """Builds the shared objects that stand for CANN into `folder`; the names of the symbols in them.

    Raises:
        NotHereError: no gcc or no nm.
    """
    for tool in ("gcc", "nm"):
        if shutil.which(tool) is None:
            raise NotHereError(f"no {tool} on this machine")
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    libraries = [
        *(package / "torch_npu" / "lib" / f"lib{name}.so" for name in ("torch_npu", "npu_profiler", "tensorpipe")),
        *(package / "torch_npu").glob("_C.*.so"),
    ]
    others = [*libraries, *(Path(spec.origin).parent / "lib").glob("*.so*")]
    defined = {name for path in others for name, _ in _symbols(path, "--defined-only")}
    process = ctypes.CDLL(None)  # what libc, libm and Python itself have
    missing = sorted(
        name
        for path in libraries
        for name, kind in _symbols(path, "--undefined-only")
        if kind == "U" and "@" not in name and name not in defined and not hasattr(process, name)
    )
    missing = list(dict.fromkeys(missing))
    source = "\n".join(BODIES.get(name, f"long {name}(void) {{ return 0; }}") for name in missing)
    for soname in SONAMES:
        file = folder / f"{soname}.so"
        text = source if soname == "libascendcl" else ""
        command = ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(file), f"-Wl,-soname,{file.name}"]
        subprocess.run(command, input=text, text=True, check=True, capture_output=True)
    return missing


def _symbols(path: Path, which: str) -> list[tuple[str, str]]:
    """(name, type) of the dynamic symbols of a library; names without their version."""
    text = subprocess.run(["nm", "-D", which, str(path)], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in text.splitlines() if line.strip()]
    keep = which == "--undefined-only"  # a version there says whose symbol it is: not CANN's, which has none
    return [(row[-1] if keep else row[-1].partition("@")[0], row[-2]) for row in rows]


def environment(package: Path, stubs: Path) -> dict[str, str]:
    """Environment of a process that can `import torch_npu`."""
    found = dict(os.environ)
    found.pop("ASCEND_RT_VISIBLE_DEVICES", None)
    found["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(stubs), os.environ.get("LD_LIBRARY_PATH", "")]))
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH", "")]))
    found["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    return found
