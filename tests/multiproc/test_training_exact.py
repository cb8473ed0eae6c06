"""One step gives the numbers of one device: any dp x cp, accumulation, sharding, with and without recomputation."""

from functools import cache

import pytest
import torch

from tests.multiproc.launcher import RankError, run_ranks
from tests.multiproc.training_cases import Case, Result, difference, run_cases, run_reference

TOLERANCE = 1e-5

BY_WORLD = {
    1: [
        Case(packs=1),
        Case(packs=2, tied=True),
        Case(packs=3, weighted=True),
        Case(packs=2, sparse=True, checkpointing=True),
        Case(packs=2, tied=True, shard="none"),
        Case(packs=3, weighted=True, shard="none", once=True),
    ],
    2: [
        *(Case(dp=2, packs=n) for n in (1, 2, 4)),
        *(Case(cp=2, packs=n) for n in (1, 2, 3)),
        Case(dp=2, packs=3, tied=True, weighted=True),
        Case(cp=2, packs=3, weighted=True),
        Case(dp=2, packs=2, tied=True, shard="none"),
        Case(cp=2, packs=2, tied=True, checkpointing=True),
        Case(cp=2, packs=2, sparse=True, layout="contiguous"),
        Case(cp=2, packs=2, sparse=True, checkpointing=True, layout="contiguous", shard="none"),
        Case(dp=2, packs=1, sparse=True, checkpointing=True),
        Case(dp=2, packs=4, shard="none", once=True),
        Case(cp=2, packs=3, weighted=True, checkpointing=True, shard="none", once=True),
    ],
    4: [
        Case(dp=2, cp=2, packs=2),
        Case(dp=2, cp=2, packs=3, weighted=True),
        Case(dp=2, cp=2, packs=2, tied=True, checkpointing=True),
        Case(dp=2, cp=2, packs=6, tied=True),
        Case(cp=4, packs=1),
        Case(cp=4, packs=2, tied=True),
        Case(cp=4, packs=3, weighted=True, checkpointing=True),
        Case(cp=4, packs=2, sparse=True, layout="contiguous"),
        Case(dp=2, cp=2, packs=1, sparse=True, shard="none"),
        Case(dp=2, cp=2, packs=6, tied=True, shard="none", once=True),
    ],
}
FAULTS = [
    Case(cp=2, packs=2, fault="gradient x 2"),
    Case(dp=2, packs=2, fault="gradient x 2"),
    Case(cp=2, packs=2, fault="leaked document"),
    Case(dp=2, packs=2, fault="leaked document"),
    Case(cp=2, packs=2, fault="skipped pack"),
    Case(dp=2, packs=2, fault="skipped pack"),
    Case(cp=2, packs=2, fault="stale buffer"),
    Case(cp=2, packs=2, shard="none", fault="ended too early"),
]
EVERY = [(world_size, case) for world_size, cases in BY_WORLD.items() for case in cases]


def name(value: object) -> str:
    return str(value).replace("Case", "").replace(" ", "")


@cache
def _launch(world_size: int) -> dict[Case, Result] | RankError:
    """One launch per world size, also when it fails."""
    cases = BY_WORLD[world_size] + (FAULTS if world_size == 2 else [])
    try:
        return dict(zip(cases, run_ranks(run_cases, world_size, cases, timeout=150)[0], strict=True))
    except RankError as error:
        return error


def results(world_size: int) -> dict[Case, Result]:
    found = _launch(world_size)
    if isinstance(found, RankError):
        raise found
    return found


@cache
def _reference(data: tuple[bool, int, bool, bool]) -> Result:
    tied, packs, weighted, sparse = data
    return run_reference(Case(tied=tied, packs=packs, weighted=weighted, sparse=sparse))


def reference(case: Case) -> Result:
    return _reference(case.data)


@pytest.mark.parametrize(("world_size", "case"), EVERY, ids=name)
def test_gradients_update_norm_and_loss_equal_one_device(world_size: int, case: Case) -> None:
    got, want = results(world_size)[case], reference(case)
    assert difference(got.gradient, want.gradient) < TOLERANCE
    assert difference(got.update, want.update) < TOLERANCE
    assert got.norm == pytest.approx(want.norm, rel=1e-6)
    assert got.loss == pytest.approx(want.loss, rel=1e-6)


@pytest.mark.parametrize(("world_size", "case"), EVERY, ids=name)
def test_random_initialisation_is_bit_equal_everywhere(world_size: int, case: Case) -> None:
    got, want = results(world_size)[case].initial, reference(case).initial
    assert got.keys() == want.keys()
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("case", FAULTS, ids=name)
def test_a_planted_fault_is_seen(case: Case) -> None:
    got, want = results(2)[case], reference(case)
    assert difference(got.gradient, want.gradient) > 100 * TOLERANCE
    assert difference(got.update, want.update) > 100 * TOLERANCE
    assert got.norm != pytest.approx(want.norm, rel=1e-5)


def test_a_tied_weight_is_one_parameter() -> None:
    tied = results(1)[Case(packs=2, tied=True)]
    untied = results(1)[Case(packs=1)]
    assert set(untied.gradient) - set(tied.gradient) == {"lm_head.weight"}
