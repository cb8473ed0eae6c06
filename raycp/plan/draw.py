"""A picture of a plan: the mask and who computes it, who holds which tokens, which K/V rows travel.

Guarantees: counts and numbers are exact; pixels are samples, one for each token up to `POINTS` tokens, one for each
bin of equal length above (documents shorter than a bin show as their middle token does). Needs matplotlib, which is
imported here only. Costs about a second.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raycp.errors import PlanError
from raycp.plan.estimate import Counts, count
from raycp.plan.layout import Ints, Shard

if TYPE_CHECKING:
    from raycp.plan.attention_plan import AttentionPlan

POINTS = 1024
_MOST_LABELS = 16
_PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee7733", "#777777")
_WHITE = (1.0, 1.0, 1.0)


def draw(plan: "AttentionPlan", shards: tuple[Shard, ...], path: Path | str) -> Path:
    """See `AttentionPlan.draw`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError("drawing a plan needs matplotlib", fix="pip install matplotlib") from error
    if not plan.pack_length:
        raise PlanError("a pack without tokens has no picture", fix="draw a pack that holds a document")
    causal = plan.mask == "causal"
    counts = count(shards, plan.doc_ends, causal=causal, window=plan.sliding_window)
    view = _View(plan, shards)
    figure = Figure(figsize=(15, 9.5), dpi=110, layout="constrained")
    grid = figure.add_gridspec(2, 3, width_ratios=(1.25, 1, 0.62), height_ratios=(1, 1))
    figure.suptitle(_title(plan), fontsize=13, x=0.01, ha="left")
    _draw_mask(figure.add_subplot(grid[:, 0]), view)
    _draw_lanes(figure.add_subplot(grid[0, 1:]), view)
    _draw_traffic(figure.add_subplot(grid[1, 1]), view, counts)
    _draw_shares(figure.add_subplot(grid[1, 2]), view, counts)
    target = Path(path)
    figure.savefig(target, format="png")
    return target


class _View:
    """Samples of a plan: `position` [n] tokens, and for each its `owner` and the keys [`low`, `high`) that it sees."""

    def __init__(self, plan: "AttentionPlan", shards: tuple[Shard, ...]) -> None:
        self.size = len(shards)
        self.length = plan.pack_length
        n = min(self.length, POINTS)
        self.position: Ints = (np.arange(n, dtype=np.int64) * 2 + 1) * self.length // (2 * n)
        owner = np.repeat(np.arange(self.size), [len(s.start) for s in shards])
        start = np.concatenate([s.start for s in shards])
        order = np.argsort(start)
        piece = order[np.searchsorted(start[order], self.position, side="right") - 1]
        self.owner: Ints = owner[piece]
        self.ends = np.asarray(plan.doc_ends, dtype=np.int64)
        document = np.searchsorted(self.ends, self.position, side="right")
        first = np.append(0, self.ends)[document]
        self.low: Ints = first
        if plan.sliding_window is not None:
            self.low = np.maximum(first, self.position - plan.sliding_window + 1)
        self.high: Ints = self.position + 1 if plan.mask == "causal" else self.ends[document]
        colours = _PALETTE if self.size <= len(_PALETTE) else _many(self.size)
        self.colours = np.array([_rgb(colours[rank]) for rank in range(self.size)])
        self.names = [_name(plan, ring) for ring in range(self.size)]
        self.bins = "" if n == self.length else f", a pixel for {self.length / n:.0f} tokens"

    @property
    def seen(self) -> npt.NDArray[np.bool_]:
        """[n, n]: whether the query of the row sees the key of the column."""
        return (self.low[:, None] <= self.position) & (self.position < self.high[:, None])


def _draw_mask(axes: Any, view: _View) -> None:
    image = np.where(view.seen[..., None], view.colours[view.owner][:, None, :], _WHITE)
    axes.imshow(image, extent=(0, view.length, view.length, 0), interpolation="nearest", aspect="equal")
    for end in view.ends[:-1] if len(view.ends) <= 200 else ():
        axes.axvline(end, color="#000000", linewidth=0.3, alpha=0.35)
        axes.axhline(end, color="#000000", linewidth=0.3, alpha=0.35)
    axes.set_title(f"the mask; colour: who computes a query's row{view.bins}", fontsize=10, loc="left")
    axes.set_xlabel("key")
    axes.set_ylabel("query")


