"""Instruments around communicators and kernels: what they carried, and how long they took.

Guarantees: what they wrap does the same with them as without; a meter belongs to one rank.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from raycp.attention import Groups
from raycp.attention.communicator import Communicator, Handle, Message
from raycp.attention.kernels import Kernel
from raycp.plan import Slice


@dataclass
class Meter:
    """Bytes that one rank sent and received, seconds in its kernels, and seconds that it posted and waited."""

    sent: int = 0
    received: int = 0
    kernel_seconds: float = 0.0
    exchange_seconds: float = 0.0

    def on(self, groups: Groups) -> Groups:
        """The same groups, metered."""
        return replace(
            groups,
            communicator=_MeteredCommunicator(groups.communicator, self),
            ulysses=_MeteredCommunicator(groups.ulysses, self),
            outer=_MeteredCommunicator(groups.outer, self),
        )


class _MeteredCommunicator:
    def __init__(self, inner: Communicator, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter
        self.rank, self.size = inner.rank, inner.size

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        self._meter.sent += sum(m.tensor.nbytes for m in sends)
        self._meter.received += sum(m.tensor.nbytes for m in receives)
        began = time.perf_counter()
        handle = self._inner.post(sends, receives)
        self._meter.exchange_seconds += time.perf_counter() - began
        return _MeteredHandle(handle, self._meter)


class _MeteredHandle:
    def __init__(self, inner: Handle, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter

    def wait(self) -> None:
        began = time.perf_counter()
        self._inner.wait()
        self._meter.exchange_seconds += time.perf_counter() - began


class MeteredKernel:
    """Follows `Kernel`; t, s, H, K, D, Dv as there."""

    def __init__(self, inner: Kernel, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slices: Sequence[Slice], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        began = time.perf_counter()
        result = self._inner.forward(q, k, v, slices, scale)
        self._meter.kernel_seconds += time.perf_counter() - began
        return result

    def backward(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Kernel.backward`."""
        began = time.perf_counter()
        result = self._inner.backward(*arguments)
        self._meter.kernel_seconds += time.perf_counter() - began
        return result
