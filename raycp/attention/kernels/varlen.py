"""Kernels that take many documents in one call (Ascend's TND layout, flash-attn's varlen): slices to calls and back.

Guarantees: slices with the same mask share a call, up to the op's limits; lengths stay host integers, so nothing waits
for the device; rows that lie next to each other are passed as a view, others are copied together; where several calls
have a row, they are merged in fp32 in the order of the slices, so gradients are the same bits each time. Costs one plan
per step's slices (kept for the last 256), and one add per run of key rows in backward where the rows have gaps.

Every mask is told from the *last* key of a document: with n queries and m keys, query i sees key j if
`-before <= j - i - (m - n) <= after` (Ascend's sparse modes 3 and 4, flash-attn since 2.1). A causal mask is
`after = 0` and no `before`.

Legend: t query rows, s key rows of the step's block, n query rows of a call, m its key rows, H query heads, K key/value
heads, D head dim, Dv value dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch
from torch.nn.functional import pad

from raycp.attention.kernels.diagonal import diagonal_backward, diagonal_forward
from raycp.attention.merge import merge_
from raycp.attention.rows import row_places, take_rows
from raycp.errors import PlanError
from raycp.plan import MaskKind, Range, Slice

NO_LIMIT = 2**31 - 1
"""`before` or `after` of a band that has no such side; what Ascend's op has as its default."""


@dataclass(frozen=True)
class VarlenLimits:
    """What one call of an op takes.

    Attributes:
        documents: at most.
        rows: of queries, or of keys, at most.
        heads: of queries, at most.
        dim: head dim, at most.
        multiple: head dims are padded with zeros to a multiple of it.
        padded: documents times queries of the longest, at most, for an op that pads inside (one document always fits);
            None: it does not.
    """

    documents: int
    rows: int
    heads: int
    dim: int
    multiple: int
    padded: int | None = None


@dataclass(frozen=True)
class VarlenCall:
    """One call: documents one after the other, all with one kind of mask.

    Attributes:
        rows: of q, ascending and disjoint.
        cols: of k and v; may repeat rows.
        q_ends: where each document's queries end; the last entry is the number of rows.
        k_ends: the same of its keys.
        kind: FULL, CAUSAL (towards the last key), BAND, or DIAGONAL (not for the op).
        before: of a band; NO_LIMIT where it has no such side.
        after: of a band.
        fresh: no earlier call of the step has one of `rows`.
    """

    rows: tuple[Range, ...]
    cols: tuple[Range, ...]
    q_ends: tuple[int, ...]
    k_ends: tuple[int, ...]
    kind: MaskKind
    before: int
    after: int
    fresh: bool

    @property
    def max_q(self) -> int:
        """Queries of the longest document."""
        return _longest(self.q_ends)

    @property
    def max_k(self) -> int:
        """Keys of the longest document."""
        return _longest(self.k_ends)


