"""The one autograd function around every schedule, and around the trade of tokens for heads that may surround it.

Guarantees: gradients have the dtypes of their tensors; an earlier forward of the same call that was kept is not run
again and moves nothing again (activation checkpointing); what is saved for backward is q, k, v (of a Ulysses rank's
heads, where there is a trade), output, log-sum-exp and cached blocks, and is released with the graph.

What is kept of a call: output, log-sum-exp and cached blocks; with a trade also q, k and v of the rank's heads, since
backward needs them and recomputation has them by tokens only, and the output by tokens.

Legend: t own rows, N rows of the Ulysses group (t without one), H query heads, K key/value heads, h and g those of a
Ulysses rank (H and K without one), D head dim, Dv value dim.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from raycp.attention.call import AttentionCall, Tensors
from raycp.attention.ulysses import HeadTrade


class PlannedAttention(torch.autograd.Function):
    """`PlannedAttention.apply(q, k, v, call, trade)`: q [t, H, D], k [t, K, D], v [t, K, Dv] -> [t, H, Dv].

    The output has q's dtype. `trade` is None where the rank computes all heads of its own rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: AttentionCall,
        trade: HeadTrade | None = None,
    ) -> torch.Tensor:
        """Runs the schedule, or takes what an earlier run of the same call kept."""
        kept = call.recall() if call.recall is not None else None
        if kept is None:
            kept = _run(q, k, v, call, trade)
            if call.keep is not None:
                call.keep((kept[0].detach(), *kept[1:]))
        used = (q, k, v, *kept) if trade is None else kept[1:]
        ctx.save_for_backward(*used)
        ctx.call, ctx.trade = call, trade
        return kept[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Runs the schedule again, for gradients."""
        q, k, v, out, lse, *cache = ctx.saved_tensors
        call: AttentionCall = ctx.call
        trade: HeadTrade | None = ctx.trade
        if trade is not None:
            dout = trade.output_to_heads(dout)
        gradients = call.schedule.backward(dout, q, k, v, out, lse, tuple(cache), call)
        dq, dk, dv = (gradient.to(x.dtype) for gradient, x in zip(gradients, (q, k, v), strict=True))
        if trade is not None:
            dq, dk, dv = trade.inputs_to_tokens((dq, dk, dv))
        return dq, dk, dv, None, None


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall, trade: HeadTrade | None) -> Tensors:
    """Out [N, h, Dv], log-sum-exp [N, h] and cached blocks; with a trade, before them: out [t, H, Dv], q, k, v."""
    if trade is None:
        out, lse, cache = call.schedule.forward(q, k, v, call)
        return out, lse, *cache
    q, k, v = trade.inputs_to_heads((q, k, v))
    out, lse, cache = call.schedule.forward(q, k, v, call)
    return trade.output_to_tokens(out), q, k, v, out, lse, *cache
