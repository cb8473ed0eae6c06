"""Joins attention over disjoint sets of keys: the online softmax, in fp32.

Guarantees: merging in any number of parts gives the softmax over all keys; a row without a visible key stays 0 with
log-sum-exp -inf and never becomes NaN, while a NaN of the inputs stays one.

Legend: t query rows, H query heads, Dv value dim.
"""

import torch


def merge_(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merges a part into `out` and `lse`, in place.

    Args:
        out: [t, H, Dv] fp32, softmax over the keys so far.
        lse: [t, H] fp32, their log-sum-exp; -inf for none.
        part: [t, H, Dv] fp32, softmax over further keys.
        part_lse: [t, H] fp32.
    """
    weight = torch.where(part_lse == -torch.inf, 0.0, torch.sigmoid(part_lse - lse))
    out.lerp_(part, weight[..., None])
    lse.copy_(torch.logaddexp(lse, part_lse))
