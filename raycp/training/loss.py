"""Cross-entropy over a large vocabulary without the logits of all tokens.

n target rows of this rank, h hidden size, V vocabulary. Logits exist for `chunk` rows at a time; the gradients of
hidden states and head weight are made in the same pass, so the head weight is read once per micro-batch and nothing
is recomputed in backward. Costs one [V, h] fp32 buffer from forward to backward, and [chunk, V] fp32 in between
(all logits of 131 072 rows at V = 128 256 would be 63 GiB). Without gradients (evaluation) only the loss is computed.
"""

from typing import Any

import torch

IGNORE = -100
"""Label of a position that is not a target."""


def chunked_cross_entropy(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor | None,
    *,
    chunk: int,
    scale: float,
    logit_scale: float = 1.0,
) -> torch.Tensor:
    """Scale * sum_i weights[i] * CE(logit_scale * head @ hidden[i], targets[i]).

    Args:
        hidden: [n, h], fp32 or bf16; n may be 0, the graph stays connected.
        head: [V, h], same dtype.
        targets: int64 [n], each in [0, V): no ignored label here, select the rows first.
        weights: fp32 [n], or None for 1.
        chunk: rows whose logits exist at once.
        scale: 1 / sum of the target weights of the whole step (all ranks, all micro-batches).
        logit_scale: factor on the logits that some models have (Granite: 1 / logits_scaling).

    Returns:
        fp32 scalar. Sum it over ranks and micro-batches for the loss of the step.
    """
    need_grad = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    loss: torch.Tensor = ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, head, targets, weights, chunk, scale, logit_scale, need_grad
    )
    return loss


class ChunkedCrossEntropy(torch.autograd.Function):
    """The function behind `chunked_cross_entropy`; its backward runs once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor | None,
        chunk: int,
        scale: float,
        logit_scale: float,
        need_grad: bool,
    ) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if need_grad else None
        d_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device) if need_grad else None
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            h_c, y_c = hidden[rows], targets[rows, None]
            logits = (h_c @ head.t()).float()  # [chunk, V]
            if logit_scale != 1.0:
                logits *= logit_scale
            lse = torch.logsumexp(logits, dim=1, keepdim=True)
            nll = lse - logits.gather(1, y_c)
            factor = torch.full_like(lse, scale) if weights is None else weights[rows, None].float() * scale
            loss += (nll * factor).sum()
            if d_hidden is None or d_head is None:
                continue
            d_logits = logits.sub_(lse).exp_()
            d_logits.scatter_add_(1, y_c, torch.full_like(lse, -1.0))
            d_logits *= factor * logit_scale
            d_low = d_logits.to(hidden.dtype)
            torch.mm(d_low, head, out=d_hidden[rows])
            if hidden.dtype == torch.float32:
                d_head.addmm_(d_low.t(), h_c)
            else:
                d_head += d_low.t() @ h_c
        ctx.grads = (d_hidden, d_head, head.dtype) if d_hidden is not None and d_head is not None else None
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if ctx.grads is None:
            raise RuntimeError("the gradients of ChunkedCrossEntropy were used already: run forward again")
        d_hidden, d_head, head_dtype = ctx.grads
        ctx.grads = None
        factor = grad_outputs[0]
        return d_hidden.mul_(factor), d_head.mul_(factor).to(head_dtype), None, None, None, None, None, None