def _draw_lanes(axes: Any, view: _View) -> None:
    """Two lines a rank: tokens that it holds, and rows of K and V that it receives, in the colour of their owner."""
    seen = view.seen
    image = np.ones((3 * view.size, len(view.position), 3))
    for rank in range(view.size):
        mine = view.owner == rank
        image[3 * rank, mine] = view.colours[rank]
        arrives = seen[mine].any(0) & ~mine
        image[3 * rank + 1, arrives] = view.colours[view.owner[arrives]]
    axes.imshow(image, extent=(0, view.length, 3 * view.size, 0), interpolation="nearest", aspect="auto")
    for rank in range(view.size):
        axes.axhspan(3 * rank + 1, 3 * rank + 2, color="#000000", alpha=0.07, linewidth=0)
    for end in view.ends[:-1] if len(view.ends) <= 200 else ():
        axes.axvline(end, color="#000000", linewidth=0.3, alpha=0.35)
    axes.set_yticks([3 * rank + 1 for rank in range(view.size)], view.names, fontsize=8)
    axes.set_title(
        "each rank: tokens that it holds (upper line), K/V rows that it receives (grey line, colour of their owner)",
        fontsize=10,
        loc="left",
    )
    axes.set_xlabel("token of the pack; thin lines: documents end" if len(view.ends) <= 200 else "token of the pack")


def _draw_traffic(axes: Any, view: _View, counts: Counts) -> None:
    rows = counts.rows
    axes.imshow(rows, cmap="Greys", vmin=0, vmax=max(1.0, 1.6 * rows.max()))
    axes.set_title(f"K/V rows that travel: {int(rows.sum()):,} in all", fontsize=10, loc="left")
    axes.set_xlabel("owner")
    axes.set_ylabel("receiver")
    if view.size > _MOST_LABELS:
        return
    axes.set_xticks(range(view.size), range(view.size))
    axes.set_yticks(range(view.size), range(view.size))
    for receiver in range(view.size):
        for owner in range(view.size):
            words = "own" if receiver == owner else f"{int(rows[receiver, owner]):,}"
            axes.text(owner, receiver, words, ha="center", va="center", fontsize=8 if view.size <= 8 else 6)


def _draw_shares(axes: Any, view: _View, counts: Counts) -> None:
    """Tokens, work and received rows of each rank, over the mean of tokens and work."""
    work, received = counts.entries.sum(1), counts.rows.sum(1)
    bars = (
        ("tokens / mean", counts.tokens / max(counts.tokens.mean(), 1)),
        ("work / mean", work / max(work.mean(), 1)),
        ("rows received / tokens held", received / np.maximum(counts.tokens, 1)),
    )
    y = np.arange(view.size, dtype=np.float64)
    for n, (name, values) in enumerate(bars):
        axes.barh(y + 0.27 * (n - 1), values, height=0.25, color=("#bbbbbb", "#555555", "#88ccee")[n], label=name)
    axes.axvline(1, color="#000000", linewidth=0.6)
    axes.set_yticks(y, view.names, fontsize=8)
    axes.invert_yaxis()
    axes.set_title(f"work max / mean: {work.max() / max(work.mean(), 1):.3f}", fontsize=10, loc="left")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=1, frameon=False)


def _title(plan: "AttentionPlan") -> str:
    grid = plan.grid
    window = "" if plan.sliding_window is None else f", window {plan.sliding_window}"
    return (
        f"{plan.pack_length:,} tokens in {len(plan.doc_ends)} documents; {plan.algorithm}, {plan.layout}, "
        f"{plan.mask}{window}; cp = {grid.cp} (ring {grid.ring} x ulysses {grid.ulysses})"
    )


def _name(plan: "AttentionPlan", ring_index: int) -> str:
    first, size = ring_index * plan.grid.ulysses, plan.grid.ulysses
    return f"rank {first}" if size == 1 else f"ranks {first}-{first + size - 1}"


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


def _many(count: int) -> list[str]:
    """Colours for many ranks; neighbours differ."""
    import matplotlib
    from matplotlib.colors import to_hex

    table = matplotlib.colormaps["turbo"]
    half = (count + 1) // 2
    return [str(to_hex(table((0.5 * (i % 2) + (i // 2) / (2 * half)) % 1.0))) for i in range(count)]
