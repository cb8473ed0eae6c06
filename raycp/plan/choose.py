"""Chooses what was left on "auto": layout and ring or all-gather for each pack, ring x Ulysses once per run.

Guarantees: a pure function of its arguments, so that every rank that asks gets the same answer; what was asked for is
kept; the fastest candidate by `raycp.plan.estimate` is taken, or one that is within 1 % of it and comes earlier in the
order of preference (so that rounding decides nothing). Costs 1 to 2 ms a pack at 8 ranks, and nothing where there is
nothing to choose.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from raycp.errors import PlanError
from raycp.plan.cost import CostModel
from raycp.plan.estimate import Estimate, count, estimate
from raycp.plan.grid import RankGrid
from raycp.plan.layout import Shard, make_shards

PREFERRED = ("balanced", "zigzag", "contiguous")
"""Layouts, in the order in which one is taken among equals."""
_NEAR = 1.01
_MOST_PIECES = 500_000
"""Zigzag is no candidate when pieces x ranks exceed this: so many documents are better kept whole."""


@dataclass(frozen=True)
class Candidate:
    """One way to run a pack, and what it is estimated to cost."""

    algorithm: str
    layout: str
    estimate: Estimate

    def __str__(self) -> str:
        e = self.estimate
        return (
            f"{self.algorithm}, {self.layout}: {e.seconds * 1e3:.3g} ms a layer (compute {e.compute * 1e3:.3g}, "
            f"exposed communication {e.exposed * 1e3:.3g}, rest {e.rest * 1e3:.3g}; work max/mean {e.imbalance:.3f}, "
            f"{e.rows:.1%} of remote K/V rows)"
        )


@dataclass(frozen=True)
class Choice:
    """What was chosen for a pack: `candidates` in the order of their time, empty if there was nothing to choose."""

    algorithm: str
    layout: str
    candidates: tuple[Candidate, ...] = ()
    shards: tuple[Shard, ...] | None = field(default=None, repr=False, compare=False)

    @property
    def reason(self) -> str:
        """Lines for a person: the chosen one, then what the others would have cost."""
        if not self.candidates:
            return ""
        mine = next(c for c in self.candidates if (c.algorithm, c.layout) == (self.algorithm, self.layout))
        others = [f"  instead of {c}" for c in self.candidates if c is not mine]
        return "\n".join([f"chosen: {mine}", *others])


@dataclass(frozen=True)
class GridChoice:
    """A factorisation of the context-parallel ranks; `seconds` of a layer by (ring, ulysses, window), fastest first."""

    grid: RankGrid
    seconds: tuple[tuple[tuple[int, int, int], float], ...]

    @property
    def reason(self) -> str:
        """One line for a person."""
        name = "ring {} x ulysses {} (window {})"
        parts = [f"{name.format(*shape)}: {seconds * 1e3:.3g} ms a layer" for shape, seconds in self.seconds]
        mine = name.format(self.grid.ring, self.grid.ulysses, self.grid.window)
        return f"chosen: {mine}; " + ", ".join(parts)


def choose_plan(
    doc_ends: Sequence[int],
    grid: RankGrid,
    *,
    algorithms: Sequence[str],
    layouts: Sequence[str],
    causal: bool,
    window: int | None,
    num_heads: int,
    num_kv_heads: int,
    cost: CostModel,
) -> Choice:
    """Chooses for one pack.

    Args:
        doc_ends: where each document ends.
        grid: the world; its factorisation is kept.
        algorithms: those that may be taken, in order of preference; at least one.
        layouts: as `algorithms`.
        causal: whether queries see earlier keys only.
        window: keys that a query sees at most, or None.
        num_heads: query heads of the model.
        num_kv_heads: key/value heads of the model.
        cost: figures.
    """
    if grid.ring == 1:
        layouts = layouts[:1]  # one shard holds everything, in any layout
    if len(algorithms) * len(layouts) == 1:
        return Choice(algorithms[0], layouts[0])
    found = _candidates(doc_ends, grid, algorithms, layouts, causal, window, num_heads, num_kv_heads, cost)
    chosen, shards = _first_of_fastest(found)
    by_time = tuple(sorted((c for c, _ in found), key=lambda c: c.estimate.seconds))
    return Choice(chosen.algorithm, chosen.layout, by_time, shards)


def _candidates(
    doc_ends: Sequence[int],
    grid: RankGrid,
    algorithms: Sequence[str],
    layouts: Sequence[str],
    causal: bool,
    window: int | None,
    num_heads: int,
    num_kv_heads: int,
    cost: CostModel,
    balance: Sequence[tuple[int | None, int]] = (),
) -> list[tuple[Candidate, tuple[Shard, ...]]]:
    """Every combination with its shards, in order of preference; `balance` as in `make_shards`."""
    found = []
    for layout in layouts:
        if layout == "zigzag" and len(layouts) > 1 and len(doc_ends) * 2 * grid.ring**2 > _MOST_PIECES:
            continue
        shards = make_shards(doc_ends, grid.ring, layout, causal=causal, window=window, balance=balance)
        counts = count(shards, doc_ends, causal=causal, window=window, block=cost.causal_block)
        for algorithm in algorithms:
            e = estimate(counts, grid, cost, algorithm=algorithm, num_heads=num_heads, num_kv_heads=num_kv_heads)
            found.append((Candidate(algorithm, layout, e), shards))
    return found


def _first_of_fastest(
    found: Sequence[tuple[Candidate, tuple[Shard, ...]]],
) -> tuple[Candidate, tuple[Shard, ...]]:
    fastest = min(c.estimate.seconds for c, _ in found)
    return next(item for item in found if item[0].estimate.seconds <= fastest * _NEAR)


def choose_grid(
    cp: int,
    num_heads: int,
    num_kv_heads: int,
    seq_length: int,
    cost: CostModel,
    *,
    packs: Sequence[Sequence[int]] = (),
    layers: Sequence[tuple[int | None, int]] = ((None, 1),),
    algorithm: str = "auto",
    ulysses: int | None = None,
    window: int | None = 1,
    layout: str = "auto",
    dp: int = 1,
    kv_cache: str = "none",
) -> GridChoice:
    """Chooses ring x Ulysses for a run.

    Args:
        cp: ranks that share a pack.
        num_heads: query heads of the model.
        num_kv_heads: key/value heads of the model.
        seq_length: tokens of a pack.
        cost: figures.
        packs: ends of the documents of typical packs; none: one document of `seq_length` tokens.
        layers: (sliding window or None, layers) of each kind of layer of the model.
        algorithm: "ring", "allgather" (both: ulysses 1), "ulysses" (ring 1), "hybrid" (both above 1), "auto" (any).
        ulysses: Ulysses ranks that were asked for; None: any.
        window: inner ring length that was asked for; None: any.
        layout: as asked for.
        dp: data-parallel replicas.
        kv_cache: what is kept of other ranks' K and V; not "none": there must be a ring.

    Raises:
        PlanError: no factorisation is left.
    """
    shapes = [
        (cp // u, u, w)
        for u in range(1, min(cp, num_heads) + 1)
        if cp % u == 0 and (ulysses is None or u == ulysses) and _fits(algorithm, cp // u, u)
        for w in _windows(cp // u, u, 1 if algorithm == "allgather" and window is None else window, cost)
    ]
    if not shapes:
        raise PlanError(
            f"algorithm={algorithm!r} with cp={cp}, ulysses={ulysses or 'auto'}, window={window or 'auto'} and "
            f"{num_heads} query heads: no ring x ulysses = {cp} fits",
            fix="let ulysses divide cp and not exceed the query heads, or leave algorithm and ulysses on 'auto'",
        )
    kept = kv_cache != "none"
    shapes = [(r, u, w) for r, u, w in shapes if not kept or r > 1 or u == 1]
    if not shapes:
        raise PlanError(
            f"kv_cache={kv_cache!r} with algorithm={algorithm!r}, cp={cp} and ulysses={ulysses or 'auto'}: Ulysses "
            "alone brings no K/V blocks that can be kept",
            fix="set kv_cache='none', or ulysses to less than cp, which leaves a ring",
        )
    seconds: list[tuple[tuple[int, int, int], float]] = []
    for shape in shapes:
        grid = RankGrid(dp, *shape)
        names = ("allgather",) if algorithm == "allgather" else natural_algorithms(grid)[: 1 if kept else None]
        layouts = (PREFERRED if layout == "auto" else (layout,))[: None if grid.ring > 1 and len(layers) == 1 else 1]
        total = 0.0
        for ends in packs or ((seq_length,),) if len(shapes) > 1 else ():
            longest = max((b - a for a, b in pairwise((0, *ends))), default=0)
            kinds = [(None if w is None or w >= longest else w, n) for w, n in layers]
            balance = kinds if len(kinds) > 1 else ()  # several kinds share a layout, as in `plans_by_kind`
            for kind, n in kinds:
                found = _candidates(ends, grid, names, layouts, True, kind, num_heads, num_kv_heads, cost, balance)
                total += _first_of_fastest(found)[0].estimate.seconds * n
        seconds.append((shape, total / max(len(packs), 1) / sum(n for _, n in layers)))
    fastest = min(s for _, s in seconds)
    ring, u, w = next(shape for shape, s in seconds if s <= fastest * _NEAR)
    return GridChoice(RankGrid(dp, ring, u, w), tuple(sorted(seconds, key=lambda item: item[1])))


def ring_warning(grid: RankGrid, seq_length: int, *, num_heads: int, num_kv_heads: int, cost: CostModel) -> str | None:
    """What to say where a ring's chunks are too short to hide its traffic behind one long document; None: nothing."""
    if grid.ring == 1:
        return None
    held = seq_length // grid.ring
    inter = grid.cp > cost.ranks_per_node
    need = cost.smallest_ring_chunk(heads_per_kv_head=num_heads / num_kv_heads, inter=inter, window=grid.window)
    if held >= need:
        return None
    return (
        f"a ring of {grid.ring} holds {held} tokens a rank, and needs {need} to hide its traffic where documents are "
        f"as long as the pack ({num_heads} query heads on {num_kv_heads} key/value heads, "
        f"{cost.flops:.3g} FLOP/s, {cost.inter_bandwidth if inter else cost.bandwidth:.3g} bytes/s); "
        "Ulysses, or fewer ring ranks, may be faster"
    )


def natural_algorithms(grid: RankGrid) -> tuple[str, ...]:
    """What "auto" may take on a grid, in order of preference."""
    if grid.ulysses > 1:
        return ("ulysses",) if grid.ring == 1 else ("hybrid",)
    return ("ring", "allgather") if grid.window == 1 else ("ring",)


def _fits(algorithm: str, ring: int, ulysses: int) -> bool:
    if algorithm in ("ring", "allgather"):
        return ulysses == 1
    if algorithm == "ulysses":
        return ring == 1
    return algorithm == "auto" or (ring > 1 and ulysses > 1)


def _windows(ring: int, ulysses: int, window: int | None, cost: CostModel) -> list[int]:
    """Inner ring lengths to try: the one asked for, or 1 and as much of a ring as fills a node."""
    if window is not None:
        return [window] if ring % window == 0 else []
    inside, rest = divmod(cost.ranks_per_node, ulysses)
    return [1, inside] if not rest and 1 < inside < ring and ring % inside == 0 else [1]
