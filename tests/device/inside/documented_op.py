"""`npu_fusion_attention`, its gradient and `npu_ring_attention_update` on CPU tensors, by their documents' rules.

Guarantees: dense fp64, one document at a time; whatever the documents rule out raises here. Written from
torch_npu-npu_fusion_attention.md and the docstring of npu_ring_attention_update in torch_npu 2.13.0: masks
("sparse_mode"), the two orders of the softmax statistics, lengths, limits. `contract_golden.py` guards it with answers
that were worked out by hand.

Legend: T rows of all documents, N query heads, D head dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch

MASK_SIZE = 2048
COPIES = 8


@dataclass
class DocumentedOp:
    """The ops of one (imagined) version of CANN.

    Attributes:
        takes_layout: whether `softmax_layout` may be "TND".
        default_order: "documents": each document [N, s, 8] (what MindSpeed regroups); "heads": all rows [N, T, 8].
    """

    takes_layout: bool = True
    default_order: str = "documents"

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        head_num: int,
        input_layout: str,
        pse: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
        atten_mask: torch.Tensor | None = None,
        scale: float = 1.0,
        keep_prob: float = 1.0,
        pre_tockens: int = 2**31 - 1,
        next_tockens: int = 2**31 - 1,
        inner_precise: int = 0,
        prefix: Sequence[int] | None = None,
        actual_seq_qlen: Sequence[int] | None = None,
        actual_seq_kvlen: Sequence[int] | None = None,
        sparse_mode: int = 0,
        gen_mask_parallel: bool = True,
        sync: bool = False,
        softmax_layout: str = "",
        *rest: object,
        **more: object,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
        """out [T, N, Dv], softmax max and sum [T, N, 8] fp32, nothing, and three integers of dropout."""
        self._check(query, key, value, head_num, input_layout, keep_prob, softmax_layout)
        out = query.new_zeros(len(query), head_num, value.shape[2])
        top, total = (torch.zeros(len(query), head_num, dtype=torch.float64) for _ in "ms")
        _check_mask(atten_mask, sparse_mode)
        lengths = self._documents(actual_seq_qlen, actual_seq_kvlen, len(query), len(key))
        for rows, cols in lengths:
            visible = self._visible(rows, cols, atten_mask, sparse_mode, pre_tockens, next_tockens)
            if not visible.any(1).all():
                raise RuntimeError("a row of a varlen call sees no key")
            scores = self._scores(query[rows], key[cols], scale).masked_fill(~visible, -torch.inf)
            top[rows] = scores.amax(-1).t()
            weights = (scores - top[rows].t()[..., None]).exp()
            total[rows] = weights.sum(-1).t()
            p = weights / weights.sum(-1, keepdim=True)
            out[rows] = torch.einsum("nts,snd->tnd", p, _repeat(value[cols], head_num)).to(query.dtype)
        first, second = (self._to_order(x.float(), lengths, softmax_layout) for x in (top, total))
        return out, first, second, query.new_empty(0), 0, 0, 0

    def backward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dy: torch.Tensor,
        head_num: int,
        input_layout: str,
        *,
        atten_mask: torch.Tensor | None = None,
        softmax_max: torch.Tensor,
        softmax_sum: torch.Tensor,
        attention_in: torch.Tensor,
        scale_value: float = 1.0,
        keep_prob: float = 1.0,
        pre_tockens: int = 2**31 - 1,
        next_tockens: int = 2**31 - 1,
        actual_seq_qlen: Sequence[int] | None = None,
        actual_seq_kvlen: Sequence[int] | None = None,
        sparse_mode: int = 0,
        softmax_layout: str = "",
        **rest: object,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk, dv of the inputs' shapes, and two empty tensors."""
        self._check(query, key, value, head_num, input_layout, keep_prob, softmax_layout)
        if not dy.dtype == attention_in.dtype == query.dtype:
            raise RuntimeError(f"dy is {dy.dtype}, attention_in {attention_in.dtype}, query {query.dtype}")
        _check_mask(atten_mask, sparse_mode)
        lengths = self._documents(actual_seq_qlen, actual_seq_kvlen, len(query), len(key))
        top, total = (self._from_order(x, lengths, softmax_layout) for x in (softmax_max, softmax_sum))
        dq, dk, dv = (torch.zeros_like(x) for x in (query, key, value))
        for rows, cols in lengths:
            visible = self._visible(rows, cols, atten_mask, sparse_mode, pre_tockens, next_tockens)
            scores = self._scores(query[rows], key[cols], scale_value)
            p = (scores - top[rows].t()[..., None]).exp() / total[rows].t()[..., None]
            p = p.masked_fill(~visible, 0.0)
            dout = dy[rows].double()
            gap = torch.einsum("tnd,snd->nts", dout, _repeat(value[cols], head_num))
            gap = gap - (dout * attention_in[rows].double()).sum(-1).t()[..., None]
            dscores = p * gap * scale_value
            dq[rows] = torch.einsum("nts,snd->tnd", dscores, _repeat(key[cols], head_num)).to(query.dtype)
            for into, x in ((dk, torch.einsum("nts,tnd->snd", dscores, query[rows].double())),
                            (dv, torch.einsum("nts,tnd->snd", p, dout))):  # fmt: skip
                into[cols] = x.view(len(x), into.shape[1], -1, x.shape[-1]).sum(2).to(into.dtype)
        return dq, dk, dv, query.new_empty(0), query.new_empty(0)

    def _visible(
        self, rows: slice, cols: slice, mask: torch.Tensor | None, mode: int, before: int, after: int
    ) -> torch.Tensor:
        """bool [queries, keys] of one document: which pairs are computed."""
        sq, skv = rows.stop - rows.start, cols.stop - cols.start
        distance = torch.arange(skv) - torch.arange(sq)[:, None]  # key minus query, from the top left
        if mask is None:
            return torch.ones(sq, skv, dtype=torch.bool)  # the mode does not count then
        if mode in (2, 3, 4):
            match mode:
                case 2:
                    return distance <= 0
                case 3:
                    return distance <= skv - sq
                case _:
                    if before + after < 0:
                        raise RuntimeError("a band without a key")
                    return (distance - (skv - sq) >= -before) & (distance - (skv - sq) <= after)
        given = ~mask.bool()[:sq, :skv]
        if mode == 0:
            return given & (distance >= -before) & (distance <= after)
        if mode == 1:
            return given
        raise RuntimeError(f"sparse_mode {mode} is not written down here")

    def _scores(self, q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
        """fp64 [N, queries, keys]."""
        return torch.einsum("tnd,snd->nts", q.double(), _repeat(k, q.shape[1])) * scale

    def _to_order(self, x: torch.Tensor, lengths: list[tuple[slice, slice]], layout: str) -> torch.Tensor:
        """[T, N] -> [T, N, 8], its numbers in the order of the version."""
        if layout == "TND":
            ordered = x
        elif self.default_order == "documents":
            ordered = x.clone()
            for rows, _ in lengths:
                ordered[rows] = x[rows].t().reshape(x[rows].shape)
        else:
            ordered = x.t().reshape(x.shape)
        return ordered[..., None].repeat(1, 1, COPIES)

    def _from_order(self, x: torch.Tensor, lengths: list[tuple[slice, slice]], layout: str) -> torch.Tensor:
        """The inverse, fp64."""
        if (
            x.shape[-1] != COPIES
            or x.dtype != torch.float32
            or not torch.equal(x.nan_to_num(), x[..., :1].expand_as(x).nan_to_num())
        ):
            raise RuntimeError(f"statistics are {COPIES} equal fp32 copies, not {x.dtype} {list(x.shape)}")
        column = x[..., 0].contiguous()
        if layout != "TND" and self.default_order == "documents":
            flat, n = column.view(-1), x.shape[1]
            parts = [flat[rows.start * n : rows.stop * n].view(n, rows.stop - rows.start).t() for rows, _ in lengths]
            column = torch.cat(parts)
        elif layout != "TND":
            column = column.view(x.shape[1], x.shape[0]).t()
        return column.double()

    def _documents(
        self, q_ends: Sequence[int] | None, k_ends: Sequence[int] | None, num_q: int, num_k: int
    ) -> list[tuple[slice, slice]]:
        if not q_ends or not k_ends or len(q_ends) != len(k_ends):
            raise RuntimeError("TND takes two length lists of one size")
        if len(q_ends) > 1024:
            raise RuntimeError(f"{len(q_ends)} documents in a varlen call: at most 1K")
        spans = (list(_spans(q_ends)), list(_spans(k_ends)))
        if q_ends[-1] and (q_ends[-1] != num_q or k_ends[-1] != num_k):
            raise RuntimeError(f"lists end at {q_ends[-1]} and {k_ends[-1]}, tensors have {num_q} and {num_k} rows")
        return [(rows, cols) for rows, cols in zip(*spans, strict=True) if rows.stop > rows.start]

    def _check(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        heads: int,
        layout: str,
        keep_prob: float,
        softmax_layout: str,
    ) -> None:
        if layout != "TND" or keep_prob != 1.0:
            raise RuntimeError(f"only TND without dropout is written down here, not {layout}, keep_prob {keep_prob}")
        if softmax_layout not in ("", "TND") or (softmax_layout and not self.takes_layout):
            raise RuntimeError(f"softmax_layout={softmax_layout!r} is not taken")
        if not query.dtype == key.dtype == value.dtype or query.dtype not in (
            torch.float16,
            torch.bfloat16,
            torch.float32,
        ):
            raise RuntimeError(f"{query.dtype}, {key.dtype}, {value.dtype}")
        if heads != query.shape[1] or heads > 256 or heads % key.shape[1]:
            raise RuntimeError(f"head_num={heads} of {query.shape[1]} query and {key.shape[1]} key/value heads")
        if query.shape[2] != key.shape[2] or query.shape[2] > 768 or value.shape[2] > key.shape[2]:
            raise RuntimeError(f"head dims {query.shape[2]}, {key.shape[2]}, {value.shape[2]}")
        if max(len(query), len(key)) > 1 << 20:
            raise RuntimeError("more than 1M rows")


def ring_update(
    prev_attn_out: torch.Tensor,
    prev_softmax_max: torch.Tensor,
    prev_softmax_sum: torch.Tensor,
    cur_attn_out: torch.Tensor,
    cur_softmax_max: torch.Tensor,
    cur_softmax_sum: torch.Tensor,
    *,
    actual_seq_qlen: torch.Tensor | None = None,
    input_layout: str = "SBH",
    input_softmax_layout: str = "",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The formula of its docstring, for TND with statistics [T, N, 8]."""
    if (input_layout, input_softmax_layout) != ("TND", "TND") or actual_seq_qlen is None or int(actual_seq_qlen[0]):
        raise RuntimeError("only TND statistics with lengths from 0 are written down here")
    top = torch.maximum(prev_softmax_max, cur_softmax_max)
    first, second = (prev_softmax_max - top).exp() * prev_softmax_sum, (cur_softmax_max - top).exp() * cur_softmax_sum
    total = first + second
    out = prev_attn_out * (first / total)[..., :1] + cur_attn_out * (second / total)[..., :1]
    return out.to(prev_attn_out.dtype), top, total


def _spans(ends: Sequence[int]) -> Iterator[slice]:
    """Rows of each document; zeros at the end of the list are documents that take no part."""
    start = 0
    for end in ends:
        yield slice(start, max(start, end))
        start = max(start, end)


def _repeat(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[s, K, D] -> fp64 [s, N, D]: each key/value head for its query heads."""
    return x.double().repeat_interleave(heads // x.shape[1], 1)


def _check_mask(mask: torch.Tensor | None, mode: int) -> None:
    if mask is None or mode not in (2, 3, 4):
        return
    if mask.shape != (MASK_SIZE, MASK_SIZE) or not torch.equal(mask.bool(), _triangle()):
        raise RuntimeError(f"mode {mode} takes the compressed {MASK_SIZE} x {MASK_SIZE} triangle")


@cache
def _triangle() -> torch.Tensor:
    """True: masked out."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool).triu(1)
