"""Shows that communicators carry what plans say, byte for byte, and that all-gather moves only what is needed.

Every algorithm, layout and mask runs, forward and backward, on ranks in memory that run the executors of a real run;
what each rank hands to its communicator is counted there and compared with `plan.bytes_moved`. The lower bound of
all-gather is counted by another way: token by token, from the mask. K/V cache policies: what backward still moves, and
what is held for it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.meters import Meter
from benchmarks.packs import corpus_pack
from benchmarks.report import Report, parser, table
from raycp.attention import InMemoryWorld
from raycp.attention.api import make_call, run_call
from raycp.attention.communicator import Communicator
from raycp.plan import AttentionPlan, RankGrid
from tests.unit.attention.cases import groups_in_memory

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 3, 8
ITEMSIZE = 4
"""fp32."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of all ranks, and the largest of any rank; `held` of other ranks' K and V at once."""

    forward: int
    backward: int
    busiest: int
    held: int
    as_planned: bool


GRIDS = (
    ("ring", RankGrid(1, 3)),
    ("ring", RankGrid(1, 4, window=2)),
    ("ulysses", RankGrid(1, 1, 4)),
    ("hybrid", RankGrid(1, 2, 2)),
    ("hybrid", RankGrid(1, 4, 2, window=2)),
    ("allgather", RankGrid(1, 4)),
)


def plan_of(doc_ends: Sequence[int], algorithm: str, grid: RankGrid, **choices: object) -> AttentionPlan:
    """A plan of the small model that is measured; its 6 query heads do not divide over 4 Ulysses ranks."""
    return AttentionPlan.build(
        doc_ends,
        grid,
        algorithm=algorithm,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        **choices,  # type: ignore[arg-type]
    )


def traffic_of(plan: AttentionPlan) -> Traffic:
    """Runs a plan forward and backward on ranks in memory."""
    world = InMemoryWorld(plan.grid.cp)

    def rank_main(whole: Communicator) -> tuple[int, int, int]:
        rank, meter = whole.rank, Meter()
        groups = meter.on(groups_in_memory(world, plan.grid, rank))
        tokens = plan.num_tokens(rank)
        q, k, v = (
            torch.randn(tokens, n, HEAD_DIM, requires_grad=True) for n in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        )
        call = make_call(q, k, v, plan=plan, groups=groups, scale=None, kernel=None)
        out = run_call(q, k, v, plan=plan, groups=groups, call=call)
        forward = meter.sent
        torch.autograd.backward(out, torch.ones_like(out))
        return forward, meter.sent - forward, call.stats.max_remote_bytes

    found = world.run(rank_main)
    planned = [
        tuple(plan.bytes_moved(r, head_dim=HEAD_DIM, itemsize=ITEMSIZE, direction=d) for d in ("forward", "backward"))
        for r in range(plan.grid.cp)
    ]
    forward, backward, held = zip(*found, strict=True)
    return Traffic(
        sum(forward),
        sum(backward),
        max(f + b for f, b, _ in found),
        max(held),
        [(f, b) for f, b, _ in found] == planned,
    )


def needed_bytes(plan: AttentionPlan) -> int:
    """The lower bound of a forward pass: K and V rows that a query of a rank sees and the rank does not hold."""
    starts = np.concatenate([np.zeros(1, np.int64), np.asarray(plan.doc_ends[:-1], dtype=np.int64)])
    ends = np.asarray(plan.doc_ends, dtype=np.int64)
    rows = 0
    for rank in range(plan.grid.cp):
        index = plan.token_index(rank)
        document = np.searchsorted(ends, index, side="right")
        low = starts[document]
        if plan.sliding_window is not None:
            low = np.maximum(low, index - plan.sliding_window + 1)
        high = index + 1 if plan.mask == "causal" else ends[document]
        seen = np.zeros(plan.pack_length + 1, dtype=np.int64)
        np.add.at(seen, low, 1)
        np.add.at(seen, high, -1)
        needed = np.cumsum(seen)[:-1] > 0
        needed[index] = False
        rows += int(needed.sum())
    return rows * NUM_KV_HEADS * 2 * HEAD_DIM * ITEMSIZE


def run_all(report: Report, *, num_tokens: int, packs: int) -> None:
    """Every algorithm x layout x mask."""
    wrong = cases = 0
    for seed in range(packs):
        doc_ends = corpus_pack(num_tokens, seed)
        for algorithm, grid in GRIDS:
            for layout in ("contiguous", "zigzag", "balanced"):
                for choices in ({}, {"mask": "full"}, {"sliding_window": num_tokens // 8}):
                    plan = plan_of(doc_ends, algorithm, grid, layout=layout, **choices)
                    cases += 1
                    wrong += not traffic_of(plan).as_planned
    print(f"{cases} plans: every algorithm, three layouts, three masks, {packs} packs of {num_tokens} tokens:")
    report.at_most("plans of which a rank moved other bytes than planned", wrong, 0)


def run_bound(report: Report, *, num_tokens: int, packs: int) -> None:
    """All-gather against the needed intervals."""
    worst = 0.0
    for seed in range(packs):
        doc_ends = corpus_pack(num_tokens, seed)
        for layout in ("contiguous", "zigzag", "balanced"):
            for window in (None, num_tokens // 16):
                plan = plan_of(doc_ends, "allgather", RankGrid(1, 4), layout=layout, sliding_window=window)
                bound = needed_bytes(plan)
                moved = traffic_of(plan).forward
                worst = max(worst, moved / bound - 1 if bound else float(moved > 0))
    report.at_most("all-gather: bytes above the needed intervals, worst plan", worst, 0.01)


def run_caches(*, num_tokens: int) -> None:
    """What backward moves, and what is held, under each cache policy."""
    print(f"K/V caches of a ring of 4, zigzag, one document of {num_tokens} tokens; KiB of all ranks, held by one:")
    rows = []
    for kv_cache in ("none", "half", "full"):
        plan = plan_of([num_tokens], "ring", RankGrid(1, 4), layout="zigzag", kv_cache=kv_cache)
        t = traffic_of(plan)
        rows.append((kv_cache, t.forward / 1024, t.backward / 1024, t.held / 1024, "yes" if t.as_planned else "NO"))
    table(("kv_cache", "forward", "backward", "held", "as planned"), rows)


def main() -> int:
    """Command line."""
    options = parser(__doc__).parse_args()
    report = Report()
    report.header("bytes")
    torch.set_num_threads(1)
    size, packs = (512, 1) if options.quick else (2048, 4)
    run_all(report, num_tokens=size, packs=packs)
    run_bound(report, num_tokens=2 * size, packs=packs)
    run_caches(num_tokens=size)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
