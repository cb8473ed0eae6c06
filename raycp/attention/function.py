"""The one autograd function around every schedule.

Guarantees: gradients have the dtypes of their tensors; an earlier forward of the same call that was kept is not run
again (activation checkpointing); what is saved for backward is q, k, v, output, log-sum-exp and cached blocks, and is
released with the graph.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from raycp.attention.call import AttentionCall


class PlannedAttention(torch.autograd.Function):
    """`PlannedAttention.apply(q, k, v, call)`: q [t, H, D], k [t, K, D], v [t, K, Dv] -> [t, H, Dv] of q's dtype."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """Runs the schedule, or takes what an earlier run of the same call kept."""
        kept = call.recall() if call.recall is not None else None
        if kept is None:
            out, lse, cache = call.schedule.forward(q, k, v, call)
        else:
            out, lse, *rest = kept
            cache = tuple(rest)
        if kept is None and call.keep is not None:
            call.keep((out.detach(), lse, *cache))
        ctx.save_for_backward(q, k, v, out, lse, *cache)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        """Runs the schedule again, for gradients."""
        q, k, v, out, lse, *cache = ctx.saved_tensors
        call: AttentionCall = ctx.call
        dq, dk, dv = call.schedule.backward(dout, q, k, v, out, lse, tuple(cache), call)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None
