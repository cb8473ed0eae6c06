"""What a layout costs, counted for all ranks at once without making their programs.

Guarantees: tokens, score entries, K/V rows and kernel calls are those of the programs (tests compare them), but for
sliding windows, where entries are exact for a rank and shared over its steps by rows, and calls are a close guess.
Costs a few numpy operations on one entry per piece of a split document, for each rank: 1 ms at 8 ranks and 100
documents.

Legend: P ranks of the ring; matrices are [receiver, owner]; the diagonal is a rank's own part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from raycp.plan.cost import CostModel, Floats
from raycp.plan.grid import RankGrid
from raycp.plan.heads import head_groups, head_shares
from raycp.plan.layout import Ints, Shard, visible_entries

_ROW_BYTES = 2 * 4 * 4
"""Of one number of a kernel's output: about four passes over it in fp32, forward, and as much for dQ, backward. Merging
costs them again."""


@dataclass(frozen=True, eq=False)
class Counts:
    """Of one head of a pack on a ring of P ranks; float64.

    Fields: `tokens` [P]. `entries`, `rows`, `calls`, `queries` [P, P]: visible score entries of the receiver's queries
    against the owner's keys; rows of K and V that travel (0 on the diagonal); kernel calls, one a slice; rows of
    partial results that are merged into those of earlier steps. `masked` [P]: entries that a kernel with blocks of
    `CostModel.causal_block` computes in vain. `local` and `local_calls` [P]: entries of queries that need no other
    rank, and their kernel calls; `gathered_calls` [P]: calls for the other queries, once their keys are gathered.
    """

    tokens: Floats
    entries: Floats
    rows: Floats
    calls: Floats
    queries: Floats
    masked: Floats
    local: Floats
    local_calls: Floats
    gathered_calls: Floats


@dataclass(frozen=True)
class Estimate:
    """One layer of one pack, on its slowest rank (seconds, forward and backward) and on its fullest (bytes).

    Attributes:
        seconds: all of it.
        compute: kernels.
        exposed: communication that no compute hides.
        rest: writing and merging of rows, and the linear parts of the layer.
        rows: share of all K/V rows of the other ranks that the busiest rank receives.
        imbalance: largest work over mean work.
        block_bytes: K and V of other ranks that are held at once.
        cache_bytes: K and V of other ranks that a layer would keep until backward with `kv_cache="full"`.
    """

    seconds: float
    compute: float
    exposed: float
    rest: float
    rows: float
    imbalance: float
    block_bytes: int
    cache_bytes: int


def count(
    shards: Sequence[Shard], doc_ends: Sequence[int], *, causal: bool, window: int | None, block: int = 1
) -> Counts:
    """Counts of a layout.

    Args:
        shards: what each rank holds.
        doc_ends: where each document ends.
        causal: whether queries see earlier keys only.
        window: keys that a query sees at most, or None.
        block: `CostModel.causal_block`.
    """
    size = len(shards)
    ends = np.asarray(doc_ends, dtype=np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(ends) else ends
    entries, rows, calls, queries = (np.zeros((size, size)) for _ in range(4))
    owner = np.repeat(np.arange(size), [len(s.start) for s in shards])
    document, start, stop = (
        np.concatenate([getattr(s, name) for s in shards]) for name in ("document", "start", "stop")
    )
    length, lengths = stop - start, (ends - starts)[document]
    first = np.ones(len(owner), dtype=bool)  # of the pieces of its document on its rank
    first[1:] = (owner[1:] != owner[:-1]) | (document[1:] != document[:-1])
    strips = 1 if window is None else -(-2 * length // max(block, 2))  # a band is computed in strips of half a block
    entries_of = partial(visible_entries, causal=causal, window=window)
    total = entries_of(stop - starts[document], lengths) - entries_of(start - starts[document], lengths)
    inside = entries_of(length, length) if causal else np.zeros_like(length)

    def per_rank(weights: npt.NDArray[Any]) -> Floats:
        return _sums(owner, weights, size)

    own = np.diag_indices(size)
    masked = np.zeros(size)
    if causal and block > 1:  # a rank's pieces of a document are one square without a window, else each is one
        begins = np.flatnonzero(first) if window is None else np.arange(len(length))
        held = np.add.reduceat(length, begins) if len(begins) else length
        masked = _sums(owner[begins], np.minimum(held, block) * held / 2, size)
    calls[own] = _own_calls(owner, length, first, size) if window is None else per_rank(strips * np.ones(len(owner)))
    whole = length == lengths
    entries[own] = per_rank(np.where(whole, total, inside))
    part = np.flatnonzero(~whole)
    owner, document, start, first, length = (x[part] for x in (owner, document, start, first, length))
    strips = strips if isinstance(strips, int) else strips[part]
    remote = (total - inside)[part]
    low_at, high_at = starts[document], start if causal else ends[document]
    if window is not None:
        low_at = np.maximum(low_at, start - window + 1)
    elsewhere = np.zeros_like(start)
    for k in range(size) if len(part) else ():
        low, high = shards[k].rows_before(low_at), shards[k].rows_before(high_at)
        visible = high - low
        before = np.where(first, 0, np.append(0, high[:-1]))
        entries[:, k] += per_rank(remote * visible / np.maximum(high_at - low_at, 1))
        rows[:, k] = per_rank(np.maximum(high - np.maximum(low, before), 0))
        queries[:, k] = per_rank((visible > 0) * length)
        called = per_rank((visible > 0) & (first | (high != before) | (window is not None)) * strips)
        calls[:, k] += np.where(np.arange(size) == k, 0, called)
        elsewhere += np.where(owner == k, 0, visible)
    rows[own] = queries[own] = 0
    joined = (owner[1:] == owner[:-1]) & (document[1:] == document[:-1]) & (start[1:] == start[:-1] + length[:-1])
    run = np.cumsum(np.append(True, ~joined)[: len(owner)]) - 1  # neighbouring pieces are one run of queries
    needing = _sums(run, elsewhere, len(run))[run] > 0
    tokens, remote_total = np.array([s.num_tokens for s in shards], dtype=np.float64), total[part]
    return Counts(
        tokens,
        entries,
        rows,
        calls,
        queries,
        masked,
        local=entries.sum(1) - per_rank(np.where(needing, remote_total, 0)),
        local_calls=np.maximum(calls[own] - per_rank(needing & first), 0),
        gathered_calls=per_rank(np.where(needing, -(-2 * length // max(block, 2)) if causal else 1, 0)),
    )


def _own_calls(owner: Ints, length: Ints, first: npt.NDArray[np.bool_], size: int) -> Floats:
    """One call a document, and one for neighbouring documents of which the rank holds one token: [P]."""
    begins = np.flatnonzero(first)
    if not len(begins):
        return np.zeros(size)
    who, single = owner[begins], np.add.reduceat(length, begins) == 1
    joins = np.append(False, single[1:] & single[:-1] & (who[1:] == who[:-1]))
    return _sums(who, ~joins, size)


def _sums(group: Ints, weights: npt.NDArray[Any], size: int) -> Floats:
    """Sum of the weights of each of `size` groups."""
    return np.bincount(group, weights=weights, minlength=size).astype(np.float64)


def estimate(
    counts: Counts, grid: RankGrid, cost: CostModel, *, algorithm: str, num_heads: int, num_kv_heads: int
) -> Estimate:
    """Seconds and bytes of one layer.

    Args:
        counts: of the layout, for the ring of `grid`.
        grid: ring and Ulysses degrees.
        cost: figures.
        algorithm: "allgather" or anything else: what surrounds the ring is the grid's.
        num_heads: query heads of the model.
        num_kv_heads: key/value heads of the model.
    """
    shares = head_shares(num_heads, num_kv_heads, grid.ulysses)
    query, kv = max(len(s.query) for s in shares), max(len(s.kv) for s in shares)
    schedule = _allgather if algorithm == "allgather" else _ring
    compute, exposed, block = schedule(counts, grid, cost, query, kv)
    exposed = exposed + _exchange(counts, grid, cost, num_heads, sum(len(s.kv) for s in shares))
    written = counts.tokens + (0 if algorithm == "allgather" else 2 * counts.queries.sum(1))
    rest = written * (query * cost.value_dim * _ROW_BYTES / cost.memory_bandwidth)
    rest = rest + cost.linear_seconds * counts.tokens / grid.ulysses
    seconds = compute + exposed + rest
    slowest = int(np.argmax(seconds))
    work = counts.entries.sum(1)
    others = counts.tokens.sum() - counts.tokens
    width = kv * (cost.head_dim + cost.value_dim) * cost.itemsize
    return Estimate(
        seconds=float(seconds[slowest]),
        compute=float(compute[slowest]),
        exposed=float(exposed[slowest]),
        rest=float(rest[slowest]),
        rows=float(np.max(counts.rows.sum(1) / np.maximum(others, 1))),
        imbalance=float(work.max() / work.mean()) if work.sum() else 1.0,
        block_bytes=int(block.max()) * width,
        cache_bytes=int(counts.rows.sum(1).max()) * width,
    )


def _ring(counts: Counts, grid: RankGrid, cost: CostModel, query: int, kv: int) -> tuple[Floats, Floats, Floats]:
    """Per rank: compute and exposed communication (seconds), most rows of others that are held at once."""
    size = grid.ring
    inner = size if grid.window == 1 else grid.window
    ranks = np.arange(size)
    node = ranks * grid.ulysses // cost.ranks_per_node
    compute, exposed, held, outer_block, arriving = (np.zeros(size) for _ in range(5))
    for backward in (False, True):
        done: list[Floats] = []
        for i in range(size):
            source, provider, target, incoming = _step_rows(counts.rows, inner, i)
            outer_pull = i > 0 and i % inner == 0
            if i:
                num_bytes = _moved(cost, kv, incoming, incoming[target], backward)
                bandwidth = np.where(node != node[provider], cost.inter_bandwidth, cost.bandwidth)
                latency = (4 if backward else 2) * cost.latency * (incoming + incoming[target] > 0)
                hidden = sum(done[-inner:], np.zeros(size)) if outer_pull else done[-1]
                exposed += np.maximum(latency + num_bytes / bandwidth - hidden, 0)
                held, arriving = np.maximum(held, incoming + arriving), incoming
            if outer_pull:
                outer_block = np.maximum(outer_block, incoming)
            calls = counts.calls[ranks, source]
            seconds = cost.compute_seconds(
                (counts.entries[ranks, source] + (0 if i else counts.masked)) * query,
                np.minimum(calls, 1) if cost.one_call else calls,
                backward=backward,
            )
            compute += seconds
            done.append(seconds)
    return compute, exposed, held + outer_block


def _step_rows(rows: Floats, inner: int, step: int) -> tuple[Ints, Ints, Ints, Floats]:
    """Of each rank in a step of a ring of windows of `inner` ranks, as `raycp.plan.ring` has them.

    Returns:
        Whose rows are used, who sends them, to whom the rank sends, and how many rows arrive (for blocks that are
        passed on inside a window: at least so many).
    """
    size, ranks = len(rows), np.arange(len(rows))
    outer, s = divmod(step, inner)
    home, place = ranks - ranks % inner, ranks % inner
    source = (home - outer * inner) % size + (place - s) % inner
    if outer == 0:
        return source, source, home + (place + s) % inner, rows[ranks, source] * (step > 0)
    later = [rows[home + (source % inner + n) % inner, source] for n in range(s, inner)]
    incoming = np.max(later, axis=0)
    if s == 0:
        return source, source, (home + outer * inner) % size + place, incoming
    return source, home + (place - 1) % inner, home + (place + 1) % inner, incoming


def _allgather(counts: Counts, grid: RankGrid, cost: CostModel, query: int, kv: int) -> tuple[Floats, Floats, Floats]:
    """As `_ring`: all rows come at once, for one group of key/value heads while the group before is computed.

    Queries that need no other rank are computed first, while the first group arrives.
    """
    incoming, outgoing = counts.rows.sum(1), counts.rows.sum(0)
    peers = np.maximum((counts.rows > 0).sum(1), (counts.rows > 0).sum(0))
    groups = len(head_groups(kv))
    inter = grid.cp > cost.ranks_per_node
    bandwidth = cost.inter_bandwidth if inter else cost.bandwidth * np.clip(peers, 1, cost.links)
    work = counts.entries.sum(1)
    share = np.divide(counts.local, work, out=np.ones(grid.ring), where=work > 0)
    compute, exposed = np.zeros(grid.ring), np.zeros(grid.ring)
    calls = [counts.local_calls, groups * counts.gathered_calls]
    if cost.one_call:
        calls = [np.minimum(calls[0], 1), np.minimum(calls[1], groups)]
    for backward in (False, True):
        link = 2 * (2 if backward else 1) * groups * peers * cost.latency
        link = link + _moved(cost, kv, incoming, outgoing, backward) / bandwidth
        entries = (counts.local + counts.masked * share) * query
        local = cost.compute_seconds(entries, calls[0], backward=backward)
        entries = (work - counts.local + counts.masked * (1 - share)) * (query * cost.band_factor)
        rest = cost.compute_seconds(entries, calls[1], backward=backward)
        compute += local + rest
        exposed += np.maximum(link / groups - local, 0) + (groups - 1) / groups * np.maximum(link - rest, 0)
    return compute, exposed, incoming * (1 if groups == 1 else 2 / groups)


def _moved(cost: CostModel, kv: int, incoming: Floats, outgoing: Floats, backward: bool) -> Floats:
    """Bytes of the busier direction: K and V come and go; in backward dK and dV too, in fp32, the other way."""
    received = incoming * cost.itemsize + (outgoing * 4 if backward else 0)
    sent = outgoing * cost.itemsize + (incoming * 4 if backward else 0)
    return np.maximum(received, sent) * (cost.head_dim + cost.value_dim) * kv


def _exchange(counts: Counts, grid: RankGrid, cost: CostModel, num_heads: int, kv_copies: int) -> Floats:
    """Tokens for heads before attention and back after it, forward and backward; nothing hides it."""
    size = grid.ulysses
    if size == 1:
        return np.zeros(grid.ring)
    width = (num_heads + kv_copies) * (cost.head_dim + cost.value_dim) / size
    num_bytes = np.ceil(counts.tokens / size) * (size - 1) * width * cost.itemsize
    links = max(1, min(cost.links, size - 1))
    inter = grid.cp > cost.ranks_per_node and cost.ranks_per_node % size  # some group lies across two nodes
    bandwidth = cost.inter_bandwidth if inter else cost.bandwidth * links
    return 2 * (4 * (size - 1) * cost.latency + num_bytes / bandwidth)
