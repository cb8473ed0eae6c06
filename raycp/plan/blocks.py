"""The parts of the score matrix between the queries of one shard and the keys of another, as arrays.

Guarantees: every visible pair of the two shards is in exactly one block; a block is as large as its mask allows; a
query that sees nothing is in none. Costs a few numpy operations on arrays with one entry per piece or block, whatever
the number of tokens.
"""

from dataclasses import dataclass, replace

import numpy as np

from raycp.plan.layout import Ints, Shard
from raycp.plan.ranges import MaskKind, Slice
from raycp.plan.rows import Rows

_KINDS = tuple(MaskKind)
CODE = {kind: code for code, kind in enumerate(_KINDS)}


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks in ascending order of queries, then keys; int64 [blocks] each.

    Queries are rows of the receiver's shard, keys rows of the owner's; `kind` is an index into `tuple(MaskKind)`;
    `lower` and `upper` as in `Slice`.
    """

    q_start: Ints
    q_stop: Ints
    k_start: Ints
    k_stop: Ints
    kind: Ints
    lower: Ints
    upper: Ints

    def slices(self) -> tuple[Slice, ...]:
        """The blocks as validated objects."""
        columns = (self.q_start, self.q_stop, self.k_start, self.k_stop, self.kind, self.lower, self.upper)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return tuple(Slice(a, b, c, d, _KINDS[kind], low, high) for a, b, c, d, kind, low, high in rows)

    def needed(self) -> Rows:
        """Rows of the owner that some block reads."""
        return Rows.of(self.k_start, self.k_stop)

    def in_buffer(self, rows: Rows) -> "Blocks":
        """The same blocks, with keys counted in a buffer that holds `rows` only, which contain all keys."""
        if not len(self.k_start):
            return self
        k_start = rows.positions(self.k_start)
        return replace(self, k_start=k_start, k_stop=k_start + self.k_stop - self.k_start)


def own_blocks(shard: Shard, kind: MaskKind) -> Blocks:
    """A rank's own keys without a window: local order is global order, so each document is one square."""
    bounds = np.append(shard.local[first_of_runs(shard.document)], shard.num_tokens)
    start, stop = bounds[:-1], bounds[1:]
    return join_diagonals(_plain(start, stop, start, stop, kind))


def prefix_blocks(q: Shard, k: Shard, starts: Ints, ends: Ints, *, causal: bool) -> Blocks:
    """The keys of another rank without a window.

    Every token of `k` lies before or after a whole piece of `q`, so a piece sees the first rows of its document
    (causal) or all (not causal), and neighbouring pieces that see the same rows are one block.

    Args:
        q: the receiver's shard.
        k: the owner's shard.
        starts: where each document starts.
        ends: where each document ends.
        causal: whether queries see earlier keys only.
    """
    low = k.rows_before(starts[q.document])
    high = k.rows_before(q.start if causal else ends[q.document])
    first = first_of_runs(q.document, high)
    bounds = np.append(q.local[first], q.num_tokens)
    kept = high[first] > low[first]
    return _plain(bounds[:-1][kept], bounds[1:][kept], low[first][kept], high[first][kept], MaskKind.FULL)


def window_blocks(q: Shard, k: Shard, window: int) -> Blocks:
    """Causal keys of any rank, at most `window` of them per query, itself included: one block per pair of pieces.

    Blocks are trimmed to the rows that are in the window, and are full or causal where it hides nothing.
    """
    low = np.maximum(
        np.searchsorted(k.document, q.document, side="left"),
        np.searchsorted(k.stop, q.start - window + 1, side="right"),
    )
    high = np.minimum(
        np.searchsorted(k.document, q.document, side="right"), np.searchsorted(k.start, q.start, side="right")
    )
    count = np.maximum(high - low, 0)
    i = np.repeat(np.arange(len(count)), count)  # piece of q, and j of k, of each block
    j = np.arange(len(i)) - np.repeat(np.cumsum(count) - count, count) + low[i]
    same = k.start[j] == q.start[i]
    k_first = np.maximum(k.start[j], q.start[i] - window + 1)
    num_q = np.minimum(q.stop[i], k.stop[j] + window - 1) - q.start[i]
    num_k = k.stop[j] - k_first
    lower = q.start[i] - k_first - window + 1
    hides = lower + num_q - 1 > 0
    plain = np.where(same, CODE[MaskKind.CAUSAL], CODE[MaskKind.FULL])
    q_start, k_start = q.local[i], k.local[j] + k_first - k.start[j]
    return join_diagonals(
        Blocks(
            q_start,
            q_start + num_q,
            k_start,
            k_start + num_k,
            np.where(hides, CODE[MaskKind.BAND], plain),
            np.where(hides, lower, 0),
            np.where(hides & ~same, num_k - 1, 0),
        )
    )


def _plain(q_start: Ints, q_stop: Ints, k_start: Ints, k_stop: Ints, kind: MaskKind) -> Blocks:
    zero = np.zeros_like(q_start)
    return Blocks(q_start, q_stop, k_start, k_stop, np.full_like(q_start, CODE[kind]), zero, zero)


def join_diagonals(blocks: Blocks) -> Blocks:
    """Neighbouring blocks in which each query sees one key, in step, become one diagonal block."""
    diagonal = (blocks.q_stop - blocks.q_start == 1) & (blocks.k_stop - blocks.k_start == 1)
    diagonal |= (blocks.kind == CODE[MaskKind.BAND]) & (blocks.lower == 0) & (blocks.upper == 0)
    if not diagonal.any():
        return blocks
    follows = (blocks.q_start[1:] == blocks.q_stop[:-1]) & (blocks.k_start[1:] == blocks.k_stop[:-1])
    first = np.flatnonzero(np.append(True, ~(diagonal[1:] & diagonal[:-1] & follows)))
    last = np.append(first[1:], len(diagonal)) - 1
    return Blocks(
        blocks.q_start[first],
        blocks.q_stop[last],
        blocks.k_start[first],
        blocks.k_stop[last],
        np.where(diagonal[first], CODE[MaskKind.DIAGONAL], blocks.kind[first]),
        np.where(diagonal[first], 0, blocks.lower[first]),
        np.where(diagonal[first], 0, blocks.upper[first]),
    )


def first_of_runs(*columns: Ints) -> Ints:
    """Where a run of equal rows of `columns` begins."""
    changed = np.ones(len(columns[0]), dtype=bool)
    for n, column in enumerate(columns):
        differs = column[1:] != column[:-1]
        changed[1:] = differs if n == 0 else changed[1:] | differs
    return np.flatnonzero(changed)
