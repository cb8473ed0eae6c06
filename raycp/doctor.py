"""What this machine has to train with, and what is missing: the checks to run before a first job.

Guarantees: everything is looked at and reported, then every problem with what to change; nothing is written, and no
accelerator is touched unless its device file is there. An accelerator that is there is used for real: a product of two
matrices, and the attention kernel on a small case. Costs 2-5 s, on an NPU the first compilation of those operators.
"""

import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from raycp.errors import Problem, RaycpError
from raycp.plain_torch import import_torch

PAIRED = {"torch_npu": "torch"}
"""Packages whose version must be that of another, up to the patch release."""
PACKAGES = ("raycp", "torch", "torch_npu", "flash_attn", "ray", "transformers", "datasets", "accelerate")
SHARED_MEMORY = 1 << 30
"""Bytes of /dev/shm below which Ray's object store goes to disk."""


@dataclass
class Report:
    """What was found: (subject, finding) lines, and the problems."""

    found: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def add(self, subject: str, finding: str) -> None:
        """One more line."""
        self.found.append((subject, finding))

    def problem(self, message: str, fix: str) -> None:
        """One more problem."""
        self.problems.append(Problem(message, fix))

    def text(self) -> str:
        """For a terminal."""
        width = max((len(subject) for subject, _ in self.found), default=0)
        lines = [f"{subject:{width}}  {finding}" for subject, finding in self.found]
        lines += [f"problem {i}: {p.message}\n  fix: {p.fix}" for i, p in enumerate(self.problems, 1)]
        lines.append("no problem found" if not self.problems else f"{len(self.problems)} problem(s)")
        return "\n".join(lines)


