import threading
import time

import pytest
import torch

from raycp.attention import InMemoryWorld
from raycp.attention.communicator import Communicator, LocalCommunicator, Message
from raycp.errors import PlanError, WorkerError


def _ring_shift(communicator: Communicator, rounds: int = 3) -> list[float]:
    """Sends 10 * rank + round to the next rank, and returns what came."""
    got = []
    after, before = (communicator.rank + 1) % communicator.size, (communicator.rank - 1) % communicator.size
    for i in range(rounds):
        buffer = torch.empty(2)
        payload = torch.full((2,), 10.0 * communicator.rank + i)
        communicator.post([Message(after, payload, i, "x")], [Message(before, buffer, i, "x")]).wait()
        got.append(float(buffer[0]))
    return got


@pytest.mark.parametrize("delay", [0.0, 0.005])
def test_messages_arrive_by_peer_and_tag(delay: float) -> None:
    results = InMemoryWorld(3, delay=delay).run(_ring_shift)
    assert results == [[20.0, 21.0, 22.0], [0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]


def test_stale_fault_brings_the_delivery_before() -> None:
    results = InMemoryWorld(2, stale=True).run(_ring_shift)
    assert results == [[10.0, 10.0, 11.0], [0.0, 0.0, 1.0]]


def test_send_buffer_is_read_late_so_that_early_reuse_shows() -> None:
    posted = threading.Barrier(2)

    def rank(communicator: Communicator) -> float:
        buffer = torch.zeros(1)
        if communicator.rank == 0:
            payload = torch.ones(1)
            handle = communicator.post([Message(1, payload, 0, "x")], [])
            payload.fill_(7)  # what the protocol forbids
            posted.wait()
            handle.wait()
        else:
            posted.wait()
            communicator.post([], [Message(0, buffer, 0, "x")]).wait()
        return float(buffer)

    assert InMemoryWorld(2).run(rank)[1] == 7.0


def test_failure_of_one_rank_ends_the_others_and_is_the_error() -> None:
    def rank(communicator: Communicator) -> None:
        if communicator.rank == 1:
            raise KeyError("planted")
        communicator.post([], [Message(1, torch.empty(1), 0, "rows")]).wait()

    start = time.monotonic()
    with pytest.raises(KeyError, match="planted"):
        InMemoryWorld(2).run(rank)
    assert time.monotonic() - start < 10


def test_wait_names_what_it_waits_for() -> None:
    def rank(communicator: Communicator) -> None:
        if communicator.rank == 0:
            communicator.post([], [Message(1, torch.empty(1), 0, "K/V rows of layer 3, step 1")]).wait()

    with pytest.raises(WorkerError, match=r"cp rank 0 waited for K/V rows of layer 3, step 1 from cp rank 1") as error:
        InMemoryWorld(2, timeout=0.1).run(rank)
    assert error.value.details["cp_rank"] == 0
    assert error.value.fix


def test_ring_of_one_has_no_peer() -> None:
    LocalCommunicator().post([], []).wait()
    with pytest.raises(PlanError, match="has no peer"):
        LocalCommunicator().post([Message(1, torch.empty(1), 0, "x")], [])
