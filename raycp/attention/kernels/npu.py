"""Ascend's fused attention (`npu_fusion_attention` and its gradient) over packed rows.

Guarantees: lengths go in as host lists, so no layer waits for the device; one fp32 log-sum-exp per row comes out and is
what backward gets as (max = lse, sum = 1), so that gradients of a block are those of the whole row; the order of the
softmax statistics, which differs between versions of CANN, is measured once per process on a small case before the op
is trusted. Costs that one case (a few calls), a 2048 x 2048 mask of 4 MiB per device, and 64 bytes per (row, head) of
statistics while a call runs. bf16 and fp16 results are rounded by the op before they are merged.

`npu_ring_attention_update` is not used: it merges statistics that are eight columns wide, which moves 192 bytes per
(row, head) where one column moves 24, and makes new tensors; `raycp.attention.merge` is the same formula (tested).

The op's contract is in Ascend/op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention.md; schemas are
those of torch_npu 2.13.0, and older ones without `softmax_layout` work too.

Legend: n query rows of a call, m its key rows, H query heads, K key/value heads, D head dim.
"""

import math
from collections.abc import Mapping
from enum import Enum
from itertools import pairwise
from typing import Any

import torch

from raycp.attention.kernels.varlen import NO_LIMIT, VarlenCall, VarlenLimits
from raycp.errors import ClusterError
from raycp.plan import MaskKind, Range

LIMITS = VarlenLimits(documents=1000, rows=1 << 20, heads=256, dim=768, multiple=16)
"""Of the op's document: lists of up to 1K entries, T and S up to 1M, 256 query heads, D up to 768. Older CANN want a
multiple of 16."""
MASK_SIZE = 2048
"""Side of the compressed causal mask, whatever the lengths."""
STATISTICS = 8
"""Equal copies of each softmax statistic in the last dimension."""


class StatsOrder(Enum):
    """In which order the numbers of a [n, H, 8] statistics tensor lie in memory."""

    ROWS = "rows"
    """Row after row, each with its heads: what the shape says (`softmax_layout="TND"`)."""
    HEADS_OF_DOCUMENTS = "heads of documents"
    """Document after document, each head after head: the default of the op."""
    HEADS = "heads"
    """Head after head, each with all rows."""


class NpuOp:
    """Follows `VarlenOp`.

    Args:
        device: where the mask lives and the probe runs.
        ops: holds `npu_fusion_attention` and `npu_fusion_attention_grad`; None: `torch.ops.npu`.

    Raises:
        ClusterError: torch_npu is not loaded, or its op does not compute what its document says.
    """

    limits = LIMITS

    def __init__(self, device: torch.device, ops: Any = None) -> None:
        ops = torch.ops.npu if ops is None else ops
        try:
            self._forward_op = ops.npu_fusion_attention
            self._backward_op = ops.npu_fusion_attention_grad
        except AttributeError as error:
            raise ClusterError(
                "this process has no npu_fusion_attention: torch_npu is not loaded",
                fix="install the torch_npu of this torch version on every node, and see docs/ascend.md",
            ) from error
        self._mask = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu_(1)
        self.order, self._layout = StatsOrder.ROWS, self._optional_layout()
        probe(self, device)

    def _optional_layout(self) -> dict[str, str]:
        """`softmax_layout="TND"` where both ops of this version have the argument."""
        ops = [getattr(op, "default", None) for op in (self._forward_op, self._backward_op)]
        known = [op is not None and any(a.name == "softmax_layout" for a in op._schema.arguments) for op in ops]
        return {"softmax_layout": "TND"} if all(known) else {}

    def without_layout(self) -> None:
        """Goes on without the optional argument: this CANN does not take it."""
        self._layout = {}

    @property
    def has_layout(self) -> bool:
        """Whether the optional argument is used."""
        return bool(self._layout)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: VarlenCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `VarlenOp.forward`."""
        out, top, total = self.raw_forward(q, k, v, call, scale)
        column = top[..., 0] + total[..., 0].log()
        return out, rows_first(column, self.order, call.q_ends)

    def raw_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: VarlenCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The op's own out [n, H, D], softmax max and sum [n, H, 8] in the op's order."""
        assert call.q_ends[-1] == len(q)
        assert call.k_ends[-1] == len(k)
        found = self._forward_op(
            q, k, v, q.shape[1], "TND", scale=scale, keep_prob=1.0, **self._lists(call), **self._masking(call)
        )
        return found[0], found[1], found[2]

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: VarlenCall,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `VarlenOp.backward`."""
        column = op_order(lse, self.order, call.q_ends)
        top = column[..., None].expand(*column.shape, STATISTICS).contiguous()
        dq, dk, dv, *_ = self._backward_op(
            q,
            k,
            v,
            dout,
            q.shape[1],
            "TND",
            softmax_max=top,
            softmax_sum=torch.ones_like(top),
            attention_in=out,
            scale_value=scale,
            keep_prob=1.0,
            **self._lists(call),
            **self._masking(call),
        )
        return dq, dk, dv

    def _lists(self, call: VarlenCall) -> dict[str, Any]:
        return {"actual_seq_qlen": list(call.q_ends), "actual_seq_kvlen": list(call.k_ends), **self._layout}

    def _masking(self, call: VarlenCall) -> Mapping[str, Any]:
        """Without a mask the op ignores the sparse mode and computes everything, so each mode but FULL brings it."""
        match call.kind:
            case MaskKind.FULL:
                return {"atten_mask": None, "sparse_mode": 0, "pre_tockens": NO_LIMIT, "next_tockens": NO_LIMIT}
            case MaskKind.CAUSAL:
                return {
                    "atten_mask": self._mask,
                    "sparse_mode": 3,
                    "pre_tockens": NO_LIMIT,
                    "next_tockens": 0,
                }
            case MaskKind.BAND:
                return {
                    "atten_mask": self._mask,
                    "sparse_mode": 4,
                    "pre_tockens": call.before,
                    "next_tockens": call.after,
                }
            case MaskKind.DIAGONAL:
                raise AssertionError("rows that see one key are not computed by the op")


def rows_first(column: torch.Tensor, order: StatsOrder, ends: tuple[int, ...]) -> torch.Tensor:
    """Statistics [n, H] in the op's order -> [n, H] row after row."""
    num_rows, heads = column.shape
    match order:
        case StatsOrder.ROWS:
            return column
        case StatsOrder.HEADS:
            return column.reshape(heads, num_rows).t()
        case StatsOrder.HEADS_OF_DOCUMENTS:
            flat = column.reshape(-1)
            return torch.cat([flat[a * heads : b * heads].view(heads, b - a).t() for a, b in pairwise((0, *ends))])


