"""Attention by matrix products in fp32, a strip of queries at a time: what serves where no fused kernel does.

Guarantees: any device, dtype, head dim and mask; scores exist for one strip only, up to `STRIP_NUMBERS` of them. Costs
several times a fused kernel: scores go through memory.

Legend: r rows of a strip, c its keys, H query heads, K key/value heads, G = H / K, D head dim, Dv value dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from raycp.attention.kernels.diagonal import grouped
from raycp.attention.merge import merge_
from raycp.plan import MaskKind, Slice

STRIP_NUMBERS = 1 << 26
"""Scores of a strip, over all heads: 256 MiB in fp32."""


class MatmulKernel:
    """Follows `raycp.attention.kernels.Kernel`."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slices: Sequence[Slice], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        out = q.new_zeros(len(q), q.shape[1], v.shape[-1], dtype=torch.float32)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
        for strip in _strips(slices, q):
            rows, cols = strip.rows, strip.cols
            scores = _scores(q[rows], k[cols], scale, strip)  # [K, G, r, c]
            part_lse = scores.logsumexp(-1)
            p = (scores - part_lse[..., None]).exp()
            part = torch.einsum("kgrc,ckd->rkgd", p, v[cols].float()).flatten(1, 2)
            merge_(out[rows], lse[rows], part, part_lse.flatten(0, 1).t())
        return out, lse

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
        """See `Kernel.backward`."""
        dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
        groups = k.shape[1]
        for strip in _strips(slices, q):
            rows, cols = strip.rows, strip.cols
            dout_r, out_r, q_r = (grouped(x[rows], groups) for x in (dout, out, q))  # [r, K, G, .]
            row_lse = lse[rows].t().reshape(groups, -1, len(q_r), 1)
            p = (_scores(q[rows], k[cols], scale, strip) - row_lse).exp()
            delta = (dout_r * out_r).sum(-1).permute(1, 2, 0)[..., None]  # [K, G, r, 1]
            dscores = p * (torch.einsum("rkgd,ckd->kgrc", dout_r, v[cols].float()) - delta) * scale
            dq[rows] += torch.einsum("kgrc,ckd->rkgd", dscores, k[cols].float()).flatten(1, 2)
            dk[cols] += torch.einsum("kgrc,rkgd->ckd", dscores, q_r)
            dv[cols] += torch.einsum("kgrc,rkgd->ckd", p, dout_r)
        return dq, dk, dv


@dataclass(frozen=True)
class _Strip:
    """Queries and keys of one product; row i of it sees the keys j with `lower <= j - i <= upper`."""

    rows: slice
    cols: slice
    lower: int
    upper: int


def _strips(slices: Sequence[Slice], q: torch.Tensor) -> Iterator[_Strip]:
    for s in slices:
        num_q, num_k = s.q_stop - s.q_start, s.k_stop - s.k_start
        match s.kind:
            case MaskKind.FULL:
                lower, upper = -num_q, num_k
            case MaskKind.CAUSAL:
                lower, upper = -num_q, 0
            case MaskKind.DIAGONAL:
                lower = upper = 0
            case MaskKind.BAND:
                lower, upper = s.lower, s.upper
        step = max(1, min(num_q, STRIP_NUMBERS // max(1, q.shape[1] * num_k)))
        for first in range(0, num_q, step):
            stop = min(first + step, num_q)
            low, high = max(0, first + lower), min(num_k, stop + upper)
            yield _Strip(
                slice(s.q_start + first, s.q_start + stop),
                slice(s.k_start + low, s.k_start + high),
                lower + first - low,
                upper + first - low,
            )


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, strip: _Strip) -> torch.Tensor:
    """fp32 [K, G, r, c], -inf where a query does not see the key."""
    scores = torch.einsum("rkgd,ckd->kgrc", grouped(q, k.shape[1]), k.float()) * scale
    num_rows, num_cols = scores.shape[-2:]
    if strip.lower <= 1 - num_rows and strip.upper >= num_cols - 1:
        return scores
    distance = torch.arange(num_cols, device=q.device) - torch.arange(num_rows, device=q.device)[:, None]
    return scores.masked_fill((distance < strip.lower) | (distance > strip.upper), -torch.inf)
