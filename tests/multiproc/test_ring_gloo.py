"""The ring over gloo processes: the same executor and oracle as with threads, a smaller set of packs."""

import datetime
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raycp.attention import Groups, build_groups, cp_attention
from raycp.attention.kernels import CpuFlashKernel
from raycp.errors import PlanError, WorkerError
from raycp.plan import RankGrid
from tests.multiproc.launcher import run_ranks
from tests.unit.attention.cases import TOLERANCE, Case, errors, random_case, run_rank

WORLDS = (2, 3, 4)


def _cases(world_size: int) -> list[Case]:
    rng = random.Random(world_size)
    fixed = [
        Case((1,), world_size),
        Case((1, 90, 1, 33), world_size, layout="contiguous"),
        Case((97,), world_size, 5, 1, 8, 12),
        Case((3, 61, 1, 1, 20), world_size, mask="full"),
    ]
    drawn = [random_case(rng, max_ring=1) for _ in range(16)]
    return fixed + [Case(**{**case.__dict__, "ring": world_size}) for case in drawn]


def _run_cases(rank: int, world_size: int, double: bool = False) -> list[tuple[torch.Tensor, ...]]:
    groups = build_groups(RankGrid(1, world_size))
    assert groups.cp_rank == rank
    kernel = _Doubled() if double else None
    return [run_rank(case, groups, kernel=kernel) for case in _cases(world_size)]


class _Doubled(CpuFlashKernel):
    """Planted fault: gradients x 2."""

    def backward(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq, dk, dv = super().backward(*args)
        return dq * 2, dk * 2, dv * 2


@pytest.mark.parametrize("world_size", WORLDS)
def test_processes_agree_with_the_oracle(world_size: int) -> None:
    by_rank = run_ranks(_run_cases, world_size)
    for i, case in enumerate(_cases(world_size)):
        found = errors(case, [parts[i] for parts in by_rank])
        assert max(found.values()) <= TOLERANCE, (case, found)


def _run_ulysses(rank: int, world_size: int, ring: int) -> list[tuple[torch.Tensor, ...]]:
    groups = build_groups(RankGrid(1, ring, world_size // ring))
    return [run_rank(case, groups) for case in _ulysses_cases(world_size, ring)]


def _ulysses_cases(world_size: int, ring: int) -> list[Case]:
    shared = {"ring": ring, "ulysses": world_size // ring, "num_heads": 9, "num_kv_heads": 3}
    return [
        Case((1, 90, 1, 33), layout="balanced", **shared),
        Case((97,), layout="zigzag", value_dim=12, **shared),
        Case((3, 61, 1, 20), mask="full", layout="contiguous", **shared),
        Case((1, 1), **shared),
    ]


@pytest.mark.parametrize(("world_size", "ring"), [(2, 1), (3, 1), (4, 2)])
def test_ulysses_and_hybrid_agree_with_the_oracle(world_size: int, ring: int) -> None:
    by_rank = run_ranks(_run_ulysses, world_size, ring)
    for i, case in enumerate(_ulysses_cases(world_size, ring)):
        found = errors(case, [parts[i] for parts in by_rank])
        assert max(found.values()) <= TOLERANCE, (case, found)


def _run_schedules(rank: int, world_size: int) -> list[tuple[torch.Tensor, ...]]:
    cases = _schedule_cases(world_size)
    groups = {grid: build_groups(grid) for grid in dict.fromkeys(case.plan().grid for case in cases)}
    return [run_rank(case, groups[case.plan().grid]) for case in cases]


def _schedule_cases(world_size: int) -> list[Case]:
    """Each pack by allgather, with a cache, and through a double ring."""
    rng = random.Random(40 + world_size)
    cases = []
    for _ in range(6):
        case = random_case(rng, max_ring=1)
        cases.append(replace(case, ring=world_size, algorithm="allgather"))
        cases.append(replace(case, ring=world_size, kv_cache=rng.choice(["half", "full"]), algorithm="ring"))
        if world_size == 4:
            cases.append(replace(case, ring=4, inner=2, kv_cache=rng.choice(["none", "half"])))
    return cases


@pytest.mark.parametrize("world_size", WORLDS)
def test_gathering_caches_and_double_rings_agree_with_the_oracle(world_size: int) -> None:
    by_rank = run_ranks(_run_schedules, world_size)
    for i, case in enumerate(_schedule_cases(world_size)):
        found = errors(case, [parts[i] for parts in by_rank])
        assert max(found.values()) <= TOLERANCE, (case, found)


def test_planted_fault_shows_over_processes() -> None:
    by_rank = run_ranks(_run_cases, 2, True)
    assert max(errors(_cases(2)[2], [parts[2] for parts in by_rank]).values()) > 0.5


def _two_rings(rank: int, world_size: int) -> tuple[list[int], int, int, torch.Tensor]:
    grid = RankGrid(2, 2)
    groups = build_groups(grid, timeout=datetime.timedelta(seconds=20))
    (group,) = groups.process_groups
    case = Case((20, 13), 2, seed=grid.coordinates(rank).dp_index)
    plan = case.plan()
    plan = type(plan).build(plan.doc_ends, grid, num_heads=4, num_kv_heads=2)
    index = torch.from_numpy(plan.token_index(groups.cp_rank))
    q, k, v, _ = (x[index] for x in case.tensors())
    out = cp_attention(q, k, v, plan=plan, groups=groups)
    return dist.get_process_group_ranks(group), groups.communicator.rank, groups.cp_rank, out


def test_replicas_have_rings_of_their_own() -> None:
    results = run_ranks(_two_rings, 4)
    assert [(members, ring, cp) for members, ring, cp, _ in results] == [
        ([0, 1], 0, 0),
        ([0, 1], 1, 1),
        ([2, 3], 0, 0),
        ([2, 3], 1, 1),
    ]
    assert not torch.equal(results[0][3], results[2][3])


def _wrong_worlds(rank: int, world_size: int) -> list[str]:
    said = []
    for grid in (RankGrid(1, 3), RankGrid(1, 1, 3)):
        with pytest.raises(PlanError) as error:
            build_groups(grid)
        said.append(str(error.value))
    single = build_groups(RankGrid(2, 1))
    assert single.process_groups == ()
    assert single.communicator.size == 1
    return said


def test_grids_of_another_world_are_refused() -> None:
    for said in run_ranks(_wrong_worlds, 2):
        assert "has 3 ranks, but the process group has 2" in said[0]
        assert "has 3 ranks" in said[1]


def _one_rank_is_gone(rank: int, world_size: int) -> str:
    groups = build_groups(RankGrid(1, world_size), timeout=datetime.timedelta(seconds=2))
    if rank == 1:
        return "gone"
    with pytest.raises(WorkerError) as error:
        run_rank(Case((40,), world_size), groups)
    return str(error.value)


def test_waiting_for_a_rank_that_never_comes_names_the_rows() -> None:
    """The ring's own time-out ends the wait."""
    said = run_ranks(_one_rank_is_gone, 2)[0]
    assert "cp rank 0 waited for K/V rows of attention, step 1 from cp rank 1" in said


def test_several_ranks_need_a_process_group() -> None:
    with pytest.raises(PlanError, match="not initialised") as error:
        build_groups(RankGrid(1, 2))
    assert error.value.fix
    assert isinstance(build_groups(RankGrid(1, 1)), Groups)
