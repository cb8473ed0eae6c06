"""Which accelerator a run uses, and what follows from it: one table.

Guarantees: no other file compares device names; torch is imported only when a device object is asked for, torch_npu
only in a process that was given an NPU, so that a driver on a machine without accelerators resolves a cluster's device.
A device that was named and is not there is an error that says what each node has: never a silent run on the CPU.
`raycp.training.vendor` has the environment variables and group options that go with a device,
`raycp.training.accelerator` the object for a process's own.
"""

import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from raycp.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DeviceSpec:
    """One kind of device.

    Attributes:
        name: "cpu", "cuda" or "npu": torch's device type.
        backend: torch.distributed back end.
        ray_resource: name of the Ray resource that one rank takes one of; None: a rank takes CPUs.
        visible_devices: environment variable that Ray sets to the accelerators of an actor; None on CPU.
        dtype: compute dtype of `FitConfig(dtype="auto")`.
        ray_leaves: environment variable that tells Ray not to set `visible_devices`.
    """

    name: str
    backend: str
    ray_resource: str | None
    visible_devices: str | None
    dtype: str
    ray_leaves: str | None = None

    @property
    def is_accelerator(self) -> bool:
        """Whether ranks compute on something else than the CPU, whatever resource they are counted by."""
        return self.name != "cpu"


