"""The words that plans are written in: a range of rows, and a block of scores with its mask.

Guarantees: an object that exists is well formed (bounds in order, causal and diagonal blocks square), so
executors and kernels need no checks of their own. Costs about a microsecond per object.
"""

from dataclasses import dataclass
from enum import Enum

from raycp.errors import PlanError


class MaskKind(Enum):
    """Which keys of a block a query sees."""

    FULL = "full"
    """All of them."""
    CAUSAL = "causal"
    """Query i of the block sees keys 0 to i of the block; the block is square."""
    DIAGONAL = "diagonal"
    """Query i of the block sees key i only; the block is square. A run of 1-token documents (padding) is one block."""


@dataclass(frozen=True, slots=True)
class Range:
    """Rows `start <= row < stop`; never empty.

    Raises:
        PlanError: not `0 <= start < stop`.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise PlanError(
                f"Range({self.start}, {self.stop}) holds no row", fix="leave empty ranges out; start must be below stop"
            )

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Slice:
    """One block of the score matrix: queries [q_start, q_stop) against keys [k_start, k_stop), masked by `kind`.

    Queries are rows of the rank's own shard; keys are rows of the K/V block of the step.

    Raises:
        PlanError: an empty side, a negative bound, or a causal or diagonal block that is not square.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    kind: MaskKind

    def __post_init__(self) -> None:
        if not (0 <= self.q_start < self.q_stop and 0 <= self.k_start < self.k_stop):
            raise PlanError(f"{self} has an empty or negative side", fix="leave empty slices out of the plan")
        if self.kind is not MaskKind.FULL and self.q_stop - self.q_start != self.k_stop - self.k_start:
            raise PlanError(f"{self} is not square", fix="cut it into a full and a square part")

    @property
    def area(self) -> int:
        """Score entries of the block that are visible."""
        num_q, num_k = self.q_stop - self.q_start, self.k_stop - self.k_start
        match self.kind:
            case MaskKind.FULL:
                return num_q * num_k
            case MaskKind.CAUSAL:
                return num_q * (num_q + 1) // 2
            case MaskKind.DIAGONAL:
                return num_q
