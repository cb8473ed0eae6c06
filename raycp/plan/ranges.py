"""The words that plans are written in: a range of rows, and a block of scores with its mask.

Guarantees: an object that exists is well formed (bounds in order, causal and diagonal blocks square), so
executors and kernels need no checks of their own. Costs about a microsecond per object.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from raycp.errors import PlanError

NEAR = 64
"""Rows between two runs of queries that are worth less than treating the runs one by one."""


class MaskKind(Enum):
    """Which keys of a block a query sees."""

    FULL = "full"
    """All of them."""
    CAUSAL = "causal"
    """Query i of the block sees keys 0 to i of the block; the block is square."""
    DIAGONAL = "diagonal"
    """Query i of the block sees key i only; the block is square. A run of 1-token documents (padding) is one block."""
    BAND = "band"
    """Query i of the block sees keys j with `lower <= j - i <= upper`, at least one of them: a sliding window."""


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

    `lower` and `upper` bound key minus query of a band, both counted inside the block; other kinds ignore them.

    Raises:
        PlanError: an empty side, a negative bound, a causal or diagonal block that is not square, or a band in which a
            query sees no key.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    kind: MaskKind
    lower: int = 0
    upper: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.q_start < self.q_stop and 0 <= self.k_start < self.k_stop):
            raise PlanError(f"{self} has an empty or negative side", fix="leave empty slices out of the plan")
        num_q, num_k = self.q_stop - self.q_start, self.k_stop - self.k_start
        if self.kind in (MaskKind.CAUSAL, MaskKind.DIAGONAL) and num_q != num_k:
            raise PlanError(f"{self} is not square", fix="cut it into a full and a square part")
        if self.kind is MaskKind.BAND and not (
            self.lower <= self.upper and self.upper >= 0 and self.lower <= num_k - num_q
        ):
            raise PlanError(f"{self} has a query that sees no key", fix="trim the queries to those that see a key")

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
            case MaskKind.BAND:
                return _below(num_q, num_k, self.upper) - _below(num_q, num_k, self.lower - 1)

    def cut(self, rows: int) -> tuple["Slice", "Slice"]:
        """The first `rows` queries, and the others; `0 < rows < q_stop - q_start`. Keys that none sees are left out."""
        match self.kind:
            case MaskKind.FULL:
                low, high = -(self.q_stop - self.q_start), self.k_stop - self.k_start
            case MaskKind.BAND:
                low, high = self.lower, self.upper
            case MaskKind.CAUSAL:
                low, high = -(self.q_stop - self.q_start), 0
            case MaskKind.DIAGONAL:
                low = high = 0
        return self._part(0, rows, low, high), self._part(rows, self.q_stop - self.q_start, low, high)

    def _part(self, first: int, stop: int, low: int, high: int) -> "Slice":
        """Queries [first, stop) of the block, whose keys j of query i are those with `low <= j - i <= high`."""
        start, end = max(0, first + low), min(self.k_stop - self.k_start, stop + high)
        kind = self.kind
        if kind is MaskKind.CAUSAL and first:
            kind = MaskKind.BAND
        lower, upper = (low + first - start, high + first - start) if kind is MaskKind.BAND else (0, 0)
        if kind is MaskKind.BAND and self.kind is MaskKind.CAUSAL:
            lower = 1 - (stop - first)
        return Slice(
            self.q_start + first, self.q_start + stop, self.k_start + start, self.k_start + end, kind, lower, upper
        )


def query_runs(slices: Sequence[Slice]) -> Iterator[slice]:
    """Rows of the queries of `slices` (in ascending order), in runs that have up to `NEAR` rows of no slice inside."""
    start = stop = -1
    for s in slices:
        if start < 0 or s.q_start > stop + NEAR:
            if start >= 0:
                yield slice(start, stop)
            start, stop = s.q_start, s.q_stop
        stop = max(stop, s.q_stop)
    if start >= 0:
        yield slice(start, stop)


def _below(num_q: int, num_k: int, bound: int) -> int:
    """Pairs (i, j) of a num_q x num_k block with `j - i <= bound`: row i has i + bound + 1, cut to [0, num_k]."""
    first = min(max(-bound - 1, 0), num_q)  # rows before it have none
    full = min(max(num_k - bound - 1, first), num_q)  # rows from here on have all
    growing = full - first
    return growing * (first + bound + 1) + growing * (growing - 1) // 2 + (num_q - full) * num_k
