"""First messages of pairs: in one order on all ranks, over links that are made when two ranks first meet."""

import threading
from collections.abc import Sequence

import pytest
import torch

from raycp.attention.communicator import Communicator, Handle, LocalCommunicator, Message
from raycp.attention.groups import Groups
from raycp.attention.in_memory import InMemoryWorld
from raycp.attention.warm import _warm, pair_order, warm_pairs
from raycp.errors import ClusterError, WorkerError
from raycp.plan import RankGrid

CPU = torch.device("cpu")


class Links:
    """What HCCL does for two ranks that first meet: both enter, and neither goes on until the other is there."""

    def __init__(self, patience: float) -> None:
        self.made: set[frozenset[int]] = set()
        self._patience = patience
        self._barriers: dict[frozenset[int], threading.Barrier] = {}
        self._lock = threading.Lock()

    def meet(self, pair: frozenset[int]) -> None:
        if pair in self.made:
            return
        with self._lock:
            barrier = self._barriers.setdefault(pair, threading.Barrier(2))
        try:
            barrier.wait(self._patience)
        except threading.BrokenBarrierError as error:
            raise WorkerError(f"{sorted(pair)} never met", fix="") from error
        self.made.add(pair)


class LazyCommunicator:
    """Follows `Communicator`; makes a link before the first message of a pair, receives first, as `post` lists them."""

    def __init__(self, inner: Communicator, links: Links) -> None:
        self._inner, self._links = inner, links
        self.rank, self.size = inner.rank, inner.size

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        for message in (*receives, *sends):
            self._links.meet(frozenset((self.rank, message.peer)))
        return self._inner.post(sends, receives)


def lazy(size: int, patience: float = 20.0) -> tuple[InMemoryWorld, Links]:
    return InMemoryWorld(size), Links(patience)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 13])
def test_all_pairs_have_their_links(size: int) -> None:
    world, links = lazy(size)
    made = world.run(lambda c: _warm(LazyCommunicator(c, links), pair_order(size), CPU))
    assert made == [size - 1] * size
    assert len(links.made) == size * (size - 1) // 2


def test_everybody_from_its_own_predecessor_is_a_circle() -> None:
    """What a first step would do: each rank receives from the rank before it, and waits for it to come."""

    def step(communicator: Communicator) -> None:
        rank, size = communicator.rank, communicator.size
        one, other = torch.ones(1), torch.ones(1)
        sends, receives = [Message((rank + 1) % size, one, 0, "k")], [Message((rank - 1) % size, other, 0, "k")]
        communicator.post(sends, receives).wait()

    cold, unlinked = lazy(4, patience=0.5)
    with pytest.raises(WorkerError, match="never met"):
        cold.run(lambda c: step(LazyCommunicator(c, unlinked)))
    world, links = lazy(4)
    world.run(lambda c: _warm(LazyCommunicator(c, links), pair_order(4), CPU))
    world.run(lambda c: step(LazyCommunicator(c, links)))


def test_pairs_without_a_common_rank_run_side_by_side() -> None:
    """Rounds that the order takes, if each pair starts as soon as both of its ranks are free."""
    for size in (4, 8, 16, 64):
        free = [0] * size
        for a, b in pair_order(size):
            free[a] = free[b] = max(free[a], free[b]) + 1
        assert max(free) <= 2 * size


def test_a_double_ring_links_windows_and_places() -> None:
    assert sorted(pair_order(6, window=3)) == [(0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5)]
    assert sorted(pair_order(6, window=3, outer=True)) == [(0, 3), (1, 4), (2, 5)]
    assert pair_order(1) == []


def test_every_group_of_a_rank() -> None:
    world, links = lazy(6)
    grid = RankGrid(dp=1, ring=6, window=3)
    outer = InMemoryWorld(6)

    def warm(c: Communicator) -> int:
        ends = LazyCommunicator(c, links), LazyCommunicator(outer.communicator(c.rank), links)
        return warm_pairs(Groups(grid, c.rank, ends[0], (), LocalCommunicator(), ends[1]), CPU)

    assert world.run(warm) == [3] * 6
    assert len(links.made) == 9


def test_a_number_that_is_not_the_peers_shows() -> None:
    world = InMemoryWorld(3, stale=True)
    with pytest.raises(ClusterError, match="was sent"):
        world.run(lambda c: _warm(c, pair_order(3), CPU))
