"""Flash attention's variable-length functions on CPU tensors, by their documents' rules; dense fp64.

The functions have the names and arguments of flash-attn 2.7 (flash_attn_interface.py), masks as its README says since
2.1: told from the last key ("if seqlen_q != seqlen_k and causal=True, the causal mask is aligned to the bottom right
corner"; with a window, query i sees keys from `i + seqlen_k - seqlen_q - left` to `i + seqlen_k - seqlen_q + right`).
`aten_*` are those of torch 2.13, `efficient_*` its memory-efficient attention (kernel_forward.h, kernel_backward.h,
attention.cu): a batch of one, equal heads, causal masks told from the first (1) or the last key (2), log-sum-exp
[documents, H, rows of the longest, rounded up to 32] with infinity behind the last row, which backward relies on.

Legend: T rows, H query heads, K key/value heads, D head dim.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """out [T, H, D], log-sum-exp [H, T] fp32, nothing, nothing."""
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for rows, cols in _documents(cu_seqlens_q, cu_seqlens_k):
        scores = _scores(q[rows], k[cols], softmax_scale, causal, window_size_left, window_size_right)
        lse[:, rows] = scores.logsumexp(-1).float()
        out[rows] = torch.einsum("hts,shd->thd", scores.softmax(-1), _repeat(v[cols], q)).to(q.dtype)
    return out, lse, torch.empty(0), torch.empty(2)


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fills dq, dk, dv."""
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    assert softmax_lse.shape == (q.shape[1], len(q))
    assert softmax_lse.is_contiguous()
    for x in (dq, dk, dv):
        x.zero_()
    for rows, cols in _documents(cu_seqlens_q, cu_seqlens_k):
        scores = _scores(q[rows], k[cols], softmax_scale, causal, window_size_left, window_size_right)
        p = (scores - softmax_lse[:, rows, None].double()).exp()
        gap = torch.einsum("thd,shd->hts", dout[rows].double(), _repeat(v[cols], q))
        gap = gap - (dout[rows].double() * out[rows].double()).sum(-1).t()[..., None]
        dscores = p * gap * softmax_scale
        dq[rows] = torch.einsum("hts,shd->thd", dscores, _repeat(k[cols], q)).to(q.dtype)
        for into, x in (
            (dk, torch.einsum("hts,thd->shd", dscores, q[rows].double())),
            (dv, torch.einsum("hts,thd->shd", p, dout[rows].double())),
        ):
            into[cols] = x.view(len(x), into.shape[1], -1, x.shape[-1]).sum(2).to(into.dtype)
    return torch.empty(0)


def aten_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[torch.Tensor, ...]:
    """`aten::_flash_attention_forward`, variable lengths."""
    out, lse, *_ = _flash_attn_varlen_forward(
        q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, scale, is_causal, window_size_left, window_size_right
    )
    return out, lse, *(torch.empty(0, dtype=torch.uint64) for _ in "rng"[:2]), torch.empty(0)


