"""Shows that a ring hides its messages: each is delayed by a part of one block's compute, and the step takes as long.

Ranks are threads in memory that run the executors of a real run. A message arrives `delay` seconds after it was sent,
whatever the receiver does meanwhile, so only a schedule that posts before it computes can hide it. Two settings: two
ranks with the real kernel, one core each, on one long document; and a ring of four or eight whose kernel takes a fixed
time without a core, as an accelerator's does, so that ranks do not compete for cores.

In backward the gradients of the last block go back when nothing is left to compute: one delay of a whole step cannot be
hidden by any order that computes a block's gradient in one piece. It is printed apart.
"""

import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from benchmarks.report import Report, parser
from raycp.attention import Groups, InMemoryWorld, cp_attention
from raycp.attention.communicator import Communicator, Handle, LocalCommunicator, Message
from raycp.attention.kernels import CpuFlashKernel, Kernel
from raycp.plan import AttentionPlan, RankGrid, Slice

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 1, 64
Arrivals = defaultdict[tuple[int, int, int], deque[float]]
"""When each message arrives, by sender, receiver and tag, in the order in which they were sent."""


class DelayedCommunicator:
    """Messages arrive `delay` seconds after they were sent."""

    def __init__(self, inner: Communicator, arrivals: Arrivals, delay: float) -> None:
        self._inner = inner
        self._arrivals = arrivals
        self._delay = delay
        self.rank, self.size = inner.rank, inner.size

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        """See `Communicator.post`."""
        for m in sends:
            self._arrivals[self.rank, m.peer, m.tag].append(time.perf_counter() + self._delay)
        handle = self._inner.post(sends, receives)
        return _DelayedHandle(handle, [self._arrivals[m.peer, self.rank, m.tag] for m in receives])


class _DelayedHandle:
    def __init__(self, inner: Handle, arrivals: Sequence[deque[float]]) -> None:
        self._inner = inner
        self._arrivals = arrivals

    def wait(self) -> None:
        self._inner.wait()
        latest = max((queue.popleft() for queue in self._arrivals), default=0.0)
        time.sleep(max(0.0, latest - time.perf_counter()))


class TimedKernel:
    """Takes a fixed time a block and no core, 2.5 times as long backward, as real kernels do.

    Results are zeros of the right shape: only the schedule is looked at.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slices: Sequence[Slice], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros, after a while."""
        time.sleep(self._seconds)
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
        time.sleep(2.5 * self._seconds)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def step_seconds(plan: AttentionPlan, make_kernel: Callable[[], Kernel], delay: float) -> tuple[float, float]:
    """Seconds of forward, and of backward, on the slowest rank."""
    world, arrivals = InMemoryWorld(plan.grid.cp), Arrivals(deque)

    def rank_main(communicator: Communicator) -> Any:
        ring: Communicator = DelayedCommunicator(communicator, arrivals, delay)
        groups = Groups(plan.grid, communicator.rank, ring, (), LocalCommunicator(), ring)
        shapes = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        tokens = plan.num_tokens(communicator.rank)
        q, k, v = (torch.randn(tokens, n, HEAD_DIM, requires_grad=True) for n in shapes)
        plan.program(communicator.rank)
        gate.wait()
        began = time.perf_counter()
        out = cp_attention(q, k, v, plan=plan, groups=groups, kernel=make_kernel())
        middle = time.perf_counter()
        gate.wait()
        again = time.perf_counter()
        torch.autograd.backward(out, torch.ones_like(out))
        return middle - began, time.perf_counter() - again

    gate = threading.Barrier(plan.grid.cp)
    forward, backward = zip(*world.run(rank_main), strict=True)
    return max(forward), max(backward)


def measure(plan: AttentionPlan, make_kernel: Callable[[], Kernel], delay: float, rounds: int) -> tuple[float, ...]:
    """Medians of interleaved rounds: forward and backward seconds without, then with delay."""
    found: dict[float, list[tuple[float, float]]] = {0.0: [], delay: []}
    step_seconds(plan, make_kernel, 0.0)
    for _ in range(rounds):
        for each, rows in found.items():
            rows.append(step_seconds(plan, make_kernel, each))
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


def judge(report: Report, title: str, times: tuple[float, ...], delay: float) -> None:
    """Prints one setting."""
    forward, backward, slow_forward, slow_backward = times
    print(f"{title}: messages take {delay * 1e3:.0f} ms")
    report.at_most("  forward grows by", slow_forward / forward - 1, 0.05)
    report.at_most("  backward grows by", slow_backward / backward - 1, None)
    last = max(0.0, slow_backward - delay) / backward - 1
    report.at_most("  backward grows by, without the last block's return", last, 0.05)
    whole = (slow_forward + slow_backward) / (forward + backward) - 1
    report.at_most("  forward and backward grow by", whole, None)


def main() -> int:
    """Command line."""
    options = parser(__doc__).parse_args()
    report = Report()
    report.header("overlap")
    torch.set_num_threads(1)
    tokens, block, rounds = (1024, 0.02, 2) if options.quick else (8192, 0.1, 5)
    plan = plan_of(tokens, 2)
    compute = min(step_seconds(plan, CpuFlashKernel, 0.0)[0] for _ in range(2)) / 2
    delay = 0.8 * compute
    judge(report, f"2 ranks, {tokens} tokens, real kernel", measure(plan, CpuFlashKernel, delay, rounds), delay)
    for ranks in (4, 8):
        times = measure(plan_of(1024, ranks), lambda: TimedKernel(block), 0.8 * block, rounds)
        judge(report, f"{ranks} ranks, a kernel of {block * 1e3:.0f} ms a block", times, 0.8 * block)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
