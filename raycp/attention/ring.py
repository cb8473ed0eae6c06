"""Ring attention over a pack: one loop that moves K/V rows while it computes, forward and backward.

Guarantees: computes exactly what the plan says; step i + 1 is posted before step i is computed; at most two remote K/V
blocks are held (one in use, one arriving), trimmed to the rows that are needed; sums over steps are fp32; dK and dV
travel in fp32 and their owner adds them in the order of the steps, so gradients are the same bits each time. Backward
moves K and V a second time and uses the merged output and log-sum-exp (kept: t x H x (Dv + 1) numbers a layer).

The algorithm is Liu et al., "Ring Attention with Blockwise Transformers" (2310.01889), with a direct pull from the
owner in place of passing blocks on.

Legend: t own rows, s rows of a step's block, H query heads, K key/value heads, D head dim, Dv value dim.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from raycp.attention.communicator import Communicator, Handle, Message
from raycp.attention.kernels import Kernel
from raycp.attention.merge import merge_
from raycp.plan import RankProgram, Step, Transfer


@dataclass
class RingStats:
    """Counts of what one rank did, over all layers that share the object."""

    kernel_forward_calls: int = 0
    kernel_backward_calls: int = 0
    remote_blocks: int = 0
    """Remote K/V blocks that exist now, those still arriving included."""
    max_remote_blocks: int = 0
    bytes_sent: int = 0

    def hold(self, block: object) -> None:
        """Counts `block` as held for as long as it lives."""
        self.remote_blocks += 1
        self.max_remote_blocks = max(self.max_remote_blocks, self.remote_blocks)
        weakref.finalize(block, self._release)

    def _release(self) -> None:
        self.remote_blocks -= 1


@dataclass(frozen=True)
class RingCall:
    """Everything about one attention call but its tensors."""

    program: RankProgram
    communicator: Communicator
    kernel: Kernel
    scale: float
    name: str = "attention"
    """Named in errors: the layer."""
    stats: RingStats = field(default_factory=RingStats)
    on_step: Callable[[int], None] | None = None
    """Called with the step's index after each computed step: progress."""
    recall: Callable[[], tuple[torch.Tensor, torch.Tensor] | None] | None = None
    """Output and log-sum-exp of an earlier forward of this very call, if they were kept."""
    keep: Callable[[torch.Tensor, torch.Tensor], None] | None = None
    """Takes output and log-sum-exp after a forward."""


class RingAttention(torch.autograd.Function):
    """`RingAttention.apply(q, k, v, call)`: q [t, H, D], k [t, K, D], v [t, K, Dv] -> [t, H, Dv] of q's dtype."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: RingCall) -> torch.Tensor:
        """Runs the ring, or takes what an earlier run of the same call kept."""
        kept = call.recall() if call.recall is not None else None
        out, lse = ring_forward(q, k, v, call) if kept is None else kept
        if kept is None and call.keep is not None:
            call.keep(out.detach(), lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        """Runs the ring again, for gradients."""
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = ring_backward(dout, q, k, v, out, lse, ctx.call)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def ring_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: RingCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries over the keys of all ranks.

    Args:
        q: [t, H, D].
        k: [t, K, D].
        v: [t, K, Dv].
        call: plan, communicator, kernel.

    Returns:
        out [t, H, Dv] of q's dtype, and the log-sum-exp [t, H] fp32.
    """
    out = lse = None
    for block in _blocks(k, v, call):
        step = block.step
        if out is None or lse is None or step.slices:
            part, part_lse = call.kernel.forward(q, block.k, block.v, step.slices, call.scale)
            call.stats.kernel_forward_calls += bool(step.slices)
            if out is None or lse is None:
                out, lse = part, part_lse
            else:
                merge_(out, lse, part, part_lse)
        del block
        _progress(call, step)
    assert out is not None
    assert lse is not None
    return out.to(q.dtype), lse


