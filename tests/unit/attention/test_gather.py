"""The gathering schedule against the fp64 oracle, with threads as ranks; checks are shown to fail on planted faults."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from raycp.attention import Groups, InMemoryWorld, cp_attention, exchange
from raycp.attention.communicator import Communicator, Handle, Message
from raycp.attention.kernels import CpuFlashKernel, Kernel, ReferenceKernel
from raycp.attention.kernels.reference import sawtooth
from raycp.plan import Slice
from tests.unit.attention.cases import TOLERANCE, Case, assert_bytes_as_planned, errors, random_case, run_in_memory

LONG = Case(lengths=(1, 90, 1, 1, 33, 7), ring=3, num_heads=9, num_kv_heads=3, algorithm="allgather")


def _worst(case: Case, **how: Any) -> float:
    return max(errors(case, run_in_memory(case, **how)).values())


@pytest.mark.parametrize("block", range(3))
def test_random_packs_agree_with_the_oracle(block: int) -> None:
    rng = random.Random(100 + block)
    for _ in range(40):
        case = replace(random_case(rng, max_ring=8), algorithm="allgather")
        found = errors(case, run_in_memory(case))
        assert max(found.values()) <= TOLERANCE, (case, found)


@pytest.mark.parametrize("ring", [2, 5])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "balanced"])
@pytest.mark.parametrize("options", [{}, {"mask": "full"}, {"window": 1}, {"window": 17}, {"window": 60}])
def test_masks_and_layouts(ring: int, layout: str, options: dict[str, Any]) -> None:
    case = Case((5, 1, 61, 1, 1, 30), ring, 6, 2, 8, 12, layout, algorithm="allgather", **options)
    assert _worst(case) <= TOLERANCE


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 5, 8])
def test_any_number_of_heads_is_cut_into_groups(num_kv_heads: int) -> None:
    case = replace(LONG, num_heads=2 * num_kv_heads, num_kv_heads=num_kv_heads)
    groups = case.plan().head_groups()
    assert [h for g in groups for h in range(g.start, g.stop)] == list(range(num_kv_heads))
    assert _worst(case) <= TOLERANCE


def test_more_kinds_of_numbers() -> None:
    assert _worst(LONG, kernel=ReferenceKernel()) <= 2e-7
    assert _worst(replace(LONG, dtype=torch.bfloat16)) <= 1.5e-2
    assert _worst(replace(LONG, lengths=(2, 1), ring=5, layout="contiguous")) <= TOLERANCE
    assert list(run_in_memory(replace(LONG, lengths=()))[1][0].shape) == [0, 9, 8]


def test_gradients_are_the_same_bits_each_time() -> None:
    first, again = (run_in_memory(LONG, world=InMemoryWorld(3, delay=0.003, seed=seed)) for seed in (1, 2))
    assert all(torch.equal(x, y) for a, b in zip(first, again, strict=True) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("layout", ["zigzag", "balanced", "contiguous"])
@pytest.mark.parametrize("options", [{}, {"mask": "full"}, {"window": 9}])
def test_bytes_are_as_planned_and_no_more_than_is_needed(layout: str, options: dict[str, Any]) -> None:
    case = replace(LONG, lengths=(1, 90, 33, 1), ring=4, layout=layout, **options)
    plan = case.plan()
    visible = sawtooth(case.doc_ends, causal=case.mask == "causal", window=case.window)
    held = [torch.from_numpy(plan.token_index(rank)) for rank in range(4)]
    needed = sum(int(visible[mine].any(0).sum()) - int(visible[mine].any(0)[mine].sum()) for mine in held)
    counted = assert_bytes_as_planned(case)
    assert sum(c.forward for c in counted) == needed * 3 * (8 + 8) * 4
    assert sum(c.backward for c in counted) == needed * 3 * (8 + 8) * 8
    assert max(c.after.max_remote_blocks for c in counted) <= 2


class _Recording(CpuFlashKernel):
    """Notes kernel calls, and as a communicator the exchanges, of one rank."""

    def __init__(self, inner: Communicator, log: list[str]) -> None:
        self.inner, self.rank, self.size, self.log = inner, inner.rank, inner.size, log

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        self.log.append((*sends, *receives)[0].name.replace(" rows of attention, step", ""))
        return self.inner.post(sends, receives)

    def forward(self, q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.log.append(f"{q.shape[1]} heads")
        return super().forward(q, *rest)

    def backward(self, dout: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.log.append(f"back {dout.shape[1]} heads")
        return super().backward(dout, *rest)


def test_next_group_is_posted_before_this_one_is_computed() -> None:
    case = replace(LONG, ring=2, lengths=(90,), layout="zigzag")
    plan, world = case.plan(), InMemoryWorld(2)

    def rank(communicator: Communicator) -> list[str]:
        recording = _Recording(communicator, [])
        groups = Groups(plan.grid, communicator.rank, recording)
        q, k, v, dout = (x[torch.from_numpy(plan.token_index(communicator.rank))] for x in case.tensors())
        cp_attention(q.requires_grad_(), k, v, plan=plan, groups=groups, kernel=recording).backward(dout)
        return recording.log

    first, second = world.run(rank)
    assert first[:7] == second[:7] == ["K/V 1", "9 heads", "K/V 2", "3 heads", "K/V 3", "3 heads", "3 heads"]
    assert first[7:] == [
        *("K/V 1", "back 9 heads", "K/V 2", "back 3 heads", "dK/dV 1", "K/V 3"),
        *("back 3 heads", "dK/dV 2", "back 3 heads", "dK/dV 3"),
    ]
    assert second[7:] == [x for x in first[7:] if x != "back 9 heads"], "its queries all need the first rank"


def test_each_query_row_is_computed_once() -> None:
    """No merge: a row is in one slice of one step."""
    for options in ({}, {"mask": "full"}, {"window": 9}):
        plan = replace(LONG, **options).plan()
        for rank in range(3):
            slices = [s for step in plan.program(rank).steps for s in step.slices]
            rows = [row for s in slices for row in range(s.q_start, s.q_stop)]
            assert sorted(rows) == list(range(plan.num_tokens(rank)))


class _Skipping(CpuFlashKernel):
    """Planted fault: the last slice is not computed."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slices: Sequence[Slice], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().forward(q, k, v, slices, scale)
        for s in slices[-1:]:
            out[s.q_start : s.q_stop], lse[s.q_start : s.q_stop] = 0, -torch.inf
        return out, lse


