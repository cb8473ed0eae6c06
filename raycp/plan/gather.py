"""The program of the gathering schedule: all K/V rows that a rank's queries need, in one exchange.

Guarantees: a rank receives from each other rank exactly the K/V rows that one of its queries sees, straight from their
owner; the gathered rows lie in the order of the pack, so that all keys of a query are one range, each query row is in
one slice, and nothing has to be merged. Queries whose keys are all on the rank are computed in step 0, on the own
shard, while the exchange of step 1 begins; step 1 computes the rest. Costs a few numpy operations for each rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raycp.plan.blocks import CODE, Blocks, first_of_runs, join_diagonals
from raycp.plan.layout import Ints, Shard
from raycp.plan.program import RankProgram, Step, Transfer
from raycp.plan.ranges import MaskKind, Range
from raycp.plan.rows import Rows


@dataclass(frozen=True, eq=False)
class _Runs:
    """Neighbouring tokens of one document on one rank, and the keys that they see; int64 [runs], global positions.

    `local` is where a run starts in the shard; `low` and `high` bound its keys.
    """

    start: Ints
    stop: Ints
    local: Ints
    low: Ints
    high: Ints
    remote: npt.NDArray[np.bool_]

    @property
    def gathered(self) -> Rows:
        """Global positions of the rows that step 1 works on."""
        return Rows.of(self.low[self.remote], self.high[self.remote])


def gather_program(
    shards: Sequence[Shard], doc_ends: Sequence[int], rank: int, *, causal: bool, window: int | None
) -> RankProgram:
    """The program of ring index `rank`; arguments as those of `raycp.plan.ring.ring_program`."""
    ends = np.asarray(doc_ends, dtype=np.int64)
    size = len(shards)
    own = shards[rank]
    runs = [_runs(shard, ends, causal, window) for shard in shards]
    mine, gathered = runs[rank], runs[rank].gathered
    local = _blocks(mine, ~mine.remote, own.rows_before(mine.low), causal, window)
    remote = _blocks(
        mine, mine.remote, gathered.positions(mine.low) if len(gathered.start) else mine.low, causal, window
    )
    receives, places, sends = [], [], []
    for i in range(1, size):
        source, target = (rank - i) % size, (rank + i) % size
        rows, place = _held(shards[source], gathered)
        if len(rows.start):
            receives.append(Transfer(source, rows.ranges()))
            places.append(place.ranges())
        rows, _ = _held(own, runs[target].gathered)
        if len(rows.start):
            sends.append(Transfer(target, rows.ranges()))
    step = Step(
        1,
        tuple(receives),
        tuple(sends),
        remote.slices(),
        own=_paired(*_held(own, gathered)),
        places=tuple(places),
        returns=tuple(Transfer(t.peer, place) for t, place in zip(receives, places, strict=True)),
        collects=tuple(sends),
        settled=1,
    )
    return RankProgram(own.num_tokens, (Step(0, (), (), local.slices()), step))


def _runs(shard: Shard, ends: Ints, causal: bool, window: int | None) -> _Runs:
    begins = np.append(False, shard.start[1:] == shard.stop[:-1])[: len(shard.start)]
    first = first_of_runs(shard.document, np.cumsum(~begins))
    last = np.append(first[1:], len(shard.start)) - 1 if len(first) else first
    start, stop, document = shard.start[first], shard.stop[last], shard.document[first]
    low = np.append(0, ends)[document]
    high = stop if causal else ends[document]
    if window is not None:
        low = np.maximum(low, start - window + 1)
    return _Runs(start, stop, shard.local[first], low, high, (low < start) | (high > stop))


def _blocks(runs: _Runs, chosen: npt.NDArray[np.bool_], k_start: Ints, causal: bool, window: int | None) -> Blocks:
    """One block per run; `k_start` [runs] is where its keys begin in the rows that it is computed on."""
    start, low, k_start, q_start = runs.start[chosen], runs.low[chosen], k_start[chosen], runs.local[chosen]
    num_q, num_k = runs.stop[chosen] - start, runs.high[chosen] - low
    before = start - low
    lower = 1 - num_q if window is None else before - window + 1
    hides = lower + num_q - 1 > 0
    if causal:
        square = np.where(before == 0, CODE[MaskKind.CAUSAL], CODE[MaskKind.BAND])
        kind = np.where(hides, CODE[MaskKind.BAND], np.where((num_q == 1) & (before > 0), CODE[MaskKind.FULL], square))
    else:
        kind = np.full_like(start, CODE[MaskKind.FULL])
    band = kind == CODE[MaskKind.BAND]
    return join_diagonals(
        Blocks(
            q_start,
            q_start + num_q,
            k_start,
            k_start + num_k,
            kind,
            np.where(band, np.where(hides, lower, 1 - num_q), 0),
            np.where(band, before, 0),
        )
    )


def _held(shard: Shard, rows: Rows) -> tuple[Rows, Rows]:
    """The part of `rows` (global) that a shard holds: as rows of the shard, and as rows of a buffer of `rows`."""
    first = np.searchsorted(rows.stop, shard.start, side="right")
    count = np.maximum(np.searchsorted(rows.start, shard.stop, side="left") - first, 0)
    i = np.repeat(np.arange(len(count)), count)  # piece, and j range, of each overlap
    j = np.arange(len(i)) - np.repeat(np.cumsum(count) - count, count) + first[i]
    start, stop = np.maximum(shard.start[i], rows.start[j]), np.minimum(shard.stop[i], rows.stop[j])
    held = shard.local[i] + start - shard.start[i]
    place = rows.positions(start) if len(start) else start
    return Rows.of(held, held + stop - start), Rows.of(place, place + stop - start)


def _paired(rows: Rows, places: Rows) -> tuple[tuple[Range, Range], ...]:
    """Two cuts of the same rows, in the same order, cut alike."""
    ends = [np.cumsum(x.stop - x.start) for x in (rows, places)]
    cuts = np.union1d(*ends)
    begin = np.append(0, cuts[:-1])[: len(cuts)]
    a, b = (x.start[np.searchsorted(e, begin, side="right")] + begin for x, e in zip((rows, places), ends, strict=True))
    a, b = (
        start - np.append(0, e)[np.searchsorted(e, begin, side="right")] for start, e in zip((a, b), ends, strict=True)
    )
    length = (cuts - begin).tolist()
    return tuple((Range(x, x + n), Range(y, y + n)) for x, y, n in zip(a.tolist(), b.tolist(), length, strict=True))
