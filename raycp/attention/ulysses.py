"""Ulysses: ranks of a group trade tokens for heads before attention, and back after it.

Guarantees: each rank sends a head only to the rank that computes it, and receives exactly the key/value heads that its
query heads read; q, k and v travel in one exchange. The two directions are each other's gradient: gradients of a
key/value head that several ranks hold are summed in fp32, in the order of the ranks. Neither tokens nor heads need
divide. (Jacobs et al., DeepSpeed Ulysses, 2309.14509.)

Legend: t own rows, N rows of the whole group, H heads of the model, h heads of a rank, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from raycp.attention.call import AttentionStats
from raycp.attention.communicator import Communicator, Message
from raycp.plan import Range


@dataclass(frozen=True)
class HeadExchange:
    """Who holds which rows of the group's tokens, and who computes which heads."""

    communicator: Communicator
    rows: tuple[int, ...]
    """Rows of each rank; they follow each other in the order of the ranks."""
    name: str = "attention"
    stats: AttentionStats = field(default_factory=AttentionStats)

    def to_heads(self, tensors: Sequence[torch.Tensor], heads: Sequence[Sequence[Range]]) -> tuple[torch.Tensor, ...]:
        """Each [t, H, D] -> [N, h, D]. `heads[i][rank]`: the heads of tensor i that `rank` computes."""
        rank, offsets = self.communicator.rank, self._offsets()
        out = [
            x.new_empty(sum(self.rows), len(share[rank]), x.shape[2]) for x, share in zip(tensors, heads, strict=True)
        ]
        sends, receives = [], []
        for tag, (x, y, share) in enumerate(zip(tensors, out, heads, strict=True)):
            for peer, rows in enumerate(self.rows):
                mine, theirs = y[offsets[peer] : offsets[peer] + rows], x[:, share[peer].start : share[peer].stop]
                if peer == rank:
                    mine.copy_(theirs)
                    continue
                if rows:
                    receives.append(Message(peer, mine, tag, f"heads of {self.name}"))
                if len(x):
                    sends.append(Message(peer, theirs.contiguous(), tag, f"heads of {self.name}"))
        self._run(sends, receives)
        return tuple(out)

    def to_tokens(self, tensors: Sequence[torch.Tensor], heads: Sequence[Sequence[Range]]) -> tuple[torch.Tensor, ...]:
        """Each [N, h, D] -> [t, H, D], summed where several ranks have a head: the adjoint of `to_heads`."""
        rank, offsets = self.communicator.rank, self._offsets()
        own_rows, sends, receives = self.rows[rank], [], []
        arriving: list[list[torch.Tensor]] = []
        for tag, (y, share) in enumerate(zip(tensors, heads, strict=True)):
            parts = []
            for peer, rows in enumerate(self.rows):
                theirs = y[offsets[peer] : offsets[peer] + rows]
                if peer == rank:
                    parts.append(theirs)
                    continue
                parts.append(y.new_empty(own_rows, len(share[peer]), y.shape[2]))
                if own_rows:
                    receives.append(Message(peer, parts[-1], tag, f"tokens of {self.name}"))
                if rows:
                    sends.append(Message(peer, theirs.contiguous(), tag, f"tokens of {self.name}"))
            arriving.append(parts)
        self._run(sends, receives)
        out = []
        for y, share, parts in zip(tensors, heads, arriving, strict=True):
            total = y.new_zeros(own_rows, max(r.stop for r in share), y.shape[2], dtype=torch.float32)
            for r, part in zip(share, parts, strict=True):
                total[:, r.start : r.stop] += part
            out.append(total.to(y.dtype))
        return tuple(out)

    def _offsets(self) -> list[int]:
        return [sum(self.rows[:rank]) for rank in range(len(self.rows))]

    def _run(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self.stats.bytes_sent += sum(m.tensor.nbytes for m in sends)
        self.communicator.post(sends, receives).wait()


class TokensToHeads(torch.autograd.Function):
    """`TokensToHeads.apply(exchange, heads, *tensors)`: `HeadExchange.to_heads`, differentiable once."""

    @staticmethod
    def forward(
        ctx: Any, exchange: HeadExchange, heads: Sequence[Sequence[Range]], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """One exchange."""
        ctx.exchange, ctx.heads = exchange, heads
        return exchange.to_heads(tensors, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """One exchange, the other way."""
        return None, None, *ctx.exchange.to_tokens(gradients, ctx.heads)


class HeadsToTokens(torch.autograd.Function):
    """`HeadsToTokens.apply(exchange, heads, tensor)`: `HeadExchange.to_tokens`, differentiable once."""

    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, heads: Sequence[Range], tensor: torch.Tensor) -> torch.Tensor:
        """One exchange."""
        ctx.exchange, ctx.heads = exchange, heads
        return exchange.to_tokens((tensor,), (heads,))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        """One exchange, the other way."""
        return None, None, ctx.exchange.to_heads((gradient,), (ctx.heads,))[0]
