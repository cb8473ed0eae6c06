"""PyTorch's flash attention for CPUs, one call per slice, on views of the packed tensors.

Guarantees: fp32 log-sum-exp, so partial results can be merged; grouped heads without copies; D != Dv by padding with
zeros. Costs about 11 us a call forward and 17 us backward. The op does not skip masked keys inside its block of 512, so
a causal slice of up to 512 rows costs as much as a full one. A band is cut into strips of 256 queries, each with a mask
tensor of its own: 256 x (window + 256) numbers at a time. A band that is causal towards its last key is a full and a
causal call, merged: 0.7 to 1.0 of the time of strips. Inputs fp32, bf16 or fp16; sums inside are fp32.

Legend: t query rows, s key rows of the step's block, H query heads, K key/value heads, D head dim, Dv value dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from raycp.attention.kernels.diagonal import diagonal_backward, diagonal_forward
from raycp.attention.merge import merge_
from raycp.plan import MaskKind, Slice

STRIP = 256
"""Queries of a band that are computed in one call."""

_forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class CpuFlashKernel:
    """Follows `raycp.attention.kernels.Kernel`."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slices: Sequence[Slice], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        value_dim = v.shape[-1]
        q, k, v = _same_width(q, k, v)
        out = q.new_empty(len(q), q.shape[1], value_dim, dtype=torch.float32)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        written = slices[0].q_start if slices else 0
        for call in _calls(slices, q):
            rows, cols = call.rows, call.cols
            if call.kind is MaskKind.DIAGONAL:
                part, part_lse = diagonal_forward(q[rows], k[cols], v[cols], scale)
            else:
                part, part_lse = _forward_op(
                    _heads_first(q[rows]),
                    _heads_first(k[cols]),
                    _heads_first(v[cols]),
                    0.0,
                    call.kind is MaskKind.CAUSAL,
                    attn_mask=call.mask,
                    scale=scale,
                )
                part, part_lse = part[0].transpose(0, 1), part_lse[0].t()
            fresh = _unwritten(written, rows)
            out[fresh], lse[fresh] = 0, -torch.inf
            if rows.start < written:  # a row of an earlier call: only bands have that
                merge_(out[rows], lse[rows], part[..., :value_dim].float(), part_lse)
            else:
                out[rows], lse[rows] = part[..., :value_dim], part_lse
            written = max(written, rows.stop)
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
        head_dim, value_dim = q.shape[-1], v.shape[-1]
        q, k, v = _same_width(q, k, v)
        _, dout, out = _same_width(q, dout, out)
        dq = q.new_empty(*q.shape[:2], head_dim, dtype=torch.float32)
        written = slices[0].q_start if slices else 0
        dk = torch.zeros(*k.shape[:2], head_dim, dtype=torch.float32, device=q.device)
        dv = torch.zeros(*v.shape[:2], value_dim, dtype=torch.float32, device=q.device)
        for call in _calls(slices, q):
            rows, cols = call.rows, call.cols
            if call.kind is MaskKind.DIAGONAL:
                parts = diagonal_backward(dout[rows], q[rows], k[cols], v[cols], out[rows], lse[rows], scale)
            else:
                heads_first = _backward_op(
                    _heads_first(dout[rows]),
                    _heads_first(q[rows]),
                    _heads_first(k[cols]),
                    _heads_first(v[cols]),
                    _heads_first(out[rows]),
                    lse[rows].t()[None],
                    0.0,
                    call.kind is MaskKind.CAUSAL,
                    attn_mask=call.mask,
                    scale=scale,
                )
                parts = tuple(x[0].transpose(0, 1) for x in heads_first)
            dq[_unwritten(written, rows)] = 0
            if rows.start < written:
                dq[rows] += parts[0][..., :head_dim]
            else:
                dq[rows] = parts[0][..., :head_dim]
            written = max(written, rows.stop)
            dk[cols] += parts[1][..., :head_dim]
            dv[cols] += parts[2][..., :value_dim]
        return dq, dk, dv


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the op: rows of q, rows of k and v, and an additive mask [rows, cols] for a part of a band."""

    rows: slice
    cols: slice
    kind: MaskKind
    mask: torch.Tensor | None = None


def _calls(slices: Sequence[Slice], q: torch.Tensor) -> Iterator[_Call]:
    for s in slices:
        if s.kind is not MaskKind.BAND:
            yield _Call(slice(s.q_start, s.q_stop), slice(s.k_start, s.k_stop), s.kind)
            continue
        square = s.k_stop - (s.q_stop - s.q_start)
        if s.lower <= s.q_start - s.q_stop + 1 and s.upper == square - s.k_start > 0:
            yield _Call(slice(s.q_start, s.q_stop), slice(s.k_start, square), MaskKind.FULL)
            yield _Call(slice(s.q_start, s.q_stop), slice(square, s.k_stop), MaskKind.CAUSAL)
            continue
        for first in range(0, s.q_stop - s.q_start, STRIP):
            last = min(first + STRIP, s.q_stop - s.q_start) - 1
            low, high = max(0, first + s.lower), min(s.k_stop - s.k_start, last + s.upper + 1)
            distance = (
                torch.arange(low, high, device=q.device) - torch.arange(first, last + 1, device=q.device)[:, None]
            )
            hidden = (distance < s.lower) | (distance > s.upper)
            mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
            rows = slice(s.q_start + first, s.q_start + last + 1)
            yield _Call(rows, slice(s.k_start + low, s.k_start + high), s.kind, mask)


def _unwritten(written: int, rows: slice) -> slice:
    """Of output rows, of which those before `written` have been: what must be cleared before `rows` come next."""
    return slice(written, rows.start if rows.start >= written else max(written, rows.stop))


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[rows, heads, dim] -> [1, heads, rows, dim], a view."""
    return x.transpose(0, 1)[None]


def _same_width(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pads last dimensions with zeros to the widest: scores do not change, and padded outputs are 0."""
    width = max(x.shape[-1] for x in tensors)
    return tuple(x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in tensors)
