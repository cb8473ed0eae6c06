"""How rows travel between the ranks of a ring: one small protocol, and its process-group implementation.

Guarantees: a posted exchange runs while the caller computes; its buffers must not be touched, and are kept alive, until
`wait` returns; a failure says which rows from which rank were waited for. Executors know only the protocol.

* `ProcessGroupCommunicator`: torch.distributed (gloo, NCCL, HCCL)
* `LocalCommunicator`: a ring of one
* `raycp.attention.in_memory.InMemoryWorld`: threads of one process, with delays and faults to order
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from raycp.errors import PlanError, WorkerError


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """One contiguous tensor to or from ring index `peer`; messages of a pair are told apart by `tag`."""

    peer: int
    tensor: torch.Tensor
    tag: int
    name: str


class Handle(Protocol):
    """An exchange in flight."""

    def wait(self) -> None:
        """Returns when every receive is filled and every send buffer may be reused.

        Raises:
            WorkerError: a peer failed or did not answer in time.
        """
        ...


class Communicator(Protocol):
    """The ring, seen from one of its ranks."""

    @property
    def rank(self) -> int:
        """Own ring index."""
        ...

    @property
    def size(self) -> int:
        """Ranks of the ring."""
        ...

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        """Starts all sends and receives, and returns at once."""
        ...


class ProcessGroupCommunicator:
    """Follows `Communicator` over a torch process group whose group ranks are the ring indices."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        """See `Communicator.post`. In each pair of ranks, both must post in the same order."""
        messages = [*receives, *sends]
        if not messages:
            return _Posted([], [], self.rank)
        ops = [
            dist.P2POp(dist.irecv if i < len(receives) else dist.isend, m.tensor, None, self._group, m.tag, m.peer)
            for i, m in enumerate(messages)
        ]
        names = [f"{m.name} {'from' if i < len(receives) else 'to'} cp rank {m.peer}" for i, m in enumerate(messages)]
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise _failure("could not post", ", ".join(names), self.rank, error) from error
        if len(works) != len(names):  # back ends that coalesce return one work for all
            names = [", ".join(names)] * len(works)
        return _Posted(list(zip(works, names, strict=True)), messages, self.rank)


class _Posted:
    def __init__(self, works: list[tuple[dist.Work, str]], messages: list[Message], rank: int) -> None:
        self._works = works
        self._messages = messages  # keeps the buffers alive
        self._rank = rank

    def wait(self) -> None:
        for work, name in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                raise _failure("waited for", name, self._rank, error) from error
        self._works, self._messages = [], []


class LocalCommunicator:
    """A ring of one rank: there is nobody to exchange with."""

    rank = 0
    size = 1

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        """Returns a finished handle.

        Raises:
            PlanError: there is a message.
        """
        if sends or receives:
            raise PlanError(
                f"a ring of one rank has no peer for {[m.name for m in (*sends, *receives)]}",
                fix="build the plan and the groups from the same RankGrid",
            )
        return _Posted([], [], 0)


def _failure(what: str, name: str, rank: int, error: RuntimeError) -> WorkerError:
    return WorkerError(
        f"cp rank {rank} {what} {name}: {error}",
        fix="look for the first rank that failed; this one only noticed",
        waiting_for=name,
        cp_rank=rank,
        cause=str(error),
    )
