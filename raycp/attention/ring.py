"""Ring attention over a pack: one loop that moves K/V rows while it computes, forward and backward.

Guarantees: computes exactly what the plan says; a block is posted before the step that hides it is computed, and part
of the own block is computed last in backward, to hide the last gradients that return; a step writes, adds and merges
only the rows that it computed; two remote K/V blocks are held at most (one in use, one arriving), three in a double
ring (one more, from another window), trimmed to the rows that are needed; sums over steps are fp32; dK and dV travel in
fp32 and are added in the order of the steps, so gradients are the same bits each time. Backward moves again what the
plan's `kv_cache` does not keep of K and V, and uses the merged output and log-sum-exp (kept: t x H x (Dv + 1) numbers a
layer).

The algorithm is Liu et al., "Ring Attention with Blockwise Transformers" (2310.01889); which block comes from where, by
direct pull or through a window, is in `raycp.plan.ring`.

Legend: t own rows, s rows of a step's block, H query heads, K key/value heads, D head dim, Dv value dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from raycp.attention.call import AttentionCall, Tensors
from raycp.attention.exchange import Block, Returning, fetch
from raycp.attention.merge import merge_
from raycp.plan import OwnPart, Slice, query_runs


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """See `Schedule.forward`; the cache holds the first `call.cached` tensors of each remote block, step by step."""
    out = lse = None
    cache: list[torch.Tensor] = []
    for turn in _turns((k, v), call):
        if out is None or lse is None:  # the own block: every query sees a key of it
            out, lse = call.kernel.forward(q, turn.k, turn.v, turn.slices, call.scale)
            call.stats.kernel_forward_calls += bool(turn.slices)
        elif turn.slices:
            part, part_lse = call.kernel.forward(q, turn.k, turn.v, turn.slices, call.scale)
            call.stats.kernel_forward_calls += 1
            for rows in query_runs(turn.slices):
                merge_(out[rows], lse[rows], part[rows], part_lse[rows])
        if turn.index:
            cache += turn.tensors[: call.cached]
        call.progress(turn.index)
        del turn  # its rows, before the next ones are waited for
    assert out is not None
    assert lse is not None
    return out.to(q.dtype), lse, tuple(cache)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cache: Tensors,
    call: AttentionCall,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `Schedule.backward`."""
    dout = dout.contiguous()
    dq = torch.zeros_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
    gradients = _BlockGradients((k, v), call)
    for turn in _turns((k, v), call, cache, call.program.own):
        if turn.slices:
            part, *share = call.kernel.backward(dout, q, turn.k, turn.v, out, lse, turn.slices, call.scale)
            call.stats.kernel_backward_calls += 1
            for rows in query_runs(turn.slices):
                dq[rows] += part[rows]
            gradients.put(turn, tuple(share))
            del part, share
        index = turn.index
        del turn
        gradients.settle(index)
        call.progress(index)
    dk, dv = gradients.own()
    return dq, dk, dv


@dataclass(frozen=True, eq=False)
class _Turn:
    """One kernel call: `slices`, on `tensors` K [s, K, D] and V [s, K, Dv], rows `keys` of the block of step `index`.

    The rest of the own block, in backward, has the index after that of the last step.
    """

    index: int
    tensors: Tensors
    slices: Sequence[Slice]
    keys: slice

    @property
    def k(self) -> torch.Tensor:
        return self.tensors[0]

    @property
    def v(self) -> torch.Tensor:
        return self.tensors[1]


def _turns(own: Tensors, call: AttentionCall, cache: Tensors = (), parts: Sequence[OwnPart] = ()) -> Iterator[_Turn]:
    """Each step's block in turn, later ones on their way while the caller computes; then what `parts` left for last."""
    steps, kept = call.program.steps, call.cached if cache else 0
    if len(steps) > 1:
        own = tuple(x.contiguous() for x in own)
    of_own = [_own_turn(own, part, index) for part, index in zip(parts, (0, len(steps)), strict=False)]
    pending = {0: Block(steps[0], own)}
    for step in steps:
        block = pending.pop(step.index).ready()
        for later in steps[step.index + 1 :]:
            if later.posted == step.index:
                source = own if later.source == 0 else block.tensors
                there = cache[kept * (later.index - 1) : kept * later.index]
                pending[later.index] = fetch(later, own, source, call, kept=there)
        whole = step.index or not of_own
        yield _Turn(step.index, block.tensors, step.slices, slice(None)) if whole else of_own[0]
        del block
    yield from of_own[1:]


def _own_turn(own: Tensors, part: OwnPart, index: int) -> _Turn:
    keys = slice(part.keys.start, part.keys.stop)
    return _Turn(index, tuple(x[keys] for x in own), part.slices, keys)


class _BlockGradients:
    """dK and dV of each block, from its computation until they are with the rows' owners."""

    def __init__(self, own: Tensors, call: AttentionCall) -> None:
        self._own = own
        self._call = call
        self._sums: dict[int, Tensors] = {0: self._zeros(len(own[0]))}
        self._flying: dict[int, Returning] = {}  # by the block that they are added to

    def put(self, turn: _Turn, share: Tensors) -> None:
        """Adds what a rank computed itself in a turn."""
        if 0 < turn.index < len(self._call.program.steps):
            self._sums[turn.index] = share
            return
        for total, part in zip(self._sums[0], share, strict=True):
            total[turn.keys] += part

    def settle(self, index: int) -> None:
        """Posts the gradients of the blocks that are complete after step `index`.

        What goes to the same blocks is waited for first, on every rank at the same point, whether or not it has
        anything to send: so no rank waits for one that waits for it.
        """
        for step in sorted(self._call.program.steps[1:], key=lambda step: step.outer):
            if step.settled != index:
                continue
            for block in (step.into, step.index):
                self._land(block)
            self._flying[step.into] = Returning(step, self._sums.pop(step.index, None), self._own, self._call)

    def own(self) -> Tensors:
        """Waits for all that is still to come; dk [t, K, D] and dv [t, K, Dv], fp32."""
        self._land(0)
        assert not self._flying
        return self._sums[0]

    def _land(self, block: int) -> None:
        """Adds what is on its way to the gradient of a block."""
        returning = self._flying.pop(block, None)
        if returning is None:
            return
        if block not in self._sums:  # a block that this rank holds for its window only
            self._sums[block] = self._zeros(self._call.program.steps[block].block_rows)
        returning.add_to(self._sums[block])

    def _zeros(self, rows: int) -> Tensors:
        return tuple(x.new_zeros(rows, *x.shape[1:], dtype=torch.float32) for x in self._own)
