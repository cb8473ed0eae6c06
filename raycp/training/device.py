"""Which accelerator a run uses, and what follows from it: collective back end, Ray resource, visible-devices variable.

Guarantees: the answer comes from one table, so that no other file compares device names; torch is imported only when
a device object is asked for, torch_npu only on an NPU. A driver without accelerators can resolve a cluster's device.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
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
    """

    name: str
    backend: str
    ray_resource: str | None
    visible_devices: str | None
    dtype: str


_TABLE = {
    "npu": DeviceSpec("npu", "hccl", "NPU", "ASCEND_RT_VISIBLE_DEVICES", "bfloat16"),
    "cuda": DeviceSpec("cuda", "nccl", "GPU", "CUDA_VISIBLE_DEVICES", "bfloat16"),
    "cpu": DeviceSpec("cpu", "gloo", None, None, "float32"),
}


def resolve_device(name: str, cluster_resources: Mapping[str, float]) -> DeviceSpec:
    """The device of a run.

    Args:
        name: "cpu", "cuda", "npu", or "auto": NPU if the cluster has one, else GPU, else CPU.
        cluster_resources: `ray.cluster_resources()`.

    Raises:
        ConfigError: the name is not a device.
        ClusterError: the cluster has none of the device that was named.
    """
    if name == "auto":
        found = [s for s in _TABLE.values() if s.ray_resource and cluster_resources.get(s.ray_resource, 0) >= 1]
        return found[0] if found else _TABLE["cpu"]
    if name not in _TABLE:
        raise ConfigError(f"device={name!r} is not a device", fix="set device to auto, cpu, cuda or npu")
    spec = _TABLE[name]
    if spec.ray_resource and cluster_resources.get(spec.ray_resource, 0) < 1:
        have = {k: v for k, v in cluster_resources.items() if k in ("CPU", "GPU", "NPU")}
        raise ClusterError(
            f"device={name!r} needs the Ray resource {spec.ray_resource!r}, and the cluster has {have}",
            fix=f"start the Ray nodes with their {spec.ray_resource}s visible, or set device='auto' or 'cpu'",
        )
    return spec


def torch_device(spec: DeviceSpec, local_index: int = 0) -> "torch.device":
    """The torch device of this process, made its current device.

    Args:
        local_index: index among the accelerators that this process sees; ignored on CPU.

    Raises:
        ClusterError: this process does not see that accelerator.
    """
    import torch

    if spec.name == "cpu":
        return torch.device("cpu")
    if spec.name == "npu":
        importlib.import_module("torch_npu")  # registers torch.npu
    module = torch.get_device_module(spec.name)
    count = module.device_count() if module.is_available() else 0
    if local_index >= count:
        raise ClusterError(
            f"{spec.name} device {local_index} was assigned to this process, which sees {count}",
            fix=f"check the driver on this node and the value of {spec.visible_devices} in its Ray workers",
        )
    module.set_device(local_index)
    return torch.device(spec.name, local_index)


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


def device_memory(device: "torch.device") -> tuple[int, int]:
    """(total, free) bytes of one accelerator; of the host for a CPU."""
    if device.type == "cpu":
        return host_memory()
    import torch

    free, total = torch.get_device_module(device.type).mem_get_info(device)
    return int(total), int(free)


def _number(path: Path) -> int | None:
    if not path.exists():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None
