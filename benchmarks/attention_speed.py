"""Shows how fast the attention is: two gloo processes of one thread each, fp32, forward and backward.

Three rows: one document (both sides sit at the speed of the kernel: what counts is what is added to it), short
documents, and documents of a real corpus (the peers compute the whole triangle, raycp what the mask leaves). Beside
raycp's ring and its "auto": the bare kernel calls of the same plan, PyTorch's own ring (two rotations), DeepSpeed's
Ulysses attention if it is installed, and one process with one and two threads.

All run in turn in the same processes, round by round. Ratios are of minima on one document, where a few per cent
decide, and of medians on packed rows. raycp's time is then split into kernels, exposed communication (posting and
waiting), planning, and the rest (merging, copies, autograd).
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.balance import seconds
from benchmarks.meters import Meter, MeteredKernel
from benchmarks.packs import corpus_pack, uniform_pack
from benchmarks.peers import Attention, bare_kernels, deepspeed_ulysses, one_process_by_document, torch_ring
from benchmarks.report import Report, parser, table
from benchmarks.rounds import Times, interleave
from raycp.attention import Groups, build_groups, cp_attention
from raycp.attention.kernels import CpuFlashKernel
from raycp.plan import AttentionPlan, CostModel, RankGrid
from tests.multiproc.launcher import run_ranks

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 64
RANKS = 2
COST = CostModel(head_dim=HEAD_DIM, value_dim=HEAD_DIM)
RING, AUTO, BARE = "raycp ring", "raycp auto", "bare kernels"
DEEPSPEED = "DeepSpeed Ulysses"
ROTATIONS = {"PyTorch ring, all-gather": "allgather", "PyTorch ring, all-to-all": "alltoall"}
ROWS = ("whole", "short", "corpus")
ONE, TWO = "one process, 1 thread", "one process, 2 threads"


@dataclass(frozen=True)
class Split:
    """Seconds of one rank in one round."""

    whole: float
    kernels: float
    exchange: float
    planning: float

    @property
    def rest(self) -> float:
        """Merging, copies, autograd."""
        return self.whole - self.kernels - self.exchange


def plan_of(doc_ends: Sequence[int], algorithm: str, layout: str) -> AttentionPlan:
    """Of the shape that is measured."""
    return AttentionPlan.build(
        doc_ends,
        RankGrid(1, RANKS),
        algorithm=algorithm,
        layout=layout,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        cost=COST,
    )


def tensors(num_tokens: int, *, heads_first: bool) -> list[torch.Tensor]:
    """q, k, v (leaves) and dout: [t, heads, D], or [1, heads, t, D]."""
    made = []
    for n in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS):
        made.append(torch.randn(1, n, num_tokens, HEAD_DIM) if heads_first else torch.randn(num_tokens, n, HEAD_DIM))
    return [x.requires_grad_(i < 3) for i, x in enumerate(made)]


def ours(plan: AttentionPlan, groups: Groups, meter: Meter | None = None) -> Callable[[], None]:
    """Forward and backward of this rank's share."""
    q, k, v, dout = tensors(plan.num_tokens(groups.cp_rank), heads_first=False)
    kernel = None if meter is None else MeteredKernel(CpuFlashKernel(), meter)
    groups = groups if meter is None else meter.on(groups)

    def run() -> None:
        q.grad = k.grad = v.grad = None
        torch.autograd.backward(cp_attention(q, k, v, plan=plan, groups=groups, kernel=kernel), dout)

    return run


def theirs(attend: Attention, num_tokens: int, *, threads: int = 1) -> Callable[[], None]:
    """Forward and backward of `num_tokens` tokens on this rank."""
    q, k, v, dout = tensors(num_tokens, heads_first=True)

    def run() -> None:
        q.grad = k.grad = v.grad = None
        torch.set_num_threads(threads)
        out = attend(q, k, v)
        torch.autograd.backward(out, dout.view(out.shape))
        torch.set_num_threads(1)

    return run


def nothing() -> None:
    """What the other rank does while one process is measured."""


