"""The plan of one pack: documents + grid + layout + algorithm -> what each rank holds, moves and computes.

Guarantees: a plan is a pure function of its arguments, frozen, and has a hash that is equal on every rank that built it
from the same arguments. Programs are made when first asked for, one rank at a time; a rank needs only its own.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raycp.errors import PlanError
from raycp.plan.checks import check_cache, check_choice, check_doc_ends, check_heads, check_window, resolve_algorithm
from raycp.plan.choose import PREFERRED, Choice, choose_plan, natural_algorithms
from raycp.plan.cost import CostModel
from raycp.plan.gather import gather_program
from raycp.plan.grid import RankGrid
from raycp.plan.heads import HeadShare, head_groups, head_shares
from raycp.plan.layout import LAYOUTS, Ints, Shard, make_shards
from raycp.plan.program import RankProgram
from raycp.plan.ranges import Range
from raycp.plan.ring import ring_program

ALGORITHMS = ("ring", "ulysses", "hybrid", "allgather")
MASKS = ("causal", "full")
KV_CACHES = ("none", "half", "full")
VERSION = 3
"""Enters the hash: raised when the same arguments begin to give another plan."""


@dataclass(frozen=True)
class AttentionPlan:
    """Made by `AttentionPlan.build`; "auto" values are resolved in it.

    Fields: `doc_ends` (host ints, ascending, last entry T), `grid`, `layout`, `algorithm`, `num_heads` (H),
    `num_kv_heads` (K), `mask` ("causal": a token sees itself and earlier tokens of its document; "full": its whole
    document), `sliding_window` (None, or the keys that a query sees at most, itself included), `cost`, `kv_cache` (what
    of other ranks' K and V is kept for backward), `balance` (what the balanced layout weighs, see `build`).
    """

    doc_ends: tuple[int, ...]
    grid: RankGrid
    layout: str
    algorithm: str
    num_heads: int
    num_kv_heads: int
    mask: str
    sliding_window: int | None
    cost: CostModel
    kv_cache: str = "none"
    balance: tuple[tuple[int | None, int], ...] = ()
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def build(
        cls,
        doc_ends: Sequence[int],
        grid: RankGrid,
        *,
        num_heads: int,
        num_kv_heads: int,
        layout: str = "auto",
        algorithm: str = "auto",
        mask: str = "causal",
        sliding_window: int | None = None,
        cost: CostModel | None = None,
        kv_cache: str = "none",
        balance: Sequence[tuple[int | None, int]] = (),
    ) -> "AttentionPlan":
        """Plans one pack.

        Args:
            doc_ends: where each document ends, strictly ascending; the last entry is the pack's length T. Empty: a pack
                without tokens, in which every rank still takes part.
            grid: the world.
            num_heads: query heads of the model (H).
            num_kv_heads: key/value heads of the model (K); divides `num_heads`.
            layout: "contiguous", "zigzag", "balanced" or "auto": what `cost` says is fastest for this pack.
            algorithm: "ring" (ulysses 1), "ulysses" (ring 1), "hybrid" (Ulysses inside, ring outside),
                "allgather" (ulysses 1; all needed rows in one exchange), or "auto": what the grid and `cost` say.
            mask: "causal" or "full".
            sliding_window: w: a query sees itself and the w - 1 keys before it, in its document. Not shorter than the
                longest document is the same as None.
            cost: figures that "auto" is decided by; None: those of a CPU core.
            kv_cache: what of the K and V that a ring brings is kept until backward, which then does not move it again:
                "none", "half" (K) or "full". Costs all remote rows of a layer, for each layer; worth it only where
                compute cannot hide the traffic.
            balance: (sliding window, layers) of each kind of layer, if plans of several kinds share one layout (see
                `plans_by_kind`); (): this plan's own window.

        Raises:
            PlanError: an argument is out of range, or asks for something this version does not have.
        """
        ends = check_doc_ends(doc_ends)
        check_heads(num_heads, num_kv_heads)
        check_choice("mask", mask, MASKS)
        check_choice("layout", layout, ("auto", *LAYOUTS))
        check_choice("algorithm", algorithm, ("auto", *ALGORITHMS))
        if sliding_window is not None:
            check_window(sliding_window, mask)
        cost = CostModel() if cost is None else cost
        window = None if sliding_window is None or sliding_window >= _longest(ends) else sliding_window
        natural = resolve_algorithm(algorithm, grid, num_heads)
        algorithms = natural_algorithms(grid) if algorithm == "auto" else (natural,)
        if check_cache(kv_cache, natural, KV_CACHES) and algorithm == "auto":
            algorithms = tuple(a for a in algorithms if a != "allgather")
        shared = "balanced" if balance and layout == "auto" else layout
        choice = choose_plan(
            ends,
            grid,
            algorithms=algorithms,
            layouts=PREFERRED if shared == "auto" else (shared,),
            causal=mask == "causal",
            window=window,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            cost=cost,
        )
        plan = cls(
            doc_ends=ends,
            grid=grid,
            layout=choice.layout,
            algorithm=choice.algorithm,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            mask=mask,
            sliding_window=window,
            cost=cost,
            kv_cache=kv_cache,
            balance=tuple((None if w is None or w >= _longest(ends) else w, layers) for w, layers in balance),
        )
        plan._cache["choice"] = choice
        if choice.shards is not None and not balance:
            plan._cache["shards"] = choice.shards
        return plan

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": {}}

    @property
    def pack_length(self) -> int:
        """Tokens of the pack (T)."""
        return self.doc_ends[-1] if self.doc_ends else 0

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document; 0 without documents."""
        return _longest(self.doc_ends)

    @property
    def hash(self) -> str:
        """Hex digest of everything that decides what ranks do; `cost` is not part of it."""
        if "hash" not in self._cache:
            grid = self.grid
            facts = [VERSION, self.doc_ends, [grid.dp, grid.ring, grid.ulysses, grid.window], self.layout]
            facts += [self.algorithm, self.num_heads, self.num_kv_heads, self.mask, self.sliding_window]
            facts += [self.kv_cache, self.balance]
            self._cache["hash"] = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        digest: str = self._cache["hash"]
        return digest

    def program(self, cp_rank: int) -> RankProgram:
        """What context-parallel rank `cp_rank` does in each step of its ring; the same in all of a Ulysses group."""
        self._check_rank(cp_rank)
        ring_index = cp_rank // self.grid.ulysses
        if ring_index not in self._cache:
            shards, causal, window = self._shards(), self.mask == "causal", self.sliding_window
            if self.algorithm == "allgather":
                made = gather_program(shards, self.doc_ends, ring_index, causal=causal, window=window)
            else:
                inner = self.grid.window
                made = ring_program(shards, self.doc_ends, ring_index, causal=causal, window=window, inner=inner)
            self._cache[ring_index] = made
        program: RankProgram = self._cache[ring_index]
        return program

    def head_groups(self) -> tuple[Range, ...]:
        """Key/value heads that "allgather" moves and computes at a time."""
        return head_groups(self.num_kv_heads)

    def holds_same_tokens(self, other: "AttentionPlan") -> bool:
        """Whether every rank holds the same tokens of the same pack under both plans."""
        if (self.doc_ends, self.grid, self.layout) != (other.doc_ends, other.grid, other.layout):
            return False
        return self.layout != "balanced" or (self.mask, self._weights()) == (other.mask, other._weights())

    def head_shares(self) -> tuple[HeadShare, ...]:
        """Heads of each rank of a Ulysses group."""
        return head_shares(self.num_heads, self.num_kv_heads, self.grid.ulysses)

    def group_rows(self, cp_rank: int) -> tuple[int, ...]:
        """Tokens of each rank of the Ulysses group of `cp_rank`; together they are the shard of its ring index."""
        self._check_rank(cp_rank)
        rows, size = self._shards()[cp_rank // self.grid.ulysses].num_tokens, self.grid.ulysses
        return tuple(rows * (u + 1) // size - rows * u // size for u in range(size))

    def token_index(self, cp_rank: int) -> Ints:
        """Global positions of the tokens that `cp_rank` holds, in local order (ascending): int64 [t]."""
        rows, u = self.group_rows(cp_rank), cp_rank % self.grid.ulysses
        index = self._shards()[cp_rank // self.grid.ulysses].token_index()
        return index[sum(rows[:u]) : sum(rows[: u + 1])]

    def num_tokens(self, cp_rank: int) -> int:
        """Tokens that `cp_rank` holds (t); ranks may hold unequal numbers, also 0."""
        return self.group_rows(cp_rank)[cp_rank % self.grid.ulysses]

    def work(self, cp_rank: int) -> int:
        """Visible score entries that `cp_rank` computes, summed over its query heads."""
        return self.program(cp_rank).area * len(self.head_shares()[cp_rank % self.grid.ulysses].query)

    def bytes_moved(
        self,
        cp_rank: int,
        *,
        head_dim: int,
        value_dim: int | None = None,
        itemsize: int = 2,
        direction: str = "forward",
    ) -> int:
        """Payload that `cp_rank` hands to the communicator in one layer; what it keeps for itself is not counted.

        Args:
            cp_rank: the rank.
            head_dim: D of queries and keys.
            value_dim: D of values; None: the same.
            itemsize: bytes of one number of K and V.
            direction: "forward" sends K and V rows; "backward" those that are not cached, and dK and dV of received
                rows, in fp32. Rows that are passed on inside a window count each time. A Ulysses
                exchange sends its gradients as it sent the tensors.
        """
        check_choice("direction", direction, ("forward", "backward"))
        value_dim = head_dim if value_dim is None else value_dim
        program, u = self.program(cp_rank), cp_rank % self.grid.ulysses
        shares, rows = self.head_shares(), self.group_rows(cp_rank)
        own = shares[u]
        moved = head_dim + value_dim
        if direction == "backward":
            moved = {"none": head_dim + value_dim, "half": value_dim, "full": 0}[self.kv_cache]
        ring = program.rows_sent * len(own.kv) * moved * itemsize
        before = sum(  # what each token brings to the ranks that compute its heads
            len(share.query) * head_dim + len(share.kv) * (head_dim + value_dim)
            for peer, share in enumerate(shares)
            if peer != u
        )
        after = sum(len(share.query) for peer, share in enumerate(shares) if peer != u) * value_dim
        others = sum(rows) - rows[u]
        if direction == "forward":
            return ring + (rows[u] * before + others * len(own.query) * value_dim) * itemsize
        ring += program.rows_returned * len(own.kv) * (head_dim + value_dim) * 4
        back = len(own.query) * head_dim + len(own.kv) * (head_dim + value_dim)
        return ring + (rows[u] * after + others * back) * itemsize

    def explain(self, *, head_dim: int = 128, itemsize: int = 2) -> str:
        """A table of one layer: tokens, work, kernel calls, traffic, memory and estimated forward seconds of each rank.

        Below it, what "auto" chose and what the alternatives were estimated to cost. `held MiB` is K and V of other
        ranks that exist at once; `cache MiB` what keeping all of them until backward would take.
        """
        from raycp.plan.explain import explain

        choice = self._cache.get("choice", Choice(self.algorithm, self.layout))
        return explain(self, choice, head_dim=head_dim, itemsize=itemsize)

    def draw(self, path: Path | str) -> Path:
        """Writes a PNG of the pack: mask and who computes it, who holds which tokens, which K/V rows travel.

        Above 1 024 tokens a pixel stands for a bin. The ranks of a Ulysses group are drawn as one.

        Returns:
            The path.

        Raises:
            PlanError: matplotlib is not installed, or the pack is empty.
        """
        from raycp.plan.draw import draw

        return draw(self, self._shards(), path)

    def _shards(self) -> tuple[Shard, ...]:
        if "shards" not in self._cache:
            self._cache["shards"] = make_shards(
                self.doc_ends,
                self.grid.ring,
                self.layout,
                causal=self.mask == "causal",
                balance=self._weights(),
            )
        shards: tuple[Shard, ...] = self._cache["shards"]
        return shards

    def _weights(self) -> tuple[tuple[int | None, int], ...]:
        return self.balance or ((self.sliding_window, 1),)

    def _check_rank(self, cp_rank: int) -> None:
        if not 0 <= cp_rank < self.grid.cp:
            raise PlanError(f"cp_rank={cp_rank} is outside [0, {self.grid.cp})", fix="pass a rank of this plan's grid")


def _longest(doc_ends: tuple[int, ...]) -> int:
    return max((stop - start for start, stop in zip((0, *doc_ends), doc_ends, strict=False)), default=0)
