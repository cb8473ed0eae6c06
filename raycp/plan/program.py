"""What one rank does, step by step: rows of K and V to move, slices of the score matrix to compute.

Guarantees: these objects only say what is done; `raycp.plan.ring` and `raycp.plan.gather` make them, and executors obey
them. Which step's transfers are under way while which step computes is part of the program, so all ranks post in the
same order.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from raycp.plan.ranges import Range, Slice


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rows that go from one rank to another.

    `peer` is the ring index of the other side; `rows` are ranges of the sender's rows (for gradients that arrive: of
    the rows that they are added to), ascending, at least one.
    """

    peer: int
    rows: tuple[Range, ...]

    @property
    def num_rows(self) -> int:
        return sum(len(r) for r in self.rows)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank: a block of K/V rows, where it comes from, and what is computed with it.

    The block of step 0 is the rank's own shard. Any other block holds the rows of `receives`, one after the other, or
    as `places` says.

    Fields:
        index: of the step.
        receives: K/V rows that arrive, as rows of the sender's shard or block.
        sends: K/V rows that leave, as rows of block `source`.
        slices: what to compute: queries of the own shard against keys of the block.
        posted: transfers of K and V are posted before the computation of this step; at least `source`.
        source: step whose block `sends` are taken from.
        own: rows of the own shard that the block holds too: pairs of (rows of the shard, rows of the block).
        places: for each of `receives`, the rows of the block that it fills; () for one after the other.
        returns: dK/dV rows that leave, as rows of the block.
        collects: dK/dV rows that arrive, as rows of block `into`, to whose gradient they are added.
        into: step of that block.
        settled: gradients of the block are complete, and posted, after the computation of this step (those of `outer`
            blocks after those that are added to them).
        outer: between the windows of a double ring.
    """

    index: int
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]
    slices: tuple[Slice, ...]
    posted: int = 0
    source: int = 0
    own: tuple[tuple[Range, Range], ...] = ()
    places: tuple[tuple[Range, ...], ...] = ()
    returns: tuple[Transfer, ...] = ()
    collects: tuple[Transfer, ...] = ()
    into: int = 0
    settled: int = 0
    outer: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of K and V that this step receives."""
        return sum(t.num_rows for t in self.receives)

    @property
    def block_rows(self) -> int:
        """Rows of the step's block, if it is not the own shard."""
        return self.num_rows + sum(len(rows) for _, rows in self.own)

    def arrivals(self) -> Iterator[tuple[Transfer, tuple[Range, ...]]]:
        """Each of `receives`, with the rows of the block that it fills."""
        offset = 0
        for n, transfer in enumerate(self.receives):
            yield transfer, self.places[n] if self.places else (Range(offset, offset + transfer.num_rows),)
            offset += transfer.num_rows


@dataclass(frozen=True, slots=True)
class OwnPart:
    """Slices of the own shard that backward computes at a time: rows `keys` of K and V, from which keys are counted."""

    keys: Range
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class RankProgram:
    """All steps of one rank, and the number of tokens it holds.

    `own`: () if backward computes the slices of step 0 at once; else two parts of them, the second of which backward
    computes after all other steps, while the last gradients travel.
    """

    num_tokens: int
    steps: tuple[Step, ...]
    own: tuple[OwnPart, ...] = ()

    @property
    def area(self) -> int:
        """Visible score entries that the rank computes, for one head."""
        return sum(s.area for step in self.steps for s in step.slices)

    @property
    def num_slices(self) -> int:
        """Kernel calls of a forward pass, if the kernel takes one slice a call."""
        return sum(len(step.slices) for step in self.steps)

    @property
    def rows_received(self) -> int:
        return sum(step.num_rows for step in self.steps)

    @property
    def rows_sent(self) -> int:
        return sum(t.num_rows for step in self.steps for t in step.sends)

    @property
    def rows_returned(self) -> int:
        """Rows of dK and dV that leave in backward."""
        return sum(t.num_rows for step in self.steps for t in step.returns)
