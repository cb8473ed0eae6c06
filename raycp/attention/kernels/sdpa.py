"""PyTorch's flash attention for CPUs, one call per slice, on views of the packed tensors.

Guarantees: fp32 log-sum-exp, so partial results can be merged; grouped heads without copies; D != Dv by padding with
zeros. Costs about 11 us a call forward and 17 us backward. The op does not skip masked keys inside its block of 512, so
a causal slice of up to 512 rows costs as much as a full one. Inputs fp32, bf16 or fp16; sums inside are fp32.

Legend: t query rows, s key rows of the step's block, H query heads, K key/value heads, D head dim, Dv value dim.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from raycp.attention.kernels.diagonal import diagonal_backward, diagonal_forward
from raycp.plan import MaskKind, Slice

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
        out = q.new_zeros(len(q), q.shape[1], value_dim, dtype=torch.float32)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
        for s in slices:
            rows, cols = slice(s.q_start, s.q_stop), slice(s.k_start, s.k_stop)
            if s.kind is MaskKind.DIAGONAL:
                out[rows], lse[rows] = diagonal_forward(q[rows], k[cols], v[cols, :, :value_dim], scale)
                continue
            part, part_lse = _forward_op(
                _heads_first(q[rows]),
                _heads_first(k[cols]),
                _heads_first(v[cols]),
                0.0,
                s.kind is MaskKind.CAUSAL,
                scale=scale,
            )
            out[rows] = part[0].transpose(0, 1)[..., :value_dim]
            lse[rows] = part_lse[0].t()
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
        dq = torch.zeros(*q.shape[:2], head_dim, dtype=torch.float32, device=q.device)
        dk = torch.zeros(*k.shape[:2], head_dim, dtype=torch.float32, device=q.device)
        dv = torch.zeros(*v.shape[:2], value_dim, dtype=torch.float32, device=q.device)
        for s in slices:
            rows, cols = slice(s.q_start, s.q_stop), slice(s.k_start, s.k_stop)
            if s.kind is MaskKind.DIAGONAL:
                part_q, part_k, part_v = diagonal_backward(
                    dout[rows], q[rows], k[cols], v[cols], out[rows], lse[rows], scale
                )
                dq[rows] = part_q[..., :head_dim]
                dk[cols] += part_k[..., :head_dim]
                dv[cols] += part_v[..., :value_dim]
                continue
            part_q, part_k, part_v = _backward_op(
                _heads_first(dout[rows]),
                _heads_first(q[rows]),
                _heads_first(k[cols]),
                _heads_first(v[cols]),
                _heads_first(out[rows]),
                lse[rows].t()[None],
                0.0,
                s.kind is MaskKind.CAUSAL,
                scale=scale,
            )
            dq[rows] = part_q[0].transpose(0, 1)[..., :head_dim]
            dk[cols] += part_k[0].transpose(0, 1)[..., :head_dim]
            dv[cols] += part_v[0].transpose(0, 1)[..., :value_dim]
        return dq, dk, dv


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[rows, heads, dim] -> [1, heads, rows, dim], a view."""
    return x.transpose(0, 1)[None]


def _same_width(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pads last dimensions with zeros to the widest: scores do not change, and padded outputs are 0."""
    width = max(x.shape[-1] for x in tensors)
    return tuple(x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in tensors)
