"""Ulysses: ranks of a group trade tokens for heads before attention, and back after it.

Guarantees: each rank sends a head only to the rank that computes it, and receives exactly the key/value heads that its
query heads read; q, k and v travel in one exchange. The two directions are each other's gradient: gradients of a
key/value head that several ranks hold are summed in fp32, in the order of the ranks. Neither tokens nor heads need
divide. (Jacobs et al., DeepSpeed Ulysses, 2309.14509.)

Legend: t own rows, N rows of the whole group, H (query) heads of the model, h of a rank, K and g key/value heads
of both, D head dim, Dv value dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

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


@dataclass(frozen=True)
class HeadTrade:
    """The exchanges around one attention call. A gradient travels the way its tensor came, in the tensor's dtype."""

    exchange: HeadExchange
    query: Sequence[Range]
    """Query heads of each rank of the group."""
    kv: Sequence[Range]
    """Key/value heads of each rank of the group."""

    def inputs_to_heads(self, qkv: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Q [t, H, D], k [t, K, D], v [t, K, Dv] -> [N, h, D], [N, g, D], [N, g, Dv]."""
        return self.exchange.to_heads(qkv, (self.query, self.kv, self.kv))

    def inputs_to_tokens(self, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The adjoint of `inputs_to_heads`."""
        return self.exchange.to_tokens(gradients, (self.query, self.kv, self.kv))

    def output_to_tokens(self, out: torch.Tensor) -> torch.Tensor:
        """[N, h, Dv] -> [t, H, Dv]."""
        return self.exchange.to_tokens((out,), (self.query,))[0]

    def output_to_heads(self, gradient: torch.Tensor) -> torch.Tensor:
        """The adjoint of `output_to_tokens`."""
        return self.exchange.to_heads((gradient,), (self.query,))[0]
