"""The device of this process, in use: what it is, its memory, streams and random numbers, whether it is healthy.

Guarantees: the same calls on every device; a device that computes wrong numbers, does not answer or is full raises
`DeviceError`, so that no rank has it. Costs of the check: one small product, on an NPU its first compilation.
"""

import contextlib
import gc
import threading
import time
from typing import TYPE_CHECKING, Any

from raycp.errors import DeviceError
from raycp.training.device import DeviceSpec, host_memory, torch_device
from raycp.training.peak import peak_flops

if TYPE_CHECKING:
    import torch

CHECK_SECONDS = 120.0
"""How long a device may take for its first small product: an NPU compiles the operators."""
RECLAIM_SECONDS = 50.0
"""How long memory of a process that was killed may stay in use on its device (NVRx waits as long)."""
FREE_SHARE = 0.8
"""Of a device's memory, what is free when nothing but its driver and this process' context is on it."""


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

    def peak_flops(self, own: str = "auto") -> float | None:
        """Peak FLOP/s of this SKU, or the user's own figure (`FitConfig.peak_flops`); None where neither is known."""
        return peak_flops(self.sku, own)

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
