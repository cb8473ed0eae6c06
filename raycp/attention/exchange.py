"""Rows on their way: K and V of a step's block, and dK and dV back to whoever adds them up.

Guarantees: a receive has a buffer of its own that no other message uses; sent rows are views where they are one range,
so they must not change until the exchange is over; gradients travel in fp32.

Legend: s rows of a block, K key/value heads (of a group), D head dim, Dv value dim.
"""

import torch

from raycp.attention.call import AttentionCall, Tensors
from raycp.attention.communicator import Communicator, Handle, Message
from raycp.attention.rows import row_places, take_rows
from raycp.plan import Range, Step


class Block:
    """K [s, K, D] and V [s, K, Dv] of one step, filled when `ready` has returned."""

    def __init__(self, step: Step, tensors: Tensors) -> None:
        self.step = step
        self.tensors = tensors
        self._handle: Handle | None = None
        self._staged: list[tuple[torch.Tensor, torch.Tensor, tuple[Range, ...]]] = []

    @property
    def k(self) -> torch.Tensor:
        return self.tensors[0]

    @property
    def v(self) -> torch.Tensor:
        return self.tensors[1]

    def ready(self) -> "Block":
        """Waits for what was posted."""
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
            for buffer, x, places in self._staged:
                for rows, part in row_places(places):
                    x[rows] = buffer[part]
            self._staged = []
        return self


def fetch(
    step: Step, own: Tensors, source: Tensors, call: AttentionCall, *, kept: Tensors = (), round_index: int = 0
) -> Block:
    """Posts the K/V rows that come and go in `step`.

    Args:
        step: of the program.
        own: the own shard's tensors.
        source: tensors of the block that `step.sends` are rows of.
        call: communicators, name, counts.
        kept: tensors of the block that are there already, the first ones of `own`: they do not travel.
        round_index: tells exchanges of one step apart.
    """
    moving = range(len(kept), len(own))
    arriving = tuple(empty_rows(own[n], step.block_rows) for n in moving)
    block = Block(step, (*kept, *arriving))
    if not moving:
        return block
    name = f"K/V rows of {call.name}, step {step.index + round_index}"
    tag = _tag(step, round_index)
    receives, sends = [], []
    for transfer, places in step.arrivals():
        for n, x in zip(moving, arriving, strict=True):
            buffer = x[places[0].start : places[0].stop]
            if len(places) > 1:
                buffer = empty_rows(x, transfer.num_rows)
                block._staged.append((buffer, x, places))
            receives.append(Message(transfer.peer, buffer, tag + n, name))
    for transfer in step.sends:
        for n in moving:
            sends.append(Message(transfer.peer, take_rows(source[n], transfer.rows).contiguous(), tag + n, name))
    block._handle = _post(step, sends, receives, call)
    for rows, place in step.own:
        for n, x in zip(moving, arriving, strict=True):
            x[place.start : place.stop] = own[n][rows.start : rows.stop]
    if step.receives:
        call.stats.hold(arriving)
    return block


def empty_rows(like: torch.Tensor, rows: int) -> torch.Tensor:
    """A buffer [rows, ...] of its own for what arrives."""
    return like.new_empty(rows, *like.shape[1:])


class Returning:
    """dK and dV of one block on their way, and those that arrive here (fp32)."""

    def __init__(
        self, step: Step, share: Tensors | None, like: Tensors, call: AttentionCall, *, round_index: int = 0
    ) -> None:
        """Posts `share`, dK [s, K, D] and dV [s, K, Dv] of the block; what arrives is as `like` but for rows."""
        name = f"dK/dV rows of {call.name}, step {step.index + round_index}"
        tag = _tag(step, round_index) + 2
        self._step = step
        sends = [
            Message(transfer.peer, take_rows(x, transfer.rows).contiguous(), tag + n, name)
            for transfer in step.returns
            for n, x in enumerate(share or ())
        ]
        self._arriving = [
            [x.new_empty(transfer.num_rows, *x.shape[1:], dtype=torch.float32) for x in like]
            for transfer in step.collects
        ]
        receives = [
            Message(transfer.peer, x, tag + n, name)
            for transfer, buffers in zip(step.collects, self._arriving, strict=True)
            for n, x in enumerate(buffers)
        ]
        self._handle = _post(step, sends, receives, call)

    def add_to(self, totals: Tensors) -> None:
        """Waits, then adds what arrived to dK and dV of the block that it belongs to, in the order of the plan."""
        self._handle.wait()
        for transfer, buffers in zip(self._step.collects, self._arriving, strict=True):
            for total, buffer in zip(totals, buffers, strict=True):
                for rows, part in row_places(transfer.rows):
                    total[rows] += buffer[part]


def _tag(step: Step, round_index: int) -> int:
    return 4 * (step.index + round_index)


def _post(step: Step, sends: list[Message], receives: list[Message], call: AttentionCall) -> Handle:
    call.stats.bytes_sent += sum(m.tensor.nbytes for m in sends)
    communicator: Communicator = call.outer if step.outer else call.communicator
    return communicator.post(sends, receives)
