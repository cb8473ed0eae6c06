"""The one seam between a schedule and a device: a kernel computes the slices of one step.

Guarantees: every kernel follows `Kernel`, so any schedule runs with any kernel; which kernel serves a device is decided
here and nowhere else.

* `protocol`: `Kernel`
* `reference`: fp64, dense, obviously right, refused above 8 192 tokens
* `sdpa`: PyTorch's own flash attention for CPUs
* `diagonal`: rows that see one key each; elementwise, on any device
* `uneven`: any of them for heads that do not divide
"""

import torch

from raycp.attention.kernels.protocol import Kernel
from raycp.attention.kernels.reference import ReferenceKernel
from raycp.attention.kernels.sdpa import CpuFlashKernel
from raycp.attention.kernels.uneven import UnevenHeads, for_groups
from raycp.errors import PlanError

__all__ = ["DEVICES", "CpuFlashKernel", "Kernel", "ReferenceKernel", "UnevenHeads", "for_groups", "kernel_for"]


DEVICES = ("cpu",)
"""Types of the devices that a kernel serves in this version."""


def kernel_for(device: torch.device) -> Kernel:
    """The kernel that serves `device`.

    Raises:
        PlanError: none does in this version.
    """
    if device.type in DEVICES:
        return CpuFlashKernel()
    raise PlanError(
        f"no attention kernel for device {str(device)!r} in this version: the packed kernels run on cpu",
        fix="set device='cpu', or pass an object that follows raycp.attention.kernels.Kernel as kernel=",
    )
