"""The whole matrix against the fp64 oracle: algorithm x ranks x layout x heads x dims x mask, each on a random pack."""

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from raycp.attention.kernels import CpuFlashKernel
from tests.unit.attention.cases import NAMES, TOLERANCE, Case, errors, run_in_memory

SCHEDULES: dict[str, dict[str, Any]] = {
    **{f"ring {n}": {"ring": n} for n in range(1, 9)},
    **{f"double ring {n} of {w}": {"ring": n, "inner": w} for n, w in ((4, 2), (6, 2), (6, 3), (8, 2), (8, 4))},
    **{f"allgather {n}": {"ring": n, "algorithm": "allgather"} for n in range(2, 9)},
    **{f"ulysses {n}": {"ring": 1, "ulysses": n} for n in range(2, 9)},
    **{f"hybrid {r} x {u}": {"ring": r, "ulysses": u} for r, u in ((2, 2), (2, 3), (3, 2), (2, 4), (4, 2))},
    "hybrid 4 of 2 x 2": {"ring": 4, "inner": 2, "ulysses": 2},
    **{f"auto {n}": {"ring": n, "algorithm": "auto"} for n in (2, 3, 4, 8)},
}
HEADS = {"MHA": (8, 8), "GQA": (8, 2), "MQA": (8, 1)}
MASKS: tuple[dict[str, Any], ...] = ({}, {"mask": "full"}, {"window": 11})
EIGHT = ["ring 8", "double ring 8 of 4", "allgather 8", "ulysses 8", "hybrid 4 x 2"]
PACK = Case((1, 150, 40, 9, 1, 63), 1, 8, 2, 16, 16)


def pack_lengths(rng: random.Random) -> tuple[int, ...]:
    """All 1-token documents, too few tokens for all ranks, one document, or a mixture."""
    kinds = [
        [1] * rng.randint(1, 12),
        [rng.randint(1, 3)],
        [rng.randint(20, 60)],
        [rng.choice([1, rng.randint(1, 30)]) for _ in range(rng.randint(2, 5))],
    ]
    return tuple(rng.choice(kinds))


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "balanced", "auto"])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_matrix(name: str, layout: str) -> None:
    rng = random.Random(f"{name} {layout}")
    for num_heads, num_kv_heads in HEADS.values():
        for mask in MASKS:
            case = Case(
                pack_lengths(rng),
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=8,
                value_dim=rng.choice([8, 12]),
                layout=layout,
                seed=rng.randrange(1 << 30),
                **mask,
                **SCHEDULES[name],
            )
            found = errors(case, run_in_memory(case))
            assert max(found.values()) <= TOLERANCE, (case, found)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_schedule_is_the_one_it_is_called(name: str) -> None:
    """Once, rings were left to "auto", which took allgather for many of the packs above."""
    asked = {"double": "ring", "auto": "ring, allgather"}.get(name.split()[0], name.split()[0])
    assert Case((40, 9, 1), num_heads=8, **SCHEDULES[name]).plan().algorithm in asked


@cache
def _mean_errors(name: str, dtype: torch.dtype) -> dict[str, float]:
    """Root mean square over three packs of numbers."""
    found = [
        errors(case, run_in_memory(case))
        for case in (replace(PACK, seed=seed, dtype=dtype, **SCHEDULES[name]) for seed in range(3))
    ]
    return {x: (sum(f[x] ** 2 for f in found) / len(found)) ** 0.5 for x in NAMES}


@pytest.mark.parametrize("name", EIGHT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_on_eight_ranks_is_at_most_twice_that_of_one(name: str, dtype: torch.dtype) -> None:
    one, eight = _mean_errors("ring 1", dtype), _mean_errors(name, dtype)
    for x in NAMES:
        assert eight[x] <= 2 * one[x], (x, eight[x], one[x])


@pytest.mark.parametrize("name", EIGHT)
def test_large_scores_stay_finite(name: str) -> None:
    case = replace(PACK, amplitude=100.0, **SCHEDULES[name])
    assert all(x.isfinite().all() for parts in run_in_memory(case) for x in parts)
    assert errors(case, run_in_memory(case))["out"] <= 2e-5


class _Rounding(CpuFlashKernel):
    """Planted fault: partial results of each step are rounded to bf16, as systems do that merge in the input's type."""

    def forward(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().forward(*args)
        return out.bfloat16().float(), lse.bfloat16().float()


def test_rounding_between_steps_shows() -> None:
    case = replace(PACK, ring=8)
    assert max(errors(case, run_in_memory(case, kernel=_Rounding())).values()) > 100 * TOLERANCE
