"""Ulysses and hybrid against the fp64 oracle, with threads as ranks; the checks are shown to fail on planted faults."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from raycp.attention import InMemoryWorld
from raycp.attention.kernels import CpuFlashKernel, ReferenceKernel, UnevenHeads, for_groups
from raycp.attention.ulysses import HeadExchange
from raycp.plan import AttentionPlan, MaskKind, Range, Slice, head_shares
from tests.unit.attention.cases import TOLERANCE, Case, assert_bytes_as_planned, errors, random_case, run_in_memory

GRIDS = [(1, 2), (1, 3), (1, 4), (2, 2), (3, 2), (2, 3)]


def _worst(case: Case, **how: Any) -> float:
    return max(errors(case, run_in_memory(case, **how)).values())


@pytest.mark.parametrize(("ring", "ulysses"), GRIDS)
def test_random_packs_agree_with_the_oracle(ring: int, ulysses: int) -> None:
    rng = random.Random(ring * 10 + ulysses)
    done = 0
    while done < 25:
        case = replace(random_case(rng, max_ring=1), ring=ring, ulysses=ulysses)
        if case.num_heads < ulysses:
            continue
        done += 1
        found = errors(case, run_in_memory(case))
        assert max(found.values()) <= TOLERANCE, (case, found)


@pytest.mark.parametrize(("ring", "ulysses"), GRIDS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (8, 2), (5, 1), (4, 4)])
def test_heads_that_do_not_divide(ring: int, ulysses: int, num_heads: int, num_kv_heads: int) -> None:
    for lengths in ((1,), (97,), (5, 1, 64, 3)):
        case = Case(lengths, ring, num_heads, num_kv_heads, 8, 12, "balanced", ulysses=ulysses)
        assert _worst(case) <= TOLERANCE, case


def test_more_kinds_of_numbers() -> None:
    case = Case((1, 90, 33), 2, 9, 3, ulysses=2)
    assert _worst(replace(case, dtype=torch.bfloat16)) <= 1.5e-2
    assert _worst(replace(case, window=20)) <= TOLERANCE
    assert _worst(case, kernel=ReferenceKernel()) <= 2e-7


def test_bytes_are_as_planned() -> None:
    assert_bytes_as_planned(Case((1, 90, 33, 1), 2, 9, 3, 8, 12, ulysses=3))


def test_exchange_and_its_adjoint() -> None:
    """`to_tokens` of `to_heads` counts each head once per rank that holds it."""
    heads = [share.kv for share in head_shares(9, 3, 2)]
    rows = (3, 5)

    def rank(communicator: Any) -> torch.Tensor:
        exchange = HeadExchange(communicator, rows)
        x = torch.randn(rows[communicator.rank], 3, 4, generator=torch.Generator().manual_seed(communicator.rank))
        (y,) = exchange.to_heads((x,), (heads,))
        assert y.shape == (8, 2, 4)
        (back,) = exchange.to_tokens((y,), (heads,))
        return back / x

    for ratio in InMemoryWorld(2).run(rank):
        assert torch.allclose(ratio.mean((0, 2)), torch.tensor([1.0, 2.0, 1.0]))


def test_uneven_heads_are_as_many_calls_as_runs() -> None:
    calls: list[tuple[int, int]] = []

    class Counting(CpuFlashKernel):
        def forward(self, q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
            calls.append((q.shape[1], rest[0].shape[1]))
            return super().forward(q, *rest)

    q, k = torch.randn(4, 9, 8), torch.randn(4, 4, 8)
    kernel = for_groups(Counting(), (3, 2, 2, 2))
    assert isinstance(kernel, UnevenHeads)
    kernel.forward(q, k, k, (Slice(0, 4, 0, 4, MaskKind.CAUSAL),), 1.0)
    assert calls == [(3, 1), (6, 3)]
    assert isinstance(for_groups(CpuFlashKernel(), (2, 2)), CpuFlashKernel)


def test_lost_copies_of_key_value_gradients_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: only the last holder of a shared key/value head returns its gradient."""
    case = Case((1, 90, 33), 1, 9, 3, ulysses=2)
    assert _worst(case) <= TOLERANCE
    honest = HeadExchange.to_tokens

    def forgetful(self: HeadExchange, tensors: Any, heads: Any) -> Any:
        out = honest(self, tensors, heads)
        if len(heads) == 3:  # the backward of q, k and v
            out[1][:, 1] /= 2
        return out

    monkeypatch.setattr(HeadExchange, "to_tokens", forgetful)
    assert _worst(case) > 1e-2


def test_stale_buffer_shows() -> None:
    assert _worst(Case((1, 90, 33), 1, 9, 3, ulysses=2), world=InMemoryWorld(2, stale=True)) > 1e-2


def test_wrong_head_ranges_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a rank gets the key/value heads of another."""
    honest = AttentionPlan.head_shares
    monkeypatch.setattr(
        AttentionPlan,
        "head_shares",
        lambda self: tuple(replace(share, kv=Range(0, len(share.kv))) for share in honest(self)),
    )
    with pytest.raises(RuntimeError, match="invalid gradient"):
        _worst(Case((40,), 1, 8, 4, ulysses=2))
