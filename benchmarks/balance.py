"""Shows that the balanced layout gives every rank the same tokens and work, and that few K/V rows travel for it.

Packs of 131 072 tokens with documents of a real corpus, capped at a quarter, on 8 ranks; one document as long as the
pack; and how long the assignment of documents and the whole plan of a rank take, at 8 ranks and at 1M tokens on 64.
Rows are counted in the programs that ranks obey, as parts of what a full ring brings to each rank. Runs on one core.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from benchmarks.packs import corpus_pack
from benchmarks.report import Report, parser
from raycp.plan import AttentionPlan, RankGrid
from raycp.plan.layout import make_shards


@dataclass(frozen=True)
class Balance:
    """One pack on P ranks: largest over mean work and tokens, K/V rows as parts of a full ring's."""

    work: float
    tokens: float
    rows: float
    busiest_rows: float


def plan_of(doc_ends: Sequence[int], ranks: int) -> AttentionPlan:
    """The balanced ring of a model with 8 query heads on 2 key/value heads."""
    return AttentionPlan.build(
        doc_ends, RankGrid(1, ranks), layout="balanced", algorithm="ring", num_heads=8, num_kv_heads=2
    )


def balance_of(plan: AttentionPlan) -> Balance:
    """Counted in the programs of all ranks."""
    ranks = range(plan.grid.cp)
    programs = [plan.program(rank) for rank in ranks]
    work = [program.area for program in programs]
    tokens = [plan.num_tokens(rank) for rank in ranks]
    rows = [sum(t.num_rows for step in program.steps for t in step.receives) for program in programs]
    ring = plan.pack_length * (len(ranks) - 1) / len(ranks)
    return Balance(max(work) / mean(work), max(tokens) / mean(tokens), mean(rows) / ring, max(rows) / ring)


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Median of several calls."""
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return median(taken)


def run(report: Report, *, packs: int, num_tokens: int, ranks: int) -> None:
    """Balance and rows."""
    found = [balance_of(plan_of(corpus_pack(num_tokens, n, cap=num_tokens // 4), ranks)) for n in range(packs)]
    print(f"{packs} packs of {num_tokens} tokens, documents of at most {num_tokens // 4}, {ranks} ranks:")
    report.at_most("work, largest / mean, mean of packs", mean(b.work for b in found), 1.03)
    report.at_most("work, largest / mean, worst pack", max(b.work for b in found), 1.08)
    report.at_most("tokens, largest / mean, worst pack", max(b.tokens for b in found), 1.02)
    report.at_most("K/V rows of a full ring's, mean", mean(b.rows for b in found), 0.26)
    report.at_most("K/V rows of a full ring's, busiest rank, mean of packs", mean(b.busiest_rows for b in found), 0.34)
    report.at_most("K/V rows of a full ring's, busiest rank, worst pack", max(b.busiest_rows for b in found), None)
    single = balance_of(plan_of([num_tokens], ranks))
    print(f"one document of {num_tokens} tokens, {ranks} ranks:")
    report.at_most("work, largest / mean", single.work, 1.03)
    report.at_most("K/V rows of a full ring's, mean", single.rows, 0.75)


def run_times(
    report: Report, *, repeats: int, num_tokens: int, ranks: int, assign_bar: float, build_bar: float
) -> None:
    """Seconds of planning, one pack: the assignment, and all that one rank does before it can start."""
    doc_ends = corpus_pack(num_tokens, 0, cap=num_tokens // 4 if ranks <= 8 else 32_768)
    print(f"planning of {len(doc_ends)} documents in {num_tokens} tokens, {ranks} ranks, median of {repeats}:")
    assign = seconds(lambda: make_shards(doc_ends, ranks, "balanced"), repeats)
    report.at_most("assignment", assign * 1e3, assign_bar, " ms")
    build = seconds(lambda: plan_of(doc_ends, ranks).program(ranks - 1), repeats)
    report.at_most("assignment, plan and program of a rank", build * 1e3, build_bar, " ms")


def main() -> int:
    """Command line."""
    options = parser(__doc__).parse_args()
    report = Report()
    report.header("balance")
    packs, repeats = (5, 3) if options.quick else (50, 15)
    run(report, packs=packs, num_tokens=131_072, ranks=8)
    run_times(report, repeats=repeats, num_tokens=131_072, ranks=8, assign_bar=1, build_bar=10)
    run_times(report, repeats=repeats, num_tokens=1 << 20, ranks=64, assign_bar=10, build_bar=100)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