def op_order(lse: torch.Tensor, order: StatsOrder, ends: tuple[int, ...]) -> torch.Tensor:
    """The inverse of `rows_first`."""
    match order:
        case StatsOrder.ROWS:
            return lse
        case StatsOrder.HEADS:
            return lse.t().reshape(lse.shape)
        case StatsOrder.HEADS_OF_DOCUMENTS:
            return torch.cat([lse[a:b].t().reshape(-1) for a, b in pairwise((0, *ends))]).view(lse.shape)


def probe(op: NpuOp, device: torch.device) -> None:
    """Runs the op on three small documents whose answer is known, and sets `op.order` by what came back.

    Checks with it that a causal mask is told from the last key, and that gradients with (max = lse, sum = 1) are right.

    Raises:
        ClusterError: the op refuses its documented arguments, or computes something else.
    """
    call = VarlenCall((Range(0, 9),), (Range(0, 14),), (1, 4, 9), (3, 8, 14), MaskKind.CAUSAL, 0, 0, True)
    q, k, v, dout = (_ramp(rows, heads, step) for rows, heads, step in ((9, 4, 7), (14, 2, 11), (14, 2, 13), (9, 4, 5)))
    out, lse, grads = _answer(q, k, v, dout, call)
    q_d, k_d, v_d, dout_d = (
        x.to(device, torch.float32 if device.type == "cpu" else torch.bfloat16) for x in (q, k, v, dout)
    )
    try:
        found = op.raw_forward(q_d, k_d, v_d, call, 0.25)
    except RuntimeError as refused:
        if not op.has_layout:
            raise _not_as_documented(f"it raised {refused}") from refused
        op.without_layout()
        try:
            found = op.raw_forward(q_d, k_d, v_d, call, 0.25)
        except RuntimeError as error:
            raise _not_as_documented(f"it raised {error}") from error
    tolerance = 1e-5 if device.type == "cpu" else 3e-2
    if not _close(found[0], out, tolerance):
        raise _not_as_documented("its output differs from dense attention, causal from the last key")
    column = (found[1][..., 0] + found[2][..., 0].log()).cpu()
    fitting = [order for order in StatsOrder if _close(rows_first(column, order, call.q_ends), lse, tolerance)]
    if not fitting:
        raise _not_as_documented("its softmax statistics fit no known order")
    op.order = fitting[0]
    parts = op.backward(dout_d, q_d, k_d, v_d, out.to(q_d), lse.to(device), call, 0.25)
    for name, part, grad in zip(("dq", "dk", "dv"), parts, grads, strict=True):
        if not _close(part, grad, tolerance):
            raise _not_as_documented(f"its {name} differs from that of dense attention")


def _ramp(rows: int, heads: int, step: int) -> torch.Tensor:
    """Numbers that differ from row to row and head to head, the same on every machine: [rows, heads, 16] fp32."""
    count = rows * heads * 16
    return (torch.arange(count) * step % 29 - 14.0).view(rows, heads, 16) / 8.0


def _answer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, call: VarlenCall
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Output [9, 4, 16], log-sum-exp [9, 4] and gradients of the probe's case, on the CPU."""
    visible = torch.zeros(len(q), len(k), dtype=torch.bool)
    for (q0, q1), (k0, k1) in zip(pairwise((0, *call.q_ends)), pairwise((0, *call.k_ends)), strict=True):
        visible[q0:q1, k0:k1] = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril((k1 - k0) - (q1 - q0))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        scores = torch.einsum("thd,shd->hts", leaves[0], leaves[1].repeat_interleave(2, 1)) * 0.25
        scores = scores.masked_fill(~visible, -math.inf)
        out = torch.einsum("hts,shd->thd", scores.softmax(-1), leaves[2].repeat_interleave(2, 1))
        out.backward(dout)  # type: ignore[no-untyped-call]
    return out.detach(), scores.detach().logsumexp(-1).t(), [x.grad for x in leaves if x.grad is not None]


def _close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    found = found.detach().cpu().float()
    return found.shape == wanted.shape and bool((found - wanted).norm() <= tolerance * wanted.norm())


def _not_as_documented(what: str) -> ClusterError:
    return ClusterError(
        f"npu_fusion_attention of this torch_npu and CANN does not do what its document says: {what}",
        fix="install versions of torch, torch_npu and CANN that belong together (docs/ascend.md has the pairs)",
    )
