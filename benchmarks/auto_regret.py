"""Shows what "auto" costs against the best that could have been chosen: its regret.

A handful of packs on two gloo processes (fp32, one thread each, forward and backward, in turn): every algorithm and
layout is measured, and what `choose_grid` and `AttentionPlan.build` pick with algorithm, layout and grid left on "auto"
is looked up among them. On 8 and 64 ranks, which are not here, bytes and work are counted, and the estimate of what was
picked is set against the best estimate of all.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.packs import corpus_pack, equal_pack, uniform_pack
from benchmarks.report import Report, parser, table
from benchmarks.rounds import Times, interleave
from raycp.attention import build_groups, cp_attention
from raycp.plan import AttentionPlan, CostModel, RankGrid, choose_grid
from tests.multiproc.launcher import run_ranks

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 64
COST = CostModel(head_dim=HEAD_DIM, value_dim=HEAD_DIM)
LAYOUTS = ("contiguous", "zigzag", "balanced")


@dataclass(frozen=True, order=True)
class Way:
    """One way to run a pack."""

    algorithm: str
    layout: str

    def __str__(self) -> str:
        return self.algorithm if self.algorithm == "ulysses" else f"{self.algorithm}, {self.layout}"


WAYS = (*(Way(a, layout) for a in ("ring", "allgather") for layout in LAYOUTS), Way("ulysses", "balanced"))


def packs(num_tokens: int) -> dict[str, list[int]]:
    """What is measured."""
    return {
        "one document": [num_tokens],
        "four equal": equal_pack(num_tokens, 4),
        "three equal": equal_pack(num_tokens, 3),
        "128 to 512 tokens": uniform_pack(num_tokens, 0, shortest=128, longest=512),
        "corpus": corpus_pack(num_tokens, 1, cap=num_tokens // 2),
        "one of half, rest short": [num_tokens // 2 + n for n in (0, *equal_pack(num_tokens // 2, 32))],
    }


def plan_of(doc_ends: Sequence[int], grid: RankGrid, way: Way, cost: CostModel = COST) -> AttentionPlan:
    """Of the shape that is measured."""
    return AttentionPlan.build(
        doc_ends,
        grid,
        algorithm=way.algorithm,
        layout=way.layout,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        cost=cost,
    )


def chosen(doc_ends: Sequence[int], cp: int, cost: CostModel = COST) -> AttentionPlan:
    """The plan when everything is left on "auto"."""
    grid = choose_grid(cp, NUM_HEADS, NUM_KV_HEADS, doc_ends[-1], cost, packs=[doc_ends]).grid
    return plan_of(doc_ends, grid, Way("auto", "auto"), cost)


def rank_main(rank: int, world: int, doc_ends: tuple[int, ...], rounds: int) -> dict[Way, Times]:
    """Every way on one pack."""
    groups = {
        name: build_groups(grid) for name, grid in (("ring", RankGrid(1, world)), ("ulysses", RankGrid(1, 1, world)))
    }
    ways: dict[Any, Callable[[], object]] = {}
    for way in WAYS:
        mine = groups["ulysses" if way.algorithm == "ulysses" else "ring"]
        plan = plan_of(doc_ends, mine.grid, way)
        tokens = plan.num_tokens(rank)
        q, k, v, dout = (torch.randn(tokens, n, HEAD_DIM) for n in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS))
        leaves = [x.requires_grad_() for x in (q, k, v)]

        def run(leaves=leaves, dout=dout, plan=plan, mine=mine) -> None:  # type: ignore[no-untyped-def]
            torch.autograd.backward(cp_attention(*leaves, plan=plan, groups=mine), dout)

        ways[way] = run
    return interleave(ways, rounds=rounds)  # type: ignore[return-value]


def measure(report: Report, num_tokens: int, rounds: int) -> None:
    """Regret of measured packs."""
    rows, regrets, cpu = [], [], []
    for name, doc_ends in packs(num_tokens).items():
        times: dict[Way, Times] = run_ranks(rank_main, 2, tuple(doc_ends), rounds, timeout=900)[0]
        plan = chosen(doc_ends, 2)
        way = Way(plan.algorithm, plan.layout)
        way = Way("ulysses", "balanced") if plan.algorithm == "ulysses" else way
        best = min(times, key=lambda w: times[w].least)
        regrets.append(times[way].least / times[best].least - 1)
        cpu.append(times[way].cpu / min(t.cpu for t in times.values()) - 1)
        cells = [f"{times[w].least * 1e3:.4g} / {times[w].cpu * 1e3:.4g}" for w in WAYS]
        rows.append((name, *cells, str(way), str(best), f"{regrets[-1]:.1%}", f"{cpu[-1]:.1%}"))
    print(f"\n2 processes, {num_tokens} tokens, least of {rounds} rounds, milliseconds forward + backward:")
    print("of the slower process / of both processors")
    table(("pack", *map(str, WAYS), "auto took", "best", "regret", "in processor time"), rows)
    report.at_most("largest regret", max(regrets), 0.10)
    report.at_most("largest regret in processor time, to which idle ranks cost nothing", max(cpu), None)


def count(num_tokens: int) -> None:
    """What auto takes on more ranks, for the figures of several devices, with what it makes ranks do."""
    rows = []
    for device in ("cpu", "910b", "h100"):
        cost = CostModel.named(device, device="cpu")
        for cp in (8, 64):
            for name, doc_ends in packs(num_tokens).items():
                plan = chosen(doc_ends, cp, cost)
                sent = [plan.bytes_moved(r, head_dim=cost.head_dim, itemsize=cost.itemsize) for r in range(cp)]
                work = [plan.work(r) for r in range(cp)]
                shape = f"{plan.grid.ring} x {plan.grid.ulysses}"
                balance = max(work) * cp / sum(work)
                rows.append((device, cp, name, plan.algorithm, plan.layout, shape, balance, max(sent) / 2**20))
    print(f"\nwhat auto takes, {num_tokens} tokens; counted in plans")
    table(
        ("figures", "ranks", "pack", "algorithm", "layout", "ring x ulysses", "work max / mean", "MiB sent, busiest"),
        rows,
    )


def main() -> int:
    """Command line."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5, help="rounds that count")
    options.add_argument("--tokens", type=int, default=8192, help="of the packs that are measured")
    given = options.parse_args()
    report = Report()
    report.header("auto_regret")
    measure(report, 1024 if given.quick else given.tokens, 2 if given.quick else given.rounds)
    count(16_384 if given.quick else 131_072)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