class _SkippingBackward(CpuFlashKernel):
    """Planted fault: the last slice has no gradient."""

    def backward(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        *tensors, slices, scale = args
        dq, dk, dv = super().backward(*tensors, slices[:-1], scale)
        for s in slices[-1:]:
            dq[s.q_start : s.q_stop] = 0
        return dq, dk, dv


@pytest.mark.parametrize("kernel", [_Skipping(), _SkippingBackward()])
def test_kernel_faults_show(kernel: Kernel) -> None:
    assert _worst(LONG) <= TOLERANCE
    assert _worst(LONG, kernel=kernel) > 1e-2


def test_stale_buffer_shows() -> None:
    assert _worst(LONG, world=InMemoryWorld(3, stale=True)) > 1e-2


def test_rows_in_the_wrong_place_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: what arrives is laid one after the other, not in the order of the pack."""
    case = Case((97,), 4, algorithm="allgather")
    assert any(len(places) > 1 for step in case.plan().program(1).steps for _, places in step.arrivals())
    assert _worst(case) <= TOLERANCE
    honest = exchange.row_places
    monkeypatch.setattr(exchange, "row_places", lambda ranges: honest(ranges[::-1]))
    with pytest.raises((AssertionError, RuntimeError)):
        assert _worst(case) <= TOLERANCE
