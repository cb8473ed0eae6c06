import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.multiproc.launcher import RankError, run_ranks


def _sum(rank: int, world_size: int, factor: float) -> torch.Tensor:
    x = torch.full((3,), factor * (rank + 1))
    dist.all_reduce(x)
    return x


def _raise_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("planted")
    dist.barrier()


def _die_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def _hang_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(600)


def test_results_come_back_by_rank() -> None:
    for x in run_ranks(_sum, 3, 2.0):
        assert torch.equal(x, torch.full((3,), 12.0))


def test_error_of_one_rank_is_reported_and_ends_the_others() -> None:
    with pytest.raises(RankError, match="planted") as error:
        run_ranks(_raise_on_one, 2)
    assert error.value.rank == 1


def test_death_of_one_rank_is_reported() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(_die_on_one, 2)
    assert error.value.rank in (0, 1)


def test_hang_ends_after_the_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="not finished"):
        run_ranks(_hang_on_one, 2, timeout=4)
    assert time.monotonic() - start < 30
