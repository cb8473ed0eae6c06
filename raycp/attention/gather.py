"""Attention by gathering: all K/V rows that a rank's queries need come at once, a group of heads at a time.

Guarantees: each query row is computed in one kernel call over all its keys, so nothing is merged; the rows of the next
group of key/value heads are on their way while a group is computed, and those of the first while the queries are
computed that need no other rank; two groups of rows are held at most. dK and dV travel in fp32 and are added in the
order of the plan, so gradients are the same bits each time. Costs one copy of the gathered rows where they are not one
range, and no overlap for a single group without local work.

Gathering keys and values by heads is in the Llama 3 report (2407.21783, section 3.3.2); here only needed rows move.

Legend: t own rows, s gathered rows, H query heads, K key/value heads, g those of a group, D head dim, Dv value dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from raycp.attention.call import AttentionCall, Tensors
from raycp.attention.exchange import Block, Returning, fetch
from raycp.plan import Step, query_runs


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """See `Schedule.forward`; nothing is cached."""
    out = lse = None
    for turn in _turns(q, k, v, call):
        heads, slices = turn.query, turn.step.slices
        if out is None or lse is None or slices:
            part, part_lse = call.kernel.forward(q[:, heads], turn.k, turn.v, slices, call.scale)
            call.stats.kernel_forward_calls += bool(slices)
            if out is None or lse is None:
                out, lse = part, part_lse
            else:
                for start, stop in ((s.q_start, s.q_stop) for s in slices):
                    out[start:stop, heads], lse[start:stop, heads] = part[start:stop], part_lse[start:stop]
        call.progress(turn.index)
        del turn  # its rows, before the next ones are waited for
    assert out is not None
    assert lse is not None
    return out.to(q.dtype), lse, ()


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
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    flying: tuple[Returning, Tensors] | None = None
    for turn in _turns(q, k, v, call):
        heads, step = turn.query, turn.step
        totals = dk[:, turn.kv], dv[:, turn.kv]
        share: Tensors | None = None
        if step.slices:
            part, *both = call.kernel.backward(
                dout[:, heads], q[:, heads], turn.k, turn.v, out[:, heads], lse[:, heads], step.slices, call.scale
            )
            call.stats.kernel_backward_calls += 1
            for rows in query_runs(step.slices):
                dq[rows, heads] += part[rows]
            share = tuple(both)
            for total, x in zip(totals, share, strict=True):
                if step.index == 0:
                    total += x
                for held, place in step.own:
                    total[held.start : held.stop] += x[place.start : place.stop]
        if flying is not None:
            flying[0].add_to(flying[1])
            flying = None
        if step.index:
            flying = (Returning(step, share, totals, call, round_index=turn.index - step.index), totals)
        call.progress(turn.index)
        del turn
    if flying is not None:
        flying[0].add_to(flying[1])
    return dq, dk, dv


@dataclass(frozen=True, eq=False)
class _Turn:
    """One kernel call: `query` and `kv` heads, on `k` [s, g, D] and `v` [s, g, Dv]."""

    index: int
    step: Step
    query: slice
    kv: slice
    k: torch.Tensor
    v: torch.Tensor


def _turns(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> Iterator[_Turn]:
    """The local step, then each group of heads; the next group is on its way while the caller computes."""
    local, step = call.program.steps
    groups = call.head_groups if step.receives or step.sends else ()
    readers = q.shape[1] // k.shape[1]

    def post(n: int) -> Block | None:
        if n == len(groups):
            return None
        own = tuple(x[:, groups[n].start : groups[n].stop] for x in (k, v))
        return fetch(step, own, own, call, round_index=n)

    pending = post(0)
    yield _Turn(0, local, slice(None), slice(None), k, v)
    for n, heads in enumerate(groups):
        assert pending is not None
        block = pending.ready()
        pending = post(n + 1)
        query = slice(heads.start * readers, heads.stop * readers)
        yield _Turn(n + 1, step, query, slice(heads.start, heads.stop), block.k, block.v)
        del block
