"""Any kernel for query heads that do not divide evenly over key/value heads, as in a Ulysses rank of 5 + 4 heads.

Guarantees: no key or value is copied: neighbouring key/value heads with the same number of query heads are one call.

Legend: t query rows, s key rows, H query heads, K key/value heads, D head dim, Dv value dim.
"""

from collections.abc import Iterator, Sequence

import torch

from raycp.attention.kernels.protocol import Kernel
from raycp.plan import Slice


class UnevenHeads:
    """Follows `Kernel`; key/value head i is read by the next `group_sizes[i]` query heads."""

    def __init__(self, kernel: Kernel, group_sizes: Sequence[int]) -> None:
        self._kernel = kernel
        self._group_sizes = tuple(group_sizes)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slices: Sequence[Slice], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        parts = [self._kernel.forward(q[:, a], k[:, b], v[:, b], slices, scale) for a, b in self._runs()]
        return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)

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
        parts = [
            self._kernel.backward(dout[:, a], q[:, a], k[:, b], v[:, b], out[:, a], lse[:, a], slices, scale)
            for a, b in self._runs()
        ]
        dq, dk, dv = (torch.cat(columns, 1) for columns in zip(*parts, strict=True))
        return dq, dk, dv

    def _runs(self) -> Iterator[tuple[slice, slice]]:
        """Query heads and key/value heads of each call."""
        query = first = 0
        for head, size in enumerate(self._group_sizes):
            if head + 1 == len(self._group_sizes) or self._group_sizes[head + 1] != size:
                stop = query + size * (head + 1 - first)
                yield slice(query, stop), slice(first, head + 1)
                query, first = stop, head + 1


def for_groups(kernel: Kernel, group_sizes: Sequence[int]) -> Kernel:
    """`kernel` itself where every key/value head has the same number of query heads."""
    return kernel if len(set(group_sizes)) == 1 else UnevenHeads(kernel, group_sizes)
