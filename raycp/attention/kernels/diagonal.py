"""Rows that see one key each: documents of one token, such as padding, all in a few elementwise operations.

Guarantees: where that key is all a row sees, the output is the value's bits and dQ and dK are exactly 0 (a matrix
kernel leaves rounding noise there). Costs no kernel call per document.

Legend: n rows, H query heads, K key/value heads, G = H / K, D head dim, Dv value dim (or both padded to one width).
"""

import torch


def diagonal_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query i against key i: q [n, H, D], k [n, K, D], v [n, K, Dv] -> out [n, H, Dv] fp32, lse [n, H] fp32."""
    num_heads = q.shape[1]
    out = v.float()[:, :, None].expand(-1, -1, num_heads // k.shape[1], -1).flatten(1, 2)
    return out, _scores(q, k, scale).flatten(1)


def diagonal_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients, with the merged output and log-sum-exp; shapes as in `Kernel.backward`, fp32."""
    num_kv_heads = k.shape[1]
    p = (_scores(q, k, scale) - grouped(lse[..., None], num_kv_heads)[..., 0]).exp()[..., None]  # [n, K, G, 1]
    dout = grouped(dout, num_kv_heads)  # [n, K, G, Dv]
    gap = (dout * v.float()[:, :, None]).sum(-1, keepdim=True) - (dout * grouped(out, num_kv_heads)).sum(
        -1, keepdim=True
    )
    dscores = p * gap * scale
    dq = (dscores * k.float()[:, :, None]).flatten(1, 2)
    dk = (dscores * grouped(q, num_kv_heads)).sum(2)
    return dq, dk, (p * dout).sum(2)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """fp32 [n, K, G]."""
    return (grouped(q, k.shape[1]) * k.float()[:, :, None]).sum(-1) * scale


def grouped(x: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Heads by the key/value head that they read: [n, H, D] -> fp32 [n, K, G, D]."""
    return x.float().reshape(len(x), num_kv_heads, x.shape[1] // num_kv_heads, x.shape[-1])
