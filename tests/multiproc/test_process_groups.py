"""The life cycle of process groups on real gloo: create, warm, abort, rebuild in the same process."""

import socket
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from raycp.driver.store import open_store
from raycp.errors import ClusterError, WorkerError
from raycp.plan import RankGrid
from raycp.training.device import resolve_device
from raycp.training.state import STEP, export_state
from tests.multiproc.launcher import run_ranks
from workers.messages import Rendezvous
from workers.process_groups import ProcessGroups

LOOPBACK = "127.0.0.1"
CPU = resolve_device("cpu", {})


def rendezvous(rank: int, grid: RankGrid, port: int, generation: int = 1, timeout: float = 30.0) -> Rendezvous:
    return Rendezvous(
        generation=generation, rank=rank, grid=grid, store_host=LOOPBACK, store_port=port, timeout=timeout, threads=1
    )


def create(rank: int, world_size: int, port: int) -> ProcessGroups:
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves before another has connected would break its start
        dist.destroy_process_group()  # the launcher's own
    grid = RankGrid(dp=world_size // 2, ring=2)
    groups = ProcessGroups.create(rendezvous(rank, grid, port), device=CPU, address=LOOPBACK)
    groups.warm()
    return groups


def total() -> float:
    value = torch.ones(1)
    dist.all_reduce(value)
    return float(value)


def _stuck_until_aborted(rank: int, world_size: int, port: int) -> tuple[float, str]:
    """Rank 0 waits for a message that nobody sends; a control thread aborts it; the others see it too."""
    groups = create(rank, world_size, port)
    cut: list[int] = []
    if rank == 0:
        threading.Timer(0.5, lambda: cut.append(groups.abort())).start()
    began = time.monotonic()
    try:
        if rank == 0:
            dist.recv(torch.empty(4), src=1)
        else:
            total()
        return time.monotonic() - began, "no error"
    except RuntimeError as error:
        groups.abort()
        groups.destroy()
        return time.monotonic() - began, str(error)


def test_abort_frees_ranks_that_wait_for_a_message_long_before_the_timeout() -> None:
    store = open_store(LOOPBACK)
    for seconds, message in run_ranks(_stuck_until_aborted, 2, store.port):
        assert message != "no error"
        assert 0.3 < seconds < 5.0, f"freed after {seconds:.1f} s; the group's time-out is 30 s"


def _listens(rank: int, world_size: int, port: int, address: str) -> tuple[set[str], int]:
    """Addresses that this rank listens on for its groups, and the sockets there."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    before = set(_listening())
    at = rendezvous(rank, RankGrid(dp=1, ring=world_size), port)
    groups = ProcessGroups.create(at, device=CPU, address=address)
    groups.warm()
    found = set(_listening()) - before
    dist.barrier()
    groups.abort()
    groups.destroy()
    return {ip for ip, _ in found}, len(found)


def _listening() -> list[tuple[str, int]]:
    return [
        (c.laddr.ip, c.laddr.port) for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN
    ]


OTHERS = [
    address.address
    for addresses in psutil.net_if_addrs().values()
    for address in addresses
    if address.family == socket.AF_INET and address.address != LOOPBACK
]


@pytest.mark.parametrize("address", [LOOPBACK, *OTHERS[:1]])
def test_groups_listen_on_the_interface_of_the_cluster_and_on_no_other(address: str) -> None:
    store = open_store(LOOPBACK)
    for addresses, sockets in run_ranks(_listens, 2, store.port, address):
        assert addresses == {address}
        assert sockets >= 1


def _rebuilt(rank: int, world_size: int, port: int) -> tuple[float, float, str]:
    groups = create(rank, world_size, port)
    before = total()
    grid = RankGrid(dp=1, ring=world_size)
    groups = groups.rebuild(rendezvous(rank, grid, port, generation=2), device=CPU, address=LOOPBACK)
    groups.warm()
    after = total()
    try:
        groups.rebuild(rendezvous(rank, grid, port, generation=2), device=CPU, address=LOOPBACK)
        refusal = ""
    except ClusterError as error:
        refusal = error.message
    dist.barrier()
    groups.abort()
    groups.destroy()
    return before, after, refusal


def test_rebuild_in_place_with_another_grid_and_only_with_a_newer_generation() -> None:
    store = open_store(LOOPBACK)
    for before, after, refusal in run_ranks(_rebuilt, 4, store.port):
        assert before == after == 4
        assert "generation 2 is not newer than 2" in refusal


def test_a_store_that_nobody_hosts_is_named() -> None:
    nowhere = rendezvous(0, RankGrid(dp=1, ring=1), port=1, timeout=2.0)
    with pytest.raises(WorkerError, match=r"store 127\.0\.0\.1:1"):
        ProcessGroups.create(nowhere, device=CPU, address=LOOPBACK)


def test_a_rank_that_comes_late_to_a_store_that_was_closed_leaves_within_seconds() -> None:
    """It tried for the whole time-out to reach the store, and counted as lost meanwhile."""
    store = open_store(LOOPBACK)
    port = store.port
    del store
    began = time.monotonic()
    with pytest.raises(WorkerError, match="could not connect"):
        ProcessGroups.create(rendezvous(0, RankGrid(dp=1, ring=1), port), device=CPU, address=LOOPBACK)
    assert time.monotonic() - began < 9.0


def _meets_after_a_failure(rank: int, world_size: int, port: int) -> float:
    """Rank 0 waits in vain for rank 1, which is late; then both join the next generation."""
    groups = create(rank, world_size, port)
    grid = RankGrid(dp=1, ring=world_size)
    if rank == 0:
        with pytest.raises(WorkerError, match="could not connect"):
            groups.rebuild(rendezvous(rank, grid, port, generation=2, timeout=1.0), device=CPU, address=LOOPBACK)
    groups = groups.rebuild(rendezvous(rank, grid, port, generation=3, timeout=10.0), device=CPU, address=LOOPBACK)
    groups.warm()
    result = total()
    dist.barrier()
    groups.abort()
    groups.destroy()
    return result


def test_a_rank_that_failed_to_connect_once_meets_its_peers_in_the_next_generation() -> None:
    """It waited under another name for ever: torch counts groups that could not be made."""
    store = open_store(LOOPBACK)
    assert run_ranks(_meets_after_a_failure, 2, store.port) == [2.0, 2.0]


def _second_try_of_a_new_rank(rank: int, world_size: int, port: int) -> str:
    """A rank without groups fails to connect, and is not in the way of its own next attempt."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    grid = RankGrid(dp=1, ring=2)
    with pytest.raises(WorkerError):
        ProcessGroups.create(rendezvous(0, grid, port, timeout=1.0), device=CPU, address=LOOPBACK)
    alone = RankGrid(dp=1, ring=1)
    groups = ProcessGroups.create(rendezvous(0, alone, port, generation=2 + rank), device=CPU, address=LOOPBACK)
    groups.warm()
    groups.destroy()
    return "well"


def test_a_new_rank_that_failed_to_connect_can_try_again() -> None:
    store = open_store(LOOPBACK)
    assert run_ranks(_second_try_of_a_new_rank, 1, store.port) == ["well"]


def _places_after_swap(rank: int, world_size: int, port: int) -> list[tuple[bool, bool, bool]]:
    """For two generations, in the second of which the ranks have changed places: whether the parameters are on the mesh
    of that generation, at the place of this rank, and whether this rank exports the optimizer's step.
    """
    groups = create(rank, world_size, port)
    found = []
    for generation in (2, 3):
        place = rank if generation == 2 else world_size - 1 - rank
        at = rendezvous(place, RankGrid(dp=1, ring=world_size), port, generation=generation)
        groups = groups.rebuild(at, device=CPU, address=LOOPBACK)
        groups.warm()
        layer = torch.nn.Linear(4, 4)
        fully_shard(layer, mesh=groups.mesh)
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        mesh = next(layer.parameters()).device_mesh  # type: ignore[attr-defined]
        found.append((mesh is groups.mesh, mesh.get_coordinate() == (place,), STEP in export_state(layer, optimizer)))
    dist.barrier()
    groups.abort()
    groups.destroy()
    return found


def test_ranks_that_changed_places_hold_and_export_what_is_of_their_new_place() -> None:
    """After a recovery two ranks gave the optimizer's step, and no later recovery could read the state."""
    store = open_store(LOOPBACK)
    first, second = run_ranks(_places_after_swap, 2, store.port)
    assert first == [(True, True, True), (True, True, False)]
    assert second == [(True, True, False), (True, True, True)]
