"""The plan of one pack: documents + grid + layout + algorithm -> what each rank holds, moves and computes.

Guarantees: a plan is a pure function of its arguments, frozen, and has a hash that is equal on every rank that built it
from the same arguments. Programs are made when first asked for, one rank at a time; a rank needs only its own.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raycp.errors import PlanError
from raycp.plan.cost import CostModel
from raycp.plan.grid import RankGrid
from raycp.plan.layout import LAYOUTS, Ints, Shard, make_shards
from raycp.plan.program import RankProgram, ring_program

ALGORITHMS = ("ring",)
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
            algorithm: "ring" or "auto".
            mask: "causal" or "full".
            sliding_window: w: a query sees itself and the w - 1 keys before it, in its document. Not shorter than the
                longest document is the same as None.
            cost: figures for `explain`.

        Raises:
            PlanError: an argument is out of range, or asks for something this version does not have.
        """
        ends = _check_doc_ends(doc_ends)
        _check_heads(num_heads, num_kv_heads)
        _check_choice("mask", mask, MASKS)
        if layout != "auto":
            _check_choice("layout", layout, LAYOUTS)
        if algorithm != "auto":
            _check_choice("algorithm", algorithm, ALGORITHMS)
        _check_grid(grid)
        if sliding_window is not None:
            _check_window(sliding_window, mask)
        return cls(
            doc_ends=ends,
            grid=grid,
            layout="balanced" if layout == "auto" else layout,
            algorithm="ring",
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
        """What context-parallel rank `cp_rank` does in each step."""
        self._check_rank(cp_rank)
        if cp_rank not in self._cache:
            self._cache[cp_rank] = ring_program(
                self._shards(), self.doc_ends, cp_rank, causal=self.mask == "causal", window=self.sliding_window
            )
        program: RankProgram = self._cache[cp_rank]
        return program

    def token_index(self, cp_rank: int) -> Ints:
        """Global positions of the tokens that `cp_rank` holds, in local order (ascending): int64 [t]."""
        self._check_rank(cp_rank)
        return self._shards()[cp_rank].token_index()

    def num_tokens(self, cp_rank: int) -> int:
        """Tokens that `cp_rank` holds (t); ranks may hold unequal numbers, also 0."""
        self._check_rank(cp_rank)
        return self._shards()[cp_rank].num_tokens

    def work(self, cp_rank: int) -> int:
        """Visible score entries that `cp_rank` computes, summed over its query heads."""
        return self.program(cp_rank).area * self.num_heads

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
            direction: "forward" sends K and V rows; "backward" also dK and dV of received rows, in fp32.
        """
        _check_choice("direction", direction, ("forward", "backward"))
        program = self.program(cp_rank)
        row = self.num_kv_heads * (head_dim + (head_dim if value_dim is None else value_dim))
        gradients = program.rows_received * row * 4 if direction == "backward" else 0
        return program.rows_sent * row * itemsize + gradients

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
            messages = sum(len(step.sends) for step in program.steps)
            compute = self.cost.compute_seconds(self.work(rank), program.num_slices, head_dim=head_dim)
            link = self.cost.link_seconds(sent, messages)
            lines.append(
                f"{rank:>4} {program.num_tokens:>8} {self.work(rank):>16} {program.num_slices:>6} {sent / 2**20:>9.1f} "
                f"{compute:>10.4f} {link:>10.4f}"
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


_FIXES: Mapping[str, str] = {
    "ulysses": "'ulysses' is not available in this version; set algorithm to 'ring' or 'auto'",
    "hybrid": "'hybrid' is not available in this version; set algorithm to 'ring' or 'auto'",
    "allgather": "'allgather' is not available in this version; set algorithm to 'ring' or 'auto'",
}


def _longest(doc_ends: tuple[int, ...]) -> int:
    return max((stop - start for start, stop in zip((0, *doc_ends), doc_ends, strict=False)), default=0)


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        fix = _FIXES.get(value, f"set {name} to one of {', '.join(allowed)}")
        raise PlanError(f"{name}={value!r} is not a choice", fix=fix)


def _check_grid(grid: RankGrid) -> None:
    if grid.ulysses != 1:
        raise PlanError(f"RankGrid(ulysses={grid.ulysses}): a ring has one Ulysses rank", fix="set ulysses=1")
    if grid.window != 1:
        raise PlanError(
            f"RankGrid(window={grid.window}): double rings are not available in this version", fix="set window=1"
        )


def _check_window(window: int, mask: str) -> None:
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise PlanError(f"sliding_window={window!r} is not a whole number of at least 1", fix="pass None for no window")
    if mask != "causal":
        raise PlanError(f"sliding_window={window} with mask={mask!r}", fix="use mask='causal', or sliding_window=None")


def _check_heads(num_heads: int, num_kv_heads: int) -> None:
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise PlanError(
            f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}",
            fix="pass the model's num_attention_heads and num_key_value_heads",
        )


def _check_doc_ends(doc_ends: Sequence[int]) -> tuple[int, ...]:
    ends = np.asarray(doc_ends)
    if ends.ndim != 1 or (ends.size and not np.issubdtype(ends.dtype, np.integer)):
        raise PlanError(
            f"doc_ends has dtype {ends.dtype} and {ends.ndim} dimensions", fix="pass a flat list of integers"
        )
    lengths = np.diff(ends, prepend=0) if ends.size else ends
    if ends.size and int(lengths.min()) < 1:
        bad = int(np.flatnonzero(lengths < 1)[0])
        raise PlanError(
            f"doc_ends[{bad}]={int(ends[bad])} is not above the end before it ({int(ends[bad] - lengths[bad])})",
            fix="pass strictly ascending ends; leave documents without tokens out",
        )
    return tuple(int(e) for e in ends)
