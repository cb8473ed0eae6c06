"""Attention on CUDA: which kernel serves which tensors, and the flash-attn package.

Guarantees: one table, `ROUTES`, decides by dtype, head dim and compute capability, and `raycp doctor` prints it; the
flash-attn package is used where it is installed and new enough, else the same kernel inside PyTorch
(`raycp.attention.kernels.aten`). Costs nothing beside the kernels.

Legend: n query rows of a call, m its key rows, H query heads, K key/value heads, D head dim.
"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raycp.attention.kernels.aten import (
    EFFICIENT_LIMITS,
    FLASH_LIMITS,
    AtenEfficientOp,
    AtenFlashOp,
    starts,
    window,
)
from raycp.attention.kernels.matmul import MatmulKernel
from raycp.attention.kernels.protocol import Kernel
from raycp.attention.kernels.varlen import VarlenCall, VarlenKernel
from raycp.plan import MaskKind, Slice

FLASH_ATTN = (2, 7)
"""Oldest flash-attn whose functions are called: the first with these arguments."""


@dataclass(frozen=True)
class Route:
    """What one of the kernels takes.

    Attributes:
        name: "flash", "efficient" or "matmul".
        dim: head dim, at most.
        capability: least compute capability by dtype; other dtypes are not taken.
        why: what it is for.
    """

    name: str
    dim: int
    capability: Mapping[torch.dtype, tuple[int, int]]
    why: str

    def takes(self, dtype: torch.dtype, dim: int, capability: tuple[int, int]) -> bool:
        """Whether it computes tensors like these on such a GPU."""
        return dtype in self.capability and dim <= self.dim and capability >= self.capability[dtype]


_ANY_GPU, _AMPERE = (5, 0), (8, 0)
ROUTES = (
    Route(
        "flash",
        FLASH_LIMITS.dim,
        {torch.bfloat16: _AMPERE, torch.float16: _AMPERE},
        "the fastest; bands and grouped heads inside",
    ),
    Route(
        "efficient",
        EFFICIENT_LIMITS.dim,
        {torch.float32: _ANY_GPU, torch.float16: _ANY_GPU, torch.bfloat16: _AMPERE},
        "what flash attention refuses: fp32, head dims above 256, fp16 before Ampere; bands by matrix products",
    ),
    Route("matmul", 1 << 31, dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), (0, 0)), "all else; slow"),
)
"""In order: the first that takes the tensors serves them."""


class FlashAttnOp:
    """Follows `VarlenOp` with the flash-attn package.

    Args:
        module: `flash_attn.flash_attn_interface`, of version 2.7 or newer.
    """

    limits = FLASH_LIMITS

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
    """Follows `raycp.attention.kernels.Kernel`: the first of `ROUTES` that takes the tensors.

    Args:
        op: of flash attention; None: `flash_op()`.
        capability: compute capability of the GPU.
    """

    def __init__(self, op: AtenFlashOp | FlashAttnOp | None = None, *, capability: tuple[int, int] = _AMPERE) -> None:
        self._capability = capability
        self._kernels: dict[str, Kernel] = {
            "flash": VarlenKernel(op or flash_op()),
            "efficient": VarlenKernel(AtenEfficientOp()),
            "matmul": MatmulKernel(),
        }

    def route(self, dtype: torch.dtype, dim: int) -> Route:
        """What serves tensors of a dtype, the wider of whose head dims is `dim`."""
        return next(r for r in ROUTES if r is ROUTES[-1] or r.takes(dtype, dim, self._capability))

    def serving(self, q: torch.Tensor, v: torch.Tensor) -> Kernel:
        """The kernel that takes tensors like these."""
        return self._kernels[self.route(q.dtype, max(q.shape[-1], v.shape[-1])).name]

    def explain(self) -> list[str]:
        """One line for each compute dtype: what serves it at a head dim of 128, and why."""
        lines = []
        for dtype in (torch.bfloat16, torch.float32):
            route = self.route(dtype, 128)
            kernel = self._kernels[route.name]
            name = type(kernel.op if isinstance(kernel, VarlenKernel) else kernel).__name__
            dims = f"head dims up to {route.dim}" if route.dim < EFFICIENT_LIMITS.dim else "any head dim"
            lines.append(f"{str(dtype).removeprefix('torch.')}: {name}, {dims} ({route.why})")
        return lines

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
