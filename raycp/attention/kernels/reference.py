"""The reference: dense attention in fp64, one line per formula.

Guarantees: the textbook result, rows without a visible key 0 (log-sum-exp -inf). Costs memory of the square of the
tokens, so it is refused above 8 192. Every schedule and every kernel is tested against it.

Legend: t query rows, s key rows, H query heads, K key/value heads, G = H / K, D head dim, Dv value dim.
"""

from collections.abc import Sequence

import torch

from raycp.errors import PlanError
from raycp.plan import MaskKind, Slice

MAX_TOKENS = 8192


class ReferenceKernel:
    """Follows `raycp.attention.kernels.Kernel`; computes in fp64 whatever the inputs."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slices: Sequence[Slice], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        out, lse = _forward(q, k, v, visible_in(slices, len(q), len(k), q.device), scale)
        return out.float(), lse.float()

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
        visible = visible_in(slices, len(q), len(k), q.device)
        heads_per_kv = q.shape[1] // k.shape[1]
        q64, k64, v64, dout64 = q.double(), _per_query_head(k, q), _per_query_head(v, q), dout.double()
        scores = torch.einsum("thd,shd->hts", q64, k64) * scale
        p = torch.where(visible, (scores - lse.double().t()[:, :, None]).exp(), 0.0)
        delta = (dout64 * out.double()).sum(-1).t()[:, :, None]  # [H, t, 1]
        dscores = p * (torch.einsum("thd,shd->hts", dout64, v64) - delta)
        dq = torch.einsum("hts,shd->thd", dscores, k64) * scale
        dk = torch.einsum("hts,thd->shd", dscores, q64) * scale
        dv = torch.einsum("hts,thd->shd", p, dout64)
        dk, dv = (x.view(len(x), k.shape[1], heads_per_kv, x.shape[-1]).sum(2) for x in (dk, dv))
        return dq.float(), dk.float(), dv.float()


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of one device under a dense mask, in fp64 and differentiable by autograd: the oracle of the tests.

    Args:
        q: [t, H, D].
        k: [s, K, D].
        v: [s, K, Dv].
        visible: bool [t, s].
        scale: factor of the scores.

    Returns:
        [t, H, Dv] fp64.

    Raises:
        PlanError: more than 8 192 tokens.
    """
    return _forward(q, k, v, visible, scale)[0]


def sawtooth(doc_ends: Sequence[int], *, causal: bool = True, window: int | None = None) -> torch.Tensor:
    """The dense mask of a pack, bool [T, T]: True where the query (row) sees the key (column).

    Args:
        doc_ends: where each document ends.
        causal: False: a query sees its whole document.
        window: a query sees at most so many keys, itself and those before it.

    Raises:
        PlanError: more than 8 192 tokens.
    """
    total = doc_ends[-1] if len(doc_ends) else 0
    _check_size(total, total)
    ends = torch.tensor(list(doc_ends), dtype=torch.int64)
    document = torch.searchsorted(ends, torch.arange(total), right=True)
    same = document[:, None] == document[None, :]
    same = same.tril() if causal else same
    return same if window is None else same.triu(1 - window)


def visible_in(slices: Sequence[Slice], num_q: int, num_k: int, device: torch.device) -> torch.Tensor:
    """Slices as a dense mask, bool [num_q, num_k]."""
    _check_size(num_q, num_k)
    visible = torch.zeros(num_q, num_k, dtype=torch.bool, device=device)
    for s in slices:
        block = torch.ones(s.q_stop - s.q_start, s.k_stop - s.k_start, dtype=torch.bool, device=device)
        match s.kind:
            case MaskKind.CAUSAL:
                block = block.tril()
            case MaskKind.DIAGONAL:
                block = block.tril().triu()
            case MaskKind.BAND:
                block = block.tril(s.upper).triu(s.lower)
            case MaskKind.FULL:
                pass
        visible[s.q_start : s.q_stop, s.k_start : s.k_stop] |= block
    return visible


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_size(len(q), len(k))
    scores = torch.einsum("thd,shd->hts", q.double(), _per_query_head(k, q)) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    seen = visible.any(-1) if scores.shape[-1] else torch.zeros(len(q), dtype=torch.bool, device=q.device)
    top = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:2], 1)
    weights = (scores - torch.where(seen[None, :, None], top, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    p = weights / torch.where(seen[None, :, None], total, 1.0)
    lse = torch.where(seen[None], total.squeeze(-1).log() + top.squeeze(-1), -torch.inf)
    return torch.einsum("hts,shd->thd", p, _per_query_head(v, q)), lse.t()


def _per_query_head(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """K/V heads [s, K, D] repeated to query heads: fp64 [s, H, D]."""
    return x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _check_size(num_q: int, num_k: int) -> None:
    if max(num_q, num_k) > MAX_TOKENS:
        raise PlanError(
            f"{num_q} queries x {num_k} keys: the dense reference is limited to {MAX_TOKENS} tokens",
            fix="use raycp.attention.kernels.kernel_for(device), or a shorter pack",
        )
