"""Flash attention on CUDA: the flash-attn package where it is installed, else the same kernels inside PyTorch.

Guarantees: variable-length calls as in `raycp.attention.kernels.varlen`, masks told from the last key, grouped heads
without copies, fp32 log-sum-exp; backward gets the merged log-sum-exp and output. What flash attention does not take
(fp32, head dims above 256, a GPU before Ampere) is computed by `MatmulKernel`. Costs one small copy of the lengths to
the device per pack and step; gradients are the same bits each time where `torch.use_deterministic_algorithms` is on.

Neither op has a CPU kernel: shapes are checked on meta tensors, numbers on CPU tensors by a kernel that the tests
register, and on a GPU by `pytest -m cuda`.

Legend: n query rows of a call, m its key rows, H query heads, K key/value heads, D head dim.
"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from raycp.attention.kernels.matmul import MatmulKernel
from raycp.attention.kernels.protocol import Kernel
from raycp.attention.kernels.varlen import NO_LIMIT, VarlenCall, VarlenKernel, VarlenLimits
from raycp.plan import MaskKind, Slice

LIMITS = VarlenLimits(documents=1 << 15, rows=2**31 - 1, heads=1 << 15, dim=256, multiple=8)
"""Of flash attention 2: lengths are 32-bit, documents and heads are dimensions of the launch, D up to 256."""
FLASH_ATTN = (2, 7)
"""Oldest flash-attn whose functions are called: the first with these arguments."""


class AtenFlashOp:
    """Follows `VarlenOp` with `torch.ops.aten._flash_attention_forward` and its backward (seen in torch 2.13)."""

    limits = LIMITS

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: VarlenCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `VarlenOp.forward`."""
        left, right = window(call)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            starts(call.q_ends, q.device),
            starts(call.k_ends, q.device),
            call.max_q,
            call.max_k,
            0.0,
            call.kind is MaskKind.CAUSAL,
            False,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        return out, lse.t()

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
        left, right = window(call)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse.t().contiguous(),
            starts(call.q_ends, q.device),
            starts(call.k_ends, q.device),
            call.max_q,
            call.max_k,
            0.0,
            call.kind is MaskKind.CAUSAL,
            torch.empty(2, dtype=torch.uint64, device=q.device),  # of dropout, which there is none of
            torch.empty(0, dtype=torch.uint64, device=q.device),
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        return dq, dk, dv


class FlashAttnOp:
    """Follows `VarlenOp` with the flash-attn package.

    Args:
        module: `flash_attn.flash_attn_interface`, of version 2.7 or newer.
    """

    limits = LIMITS

    def __init__(self, module: Any) -> None:
        self._forward_op = module._flash_attn_varlen_forward
        self._backward_op = module._flash_attn_varlen_backward

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: VarlenCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `VarlenOp.forward`."""
        out, lse, *_ = self._forward_op(q, k, v, *self._lengths(call, q.device), 0.0, scale, **self._masking(call))
        return out, lse.t()

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
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self._backward_op(
            dout,
            q,
            k,
            v,
            out,
            lse.t().contiguous(),
            dq,
            dk,
            dv,
            *self._lengths(call, q.device),
            0.0,
            scale,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._masking(call),
        )
        return dq, dk, dv

    def _lengths(self, call: VarlenCall, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        return starts(call.q_ends, device), starts(call.k_ends, device), call.max_q, call.max_k

    def _masking(self, call: VarlenCall) -> dict[str, Any]:
        left, right = window(call)
        return {"causal": call.kind is MaskKind.CAUSAL, "window_size_left": left, "window_size_right": right}


class CudaKernel:
    """Follows `raycp.attention.kernels.Kernel`: flash attention where it can, matrix products where it cannot.

    Args:
        op: of flash attention; None: `flash_op()`.
        ampere: whether the GPU is of compute capability 8.0 or newer, which flash attention needs.
    """

    def __init__(self, op: AtenFlashOp | FlashAttnOp | None = None, *, ampere: bool = True) -> None:
        self._flash = VarlenKernel(op or flash_op()) if ampere else None
        self._matmul = MatmulKernel()

    def serving(self, q: torch.Tensor, v: torch.Tensor) -> Kernel:
        """The kernel that takes tensors like these."""
        flash = q.dtype in (torch.bfloat16, torch.float16) and max(q.shape[-1], v.shape[-1]) <= LIMITS.dim
        return self._flash if flash and self._flash is not None else self._matmul

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slices: Sequence[Slice], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        return self.serving(q, v).forward(q, k, v, slices, scale)

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
        return self.serving(q, v).backward(dout, q, k, v, out, lse, slices, scale)


def flash_op() -> AtenFlashOp | FlashAttnOp:
    """flash-attn where a version is installed that is new enough, else PyTorch's own."""
    if importlib.util.find_spec("flash_attn") is None:
        return AtenFlashOp()
    found = importlib.metadata.version("flash_attn").split(".")
    if tuple(int(x) for x in found[:2]) < FLASH_ATTN:
        return AtenFlashOp()
    return FlashAttnOp(importlib.import_module("flash_attn.flash_attn_interface"))


def window(call: VarlenCall) -> tuple[int, int]:
    """(left, right) of flash attention, told from the last key; -1: no such side."""
    match call.kind:
        case MaskKind.CAUSAL:
            return -1, 0
        case MaskKind.BAND:
            return tuple(-1 if side == NO_LIMIT else side for side in (call.before, call.after))  # type: ignore[return-value]
        case _:
            return -1, -1


@lru_cache(maxsize=512)
def starts(ends: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32 [documents + 1]: where each document starts, and the end."""
    return torch.tensor([0, *ends], dtype=torch.int32).to(device, non_blocking=True)