def examine(
    device: str = "auto",
    *,
    cluster: bool = False,
    own_peak: str = "auto",
    environ: Mapping[str, str] = os.environ,
    devices: Path = Path("/dev"),
) -> Report:
    """Looks at this machine.

    Args:
        device: what the job will run on: "npu", "cuda", "cpu", or "auto" for what is found.
        cluster: also connect to the Ray cluster and look at its nodes.
        own_peak: as `FitConfig.peak_flops`.
        environ: of this process.
        devices: folder of the device files.
    """
    report = Report()
    report.add("machine", f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
    _memory(report)
    versions = _packages(report)
    counts = _devices(report, devices)
    if device == "auto":
        device = next((name for name in ("npu", "cuda") if counts[name]), "cpu")
    report.add("device", device)
    if device != "cpu" and not counts[device]:
        report.problem(
            f"device {device!r} is wanted, and {devices} has no file of one",
            "install the driver, and give the container its devices (docs/ascend.md)",
        )
    if device == "npu":
        _cann(report, environ, versions)
    _torch(report, device, counts, own_peak)
    _environment(report, device, environ)
    if cluster:
        _cluster(report)
    return report


def _memory(report: Report) -> None:
    from raycp.training.device import host_memory

    total, free = host_memory()
    report.add("memory", f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free")
    if Path("/dev/shm").is_dir():
        shared = shutil.disk_usage("/dev/shm").total
        report.add("/dev/shm", f"{shared / 2**30:.1f} GiB")
        if shared < SHARED_MEMORY:
            report.problem(
                f"/dev/shm has {shared / 2**20:.0f} MiB: Ray's object store will be slow",
                "give the container more shared memory (docker run --shm-size=16g; an emptyDir of medium Memory)",
            )


def _packages(report: Report) -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    report.add("packages", ", ".join(f"{name} {version}" for name, version in versions.items()))
    for name, other in PAIRED.items():
        if name in versions and release(versions[name]) != release(versions.get(other, "")):
            report.problem(
                f"{name} {versions[name]} is not of {other} {versions.get(other, '(not installed)')}",
                f"install {name}=={release(versions.get(other, '')) or '...'}",
            )
    return versions


def release(version: str) -> str:
    """2.13.0 of 2.13.0.post1+cpu."""
    found = re.match(r"\d+(\.\d+)*", version)
    return ".".join(found.group().split(".")[:3]) if found else ""


def _devices(report: Report, devices: Path) -> dict[str, int]:
    from raycp.training.device import local_accelerators

    found = local_accelerators(devices, {})
    counts = {"npu": found["NPU"], "cuda": found["GPU"]}
    report.add("device files", f"{counts['npu']} NPU (davinci*), {counts['cuda']} GPU (nvidia*)")
    return counts


def _cann(report: Report, environ: Mapping[str, str], versions: Mapping[str, str]) -> None:
    home = environ.get("ASCEND_HOME_PATH") or environ.get("ASCEND_TOOLKIT_HOME")
    report.add("CANN", f"{home or 'not in the environment'}{_cann_version(home)}")
    if not home:
        report.problem(
            "ASCEND_HOME_PATH is not set: CANN's environment is not loaded",
            "source /usr/local/Ascend/ascend-toolkit/set_env.sh before `ray start`, or set it in the image",
        )
    if "torch_npu" not in versions:
        report.problem("torch_npu is not installed", f"pip install torch_npu=={release(versions.get('torch', ''))}")


def _cann_version(home: str | None) -> str:
    for file in sorted(Path(home).glob("*/ascend_toolkit_install.info")) if home else []:
        found = re.search(r"^version=(.+)$", file.read_text(), re.M)
        if found:
            return f", version {found.group(1)}"
    return ""


def _torch(report: Report, device: str, counts: Mapping[str, int], own_peak: str) -> None:
    import_torch()
    import torch

    from raycp.attention.kernels import kernel_for
    from raycp.training.accelerator import Accelerator
    from raycp.training.device import resolve_device

    own = {"npu": "NPU", "cuda": "GPU"}
    if device != "cpu" and not counts[device]:
        return
    spec = resolve_device(device, [("this machine", {own.get(device, "CPU"): 1.0})])
    for index in range(counts.get(device, 1)):
        try:
            used = Accelerator(spec, index)
            used.check()
            total, free = used.memory()
            peak = used.peak_flops(own_peak)
            speed = "peak unknown" if peak is None else f"peak {peak / 1e12:.0f} TFLOP/s bf16"
            if device != "cpu":
                report.add(str(used.device), f"{used.sku}, {total / 2**30:.1f} GiB ({free / 2**30:.1f} free), {speed}")
            if index == 0:
                _kernel(report, kernel_for(used.device), used.device)
        except RaycpError as error:
            report.problem(error.message, error.fix)
    report.add("torch", f"{torch.__version__}, {torch.get_num_threads()} threads")


def _kernel(report: Report, kernel: object, device: object) -> None:
    from raycp.attention.kernels.cuda import CudaKernel

    if isinstance(kernel, CudaKernel):
        for line in kernel.explain():
            report.add("attention", f"{line} on {device}")
        return
    op = getattr(kernel, "op", None)
    name = type(kernel).__name__ if op is None else type(op).__name__
    order = getattr(op, "order", None)
    report.add("attention", f"{name} on {device}" + (f", softmax statistics by {order.value}" if order else ""))


def _environment(report: Report, device: str, environ: Mapping[str, str]) -> None:
    from raycp.training.device import resolve_device
    from raycp.training.vendor import explain

    spec = resolve_device(device, [("this machine", {"NPU": 1.0, "GPU": 1.0})])
    for line in explain(spec, environ=environ):
        report.add("ranks get", line)
    for name in (spec.visible_devices, spec.ray_leaves):
        if name is not None and name in environ:
            report.add("set here", f"{name}={environ[name]}")


def _cluster(report: Report) -> None:
    from raycp.driver.cluster import connect, live_nodes, will_use_existing_cluster

    if not will_use_existing_cluster():
        report.problem(
            "no Ray cluster is named", "set RAY_ADDRESS=auto on a node of the cluster, or leave --cluster out"
        )
        return
    try:
        handle = connect(workers=None)
    except RaycpError as error:
        report.problem(error.message, error.fix)
        return
    try:
        for node in live_nodes():
            kinds = {k: v for k, v in node.total.items() if k in ("CPU", "GPU", "NPU")}
            report.add(f"node {node.address}", ", ".join(f"{v:g} {k}" for k, v in kinds.items()) or "no resource")
    finally:
        handle.close()
