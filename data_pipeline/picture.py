"""The sawtooth of a pack and which rank computes what of it, as SVG for a page and as characters for a terminal.

Guarantees: the SVG is exact: one polygon for each run of query rows that a rank holds of a document, so its size grows
with the runs, never with the square of the tokens; the terminal's picture samples one query and one key per cell. No
plotting library. Cost: milliseconds.

Legend: x is the key, y the query, both from 0 to T; a document [s, e) is the triangle s <= key <= query < e.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee7733", "#777777")
ANSI = ("44", "41", "42", "43", "46", "45", "103", "100")
"""Background colours of ranks in a terminal, as near to `PALETTE` as eight colours are."""

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Sawtooth:
    """A pack split over ranks.

    Args:
        doc_ends: end of each document, the last is T.
        owner: [T] rank that holds each token.
        num_ranks: ranks of the pack.
    """

    doc_ends: tuple[int, ...]
    owner: Int64
    num_ranks: int

    @classmethod
    def of(cls, doc_ends: Sequence[int], token_index: Sequence[Int64]) -> "Sawtooth":
        """From the positions that each rank holds, as `AttentionPlan.token_index` gives them."""
        owner = np.zeros(doc_ends[-1], np.int64)
        for rank, index in enumerate(token_index):
            owner[index] = rank
        return cls(doc_ends=tuple(doc_ends), owner=owner, num_ranks=len(token_index))

    @property
    def length(self) -> int:
        """T."""
        return int(self.owner.size)

    def runs(self) -> list[tuple[int, int, int, int]]:
        """(document's start, first query, end, rank) of each run of queries of one document on one rank."""
        changes = np.flatnonzero(np.diff(self.owner)) + 1
        cuts = np.union1d(changes, np.asarray(self.doc_ends, np.int64))
        starts = [0, *cuts[:-1].tolist()]
        doc_starts = np.array([0, *self.doc_ends[:-1]], np.int64)
        firsts = doc_starts[np.searchsorted(self.doc_ends, starts, side="right")]
        return [
            (int(first), a, b, int(self.owner[a])) for first, a, b in zip(firsts, starts, cuts.tolist(), strict=True)
        ]

    def work(self) -> list[int]:
        """Score entries (causal, one head) of each rank."""
        first = np.repeat([0, *self.doc_ends[:-1]], np.diff([0, *self.doc_ends]))
        entries = np.arange(self.length) - first + 1
        return [int(x) for x in np.bincount(self.owner, entries, self.num_ranks)]

    def tokens(self) -> list[int]:
        """Tokens of each rank."""
        return [int(x) for x in np.bincount(self.owner, minlength=self.num_ranks)]


def rank_colour(rank: int) -> str:
    """Colour of a rank on a page; they repeat after eight."""
    return PALETTE[rank % len(PALETTE)]


def svg(sawtooth: Sawtooth, *, size: int = 560) -> str:
    """The mask, with the rows of each rank in its colour, and a lane per rank with the tokens that it holds."""
    lane, gap, left, top = 14, 4, 70, 26
    scale = size / sawtooth.length
    height = top + size + 34 + sawtooth.num_ranks * (lane + gap)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + size + 150}" height="{height}" '
        'font-family="monospace" font-size="11">',
        f'<text x="{left}" y="16">queries (down) see keys (across); colour: the rank that computes the row</text>',
        f'<rect x="{left}" y="{top}" width="{size}" height="{size}" fill="none" stroke="#999999"/>',
    ]
    for first, a, b, rank in sawtooth.runs():
        corners = ((first, a), (a, a), (b, b), (first, b))
        points = " ".join(f"{left + x * scale:.2f},{top + y * scale:.2f}" for x, y in corners)
        parts.append(
            f'<polygon points="{points}" fill="{rank_colour(rank)}"><title>rank {rank}, queries {a} to {b - 1}'
            "</title></polygon>"
        )
    base = top + size + 22
    parts.append(f'<text x="{left}" y="{base - 6}">tokens that each rank holds; share of tokens and of work</text>')
    tokens, work = sawtooth.tokens(), sawtooth.work()
    for rank in range(sawtooth.num_ranks):
        y = base + rank * (lane + gap)
        share = f"{tokens[rank] / sawtooth.length:.1%} / {work[rank] / max(1, sum(work)):.1%}"
        parts.append(f'<text x="4" y="{y + 11}">rank {rank}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{size}" height="{lane}" fill="#eeeeee"/>')
        parts.append(f'<text x="{left + size + 8}" y="{y + 11}">{share}</text>')
    for _, a, b, rank in sawtooth.runs():
        x, y = left + a * scale, base + rank * (lane + gap)
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{max(0.4, (b - a) * scale):.2f}" height="{lane}" '
            f'fill="{rank_colour(rank)}"/>'
        )
    for end in sawtooth.doc_ends[:-1] if len(sawtooth.doc_ends) <= 400 else ():
        x = left + end * scale
        parts.append(
            f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{base}" y2="{height - gap}" stroke="#000000" stroke-width="0.4"/>'
        )
    return "\n".join([*parts, "</svg>"])


def cells(sawtooth: Sawtooth, rows: int) -> list[list[int]]:
    """[rows][2 * rows]: rank that computes the sampled (query, key), or -1 where the query does not see the key."""
    rows = min(rows, sawtooth.length)
    queries = (np.arange(rows) * 2 + 1) * sawtooth.length // (2 * rows)
    keys = (np.arange(2 * rows) * 2 + 1) * sawtooth.length // (4 * rows)
    ends = np.asarray(sawtooth.doc_ends, np.int64)
    same = np.searchsorted(ends, queries, side="right")[:, None] == np.searchsorted(ends, keys, side="right")
    own = queries * (2 * rows) // sawtooth.length  # the cell of a query's own key
    seen = (same & (keys <= queries[:, None])) | (np.arange(2 * rows) == own[:, None])
    found: list[list[int]] = np.where(seen, sawtooth.owner[queries][:, None], -1).tolist()
    return found


def text(sawtooth: Sawtooth, *, rows: int = 24, colour: bool = True) -> str:
    """The mask for a terminal, and a line per rank; without colour the rank's number stands for it."""
    lines = []
    for row in cells(sawtooth, rows):
        line = ""
        for rank, group in itertools.groupby(row):
            count = len(list(group))
            if rank < 0:
                line += ("\x1b[90m" + "." * count + "\x1b[0m") if colour else "." * count
            elif colour:
                line += f"\x1b[{ANSI[rank % len(ANSI)]}m{' ' * count}\x1b[0m"
            else:
                line += str(rank % 10) * count
        lines.append(line)
    tokens, work = sawtooth.tokens(), sawtooth.work()
    for rank in range(sawtooth.num_ranks):
        mark = f"\x1b[{ANSI[rank % len(ANSI)]}m  \x1b[0m " if colour else ""
        share = work[rank] / max(1, sum(work))
        lines.append(f"{mark}rank {rank}: {tokens[rank]:,} tokens, {share:.1%} of the work")
    return "\n".join(lines)