def ring_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: RingCall,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `ring_forward`.

    Args:
        dout: [t, H, Dv]; any strides.
        q: [t, H, D].
        k: [t, K, D].
        v: [t, K, Dv].
        out: [t, H, Dv], what forward returned.
        lse: [t, H] fp32, what forward returned.
        call: plan, communicator, kernel.

    Returns:
        dq [t, H, D], dk [t, K, D], dv [t, K, Dv], fp32; dk and dv hold the shares of all ranks.
    """
    dout = dout.contiguous()
    dq = torch.zeros_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
    dk = torch.zeros_like(k, dtype=torch.float32, memory_format=torch.contiguous_format)
    dv = torch.zeros_like(v, dtype=torch.float32, memory_format=torch.contiguous_format)
    returning: _Returning | None = None
    for block in _blocks(k, v, call):
        step = block.step
        share: tuple[torch.Tensor, torch.Tensor] | None = None
        if step.slices:
            part, *share_kv = call.kernel.backward(dout, q, block.k, block.v, out, lse, step.slices, call.scale)
            call.stats.kernel_backward_calls += 1
            dq += part
            share = (share_kv[0], share_kv[1])
        del block
        if returning is not None:
            returning.add_to(dk, dv)
            returning = None
        if step.index == 0 and share is not None:
            dk += share[0]
            dv += share[1]
        elif step.receives or step.sends:
            returning = _Returning(share, k, v, step, call)
        _progress(call, step)
    if returning is not None:
        returning.add_to(dk, dv)
    return dq, dk, dv


class _Block:
    """K [s, K, D] and V [s, K, Dv] of one step, filled when `ready` has returned."""

    def __init__(self, step: Step, k: torch.Tensor, v: torch.Tensor, handle: Handle | None) -> None:
        self.step = step
        self.k = k
        self.v = v
        self._handle = handle

    def ready(self) -> "_Block":
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
        return self


def _blocks(k: torch.Tensor, v: torch.Tensor, call: RingCall) -> Iterator[_Block]:
    """The block of each step in turn; the next one is on its way while the caller computes."""
    steps = call.program.steps
    if len(steps) > 1:
        k, v = k.contiguous(), v.contiguous()
    pending = _Block(steps[0], k, v, None)
    for following in (*steps[1:], None):
        block = pending.ready()
        if following is not None:
            pending = _fetch(k, v, following, call)
        yield block
        del block


def _fetch(k: torch.Tensor, v: torch.Tensor, step: Step, call: RingCall) -> _Block:
    """Posts the K/V rows that come and go in `step`."""
    block_k, block_v = k.new_empty(step.num_rows, *k.shape[1:]), v.new_empty(step.num_rows, *v.shape[1:])
    name = f"K/V rows of {call.name}, step {step.index}"
    receives = [
        message
        for transfer, rows in _with_rows(step.receives)
        for message in _messages(transfer.peer, (block_k[rows], block_v[rows]), 4 * step.index, name)
    ]
    sends = [
        message
        for transfer in step.sends
        for message in _messages(transfer.peer, (_rows(k, transfer), _rows(v, transfer)), 4 * step.index, name)
    ]
    call.stats.bytes_sent += sum(m.tensor.nbytes for m in sends)
    block = _Block(step, block_k, block_v, call.communicator.post(sends, receives))
    if step.receives:
        call.stats.hold(block)
    return block


class _Returning:
    """dK and dV of one step on their way to the rows' owners, and those of own rows on their way here (fp32)."""

    def __init__(
        self,
        share: tuple[torch.Tensor, torch.Tensor] | None,
        k: torch.Tensor,
        v: torch.Tensor,
        step: Step,
        call: RingCall,
    ) -> None:
        self._step = step
        name = f"dK/dV rows of {call.name}, step {step.index}"
        tag = 4 * step.index + 2
        sends = (
            []
            if share is None
            else [
                message
                for transfer, rows in _with_rows(step.receives)
                for message in _messages(transfer.peer, (share[0][rows], share[1][rows]), tag, name)
            ]
        )
        self._arriving = [
            (
                k.new_empty(transfer.num_rows, *k.shape[1:], dtype=torch.float32),
                v.new_empty(transfer.num_rows, *v.shape[1:], dtype=torch.float32),
            )
            for transfer in step.sends
        ]
        receives = [
            message
            for transfer, pair in zip(step.sends, self._arriving, strict=True)
            for message in _messages(transfer.peer, pair, tag, name)
        ]
        call.stats.bytes_sent += sum(m.tensor.nbytes for m in sends)
        self._handle = call.communicator.post(sends, receives)

    def add_to(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Waits, then adds what arrived to the gradients of own rows."""
        self._handle.wait()
        for transfer, pair in zip(self._step.sends, self._arriving, strict=True):
            for total, part in zip((dk, dv), pair, strict=True):
                offset = 0
                for rows in transfer.rows:
                    total[rows.start : rows.stop] += part[offset : offset + len(rows)]
                    offset += len(rows)


def _messages(peer: int, tensors: tuple[torch.Tensor, torch.Tensor], tag: int, name: str) -> tuple[Message, Message]:
    return Message(peer, tensors[0], tag, name), Message(peer, tensors[1], tag + 1, name)


def _rows(x: torch.Tensor, transfer: Transfer) -> torch.Tensor:
    """Rows of `x` that a transfer names, contiguous; a view where they are one range."""
    parts = [x[rows.start : rows.stop] for rows in transfer.rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _with_rows(transfers: Sequence[Transfer]) -> Iterator[tuple[Transfer, slice]]:
    """Each transfer with its rows of the step's block."""
    offset = 0
    for transfer in transfers:
        yield transfer, slice(offset, offset + transfer.num_rows)
        offset += transfer.num_rows


def _progress(call: RingCall, step: Step) -> None:
    if call.on_step is not None:
        call.on_step(step.index)
