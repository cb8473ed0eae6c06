"""Which tokens of a pack each context-parallel rank holds.

Guarantees: the shards of all ranks are a partition of the pack, for any pack length, documents of any length and any
number of ranks; the tokens of a shard are in ascending global order; each piece lies in one document. Costs a few numpy
operations on arrays of one entry per piece.

* `contiguous`: rank r holds tokens [T r / P, T (r + 1) / P). Causal work grows with the rank.
* `zigzag`: each document is cut into 2 P pieces, and rank r holds pieces r and 2 P - 1 - r of each. Every rank gets the
  same work from every document, to rounding; cuts are shifted by where the document starts, so that many short
  documents spread over all ranks. (Zigzag of whole sequences: Zhu, ring-flash-attention.)
* `balanced`: documents stay whole where they can, and are cut in mirrored pairs of pieces over as few ranks as balance
  needs (`raycp.plan.balance`). On packs of many documents it moves far fewer rows than zigzag; on one long document it
  is zigzag.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from raycp.errors import PlanError
from raycp.plan.balance import Entries, Piece, place_documents

Ints = npt.NDArray[np.int64]
Counts = TypeVar("Counts", int, Ints)

LAYOUTS = ("contiguous", "zigzag", "balanced")


@dataclass(frozen=True, eq=False)
class Shard:
    """What one rank holds: pieces in ascending global order, one array entry per piece.

    Fields (int64, [pieces]): `document` index, `start` and `stop` in the pack. `local` (int64, [pieces + 1]) is where
    each piece starts in the shard; its last entry is the number of tokens of the rank.
    """

    document: Ints
    start: Ints
    stop: Ints
    local: Ints

    @property
    def num_tokens(self) -> int:
        return int(self.local[-1])

    def token_index(self) -> Ints:
        """Global positions of this rank's tokens in local order: int64 [t]."""
        lengths = self.stop - self.start
        return np.repeat(self.start - self.local[:-1], lengths) + np.arange(self.num_tokens, dtype=np.int64)

    def rows_before(self, position: Ints) -> Ints:
        """How many tokens of this shard lie before each global `position`; both int64 [n]."""
        piece = np.searchsorted(self.start, position, side="left") - 1
        inside = np.minimum(position, self.stop[piece]) - self.start[piece] if len(self.start) else position * 0
        return np.where(piece >= 0, self.local[piece] + inside, 0)


def make_shards(
    doc_ends: Sequence[int],
    num_ranks: int,
    layout: str,
    *,
    causal: bool = True,
    window: int | None = None,
    balance: Sequence[tuple[int | None, int]] = (),
) -> tuple[Shard, ...]:
    """Cuts a pack.

    Args:
        doc_ends: where each document ends, ascending; the last entry is the pack's length T.
        num_ranks: context-parallel ranks (P).
        layout: one of `LAYOUTS`.
        causal: whether queries see earlier keys only; "balanced" weighs work by it.
        window: keys that a query sees at most, or None; as `causal`.
        balance: (window, layers) of each kind of layer, whose work is added up; (): all layers have `window`.

    Returns:
        The shard of each rank.
    """
    ends = np.asarray(doc_ends, dtype=np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(ends) else ends
    if layout == "contiguous":
        return _contiguous(starts, ends, num_ranks)
    if layout == "zigzag":
        return _zigzag(starts, ends, num_ranks)
    if layout == "balanced":
        entries = _weighed(causal, balance or ((window, 1),))
        return tuple(_from_pieces(pieces) for pieces in place_documents(doc_ends, num_ranks, entries))
    raise PlanError(f"layout={layout!r} is not available", fix=f"set layout to one of {', '.join(LAYOUTS)}")


def _contiguous(starts: Ints, ends: Ints, num_ranks: int) -> tuple[Shard, ...]:
    total = int(ends[-1]) if len(ends) else 0
    documents = np.arange(len(ends), dtype=np.int64)
    shards = []
    for rank in range(num_ranks):
        low, high = total * rank // num_ranks, total * (rank + 1) // num_ranks
        shards.append(_shard(documents, np.maximum(starts, low), np.minimum(ends, high)))
    return tuple(shards)


def _zigzag(starts: Ints, ends: Ints, num_ranks: int) -> tuple[Shard, ...]:
    pieces = 2 * num_ranks
    j = np.arange(pieces + 1, dtype=np.int64)
    cuts = starts[:, None] + (starts[:, None] % pieces + (ends - starts)[:, None] * j) // pieces  # [documents, 2 P + 1]
    documents = np.repeat(np.arange(len(ends), dtype=np.int64), 2)
    shards = []
    for rank in range(num_ranks):
        pair = [rank, pieces - 1 - rank]
        shards.append(_shard(documents, cuts[:, pair].ravel(), cuts[:, [p + 1 for p in pair]].ravel()))
    return tuple(shards)


def _weighed(causal: bool, balance: Sequence[tuple[int | None, int]]) -> Entries:
    """Visible score entries of all layers."""
    if len(balance) == 1:
        return partial(visible_entries, causal=causal, window=balance[0][0])
    return lambda x, length: sum(n * visible_entries(x, length, causal=causal, window=window) for window, n in balance)


def visible_entries(x: Counts, length: Counts, *, causal: bool, window: int | None) -> Counts:
    """Visible score entries of the first `x` queries of a document of `length` tokens; numbers, or int64 arrays."""
    if not causal:
        return x * length
    growing = x if window is None else x - (x - window) * (x > window)
    return growing * (growing + 1) // 2 + (x - growing) * growing


def _from_pieces(pieces: list[Piece]) -> Shard:
    columns = np.array(pieces, dtype=np.int64).reshape(-1, 3)
    return _shard(columns[:, 0], columns[:, 1], columns[:, 2])


def _shard(document: Ints, start: Ints, stop: Ints) -> Shard:
    held = start < stop
    document, start, stop = document[held], start[held], stop[held]
    return Shard(document, start, stop, np.concatenate([np.zeros(1, np.int64), np.cumsum(stop - start)]))
