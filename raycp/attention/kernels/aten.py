"""The attention kernels inside PyTorch for CUDA: flash, and memory-efficient (`aten::_efficient_attention_forward`).

Guarantees: variable-length calls as in `raycp.attention.kernels.varlen`; backward gets the merged output and
log-sum-exp; gradients are the same bits each time where `torch.use_deterministic_algorithms` is on, also where it only
warns. Costs one small copy of the lengths to the device per pack and step.

Efficient attention takes fp32, any head dim, and GPUs before Ampere; it has no grouped heads, so K and V are copied to
all query heads, and pads the log-sum-exp to documents x longest document, for which calls are kept small. Its masks are
full, or causal from the last key. A band goes through `MatmulKernel`: the op has a window, and its backward
(kernel_backward.h of torch 2.13) forgets that windows are told from the last key.

cuDNN's attention is not used: PyTorch never asks it for a deterministic backward, its causal mask is told from the
first key, and it has no window; PyTorch's own variable-length attention leaves it out as well (torch 2.13).

Neither op has a CPU kernel: shapes are checked on meta tensors, numbers on CPU tensors by a kernel that the tests
register, and on a GPU by `pytest -m cuda`.

Legend: n query rows of a call, m its key rows, H query heads, K key/value heads, D head dim.
"""

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import torch

from raycp.attention.kernels.matmul import MatmulKernel
from raycp.attention.kernels.varlen import NO_LIMIT, VarlenCall, VarlenLimits
from raycp.plan import MaskKind, Slice

FLASH_LIMITS = VarlenLimits(documents=1 << 15, rows=2**31 - 1, heads=1 << 15, dim=256, multiple=8)
"""Of flash attention 2: lengths are 32-bit, documents and heads are dimensions of the launch, D up to 256."""
EFFICIENT_LIMITS = VarlenLimits(
    documents=1 << 15, rows=2**31 - 1, heads=1 << 15, dim=1 << 16, multiple=8, padded=1 << 17
)
"""Of efficient attention: D up to 65 536; its backward has fp32 buffers of H x D for each padded row."""
_LSE_MULTIPLE = 32  # rows that the op pads log-sum-exp to
_FULL, _CAUSAL_FROM_LAST = 0, 2  # custom_mask_type


class AtenFlashOp:
    """Follows `VarlenOp` with `torch.ops.aten._flash_attention_forward` and its backward (seen in torch 2.13)."""

    limits = FLASH_LIMITS

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
        with deterministic():
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


class AtenEfficientOp:
    """Follows `VarlenOp` with `torch.ops.aten._efficient_attention_forward` and its backward (seen in torch 2.13)."""

    limits = EFFICIENT_LIMITS

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: VarlenCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `VarlenOp.forward`."""
        if call.kind is MaskKind.BAND:
            return MatmulKernel().forward(q, k, v, bands(call), scale)
        heads = q.shape[1]
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            q[None],
            _for_heads(k, heads)[None],
            _for_heads(v, heads)[None],
            None,
            starts(call.q_ends, q.device),
            starts(call.k_ends, q.device),
            call.max_q,
            call.max_k,
            0.0,
            _FULL if call.kind is MaskKind.FULL else _CAUSAL_FROM_LAST,
            True,
            scale=scale,
        )
        return out[0], lse.transpose(1, 2)[_places(call, q.device)]

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
        if call.kind is MaskKind.BAND:
            return MatmulKernel().backward(dout, q, k, v, out, lse, bands(call), scale)
        heads = q.shape[1]
        with deterministic():
            dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
                dout[None],
                q[None],
                _for_heads(k, heads)[None],
                _for_heads(v, heads)[None],
                None,
                out[None],
                starts(call.q_ends, q.device),
                starts(call.k_ends, q.device),
                call.max_q,
                call.max_k,
                _padded(lse, call),
                0.0,
                torch.empty((), dtype=torch.int64),  # of dropout, which there is none of
                torch.empty((), dtype=torch.int64),
                _FULL if call.kind is MaskKind.FULL else _CAUSAL_FROM_LAST,
                False,
                scale=scale,
            )
        return dq[0], _of_groups(dk[0], k), _of_groups(dv[0], v)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Inside, attention's backward is deterministic where that mode is on: where it only warns, PyTorch's is not."""
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


def bands(call: VarlenCall) -> tuple[Slice, ...]:
    """The documents of a call of bands as slices, told from the first key."""
    found = []
    for (q0, q1), (k0, k1) in zip(pairwise((0, *call.q_ends)), pairwise((0, *call.k_ends)), strict=True):
        shift = (k1 - k0) - (q1 - q0)
        lower = q0 - q1 if call.before == NO_LIMIT else shift - call.before
        upper = k1 - k0 if call.after == NO_LIMIT else shift + call.after
        found.append(Slice(q0, q1, k0, k1, MaskKind.BAND, lower, upper))
    return tuple(found)


def _places(call: VarlenCall, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Document, and row in it, of each query row: int64 [n] both; made on the device, which nothing waits for."""
    first = starts(call.q_ends, device).long()
    document = torch.repeat_interleave(first.diff(), output_size=call.q_ends[-1])
    return document, torch.arange(call.q_ends[-1], device=device) - first[document]


def _padded(lse: torch.Tensor, call: VarlenCall) -> torch.Tensor:
    """[n, H] -> [documents, H, rows of the longest, rounded up], infinite behind the last row, as the op's own."""
    first = starts(call.q_ends, lse.device).long()
    places = torch.arange(-(-call.max_q // _LSE_MULTIPLE) * _LSE_MULTIPLE, device=lse.device)
    rows = (first[:-1, None] + places).clamp(max=len(lse) - 1)
    return lse[rows].masked_fill((places >= first.diff()[:, None])[..., None], torch.inf).transpose(1, 2).contiguous()


def _for_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[m, K, D] -> [m, H, D]: a copy for each query head; `x` itself where it has as many."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _of_groups(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The adjoint of `_for_heads`: [m, H, D] -> [m, K, D]."""
    return grad if grad.shape == x.shape else grad.view(len(x), x.shape[1], -1, x.shape[2]).float().sum(2)


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
