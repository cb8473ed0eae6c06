"""Which accelerator a run uses, and what follows from it: one table, and one object for a process's own accelerator.

Guarantees: no other file compares device names; torch is imported only when a device object is asked for, torch_npu
only in a process that was given an NPU, so that a driver on a machine without accelerators resolves a cluster's device.
A device that was named and is not there is an error that says what each node has: never a silent run on the CPU.
`raycp.training.vendor` has the environment variables and group options that go with a device.
"""

import contextlib
import gc
import importlib
import os
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycp.errors import ClusterError, ConfigError, DeviceError

if TYPE_CHECKING:
    import torch

CHECK_SECONDS = 120.0
"""How long a device may take for its first small product: an NPU compiles the operators."""
RECLAIM_SECONDS = 50.0
"""How long memory of a process that was killed may stay in use on its device (NVRx waits as long)."""
FREE_SHARE = 0.8
"""Of a device's memory, what is free when nothing but its driver and this process' context is on it."""


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


class Accelerator:
    """The device of this process, in use.

    Args:
        spec: of the run.
        index: of `local_index`.

    Attributes:
        device: torch's device, made current.
        module: torch.npu, torch.cuda or torch.cpu.

    Raises:
        ClusterError: as `torch_device`.
    """

    def __init__(self, spec: DeviceSpec, index: int = 0) -> None:
        import torch

        self.spec = spec
        self.device = torch_device(spec, index)
        self.module: Any = torch.get_device_module(spec.name)

    @property
    def sku(self) -> str:
        """What the device calls itself; "cpu" for a CPU."""
        return str(self.module.get_device_name(self.device)) if self.spec.is_accelerator else "cpu"

    def memory(self) -> tuple[int, int]:
        """(total, free) bytes of the device; of the host for a CPU."""
        if not self.spec.is_accelerator:
            return host_memory()
        free, total = self.module.mem_get_info(self.device)
        return int(total), int(free)

    def synchronize(self) -> None:
        """Waits for everything that was given to the device."""
        self.module.synchronize()

    def stream(self) -> Any:
        """A new stream."""
        return self.module.Stream()

    def using(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Work inside the block goes to `stream`."""
        context: contextlib.AbstractContextManager[Any] = self.module.stream(stream)
        return context

    def rng_state(self) -> "torch.Tensor":
        """State of the device's generator, uint8 on the host."""
        import torch

        return self.module.get_rng_state().cpu() if self.spec.is_accelerator else torch.get_rng_state()

    def set_rng_state(self, state: "torch.Tensor") -> None:
        """The inverse of `rng_state`."""
        import torch

        (self.module.set_rng_state if self.spec.is_accelerator else torch.set_rng_state)(state)

    def release(self) -> int:
        """Gives cached memory back. Returns the free bytes then. Call it when no tensor of the old state is alive."""
        gc.collect()
        if self.spec.is_accelerator:
            self.synchronize()
            self.module.empty_cache()
        return self.memory()[1]

    def reclaim(self, *, share: float = FREE_SHARE, patience: float = RECLAIM_SECONDS) -> int:
        """`release`, until the device is as good as empty: the driver of a device gives back what a killed process had
        some time after its end.

        Args:
            share: of the device's memory that has to be free.
            patience: seconds to wait for it.

        Returns:
            Free bytes. Of a CPU's memory, which others use too, nothing is asked.

        Raises:
            DeviceError: less was free all the time.
        """
        end = time.monotonic() + patience
        while True:
            free, total = self.release(), self.memory()[0]
            if not self.spec.is_accelerator or free >= share * total:
                return free
            if time.monotonic() >= end:
                raise DeviceError(
                    f"{self.device} ({self.sku}) has {free / 2**30:.1f} of {total / 2**30:.1f} GiB free after "
                    f"{patience:.0f} s, before anything of this run is on it",
                    fix="end the process that has the rest (npu-smi info, nvidia-smi); a rank needs a device to itself",
                )
            time.sleep(min(0.5, patience))

    def check(self, *, deadline: float = CHECK_SECONDS) -> None:
        """Multiplies two small matrices whose product is known: the probe before a device is used, and used again.

        Args:
            deadline: seconds; a device that is wedged does not answer, and holds whoever asks.

        Raises:
            DeviceError: the device raises, computes something else, or does not answer in time.
        """
        problems: list[DeviceError] = []

        def ask() -> None:
            try:
                self._multiply()
            except DeviceError as error:
                problems.append(error)

        thread = threading.Thread(target=ask, name="raycp-device-check", daemon=True)
        thread.start()
        thread.join(deadline)
        if thread.is_alive():
            raise DeviceError(
                f"{self.device} did not finish a product of two small matrices within {deadline:.0f} s",
                fix="reset the device, or take it out of the cluster (npu-smi, nvidia-smi)",
            )
        if problems:
            raise problems[0]

    def _multiply(self) -> None:
        import torch

        try:
            if self.spec.is_accelerator:
                self.module.set_device(self.device)  # of this thread
            left = torch.arange(64.0).reshape(8, 8).to(self.device)
            found = (left @ torch.eye(8, device=self.device)).sum()
            self.synchronize()
            total = float(found.cpu())
        except RuntimeError as error:
            raise DeviceError(
                f"{self.device} ({self.sku}) fails a product of two small matrices: {error}",
                fix="take the device out of the cluster and look at its driver's log (npu-smi, nvidia-smi)",
            ) from error
        if total != 2016.0:
            raise DeviceError(
                f"{self.device} ({self.sku}) computes {total} where the sum of 0 .. 63 is 2016",
                fix="take the device out of the cluster: it computes wrong numbers",
            )


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