_TABLE = {
    "npu": DeviceSpec(
        "npu",
        "hccl",
        "NPU",
        "ASCEND_RT_VISIBLE_DEVICES",
        "bfloat16",
        "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    ),
    "cuda": DeviceSpec(
        "cuda", "nccl", "GPU", "CUDA_VISIBLE_DEVICES", "bfloat16", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    ),
    "cpu": DeviceSpec("cpu", "gloo", None, None, "float32"),
}


def resolve_device(
    name: str, nodes: Sequence[tuple[str, Mapping[str, float]]], *, resource: str | None = None
) -> DeviceSpec:
    """The device of a run.

    Args:
        name: "cpu", "cuda", "npu", or "auto": NPU if the cluster has one, else GPU, else CPU.
        nodes: (address, Ray resources) of every live node.
        resource: Ray resource that a rank takes one of; None: the device's own.

    Raises:
        ConfigError: the name is not a device.
        ClusterError: the cluster has none of the device that was named.
    """
    if name == "auto":
        found = [s for s in _TABLE.values() if s.ray_resource and _total(nodes, s.ray_resource) >= 1]
        spec = found[0] if found else _TABLE["cpu"]
    elif name in _TABLE:
        spec = _TABLE[name]
    else:
        raise ConfigError(f"device={name!r} is not a device", fix=f"set device to one of auto, {', '.join(_TABLE)}")
    if resource is not None:
        spec = replace(spec, ray_resource=resource)
    if spec.ray_resource and _total(nodes, spec.ray_resource) < 1:
        kinds = list(dict.fromkeys(["CPU", "GPU", "NPU", spec.ray_resource]))
        have = [f"{where} has " + ", ".join(f"{r.get(k, 0):g} {k}" for k in kinds if r.get(k, 0)) for where, r in nodes]
        raise ClusterError(
            f"device={name!r} takes one {spec.ray_resource} a rank, and no node of the cluster offers any: "
            + ("; ".join(have) or "there is no live node"),
            fix=f"start the nodes with `ray start --resources='{{\"{spec.ray_resource}\": 8}}'` where Ray does not see "
            "the devices by itself (docs/ascend.md), or set device='auto' or 'cpu'",
        )
    return spec


def _total(nodes: Sequence[tuple[str, Mapping[str, float]]], resource: str) -> float:
    return sum(resources.get(resource, 0.0) for _, resources in nodes)


def local_accelerators(devices: Path = Path("/dev"), environ: Mapping[str, str] = os.environ) -> dict[str, int]:
    """{"NPU": how many, "GPU": how many} of this machine, by their device files; of NPUs those that the variable for
    visible ones leaves.

    Ray counts NPUs with CANN's `acl` module, or by device files, of one digit in older versions: it is told this number
    where raycp starts it.
    """
    names = [p.name for p in devices.iterdir()] if devices.is_dir() else []
    npus, gpus = (sum(re.fullmatch(part, n) is not None for n in names) for part in (r"davinci\d+", r"nvidia\d+"))
    visible = environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if visible is not None:  # also empty: none
        npus = min(npus, sum(part.strip().isdigit() for part in visible.split(",")))
    return {"NPU": npus, "GPU": gpus}


def local_index(spec: DeviceSpec, assigned: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Index of this actor's accelerator among those that its process sees.

    Ray names accelerators by their physical id, torch by their place in the visible list: with visible 4,5,6,7 the
    accelerator 6 is torch's number 2.

    Args:
        spec: of the run.
        assigned: `ray.get_runtime_context().get_accelerator_ids()[spec.ray_resource]`.
        environ: of the actor's process.

    Raises:
        ClusterError: the actor was given none, or one that its process does not see.
    """
    if not spec.is_accelerator:
        return 0
    if not assigned:
        raise ClusterError(
            f"this worker got no {spec.ray_resource} from Ray, so it has no device to compute on",
            fix=f"check what the node offers with `ray status`: {spec.ray_resource}",
        )
    value = environ.get(spec.visible_devices or "")
    if value is None or not value.strip():
        return int(assigned[0])  # all of the node are visible, in their own order
    visible = [x.strip() for x in value.split(",")]
    if assigned[0] not in visible:
        raise ClusterError(
            f"Ray gave this worker {spec.ray_resource} {assigned[0]}, and {spec.visible_devices}={value!r} hides it",
            fix=f"unset {spec.visible_devices} and {spec.ray_leaves} where Ray is started, so that Ray sets the first",
        )
    return visible.index(assigned[0])


def torch_device(spec: DeviceSpec, index: int = 0) -> "torch.device":
    """The torch device of this process, made its current device; on an accelerator in deterministic mode.

    Args:
        spec: of the run.
        index: of `local_index`; ignored on CPU.

    Raises:
        ClusterError: this process does not see that accelerator, or the package that drives it does not load.
    """
    import torch

    if not spec.is_accelerator:
        return torch.device("cpu")
    if spec.name == "npu":
        if (
            sys.modules.get("torch_npu", torch) is None
        ):  # a machine without NPUs (`raycp.plain_torch`): say why it fails
            del sys.modules["torch_npu"]
        try:
            importlib.import_module("torch_npu")  # registers torch.npu
        except (ImportError, OSError, RuntimeError) as error:
            raise ClusterError(
                f"this process was given an NPU, and torch_npu does not load: {error}",
                fix="install CANN and the torch_npu of this torch on the node, and source CANN's set_env.sh before "
                "`ray start` (docs/ascend.md)",
            ) from error
    module = torch.get_device_module(spec.name)
    count = module.device_count() if module.is_available() else 0
    if index >= count:
        raise ClusterError(
            f"{spec.name} device {index} was assigned to this process, which sees {count}",
            fix=f"check the driver on this node and the value of {spec.visible_devices} in its Ray workers",
        )
    module.set_device(index)
    # fused kernels then sum in one order, as a run that goes on to the same bits needs; what has no such form warns
    torch.use_deterministic_algorithms(True, warn_only=True)
    return torch.device(spec.name, index)


def compute_dtype(name: str) -> "torch.dtype":
    """The torch dtype of "float32" or "bfloat16".

    Raises:
        ConfigError: another name.
    """
    import torch

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise ConfigError(f"dtype={name!r} is not a compute dtype", fix="set dtype to float32 or bfloat16")
    return dtypes[name]


def host_memory() -> tuple[int, int]:
    """(total, available) bytes of host memory of this machine or, where it is smaller, of this container. Linux."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, value = line.split(":", 1)
        fields[key] = int(value.split()[0]) * 1024
    total, available = fields["MemTotal"], fields["MemAvailable"]
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, used = _number(Path(limit_file)), _number(Path(used_file))
        if limit is not None and used is not None and limit < total:
            total, available = limit, min(available, max(0, limit - used))
    return total, available


def _number(path: Path) -> int | None:
    if not path.exists():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None