class VarlenOp(Protocol):
    """A device's op for the documents of one call. All head dims are equal, and a multiple of `limits.multiple`."""

    limits: VarlenLimits

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: VarlenCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Q [n, H, D], k [m, K, D], v [m, K, D], contiguous -> out [n, H, D], log-sum-exp [n, H] fp32."""
        ...

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: VarlenCall,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """With the merged out [n, H, D] and lse [n, H] -> dq [n, H, D], dk [m, K, D], dv [m, K, D]."""
        ...


class VarlenKernel:
    """Follows `raycp.attention.kernels.Kernel` with a `VarlenOp`."""

    def __init__(self, op: VarlenOp) -> None:
        self.op = op

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slices: Sequence[Slice], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`.

        Raises:
            PlanError: more heads, a larger head dim or a longer document than the op takes.
        """
        value_dim = v.shape[-1]
        width = self._width(q, v)
        out = lse = None
        for call in plan_calls(tuple(slices), self.op.limits):
            q_n, k_m, v_m = take_rows(q, call.rows), take_rows(k, call.cols), take_rows(v, call.cols)
            if call.kind is MaskKind.DIAGONAL:
                part, part_lse = diagonal_forward(q_n, k_m, v_m, scale)
            else:
                q_n, k_m, v_m = (_widen(x, width).contiguous() for x in (q_n, k_m, v_m))
                part, part_lse = self.op.forward(q_n, k_m, v_m, call, scale)
                part = part[..., :value_dim].float()
            if out is None or lse is None:
                if (
                    call.rows == (Range(0, len(q)),) and call.kind is not MaskKind.DIAGONAL
                ):  # its out may be a view of v
                    out, lse = part, part_lse
                    continue
                out = q.new_zeros(len(q), q.shape[1], value_dim, dtype=torch.float32)
                lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
            for rows, here in row_places(call.rows):
                if call.fresh:
                    out[rows], lse[rows] = part[here], part_lse[here]
                else:
                    merge_(out[rows], lse[rows], part[here], part_lse[here])
        if out is None or lse is None:
            out = q.new_zeros(len(q), q.shape[1], value_dim, dtype=torch.float32)
            lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
        return out, lse

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        slices: Sequence[Slice],
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Kernel.backward`."""
        width = self._width(q, v)
        dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
        for call in plan_calls(tuple(slices), self.op.limits):
            dout_n, out_n, lse_n = (take_rows(x, call.rows) for x in (dout, out, lse))
            q_n, k_m, v_m = take_rows(q, call.rows), take_rows(k, call.cols), take_rows(v, call.cols)
            if call.kind is MaskKind.DIAGONAL:
                parts = diagonal_backward(dout_n, q_n, k_m, v_m, out_n, lse_n, scale)
            else:
                dout_n, q_n, k_m, v_m, out_n = (
                    _widen(x.to(q.dtype), width).contiguous() for x in (dout_n, q_n, k_m, v_m, out_n)
                )
                parts = self.op.backward(dout_n, q_n, k_m, v_m, out_n, lse_n.contiguous(), call, scale)
            for total, part, ranges in zip((dq, dk, dv), parts, (call.rows, call.cols, call.cols), strict=True):
                for rows, here in row_places(ranges):
                    total[rows] += part[here][..., : total.shape[-1]]
        return dq, dk, dv

    def _width(self, q: torch.Tensor, v: torch.Tensor) -> int:
        """The head dim of the op's calls."""
        limits = self.op.limits
        widest = max(q.shape[-1], v.shape[-1])
        if q.shape[1] > limits.heads or widest > limits.dim:
            raise PlanError(
                f"{q.shape[1]} query heads of dim {widest} on a rank: the attention op of {q.device.type} takes at "
                f"most {limits.heads} heads of dim {limits.dim}",
                fix="raise parallel.ulysses, which spreads the heads over ranks, or use another device",
            )
        return -(-widest // limits.multiple) * limits.multiple


@lru_cache(maxsize=256)
def plan_calls(slices: tuple[Slice, ...], limits: VarlenLimits) -> tuple[VarlenCall, ...]:
    """The calls that compute a step's slices.

    Args:
        slices: of a step: ascending `q_start`, no visible pair twice.
        limits: of the op.

    Raises:
        PlanError: a document is longer than a call may be.
    """
    builders: list[_Builder] = []
    newest: dict[tuple[MaskKind, int, int], _Builder] = {}
    for s in slices:
        document = _document(s)
        if max(len(document.rows), len(document.cols)) > limits.rows:
            raise PlanError(
                f"{len(document.rows)} queries against {len(document.cols)} keys of one document on a rank: the "
                f"attention op takes at most {limits.rows}",
                fix="spread the pack over more ranks (parallel.cp), or use a shorter seq_length",
            )
        builder = newest.get(document.mask)
        if builder is None or not builder.takes(document, limits):
            builder = newest[document.mask] = _Builder(*document.mask)
            builders.append(builder)
        builder.add(document)
    calls: list[VarlenCall] = []
    seen: list[Range] = []
    for builder in builders:
        calls.append(builder.build(fresh=_disjoint(seen, builder.rows)))
        seen = sorted([*seen, *builder.rows], key=lambda r: r.start)
    return tuple(calls)


@dataclass(frozen=True)
class _Document:
    rows: Range
    cols: Range
    kind: MaskKind
    before: int = 0
    after: int = 0

    @property
    def mask(self) -> tuple[MaskKind, int, int]:
        return self.kind, self.before, self.after


def _document(s: Slice) -> _Document:
    """A slice with its mask told from the last key; keys that no query of a band sees are left out."""
    rows, cols = Range(s.q_start, s.q_stop), Range(s.k_start, s.k_stop)
    if s.kind is not MaskKind.BAND:
        return _Document(rows, cols, s.kind)
    first = max(0, s.lower)
    cols = Range(s.k_start + first, min(s.k_stop, s.k_start + len(rows) + s.upper))
    lower, upper, shift = s.lower - first, s.upper - first, len(cols) - len(rows)
    all_before, all_after = lower <= 1 - len(rows), upper >= len(cols) - 1
    if all_before and (all_after or upper == shift):
        return _Document(rows, cols, MaskKind.FULL if all_after else MaskKind.CAUSAL)
    before, after = NO_LIMIT if all_before else shift - lower, NO_LIMIT if all_after else upper - shift
    return _Document(rows, cols, MaskKind.BAND, before, after)


@dataclass
class _Builder:
    kind: MaskKind
    before: int
    after: int
    rows: list[Range] = field(default_factory=list)
    cols: list[Range] = field(default_factory=list)
    q_ends: list[int] = field(default_factory=lambda: [0])
    k_ends: list[int] = field(default_factory=lambda: [0])
    longest: int = 0

    def takes(self, document: _Document, limits: VarlenLimits) -> bool:
        """Whether the document fits behind the others: limits, and no row twice."""
        return (
            len(self.q_ends) <= limits.documents
            and self.q_ends[-1] + len(document.rows) <= limits.rows
            and self.k_ends[-1] + len(document.cols) <= limits.rows
            and document.rows.start >= self.rows[-1].stop
            and (limits.padded is None or len(self.q_ends) * max(self.longest, len(document.rows)) <= limits.padded)
        )

    def add(self, document: _Document) -> None:
        self.longest = max(self.longest, len(document.rows))
        self.q_ends.append(self.q_ends[-1] + len(document.rows))
        self.k_ends.append(self.k_ends[-1] + len(document.cols))
        for ranges, new in ((self.rows, document.rows), (self.cols, document.cols)):
            if ranges and ranges[-1].stop == new.start:
                ranges[-1] = Range(ranges[-1].start, new.stop)
            else:
                ranges.append(new)

    def build(self, *, fresh: bool) -> VarlenCall:
        ends = tuple(self.q_ends[1:]), tuple(self.k_ends[1:])
        return VarlenCall(tuple(self.rows), tuple(self.cols), *ends, self.kind, self.before, self.after, fresh)


def _disjoint(seen: Sequence[Range], rows: Sequence[Range]) -> bool:
    """Whether no range of `rows` meets one of `seen`; both ascending."""
    i = 0
    for r in rows:
        while i < len(seen) and seen[i].stop <= r.start:
            i += 1
        if i < len(seen) and seen[i].start < r.stop:
            return False
    return True


def _longest(ends: Sequence[int]) -> int:
    return max(b - a for a, b in zip((0, *ends), ends, strict=False))


def _widen(x: torch.Tensor, width: int) -> torch.Tensor:
    """Zeros behind the last dimension: scores do not change, and outputs there are 0."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))
