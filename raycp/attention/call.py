"""What one attention call is, apart from its tensors, and the counts of what it did.

Guarantees: a schedule gets everything that it needs in one object, and nothing from a global.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from raycp.attention.communicator import Communicator, LocalCommunicator
from raycp.attention.kernels import Kernel
from raycp.plan import Range, RankProgram

Tensors = tuple[torch.Tensor, ...]


@dataclass
class AttentionStats:
    """Counts of what one rank did, over all layers that share the object."""

    kernel_forward_calls: int = 0
    kernel_backward_calls: int = 0
    remote_blocks: int = 0
    """Blocks of other ranks' K and V that exist now: arriving, in use, or kept for backward (of "half", K alone)."""
    max_remote_blocks: int = 0
    remote_bytes: int = 0
    """Of these blocks."""
    max_remote_bytes: int = 0
    bytes_sent: int = 0

    def hold(self, block: Tensors) -> None:
        """Counts the tensors of a block for as long as they live; it is a block while the first of them does."""
        for n, x in enumerate(block):
            self._count(n == 0, x.nbytes)
            weakref.finalize(x, self._count, -(n == 0), -x.nbytes)
        self.max_remote_blocks = max(self.max_remote_blocks, self.remote_blocks)
        self.max_remote_bytes = max(self.max_remote_bytes, self.remote_bytes)

    def _count(self, blocks: int, num_bytes: int) -> None:
        self.remote_blocks += blocks
        self.remote_bytes += num_bytes


@dataclass(frozen=True)
class AttentionCall:
    """Everything about one attention call but its tensors."""

    program: RankProgram
    schedule: "Schedule"
    communicator: Communicator
    """Of the ring."""
    kernel: Kernel
    scale: float
    outer: Communicator = field(default_factory=LocalCommunicator)
    """Of the ring too, for what goes between the windows of a double ring."""
    head_groups: tuple[Range, ...] = ()
    """Key/value heads that a schedule which works by heads takes at a time."""
    cached: int = 0
    """Tensors of each remote block that are kept for backward: none, K, or K and V."""
    name: str = "attention"
    """Named in errors: the layer."""
    stats: AttentionStats = field(default_factory=AttentionStats)
    on_step: Callable[[int], None] | None = None
    """Called with the step's index after each computed step: progress."""
    recall: Callable[[], Tensors | None] | None = None
    """What an earlier forward of this very call gave to `keep`, if it did."""
    keep: Callable[[Tensors], None] | None = None
    """Takes what a later run of the same call needs to compute and move nothing: see `raycp.attention.function`."""

    def progress(self, step: int) -> None:
        """Tells whoever watches that a step was computed."""
        if self.on_step is not None:
            self.on_step(step)


class Schedule(Protocol):
    """In which order a program's steps move and compute: `raycp.attention.ring` or `raycp.attention.gather`.

    Legend: t own rows, H query heads, K key/value heads, D head dim, Dv value dim.
    """

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
        """Attention of this rank's queries over the keys of all ranks.

        Args:
            q: [t, H, D].
            k: [t, K, D].
            v: [t, K, Dv].
            call: plan, communicator, kernel.

        Returns:
            out [t, H, Dv] of q's dtype, the log-sum-exp [t, H] fp32, and what is cached for backward.
        """
        ...

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        cache: Tensors,
        call: AttentionCall,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of `forward`.

        Args:
            dout: [t, H, Dv]; any strides.
            q: [t, H, D].
            k: [t, K, D].
            v: [t, K, Dv].
            out: [t, H, Dv], what forward returned.
            lse: [t, H] fp32, what forward returned.
            cache: what forward returned.
            call: plan, communicator, kernel.

        Returns:
            dq [t, H, D], dk [t, K, D], dv [t, K, Dv], fp32; dk and dv hold the shares of all ranks.
        """
        ...
