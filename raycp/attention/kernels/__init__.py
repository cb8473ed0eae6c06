"""The one seam between a schedule and a device: a kernel computes the slices of one step.

Guarantees: every kernel follows `Kernel`, so any schedule runs with any kernel; which kernel serves a device is decided
here and nowhere else.

* `protocol`: `Kernel`
* `reference`: fp64, dense, obviously right, refused above 8 192 tokens
* `sdpa`: PyTorch's own flash attention for CPUs
* `varlen`: what kernels share that take many documents in one call
* `npu`: Ascend's fused attention
* `cuda`: flash-attn, or what is inside PyTorch: by dtype, head dim and GPU
* `aten`: flash and memory-efficient attention inside PyTorch
* `matmul`: matrix products a strip at a time, where no fused kernel serves
* `diagonal`: rows that see one key each; elementwise, on any device
* `uneven`: any of them for heads that do not divide
"""

from functools import cache

import torch

from raycp.attention.kernels.cuda import CudaKernel
from raycp.attention.kernels.npu import NpuOp
from raycp.attention.kernels.protocol import Kernel
from raycp.attention.kernels.reference import ReferenceKernel
from raycp.attention.kernels.sdpa import CpuFlashKernel
from raycp.attention.kernels.uneven import UnevenHeads, for_groups
from raycp.attention.kernels.varlen import VarlenKernel
from raycp.errors import PlanError

__all__ = ["DEVICES", "CpuFlashKernel", "Kernel", "ReferenceKernel", "UnevenHeads", "for_groups", "kernel_for"]


DEVICES = ("cpu", "cuda", "npu")
"""Types of the devices that a kernel serves."""


@cache
def kernel_for(device: torch.device) -> Kernel:
    """The kernel that serves `device`, made once a process (the first on an NPU runs the op on a small known case).

    Raises:
        PlanError: none does.
        ClusterError: the device's library does not do what its document says.
    """
    if device.type == "cpu":
        return CpuFlashKernel()
    if device.type == "npu":
        return VarlenKernel(NpuOp(device))
    if device.type == "cuda":
        return CudaKernel(capability=torch.cuda.get_device_capability(device))
    raise PlanError(
        f"no attention kernel for device {str(device)!r}: the packed kernels run on {', '.join(DEVICES)}",
        fix="set device to one of these, or pass an object that follows raycp.attention.kernels.Kernel as kernel=",
    )
