"""The one seam between a schedule and a device: a kernel computes the slices of one step.

Guarantees: every kernel follows `Kernel`, so any schedule runs with any kernel; which kernel serves a device is decided
here and nowhere else.

* `reference`: fp64, dense, obviously right, refused above 8 192 tokens
* `sdpa`: PyTorch's own flash attention for CPUs
* `diagonal`: rows that see one key each; elementwise, on any device

Legend: t query rows, s key rows of the step's block, H query heads, K key/value heads (K divides H), D head dim of
queries and keys, Dv of values.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from raycp.attention.kernels.reference import ReferenceKernel
from raycp.attention.kernels.sdpa import CpuFlashKernel
from raycp.errors import PlanError
from raycp.plan import Slice

__all__ = ["CpuFlashKernel", "Kernel", "ReferenceKernel", "kernel_for"]


class Kernel(Protocol):
    """Attention over the slices of one step, which are in ascending order of `q_start` and share no visible pair."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slices: Sequence[Slice], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Softmax over the keys of this step only.

        Args:
            q: [t, H, D].
            k: [s, K, D].
            v: [s, K, Dv].
            slices: blocks to compute; rows of q, rows of k and v.
            scale: factor of the scores.

        Returns:
            out [t, H, Dv] fp32 and the log-sum-exp of each row [t, H] fp32; rows in no slice are 0 and -inf.
        """
        ...

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        slices: Sequence[Slice],
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The share of this step in the gradients.

        Args:
            dout: [t, H, Dv], gradient of the merged output.
            q: [t, H, D].
            k: [s, K, D].
            v: [s, K, Dv].
            out: [t, H, Dv], the merged output over all steps.
            lse: [t, H] fp32, the merged log-sum-exp over all steps.
            slices: blocks to compute.
            scale: factor of the scores.

        Returns:
            dq [t, H, D], dk [s, K, D], dv [s, K, Dv], fp32.
        """
        ...


def kernel_for(device: torch.device) -> Kernel:
    """The kernel that serves `device`.

    Raises:
        PlanError: none does in this version.
    """
    if device.type == "cpu":
        return CpuFlashKernel()
    raise PlanError(
        f"no attention kernel for device {str(device)!r} in this version: the packed kernels run on cpu",
        fix="set device='cpu', or pass an object that follows raycp.attention.kernels.Kernel as kernel=",
    )
