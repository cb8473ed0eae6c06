"""Shows that a ring hides its messages: each is delayed by a part of one block's compute, and the step takes as long.

Ranks are threads in memory that run the executors of a real run. A message arrives a fixed time after it was sent,
whatever the receiver does meanwhile, so only a schedule that posts before it computes can hide it. Two settings: two
ranks with the real kernel, one core each, on one long document; and rings whose kernel takes a fixed time without a
core, as an accelerator's does, so that ranks do not compete for cores.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from benchmarks.report import Report, parser
from raycp.attention import InMemoryWorld, cp_attention
from raycp.attention.communicator import Communicator
from raycp.attention.kernels import CpuFlashKernel, Kernel
from raycp.plan import AttentionPlan, RankGrid, Slice
from tests.unit.attention.cases import groups_in_memory

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 1, 64
SHARE = 0.8
"""Of a block's compute (forward) that a message takes."""


class TimedKernel:
    """Takes a fixed time a block and no core, 2.5 times as long backward, as real kernels do; less for part of a block.

    Results are zeros of the right shape: only the schedule is looked at.

    Args:
        seconds: of a block.
        entries: visible score entries of a block, for one head.
    """

    def __init__(self, seconds: float, entries: int) -> None:
        self._seconds = seconds
        self._entries = entries

    def _take(self, slices: Sequence[Slice], factor: float) -> None:
        time.sleep(factor * self._seconds * sum(s.area for s in slices) / self._entries)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slices: Sequence[Slice], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros, after a while."""
        self._take(slices, 1.0)
        return q.new_zeros(*q.shape[:2], v.shape[2]), q.new_zeros(q.shape[:2])

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        slices: Sequence[Slice],
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Zeros, after a while."""
        self._take(slices, 2.5)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def step_seconds(plan: AttentionPlan, kernel: Kernel, delay: float) -> tuple[float, float]:
    """Seconds of forward, and of backward, on the slowest rank."""
    world, gate = InMemoryWorld(plan.grid.cp, latency=delay), threading.Barrier(plan.grid.cp)

    def rank_main(communicator: Communicator) -> tuple[float, float]:
        rank = communicator.rank
        groups, tokens = groups_in_memory(world, plan.grid, rank), plan.num_tokens(rank)
        shapes = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        q, k, v = (torch.randn(tokens, n, HEAD_DIM, requires_grad=True) for n in shapes)
        plan.program(rank)
        gate.wait()
        began = time.perf_counter()
        out = cp_attention(q, k, v, plan=plan, groups=groups, kernel=kernel)
        middle = time.perf_counter()
        gate.wait()
        again = time.perf_counter()
        torch.autograd.backward(out, torch.ones_like(out))
        return middle - began, time.perf_counter() - again

    forward, backward = zip(*world.run(rank_main), strict=True)
    return max(forward), max(backward)


def measure(plan: AttentionPlan, kernel: Kernel, delay: float, rounds: int) -> tuple[float, ...]:
    """Medians of interleaved rounds: forward and backward seconds without, then with delay."""
    found: dict[float, list[tuple[float, float]]] = {0.0: [], delay: []}
    step_seconds(plan, kernel, 0.0)
    for _ in range(rounds):
        for each, rows in found.items():
            rows.append(step_seconds(plan, kernel, each))
    return tuple(median(column) for rows in found.values() for column in zip(*rows, strict=True))


def plan_of(num_tokens: int, ranks: int) -> AttentionPlan:
    """A ring on one document."""
    return AttentionPlan.build(
        [num_tokens],
        RankGrid(1, ranks),
        layout="zigzag",
        algorithm="ring",
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
    )


def judge(report: Report, title: str, make: Callable[[], tuple[float, ...]], delay: float) -> None:
    """Measures and prints one setting."""
    print(f"{title}: a message takes {delay * 1e3:.0f} ms, {SHARE:.0%} of a block")
    forward, backward, slow_forward, slow_backward = make()
    report.at_most("  forward grows by", slow_forward / forward - 1, 0.05)
    whole = (slow_forward + slow_backward) / (forward + backward) - 1
    report.at_most("  forward and backward grow by", whole, 0.05)


def main() -> int:
    """Command line."""
    options = parser(__doc__).parse_args()
    report = Report()
    report.header("overlap")
    torch.set_num_threads(1)
    tokens, block, rounds = (1024, 0.02, 2) if options.quick else (8192, 0.1, 5)
    plan, kernel = plan_of(tokens, 2), CpuFlashKernel()
    delay = SHARE * min(step_seconds(plan, kernel, 0.0)[0] for _ in range(3)) / 2
    judge(report, f"2 ranks, {tokens} tokens, real kernel", lambda: measure(plan, kernel, delay, rounds), delay)
    late = SHARE * block
    for ring in (plan_of(1024, ranks) for ranks in (2, 4, 8)):
        timed = TimedKernel(block, sum(s.area for s in ring.program(0).steps[0].slices))
        title = f"{ring.grid.ring} ranks, a kernel of {block * 1e3:.0f} ms a block forward"
        judge(report, title, lambda ring=ring, timed=timed: measure(ring, timed, late, rounds), late)  # type: ignore[misc]
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
