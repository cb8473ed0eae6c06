"""The program of a ring: every rank meets the K/V rows of every other rank, one block a step.

Guarantees: a rank computes each visible (query, key) pair once, in as few blocks as the layout allows (zigzag: one per
document and step); rows that no query sees do not move; an empty transfer is left out. One rank of a pack of 131 072
tokens and 1 000 documents, at P = 8, takes about 15 ms.

Single ring, by direct pull: in step i a rank receives from rank - i and sends to rank + i (mod P), straight from the
owner, and gradients go straight back.

Double ring (LoongTrain, 2406.18485): the P ranks are P / W windows of W neighbours. In the first W steps a window is a
ring of its own, by direct pull. In outer step o, a rank pulls the block of the rank with its own place in window - o,
with the rows that anyone in its window needs; the blocks are then passed on inside the window, each time trimmed to
what is still needed. So each row enters a window once, whatever W; the outer block is on its way during the W steps
before it is needed; and a rank holds three blocks at most: in use, arriving from the neighbour, arriving from the
other window. (To pass blocks on between windows too would hold a fourth while it is sent, and move rows that only
farther windows need.) Gradients of a passed block go to the rank of the window that pulled it, which sends their sum to
the owner.

In backward the last gradients that return would have nothing to hide behind: part of the own block is computed after
them (`raycp.plan.halves`).
"""

from collections.abc import Sequence
from functools import cache

import numpy as np

from raycp.plan.blocks import Blocks, own_blocks, prefix_blocks, window_blocks
from raycp.plan.halves import own_parts
from raycp.plan.layout import Shard
from raycp.plan.program import RankProgram, Step, Transfer
from raycp.plan.ranges import MaskKind
from raycp.plan.rows import Rows


class _Pairs:
    """What each rank computes with, and needs from, each other rank; made when asked for."""

    def __init__(self, shards: Sequence[Shard], doc_ends: Sequence[int], causal: bool, window: int | None) -> None:
        self._shards = shards
        self._ends = np.asarray(doc_ends, dtype=np.int64)
        self._starts = np.concatenate([np.zeros(1, np.int64), self._ends[:-1]]) if len(self._ends) else self._ends
        self._causal = causal
        self._window = window
        self.blocks = cache(self._blocks)
        self.needed = cache(lambda receiver, owner: self.blocks(receiver, owner).needed())

    def __len__(self) -> int:
        return len(self._shards)

    def _blocks(self, receiver: int, owner: int) -> Blocks:
        q, k = self._shards[receiver], self._shards[owner]
        if self._window is not None:
            return window_blocks(q, k, self._window)
        if receiver == owner:
            return own_blocks(q, MaskKind.CAUSAL if self._causal else MaskKind.FULL)
        return prefix_blocks(q, k, self._starts, self._ends, causal=self._causal)


def ring_program(
    shards: Sequence[Shard],
    doc_ends: Sequence[int],
    rank: int,
    *,
    causal: bool,
    window: int | None,
    inner: int = 1,
) -> RankProgram:
    """The program of ring index `rank`.

    Args:
        shards: what each rank holds.
        doc_ends: where each document ends.
        rank: ring index.
        causal: True for the sawtooth, False for all pairs inside a document.
        window: None, or how many keys a query sees at most, itself included (causal only).
        inner: ranks of a window of the double ring (W); 1 or all: a single ring.
    """
    size = len(shards)
    inner = size if inner == 1 else inner
    pairs = _Pairs(shards, doc_ends, causal, window)
    steps = [Step(0, (), (), pairs.blocks(rank, rank).slices())]
    home = rank - rank % inner
    for s in range(1, inner):
        source, target = home + (rank - s) % inner, home + (rank + s) % inner
        steps.append(_pull(s, pairs, rank, source, target, pairs.needed(rank, source), pairs.needed(target, rank)))
    for outer in range(1, size // inner):
        steps += _outer_steps(pairs, rank, outer, inner, size)
    return RankProgram(shards[rank].num_tokens, tuple(steps), own_parts(steps))


def _pull(
    index: int, pairs: _Pairs, rank: int, source: int, target: int, incoming: Rows, outgoing: Rows, ahead: int = 1
) -> Step:
    """Rows straight from their owner, and their gradients straight back; posted `ahead` steps before they are used."""
    return Step(
        index,
        receives=_transfer(source, incoming),
        sends=_transfer(target, outgoing),
        slices=pairs.blocks(rank, source).in_buffer(incoming).slices(),
        posted=index - ahead,
        returns=_transfer(source, incoming.inside(incoming)),
        collects=_transfer(target, outgoing),
        settled=index if ahead == 1 else min(index + ahead, len(pairs) - 1),
        outer=ahead > 1,
    )


def _outer_steps(pairs: _Pairs, rank: int, outer: int, inner: int, size: int) -> list[Step]:
    """The steps in which the blocks of the window that is `outer` windows away are pulled and passed around."""
    home, place = rank - rank % inner, rank % inner
    away, beyond = (home - outer * inner) % size, (home + outer * inner) % size
    first = outer * inner

    @cache
    def held(window: int, owner: int, s: int) -> Rows:
        """Rows of `owner` that the ranks of the window that starts at `window` need in inner step s or later."""
        return Rows.union([pairs.needed(window + (owner + later) % inner, owner) for later in range(s, inner)])

    pulled, target = away + place, beyond + place
    steps = [_pull(first, pairs, rank, pulled, target, held(home, pulled, 0), held(beyond, rank, 0), ahead=inner)]
    for s in range(1, inner):
        owner, passed = away + (place - s) % inner, away + (place - s + 1) % inner
        rows, before = held(home, owner, s), held(home, owner, s - 1)
        after = home + (place + s) % inner
        steps.append(
            Step(
                first + s,
                receives=_transfer(home + (place - 1) % inner, rows.inside(before)),
                sends=_transfer(home + (place + 1) % inner, held(home, passed, s).inside(held(home, passed, s - 1))),
                slices=pairs.blocks(rank, owner).in_buffer(rows).slices(),
                posted=first + s - 1,
                source=first + s - 1,
                returns=_transfer(home + (place - s) % inner, pairs.needed(rank, owner).inside(rows)),
                collects=_transfer(after, pairs.needed(after, pulled).inside(held(home, pulled, 0))),
                into=first,
                settled=first + s,
            )
        )
    return steps


def _transfer(peer: int, rows: Rows) -> tuple[Transfer, ...]:
    return (Transfer(peer, rows.ranges()),) if len(rows.start) else ()
