"""Shows how cost grows: with tokens (4K to 64K), with documents (1 to 1 000 in a pack), and with ranks (to 64).

Seconds of forward and backward are measured on one process and on two (fp32, one thread each, in turn); on more ranks
the plan's counters say what would be done: the busiest rank's share of the work, what part of a full ring's K/V rows
travels, kernel calls of a rank, and the time to plan. Prints both tables and writes `docs/scaling.svg`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.balance import Balance, balance_of, seconds
from benchmarks.packs import equal_pack
from benchmarks.report import Report, parser, table
from benchmarks.rounds import Times, interleave
from raycp.attention import Groups, build_groups, cp_attention
from raycp.attention.communicator import LocalCommunicator
from raycp.plan import AttentionPlan, CostModel, RankGrid
from tests.multiproc.launcher import run_ranks

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 1, 64
COST = CostModel(head_dim=HEAD_DIM, value_dim=HEAD_DIM)
PICTURE = Path(__file__).resolve().parent.parent / "docs" / "scaling.svg"


@dataclass(frozen=True)
class Point:
    """One pack of equal documents: seconds on one process and on two."""

    num_tokens: int
    documents: int
    one: float
    two: float


@dataclass(frozen=True)
class Counted:
    """One pack on many ranks."""

    num_tokens: int
    documents: int
    ranks: int
    balance: Balance
    calls: int
    plan_seconds: float


def plan_of(doc_ends: Sequence[int], ranks: int) -> AttentionPlan:
    """A ring; the layout is chosen."""
    return AttentionPlan.build(
        doc_ends,
        RankGrid(1, ranks),
        algorithm="ring",
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        cost=COST,
    )


def rank_main(rank: int, world: int, packs: Sequence[tuple[int, int]], most_seconds: float) -> list[dict[str, Times]]:
    """Times of each pack, on rank 0 alone and on all."""
    alone = Groups(RankGrid(1, 1), 0, LocalCommunicator())
    all_ranks = build_groups(RankGrid(1, world))
    found = []
    for num_tokens, documents in packs:
        ends = equal_pack(num_tokens, documents)
        ways = {}
        for name, groups in (("one", alone), ("two", all_ranks)):
            plan = plan_of(ends, groups.grid.cp)
            tokens = plan.num_tokens(groups.cp_rank)
            q, k, v, dout = (
                torch.randn(tokens, n, HEAD_DIM) for n in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
            )
            leaves = [x.requires_grad_() for x in (q, k, v)]

            def run(
                leaves: list[torch.Tensor] = leaves,
                dout: torch.Tensor = dout,
                plan: AttentionPlan = plan,
                groups: Groups = groups,
            ) -> None:
                torch.autograd.backward(cp_attention(*leaves, plan=plan, groups=groups), dout)

            ways[name] = run if name == "two" or rank == 0 else _nothing
        first = interleave(ways, rounds=1, warm_up=0)
        rounds = int(most_seconds / sum(t.least for t in first.values()))
        found.append(interleave(ways, rounds=min(rounds, 7), warm_up=0) if rounds > 1 else first)
    return found


def _nothing() -> None:
    """The other rank waits."""


def measure(sizes: Sequence[int], documents: Sequence[int], most_seconds: float) -> list[Point]:
    """Every pack on one process and on two."""
    packs = [(s, d) for d in documents for s in sizes]
    times = run_ranks(rank_main, 2, packs, most_seconds, timeout=1500)[0]
    return [Point(*pack, t["one"].least, t["two"].least) for pack, t in zip(packs, times, strict=True)]


def count(num_tokens: int, documents: Sequence[int], ranks: Sequence[int]) -> list[Counted]:
    """Counters of plans."""
    found = []
    for d in documents:
        ends = equal_pack(num_tokens, d)
        for p in ranks:
            plan = plan_of(ends, p)
            calls = max(plan.program(r).num_slices for r in range(p))
            taken = seconds(lambda ends=ends, p=p: plan_of(ends, p).program(p - 1), 3)  # type: ignore[misc]
            found.append(Counted(num_tokens, d, p, balance_of(plan), calls, taken))
    return found


def draw(points: Sequence[Point], counted: Sequence[Counted], path: Path) -> None:
    """Seconds over tokens, and K/V rows over ranks, a line for each number of documents."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "raycp"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for n, documents in enumerate(sorted({p.documents for p in points})):
        mine = [p for p in points if p.documents == documents]
        label = "1 document" if documents == 1 else f"{documents} documents"
        tokens = [p.num_tokens for p in mine]
        left.loglog(tokens, [p.two for p in mine], "o-", color=f"C{n}", label=label)
        left.loglog(tokens, [p.one for p in mine], ":", color=f"C{n}")
        many = [c for c in counted if c.documents == documents]
        right.semilogx([c.ranks for c in many], [100 * c.balance.rows for c in many], "o-", color=f"C{n}", label=label)
    left.set(xlabel="tokens of the pack", ylabel="seconds", title="Forward + backward; 2 processes (dotted: 1)")
    right.set(
        xlabel="ranks", ylabel="% of a full ring's K/V rows", title=f"Rows that travel, {counted[0].num_tokens} tokens"
    )
    left.set_xticks(
        sorted({p.num_tokens for p in points}), [f"{s // 1024}K" for s in sorted({p.num_tokens for p in points})]
    )
    right.set_xticks(sorted({c.ranks for c in counted}), [str(r) for r in sorted({c.ranks for c in counted})])
    for axes in (left, right):
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Command line."""
    options = parser(__doc__)
    options.add_argument("--picture", type=Path, default=PICTURE, help="where the plot goes")
    chosen = options.parse_args()
    report = Report()
    report.header("scaling")
    quick = chosen.quick
    sizes = (1024, 2048) if quick else (4096, 8192, 16_384, 32_768, 65_536)
    documents = (1, 10) if quick else (1, 10, 100, 1000)
    points = measure(sizes, documents, 0.5 if quick else 6.0)
    print(f"fp32, H {NUM_HEADS}, K {NUM_KV_HEADS}, D {HEAD_DIM}, equal documents, forward + backward, least of rounds")
    table(
        ("tokens", "documents", "1 process, s", "2 processes, s", "speed-up"),
        [(p.num_tokens, p.documents, p.one, p.two, p.one / p.two) for p in points],
    )
    counted = count(sizes[-1], documents, (2, 4) if quick else (2, 4, 8, 16, 32, 64))
    print(f"\ncounted in plans of {sizes[-1]} tokens")
    table(
        ("documents", "ranks", "work max / mean", "K/V rows, mean", "busiest rank", "kernel calls", "planning, ms"),
        [
            (
                c.documents,
                c.ranks,
                c.balance.work,
                c.balance.rows,
                c.balance.busiest_rows,
                c.calls,
                c.plan_seconds * 1e3,
            )
            for c in counted
        ],
    )
    draw(points, counted, chosen.picture)
    print(f"wrote {chosen.picture.name}")
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
