"""A ring of threads in one process: the communicator of tests, so that they run the executors that a run uses.

Guarantees: a message is read from the sender's buffer as late as the protocol allows (when the receiver waits for it),
so a buffer that is reused too early shows as a wrong result; deliveries can be delayed at random and made stale on
purpose. A rank that raises ends the others.
"""

import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from raycp.attention.communicator import Communicator, Handle, Message
from raycp.errors import WorkerError


class InMemoryWorld:
    """The meeting point of `size` ranks.

    Args:
        size: number of ranks.
        delay: largest random wait before a delivery, in seconds.
        latency: seconds from a message's posting until it can be delivered: time that computation may hide.
        seed: of the random waits.
        stale: plants a fault: a delivery brings what the delivery before it to the same rank brought.
        timeout: seconds a rank waits for a message.
    """

    def __init__(
        self,
        size: int,
        *,
        delay: float = 0.0,
        latency: float = 0.0,
        seed: int = 0,
        stale: bool = False,
        timeout: float = 60.0,
    ) -> None:
        self.size = size
        self._delay = delay
        self._latency = latency
        self._stale = stale
        self._timeout = timeout
        self._random = [random.Random(seed * size + rank) for rank in range(size)]
        self._last: dict[int, torch.Tensor] = {}
        self._mail: defaultdict[tuple[int, int, int], deque[_Parcel]] = defaultdict(deque)
        self._changed = threading.Condition()
        self._broken: str | None = None

    def communicator(self, rank: int, members: Sequence[int] | None = None) -> Communicator:
        """The end that belongs to `rank` of a group of ranks; None: all."""
        return _InMemoryCommunicator(self, rank, tuple(range(self.size)) if members is None else tuple(members))

    def run(self, fn: Callable[[Communicator], Any]) -> list[Any]:
        """Calls `fn(communicator)` of every rank, each in its own thread, and returns the results by rank.

        Raises:
            Exception: of the first rank that failed.
        """
        first: list[BaseException] = []

        def guarded(rank: int) -> Any:
            try:
                return fn(self.communicator(rank))
            except BaseException as error:
                with self._changed:
                    first.append(error)
                    self._broken = self._broken or f"rank {rank} raised {type(error).__name__}: {error}"
                    self._changed.notify_all()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(guarded, rank) for rank in range(self.size)]
        if first:
            raise first[0]
        return [future.result() for future in futures]

    def put(self, source: int, message: Message) -> "_Parcel":
        """Hands a message over; it is read later."""
        parcel = _Parcel(message.tensor)
        with self._changed:
            self._mail[source, message.peer, message.tag].append(parcel)
            self._changed.notify_all()
        return parcel

    def take(self, rank: int, message: Message) -> None:
        """Fills the buffer of a receive."""
        mail = self._mail[message.peer, rank, message.tag]
        self.wait_until(lambda: bool(mail), rank, f"{message.name} from cp rank {message.peer}")
        if self._delay:
            time.sleep(self._random[rank].random() * self._delay)
        with self._changed:
            parcel = mail.popleft()
        time.sleep(max(0.0, parcel.posted + self._latency - time.monotonic()))
        fresh = parcel.tensor.clone()
        stale = self._last.get(rank) if self._stale else None
        self._last[rank] = fresh
        message.tensor.copy_(fresh if stale is None else _resized(stale, fresh))
        with self._changed:
            parcel.read = True
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool], rank: int, name: str) -> None:
        """Blocks until `condition`.

        Raises:
            WorkerError: another rank failed, or the time is over.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._broken or condition(), self._timeout)
            if condition():
                return
        cause = self._broken or f"nothing for {self._timeout} s"
        raise WorkerError(
            f"cp rank {rank} waited for {name}: {cause}",
            fix="look for the first rank that failed; this one only noticed",
            waiting_for=name,
            cp_rank=rank,
            cause=cause,
        )


class _Parcel:
    __slots__ = ("posted", "read", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.posted = time.monotonic()
        self.tensor = tensor
        self.read = False


class _InMemoryCommunicator:
    def __init__(self, world: InMemoryWorld, rank: int, members: tuple[int, ...]) -> None:
        self._world = world
        self._members = members
        self._world_rank = rank
        self.rank = members.index(rank)
        self.size = len(members)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        sends, receives = ([replace(m, peer=self._members[m.peer]) for m in ms] for ms in (sends, receives))
        parcels = [(self._world.put(self._world_rank, m), m) for m in sends]
        return _InMemoryHandle(self._world, self._world_rank, parcels, receives)


class _InMemoryHandle:
    def __init__(
        self, world: InMemoryWorld, rank: int, sends: Sequence[tuple[_Parcel, Message]], receives: Sequence[Message]
    ) -> None:
        self._world = world
        self._rank = rank
        self._sends = sends
        self._receives = receives

    def wait(self) -> None:
        for message in self._receives:
            self._world.take(self._rank, message)
        for parcel, message in self._sends:
            name = f"{message.name} to cp rank {message.peer}"
            self._world.wait_until(lambda parcel=parcel: parcel.read, self._rank, name)  # type: ignore[misc]
        self._sends, self._receives = (), ()


def _resized(stale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`stale` repeated or cut to the shape and type of `like`."""
    flat = stale.flatten().to(like.dtype)
    return flat.repeat(-(-like.numel() // flat.numel()))[: like.numel()].view_as(like)
