"""Seconds of a plan: a simple model of one attention layer on one rank.

Guarantees: the same inputs give the same estimate; nothing is measured here. It tells which of two plans is better, not
what a clock will show: compute and communication of a step are taken to overlap, the CPU kernel's block effects are not
modelled.
"""

from dataclasses import dataclass

from raycp.errors import PlanError


@dataclass(frozen=True)
class CostModel:
    """What a rank and its link do. The defaults are one core of a server CPU and gloo on one host.

    Args:
        flops: matrix FLOP/s that the attention kernel reaches.
        call_seconds: overhead of one kernel call.
        bandwidth: bytes/s between two ranks.
        latency: seconds before the first byte of a message arrives.
    """

    flops: float = 1e11
    call_seconds: float = 15e-6
    bandwidth: float = 1.2e9
    latency: float = 5e-5

    def __post_init__(self) -> None:
        for name in ("flops", "call_seconds", "bandwidth", "latency"):
            value = getattr(self, name)
            rate = name in ("flops", "bandwidth")
            if not (value > 0 if rate else value >= 0):
                raise PlanError(f"CostModel({name}={value!r}) is out of range", fix=f"set {name} to a positive number")

    def compute_seconds(self, work: int, calls: int, *, head_dim: int, value_dim: int | None = None) -> float:
        """Forward of `work` score entries (summed over heads) in `calls` kernel calls: 2 (D + Dv) FLOP an entry."""
        return (
            work * 2 * (head_dim + (head_dim if value_dim is None else value_dim)) / self.flops
            + calls * self.call_seconds
        )

    def link_seconds(self, num_bytes: int, messages: int) -> float:
        """`messages` messages of `num_bytes` bytes in all."""
        return messages * self.latency + num_bytes / self.bandwidth