def rank_main(rank: int, world: int, doc_ends: tuple[int, ...], rounds: int) -> tuple[dict[str, Times], list[Split]]:
    """All ways on one row."""
    groups = build_groups(RankGrid(1, world))
    num_tokens = doc_ends[-1]
    whole = len(doc_ends) == 1
    ring = plan_of(doc_ends, "ring", "zigzag" if whole else "balanced")
    auto = plan_of(doc_ends, "auto", "auto")
    ways: dict[str, Callable[[], object]] = {
        RING: ours(ring, groups),
        AUTO: ours(auto, groups),
        BARE: bare_kernels(ring, rank, HEAD_DIM),
    }
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    for name, rotation in ROTATIONS.items():
        ways[name] = theirs(torch_ring(mesh, rotation), num_tokens // world)
    each = num_tokens // world
    positions = torch.arange(each * rank, each * (rank + 1))
    deepspeed = deepspeed_ulysses(num_tokens, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, positions)
    if deepspeed is not None:
        ways[DEEPSPEED] = theirs(deepspeed, each)
    for name, threads in ((ONE, 1), (TWO, 2)):
        alone = one_process_by_document(doc_ends)
        ways[name] = theirs(alone, num_tokens, threads=threads) if rank == 0 else nothing
    times = interleave(ways, rounds=rounds)
    return times, split_of(ring, groups, rounds)


def split_of(plan: AttentionPlan, groups: Groups, rounds: int) -> list[Split]:
    """Where the time of raycp's ring goes, on this rank, by round."""
    plan_seconds = seconds(lambda: plan_of(plan.doc_ends, plan.algorithm, plan.layout).program(groups.cp_rank), 5)
    meter, found = Meter(), []
    run = ours(plan, groups, meter)
    for _ in range(rounds + 1):
        before = replace(meter)
        taken = interleave({RING: run}, rounds=1, warm_up=0)[RING].least
        kernels = meter.kernel_seconds - before.kernel_seconds
        found.append(Split(taken, kernels, meter.exchange_seconds - before.exchange_seconds, plan_seconds))
    return found[1:]


def measure(title: str, doc_ends: Sequence[int], rounds: int) -> dict[str, Times]:
    """Runs one row and prints its table."""
    results = run_ranks(rank_main, RANKS, tuple(doc_ends), rounds, timeout=1500)
    times: dict[str, Times] = results[0][0]
    print(f"\n{title}; {rounds} rounds; milliseconds, and ratio to the bare kernels")
    floor = (times[BARE].least, times[BARE].median, times[BARE].cpu)
    table(
        ("way", "least", "median", "processor", "least / bare", "median / bare", "processor / bare"),
        [
            (name, *(x * 1e3 for x in figures), *(x / y for x, y in zip(figures, floor, strict=True)))
            for name, figures in ((name, (t.least, t.median, t.cpu)) for name, t in times.items())
        ],
    )
    for rank, (_, splits) in enumerate(results):
        s = min(splits, key=lambda x: x.whole)
        parts = ((s.kernels, "kernels"), (s.exchange, "exposed communication"), (s.rest, "merging and rest"))
        line = ", ".join(f"{name} {x * 1e3:.1f} ms ({x / s.whole:.1%})" for x, name in parts)
        print(f"raycp ring, rank {rank}, fastest round: {line}; planned before in {s.planning * 1e3:.1f} ms")
    waits = median(s.exchange / s.whole for _, splits in results for s in splits)
    print(f"exposed communication, median of rounds and ranks: {waits:.1%}")
    if DEEPSPEED not in times:
        print("DeepSpeed is not installed: left out (docs/benchmarks.md says how to install it)")
    return times


def judge(report: Report, times: dict[str, Times], *, whole: bool, bar: float) -> None:
    """The bars of a row."""
    peers = [name for name in (*ROTATIONS, DEEPSPEED) if name in times]
    mine = times[AUTO]
    if whole:
        report.at_most("raycp ring / bare kernels, least", times[RING].least / times[BARE].least, bar)
        report.at_most("raycp ring / bare kernels, processor", times[RING].cpu / times[BARE].cpu, bar)
        fastest = min(times[name].least for name in ROTATIONS)
        report.at_most("raycp auto / PyTorch ring, least", mine.least / fastest, 1.05)
        report.at_most("raycp auto / PyTorch ring, processor", mine.cpu / min(times[n].cpu for n in ROTATIONS), 1.05)
        report.at_most("raycp auto / one process with two threads, least", mine.least / times[TWO].least, 1.0)
        report.at_most("raycp auto / one process with two threads, processor", mine.cpu / times[TWO].cpu, None)
        return
    for name in peers:
        report.at_least(f"raycp auto is faster than {name}, median", times[name].median / mine.median, bar, "x")
    report.at_most("overhead over bare kernels, least", times[RING].least / times[BARE].least - 1, 0.25)
    report.at_most("overhead over bare kernels, processor", times[RING].cpu / times[BARE].cpu - 1, 0.25)
    report.at_most("raycp auto / one process with two threads, median", mine.median / times[TWO].median, None)


def main() -> int:
    """Command line."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=7, help="rounds that count")
    options.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="which rows to measure")
    chosen = options.parse_args()
    report = Report()
    report.header("attention_speed")
    print(f"{RANKS} gloo processes, fp32, H {NUM_HEADS}, K {NUM_KV_HEADS}, D {HEAD_DIM}, forward + backward")
    shrink, rounds = (8, 2) if chosen.quick else (1, chosen.rounds)
    long, packed = 8192 // shrink, 16_384 // shrink
    if "whole" in chosen.rows:
        judge(report, measure(f"one document of {long} tokens", [long], rounds), whole=True, bar=1.05)
    if "short" in chosen.rows:
        short = uniform_pack(packed, 0, shortest=128, longest=512)
        title = f"{len(short)} documents of 128 to 512 tokens in {packed}"
        judge(report, measure(title, short, rounds), whole=False, bar=8)
    if "corpus" in chosen.rows:
        corpus = corpus_pack(packed, 1, cap=packed // 4)
        title = f"{len(corpus)} documents of a corpus, at most {packed // 4} tokens, in {packed}"
        judge(report, measure(title, corpus, rounds), whole=False, bar=2)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
