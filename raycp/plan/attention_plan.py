"""The plan of one pack: documents + grid + layout + algorithm -> what each rank holds, moves and computes.

Guarantees: a plan is a pure function of its arguments, frozen, and has a hash that is equal on every rank that built it
from the same arguments. Programs are made when first asked for, one rank at a time; a rank needs only its own.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from raycp.errors import PlanError
from raycp.plan.checks import check_choice, check_doc_ends, check_heads, check_window, resolve_algorithm
from raycp.plan.cost import CostModel
from raycp.plan.grid import RankGrid
from raycp.plan.heads import HeadShare, head_shares
from raycp.plan.layout import LAYOUTS, Ints, Shard, make_shards
from raycp.plan.program import RankProgram, ring_program

ALGORITHMS = ("ring", "ulysses", "hybrid")
MASKS = ("causal", "full")
VERSION = 1
"""Enters the hash: raised when the same arguments begin to give another plan."""


@dataclass(frozen=True)
class AttentionPlan:
    """Made by `AttentionPlan.build`; "auto" values are resolved in it.

    Fields: `doc_ends` (host ints, ascending, last entry T), `grid`, `layout`, `algorithm`, `num_heads` (H),
    `num_kv_heads` (K), `mask` ("causal": a token sees itself and earlier tokens of its document; "full": its whole
    document), `sliding_window` (None, or the keys that a query sees at most, itself included), `cost`.
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
    ) -> "AttentionPlan":
        """Plans one pack.

        Args:
            doc_ends: where each document ends, strictly ascending; the last entry is the pack's length T. Empty: a pack
                without tokens, in which every rank still takes part.
            grid: the world.
            num_heads: query heads of the model (H).
            num_kv_heads: key/value heads of the model (K); divides `num_heads`.
            layout: "contiguous", "zigzag", "balanced" or "auto" (balanced).
            algorithm: "ring" (ulysses 1), "ulysses" (ring 1), "hybrid" (Ulysses inside, ring outside), or "auto": what
                the grid says.
            mask: "causal" or "full".
            sliding_window: w: a query sees itself and the w - 1 keys before it, in its document. Not shorter than the
                longest document is the same as None.
            cost: figures for `explain`.

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
        return cls(
            doc_ends=ends,
            grid=grid,
            layout="balanced" if layout == "auto" else layout,
            algorithm=resolve_algorithm(algorithm, grid, num_heads),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            mask=mask,
            sliding_window=None if sliding_window is None or sliding_window >= _longest(ends) else sliding_window,
            cost=CostModel() if cost is None else cost,
        )

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
            self._cache["hash"] = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        digest: str = self._cache["hash"]
        return digest

    def program(self, cp_rank: int) -> RankProgram:
        """What context-parallel rank `cp_rank` does in each step of its ring; the same in all of a Ulysses group."""
        self._check_rank(cp_rank)
        ring_index = cp_rank // self.grid.ulysses
        if ring_index not in self._cache:
            self._cache[ring_index] = ring_program(
                self._shards(), self.doc_ends, ring_index, causal=self.mask == "causal", window=self.sliding_window
            )
        program: RankProgram = self._cache[ring_index]
        return program

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
            direction: "forward" sends K and V rows; "backward" also dK and dV of received rows, in fp32. A Ulysses
                exchange sends its gradients as it sent the tensors.
        """
        check_choice("direction", direction, ("forward", "backward"))
        value_dim = head_dim if value_dim is None else value_dim
        program, u = self.program(cp_rank), cp_rank % self.grid.ulysses
        shares, rows = self.head_shares(), self.group_rows(cp_rank)
        own = shares[u]
        ring = program.rows_sent * len(own.kv) * (head_dim + value_dim) * itemsize
        before = sum(  # what each token brings to the ranks that compute its heads
            len(share.query) * head_dim + len(share.kv) * (head_dim + value_dim)
            for peer, share in enumerate(shares)
            if peer != u
        )
        after = sum(len(share.query) for peer, share in enumerate(shares) if peer != u) * value_dim
        others = sum(rows) - rows[u]
        if direction == "forward":
            return ring + (rows[u] * before + others * len(own.query) * value_dim) * itemsize
        ring += program.rows_received * len(own.kv) * (head_dim + value_dim) * 4
        back = len(own.query) * head_dim + len(own.kv) * (head_dim + value_dim)
        return ring + (rows[u] * after + others * back) * itemsize

    def explain(self, *, head_dim: int = 128, itemsize: int = 2) -> str:
        """A table of one layer: tokens, work, kernel calls, traffic and estimated forward seconds of each rank."""
        grid = self.grid
        window = "" if self.sliding_window is None else f" window {self.sliding_window}"
        lines = [
            f"{self.pack_length} tokens in {len(self.doc_ends)} documents; {self.algorithm}, {self.layout}, "
            f"{self.mask}{window}; cp={grid.cp} (ring {grid.ring} x ulysses {grid.ulysses})",
            f"{'rank':>4} {'tokens':>8} {'entries':>16} {'calls':>6} {'sent MiB':>9} {'compute s':>10} {'link s':>10}",
        ]
        for rank in range(grid.cp):
            program = self.program(rank)
            sent = self.bytes_moved(rank, head_dim=head_dim, itemsize=itemsize)
            messages = sum(len(step.sends) for step in program.steps) + 4 * (grid.ulysses - 1)
            compute = self.cost.compute_seconds(self.work(rank), program.num_slices, head_dim=head_dim)
            link = self.cost.link_seconds(sent, messages)
            lines.append(
                f"{rank:>4} {self.num_tokens(rank):>8} {self.work(rank):>16} {program.num_slices:>6} "
                f"{sent / 2**20:>9.1f} {compute:>10.4f} {link:>10.4f}"
            )
        return "\n".join(lines)

    def _shards(self) -> tuple[Shard, ...]:
        if "shards" not in self._cache:
            self._cache["shards"] = make_shards(
                self.doc_ends,
                self.grid.ring,
                self.layout,
                causal=self.mask == "causal",
                window=self.sliding_window,
            )
        shards: tuple[Shard, ...] = self._cache["shards"]
        return shards

    def _check_rank(self, cp_rank: int) -> None:
        if not 0 <= cp_rank < self.grid.cp:
            raise PlanError(f"cp_rank={cp_rank} is outside [0, {self.grid.cp})", fix="pass a rank of this plan's grid")


def _longest(doc_ends: tuple[int, ...]) -> int:
    return max((stop - start for start, stop in zip((0, *doc_ends), doc_ends, strict=False)), default=0)