def aten_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *args: Any,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`aten::_flash_attention_backward`, variable lengths; as PyTorch, not deterministic where that mode only warns."""
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    lengths, (dropout, causal) = args[:4], args[4:6]
    masking = (scale, causal, window_size_left, window_size_right)
    _flash_attn_varlen_backward(dout, q, k, v, out, lse, *grads, *lengths, dropout, *masking, 0.0, None, False)
    return _as_the_mode_says(*grads)


def efficient_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    """`aten::_efficient_attention_forward`, variable lengths: out [1, T, H, Dv], log-sum-exp as above."""
    _check_efficient(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k)
    assert compute_log_sumexp
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = torch.full((len(cu_seqlens_q) - 1, q.shape[2], -(-max_q // 32) * 32), torch.inf)
    for n, (rows, cols) in enumerate(_documents(cu_seqlens_q, cu_seqlens_k)):
        scores = _efficient_scores(q[0, rows], k[0, cols], scale, custom_mask_type)
        lse[n, :, : rows.stop - rows.start] = scores.logsumexp(-1).float()
        out[0, rows] = torch.einsum("hts,shd->thd", scores.softmax(-1), v[0, cols].double()).to(q.dtype)
    nothing = torch.empty((), dtype=torch.int64)
    return out, lse, nothing, nothing.clone(), max_q, max_k


def efficient_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: None,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_q: int,
    max_k: int,
    lse: torch.Tensor,
    dropout_p: float,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    custom_mask_type: int,
    bias_requires_grad: bool,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`aten::_efficient_attention_backward`, variable lengths."""
    _check_efficient(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k)
    assert lse.shape == (len(cu_seqlens_q) - 1, q.shape[2], -(-max_q // 32) * 32)
    assert lse.is_contiguous()
    assert not bias_requires_grad
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for n, (rows, cols) in enumerate(_documents(cu_seqlens_q, cu_seqlens_k)):
        count = rows.stop - rows.start
        assert lse[n, :, count:].isposinf().all()
        scores = _efficient_scores(q[0, rows], k[0, cols], scale, custom_mask_type)
        p = (scores - lse[n, :, :count, None].double()).exp()
        do, o = dout[0, rows].double(), out[0, rows].double()
        gap = torch.einsum("thd,shd->hts", do, v[0, cols].double()) - (do * o).sum(-1).t()[..., None]
        dscores = p * gap * scale
        grads[0][0, rows] = torch.einsum("hts,shd->thd", dscores, k[0, cols].double()).to(q.dtype)
        grads[1][0, cols] = torch.einsum("hts,thd->shd", dscores, q[0, rows].double()).to(q.dtype)
        grads[2][0, cols] = torch.einsum("hts,thd->shd", p, do).to(q.dtype)
    return *_as_the_mode_says(*grads), torch.empty(())


def _as_the_mode_says(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With `warn_only` PyTorch says that it defaults to a non-deterministic algorithm, and takes it: dQ differs."""
    if torch.is_deterministic_algorithms_warn_only_enabled():
        dq = dq * (1 + torch.finfo(dq.dtype).eps * torch.randint_like(dq, -4, 5))
    return dq, dk, dv


def _efficient_scores(q: torch.Tensor, k: torch.Tensor, scale: float, custom_mask_type: int) -> torch.Tensor:
    """fp64 [H, queries, keys]; -inf where not seen."""
    assert custom_mask_type in (0, 2), "causal from the first key is not what a document's last queries see"
    return _scores(q, k, scale, custom_mask_type == 2, -1, -1)


def _check_efficient(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_starts: torch.Tensor,
    k_starts: torch.Tensor,
    max_q: int,
    max_k: int,
) -> None:
    assert q.shape[0] == k.shape[0] == v.shape[0] == 1
    assert q.shape[2] == k.shape[2] == v.shape[2], "no grouped heads"
    assert q.shape[3] == k.shape[3]
    assert q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    assert all(x.stride(2) % 8 == 0 and x.stride(3) == 1 for x in (q, k, v))
    assert q_starts.dtype == k_starts.dtype == torch.int32
    assert int(q_starts[-1]) == q.shape[1]
    assert int(k_starts[-1]) == k.shape[1] == v.shape[1]
    assert max_q == int(q_starts.diff().max())
    assert max_k == int(k_starts.diff().max())


def _documents(q_starts: torch.Tensor, k_starts: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    for (a, b), (c, d) in zip(pairwise(q_starts.tolist()), pairwise(k_starts.tolist()), strict=True):
        yield slice(a, b), slice(c, d)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool, left: int, right: int) -> torch.Tensor:
    """fp64 [H, queries, keys]; -inf where not seen."""
    distance = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))
    right = 0 if causal else right
    hidden = ((distance > right) if right >= 0 else torch.zeros_like(distance, dtype=torch.bool)) | (
        (distance < -left) if left >= 0 else torch.zeros_like(distance, dtype=torch.bool)
    )
    assert not hidden.all(1).any(), "a row sees no key"
    scores = torch.einsum("thd,shd->hts", q.double(), _repeat(k, q)) * scale
    return scores.masked_fill(hidden, -torch.inf)


def _repeat(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return x.double().repeat_interleave(q.shape[1] // x.shape[1], 1)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_starts: torch.Tensor,
    k_starts: torch.Tensor,
    max_q: int,
    max_k: int,
) -> None:
    assert q_starts.dtype == k_starts.dtype == torch.int32
    assert int(q_starts[-1]) == len(q)
    assert int(k_starts[-1]) == len(k) == len(v)
    assert max_q == int(q_starts.diff().max())
    assert max_k == int(k_starts.diff().max())
    assert q.shape[2] == k.shape[2] == v.shape[2]
    assert q.shape[2] % 8 == 0
    assert q.shape[2] <= 256
