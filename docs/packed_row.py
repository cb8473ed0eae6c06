"""Draws `packed_row.svg`, the README's figure, from the real planner: one packed row split over context-parallel ranks.

    python docs/packed_row.py

Prints what the figure shows: tokens, score entries and moved K/V rows of each rank; and the same for the layout that is
not drawn. Needs numpy only.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from raycp.plan import AttentionPlan, RankGrid

DOCUMENTS = (30, 6, 4, 4, 4)
RANKS = 4
CELL = 8
COLOURS = ("#4477aa", "#ee6677", "#ccbb44", "#228833")
LAYOUTS = ("balanced", "zigzag", "contiguous")
DRAWN = ("balanced", "contiguous")
_HEADS = 1


def plan_of(layout: str) -> AttentionPlan:
    """The plan of the pictured row."""
    ends = [sum(DOCUMENTS[: i + 1]) for i in range(len(DOCUMENTS))]
    grid = RankGrid(dp=1, ring=RANKS)
    return AttentionPlan.build(ends, grid, layout=layout, num_heads=_HEADS, num_kv_heads=_HEADS)


def table(plan: AttentionPlan) -> list[tuple[int, int, int]]:
    """(tokens, score entries, K/V rows sent to other ranks) of each rank."""
    rows = []
    for rank in range(RANKS):
        sent = plan.bytes_moved(rank, head_dim=1, itemsize=1, direction="forward") // 2
        rows.append((plan.num_tokens(rank), plan.work(rank), sent))
    return rows


def owners(plan: AttentionPlan) -> list[int]:
    """The rank that holds each token of the row."""
    owner = [0] * plan.pack_length
    for rank in range(RANKS):
        for position in plan.token_index(rank):
            owner[position] = rank
    return owner


def panel(layout: str, left: int, top: int) -> list[str]:
    """SVG of one layout: a strip of the row's tokens, and below it the sawtooth mask, a row for each query token."""
    plan = plan_of(layout)
    owner, length = owners(plan), plan.pack_length
    parts = [text(left, top - 22, f'layout="{layout}"', size=14, weight="bold")]
    parts += [cell(left + i * CELL, top - 14, owner[i]) for i in range(length)]
    start = 0
    for end in plan.doc_ends:
        for query in range(start, end):
            parts.append(cell(left + start * CELL, top + query * CELL, owner[query], cells=query + 1 - start))
        side = (end - start) * CELL
        parts.append(
            f'<rect x="{left + start * CELL}" y="{top + start * CELL}" width="{side}" height="{side}" '
            'fill="none" stroke="#888"/>'
        )
        start = end
    below = top + length * CELL + 20
    for rank, (tokens, work, sent) in enumerate(table(plan)):
        parts.append(cell(left, below + rank * 18 - 8, rank))
        words = f"rank {rank}: {tokens} tokens, {work} score entries, {sent} K/V rows sent"
        parts.append(text(left + 16, below + rank * 18, words))
    return parts


def cell(x: int, y: int, rank: int, cells: int = 1) -> str:
    """One token, or the score entries of one query, in the colour of the rank."""
    size = f'width="{cells * CELL}" height="{CELL}"'
    return f'<rect x="{x}" y="{y}" {size} fill="{COLOURS[rank]}" stroke="#fff" stroke-width=".6"/>'


def text(x: int, y: int, words: str, size: int = 12, weight: str = "normal") -> str:
    """A line of text."""
    return f'<text x="{x}" y="{y}" font-family="sans-serif" font-size="{size}" font-weight="{weight}">{words}</text>'


def figure() -> str:
    """The SVG text."""
    side = sum(DOCUMENTS) * CELL
    width, height = 2 * side + 90, side + 150
    lengths = ", ".join(map(str, DOCUMENTS))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        text(
            20,
            24,
            f"A packed row of {sum(DOCUMENTS)} tokens: documents of {lengths}, split over {RANKS} ranks",
            size=15,
        ),
    ]
    for i, layout in enumerate(DRAWN):
        parts += panel(layout, 20 + i * (side + 50), 70)
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Writes the figure beside this file and prints its numbers."""
    for layout in LAYOUTS:
        print(layout, *(f"rank {r}: {t}" for r, t in enumerate(table(plan_of(layout)))), sep="\n  ")
    target = Path(__file__).with_name("packed_row.svg")
    target.write_text(figure(), encoding="utf-8")
    print(f"(tokens, score entries, K/V rows sent); wrote {target.name}")


if __name__ == "__main__":
    main()
