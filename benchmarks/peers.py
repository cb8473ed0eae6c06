"""What raycp is measured against: PyTorch's ring, DeepSpeed's Ulysses, one process, and kernels that move nothing.

Guarantees: each is the project's own code, called as its authors' code calls it; a peer that is not installed is None.
PyTorch's ring has no public entry on CPUs (torch 2.13: its causal sharding rules miss the CPU kernel), so its own
private loops are called with the CPU's kernel. Both peers compute the whole causal triangle of a packed row: documents
see each other, which is wrong, and what they offer on a CPU.

Legend: t rows of a rank, T of the whole row, H query heads, K key/value heads, D head dim.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from raycp.plan import AttentionPlan, MaskKind

_forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q [1, H, t, D], k and v [1, K, t, D] -> a tensor of H x t x D numbers, differentiable."""


class TorchRing(torch.autograd.Function):
    """PyTorch's templated ring: q [1, H, t, D], k and v [1, K, t, D] in its head-tail (zigzag) order."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Rotates K and V as `set_rotate_method` says."""
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        out, lse = ring._templated_ring_attention(
            group, 2, _forward_op, q, k, v, is_causal=True, dropout_p=0.0, scale=None
        )[:2]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The ring again."""
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        q, k, v, out, lse = ctx.saved_tensors
        gradients = ring._templated_ring_attention_backward(
            ctx.group,
            2,
            _backward_op,
            grad_out=gradient.contiguous(),
            grad_out_name="grad_out",
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=lse,
            is_causal=True,
            dropout_p=0.0,
            scale=None,
        )
        return (*gradients[:3], None)


def torch_ring(mesh: DeviceMesh, rotation: str) -> Attention:
    """PyTorch's ring with head-tail balance; `rotation`: "allgather" or "alltoall"."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    group = mesh.get_group()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ring.set_rotate_method(rotation)
        ring._cp_options.enable_load_balance = True
        out: torch.Tensor = TorchRing.apply(q, k, v, group)  # type: ignore[no-untyped-call]
        return out

    return attend


def deepspeed_ulysses(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, positions: torch.Tensor
) -> Attention | None:
    """DeepSpeed's `UlyssesSPAttentionHF` around transformers' sdpa; None where DeepSpeed is not installed.

    Args:
        num_tokens: T, which the ranks divide.
        num_heads: H.
        num_kv_heads: K.
        head_dim: D.
        positions: int64 [t], global positions of this rank's contiguous slice.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return None
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    deepspeed = importlib.import_module("deepspeed")
    ulysses = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
    deepspeed.comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    attention = ulysses.UlyssesSPAttentionHF(
        attn=sdpa_attention_forward,
        batch_size=1,
        attn_head_count=num_heads,
        attn_head_size=head_dim,
        kv_head_count=num_kv_heads,
        num_hidden_layers=1,
        process_group=dist.group.WORLD,
        local_seq_length=len(positions),
        global_seq_length=num_tokens,
    )
    attention.core_attn_implementation = "sdpa"
    layer = torch.nn.Module()
    layer.is_causal = True  # type: ignore[assignment]
    layer.num_key_value_groups = num_heads // num_kv_heads  # type: ignore[assignment]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attention(layer, q, k, v, None, position_ids=positions[None])[0]
        return out

    return attend


def one_process(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's own causal attention of one whole document."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def one_process_by_document(doc_ends: tuple[int, ...]) -> Attention:
    """PyTorch's own causal attention, one document of a packed row after the other."""
    lengths = [b - a for a, b in zip((0, *doc_ends), doc_ends, strict=False)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        documents = zip(*(torch.split(x, lengths, 2) for x in (q, k, v)), strict=True)
        return torch.cat([one_process(*document) for document in documents], 2)

    return attend


def bare_kernels(plan: AttentionPlan, cp_rank: int, head_dim: int) -> Callable[[], None]:
    """The kernel calls of one rank's plan, forward and backward, on tensors that are there: nothing moves or is merged.

    For rings without a sliding window. Every block is a tensor of its own with as many rows as would have arrived. This
    is the floor: what is computed, at the speed of PyTorch's kernel called slice by slice.
    """
    program = plan.program(cp_rank)
    heads, kv_heads = plan.num_heads, plan.num_kv_heads
    q = torch.randn(program.num_tokens, heads, head_dim).transpose(0, 1)[None]
    dout = torch.randn_like(q)
    blocks = [
        [torch.randn(rows, kv_heads, head_dim).transpose(0, 1)[None] for _ in range(2)]
        for rows in (program.num_tokens if s.index == 0 else s.block_rows for s in program.steps)
    ]

    def run() -> None:
        kept = []
        for step, (k, v) in zip(program.steps, blocks, strict=True):
            for s in step.slices:
                if s.kind is MaskKind.DIAGONAL:
                    continue
                rows, cols = slice(s.q_start, s.q_stop), slice(s.k_start, s.k_stop)
                causal = s.kind is not MaskKind.FULL
                tensors = q[:, :, rows], k[:, :, cols], v[:, :, cols]
                kept.append((rows, tensors, causal, _forward_op(*tensors, 0.0, causal)))
        for rows, tensors, causal, (out, lse) in kept:
            _backward_op(dout[:, :, rows], *tensors, out, lse, 0.0, causal)

    return run
