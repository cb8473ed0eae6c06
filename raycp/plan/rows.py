"""Sets of rows as ascending ranges that do not touch: what transfers are computed with.

Guarantees: the result of every operation is again ascending and has no empty or touching ranges. Costs a few numpy
operations on arrays with one entry per range.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raycp.plan.layout import Ints
from raycp.plan.ranges import Range


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows `start[i] <= row < stop[i]`: int64 [ranges] each."""

    start: Ints
    stop: Ints

    @classmethod
    def of(cls, start: Ints, stop: Ints) -> "Rows":
        """The union of ranges in any order, none of them empty."""
        if not len(start):
            return cls(start, stop)
        order = np.argsort(start, kind="stable")
        start, stop = start[order], np.maximum.accumulate(stop[order])
        first = np.flatnonzero(np.append(True, start[1:] > stop[:-1]))
        return cls(start[first], stop[np.append(first[1:], len(stop)) - 1])

    @classmethod
    def union(cls, parts: Sequence["Rows"]) -> "Rows":
        """Rows that are in at least one of `parts`."""
        return cls.of(np.concatenate([p.start for p in parts]), np.concatenate([p.stop for p in parts]))

    @property
    def count(self) -> int:
        """Number of rows."""
        return int((self.stop - self.start).sum())

    def positions(self, row: Ints) -> Ints:
        """Where each `row`, one of these rows, is in a buffer that holds exactly these rows: int64 [n]."""
        length = self.stop - self.start
        piece = np.searchsorted(self.start, row, side="right") - 1
        shift: Ints = np.cumsum(length) - length - self.start
        return row + shift[piece]

    def inside(self, buffer: "Rows") -> "Rows":
        """These rows, a subset of `buffer`, counted in a buffer that holds exactly the rows of `buffer`."""
        if not len(self.start):
            return self
        start = buffer.positions(self.start)
        return Rows.of(start, start + self.stop - self.start)

    def ranges(self) -> tuple[Range, ...]:
        """As validated objects."""
        return tuple(map(Range, self.start.tolist(), self.stop.tolist()))
