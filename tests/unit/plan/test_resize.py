"""Which world is formed of the workers that are left."""

import itertools

import pytest

from raycp.errors import PlanError
from raycp.plan.resize import WorldLimits, worlds


def limits(cp: tuple[int, int], dp: tuple[int, int], workers: tuple[int, int], wanted: tuple[int, int]) -> WorldLimits:
    return WorldLimits(cp=cp, dp=dp, workers=workers, wanted=wanted)


@pytest.mark.parametrize(
    ("available", "cp", "dp", "wanted", "best"),
    [
        (4, (1, 4), (1, 1), (1, 4), (1, 4)),
        (3, (1, 4), (1, 1), (1, 4), (1, 3)),  # one rank of 4 lost
        (2, (1, 4), (1, 1), (1, 4), (1, 2)),  # a 2-rank node of 4 lost
        (7, (8, 8), (1, 1), (1, 8), None),  # a fixed degree stays
        (15, (8, 8), (1, 2), (2, 8), (1, 8)),  # and replicas give way
        (7, (2, 8), (1, 1), (1, 8), (1, 7)),
        (1, (2, 8), (1, 1), (1, 8), None),
        (7, (1, 4), (1, 2), (2, 4), (2, 3)),
        (9, (1, 4), (1, 2), (2, 4), (2, 4)),  # no more than was asked for
    ],
)
def test_the_best_world_of_what_is_left(
    available: int, cp: tuple[int, int], dp: tuple[int, int], wanted: tuple[int, int], best: tuple[int, int] | None
) -> None:
    found = worlds(available, limits(cp, dp, (1, wanted[0] * wanted[1]), wanted))
    assert (found[0] if found else None) == best


def test_every_world_is_within_the_limits_and_the_first_uses_most_workers() -> None:
    for available, low, high, dp, least in itertools.product(range(10), (1, 2), (2, 5), (1, 3), (1, 3)):
        bounds = limits((low, high), (1, dp), (least, 8), (dp, high))
        found = worlds(available, bounds)
        sizes = [a * b for a, b in found]
        assert len(set(found)) == len(found)
        assert all(least <= s <= min(available, 8) for s in sizes)
        assert all(low <= b <= high and 1 <= a <= dp for a, b in found)
        everything = [
            a * b for a in range(1, dp + 1) for b in range(low, high + 1) if least <= a * b <= min(available, 8)
        ]
        assert sizes[:1] == ([max(everything)] if everything else [])


@pytest.mark.parametrize("bad", [(0, 1), (3, 2)])
def test_an_empty_range_is_refused_with_its_name(bad: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match=r"cp=\("):
        limits(bad, (1, 1), (1, 8), (1, 8))
