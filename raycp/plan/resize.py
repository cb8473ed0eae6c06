"""Which world to run when the number of live workers changed.

Guarantees: a pure function of (workers that are left, limits, the world that was asked for): every driver of the run
decides alike. A fixed context-parallel degree stays (replicas give way); a ranged one may shrink and come back; as many
workers as possible are used; among equal ones the degree closest to the wanted one. Global batch, data order and
learning rate do not appear here, since they never depend on the world. numpy-free, costs microseconds.
"""

from dataclasses import dataclass

from raycp.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class WorldLimits:
    """What a run may shrink and grow to; each pair is (lowest, highest), both included.

    Attributes:
        cp: context-parallel ranks of one pack.
        dp: replicas.
        workers: dp x cp.
        wanted: (dp, cp) of the start, which ties are decided by.

    Raises:
        PlanError: a pair is empty or below 1.
    """

    cp: tuple[int, int]
    dp: tuple[int, int]
    workers: tuple[int, int]
    wanted: tuple[int, int]

    def __post_init__(self) -> None:
        for name in ("cp", "dp", "workers"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise PlanError(
                    f"{name}=({low}, {high}) holds no size of at least 1",
                    fix=f"set the lower end of {name} to 1 or more, and the upper end not below it",
                )


def worlds(available: int, limits: WorldLimits) -> list[tuple[int, int]]:
    """The worlds (dp, cp) that `available` workers can form within `limits`, best first; empty if there is none."""
    least, most = limits.workers
    room = min(available, most)
    found = [
        (dp, cp)
        for cp in range(limits.cp[0], limits.cp[1] + 1)
        for dp in range(limits.dp[0], limits.dp[1] + 1)
        if least <= dp * cp <= room
    ]
    wanted_dp, wanted_cp = limits.wanted
    return sorted(found, key=lambda w: (-w[0] * w[1], abs(w[1] - wanted_cp), abs(w[0] - wanted_dp), -w[1]))
