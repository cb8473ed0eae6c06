"""What a kernel is: attention over the slices of one step, and its share of the gradients.

Guarantees: schedules know only this. Legend: t query rows, s key rows of the step's block, H query heads, K key/value
heads (K divides H), D head dim of queries and keys, Dv of values.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from raycp.plan import Slice


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
            out [t, H, Dv] fp32 and the log-sum-exp of each row [t, H] fp32. Rows in no slice are 0 and -inf between
            the first and the last row of `slices`, and anything before and after them: they cost nothing.
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
            dq [t, H, D], dk [s, K, D], dv [s, K, Dv], fp32. Rows of dq in no slice are 0 or anything, as in `forward`.
        """
        ...
