"""The ring against the fp64 oracle, with threads as ranks; the checks are shown to fail on planted faults."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from raycp.attention import Groups, InMemoryWorld, cp_attention, ring
from raycp.attention.call import AttentionCall, AttentionStats
from raycp.attention.communicator import Communicator, Handle, Message
from raycp.attention.function import PlannedAttention
from raycp.attention.kernels import CpuFlashKernel, ReferenceKernel
from raycp.errors import PlanError, WorkerError
from raycp.plan import AttentionPlan, RankGrid, Slice
from tests.unit.attention.cases import (
    TOLERANCE,
    Case,
    assert_bytes_as_planned,
    errors,
    random_case,
    run_in_memory,
    run_rank,
)

LONG = Case(lengths=(1, 90, 1, 1, 33, 7), ring=3)


def _worst(case: Case, **how: Any) -> float:
    return max(errors(case, run_in_memory(case, **how)).values())


@pytest.mark.parametrize("block", range(4))
def test_random_packs_agree_with_the_oracle(block: int) -> None:
    rng = random.Random(block)
    for _ in range(50):
        case = random_case(rng, max_ring=8)
        found = errors(case, run_in_memory(case))
        assert max(found.values()) <= TOLERANCE, (case, found)


@pytest.mark.parametrize("ring", [2, 3])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "balanced"])
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_named_shapes_agree_with_the_oracle(
    ring: int, layout: str, mask: str, num_heads: int, num_kv_heads: int
) -> None:
    for lengths in ((1,), (1, 1, 1), (97,), (5, 1, 64, 3)):
        case = Case(lengths, ring, num_heads, num_kv_heads, 8, 12, layout, mask)
        assert _worst(case) <= TOLERANCE, case


@pytest.mark.parametrize("ring", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "balanced"])
@pytest.mark.parametrize("window", [1, 2, 17, 60, 61])
def test_sliding_windows_agree_with_the_oracle(ring: int, layout: str, window: int) -> None:
    case = Case((5, 1, 61, 1, 1, 30), ring, layout=layout, window=window)
    assert _worst(case) <= TOLERANCE
    if window in (2, 17):
        wider = Case(case.lengths, ring, layout=layout, window=window + 1)
        assert max(_errors_in(case, case, run_in_memory(case, plan=wider.plan())).values()) > 1e-2, "planted fault"


def test_reference_kernel_runs_the_same_schedule() -> None:
    assert _worst(LONG, kernel=ReferenceKernel()) <= 2e-7


def test_bfloat16_stays_near_the_oracle() -> None:
    assert _worst(Case((1, 90, 33), 3, dtype=torch.bfloat16)) <= 1e-2


def test_logits_times_100_stay_finite() -> None:
    case = Case((1, 90, 33), 3, amplitude=100.0)
    parts = run_in_memory(case)
    assert all(x.isfinite().all() for part in parts for x in part)
    assert errors(case, parts)["out"] <= 2e-5


def test_zero_stride_gradient() -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        plan = LONG.plan()
        index = torch.from_numpy(plan.token_index(communicator.rank))
        q, k, v, _ = (x[index].requires_grad_() for x in LONG.tensors())
        out = cp_attention(q, k, v, plan=plan, groups=Groups(plan.grid, communicator.rank, communicator))
        out.sum().backward()
        assert v.grad is not None
        return v.grad.sum()

    # dV of out.sum() has one share of 1 for each query head and value number of each token
    total = sum(InMemoryWorld(3).run(rank))
    assert float(total) == pytest.approx(sum(LONG.lengths) * 4 * 8, rel=1e-5)


def test_views_that_are_not_contiguous() -> None:
    """As Hugging Face hands them over: [1, H, t, D] transposed."""

    def rank(communicator: Communicator) -> torch.Tensor:
        plan = LONG.plan()
        index = torch.from_numpy(plan.token_index(communicator.rank))
        q, k, v, _ = (x[index].transpose(0, 1).contiguous().transpose(0, 1) for x in LONG.tensors())
        return cp_attention(q, k, v, plan=plan, groups=Groups(plan.grid, communicator.rank, communicator))

    for out, (expected, *_) in zip(InMemoryWorld(3).run(rank), run_in_memory(LONG), strict=True):
        assert torch.allclose(out, expected, rtol=0, atol=1e-6)


def test_bits_do_not_depend_on_when_messages_arrive() -> None:
    case = Case((1, 60, 20, 9), 4)
    first = run_in_memory(case)
    for seed in range(3):
        again = run_in_memory(case, world=InMemoryWorld(4, delay=0.003, seed=seed))
        for a, b in zip(first, again, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_two_remote_blocks_at_most_and_bytes_as_planned() -> None:
    for counted in assert_bytes_as_planned(Case((1, 90, 33, 1), 5)):
        assert counted.after.max_remote_blocks == 2
        assert counted.between.remote_blocks == 0


def test_holding_on_to_blocks_shows_in_the_counter() -> None:
    """Planted fault: a kernel that keeps its blocks alive."""

    stats = AttentionStats()
    held = [(torch.zeros(4), torch.zeros(2)) for _ in range(3)]
    for block in held:
        stats.hold(block)
    del block, held[0]
    assert (stats.max_remote_blocks, stats.remote_blocks) == (3, 2)
    assert (stats.max_remote_bytes, stats.remote_bytes) == (72, 48)


def test_next_step_is_posted_before_this_one_is_computed() -> None:
    class Recording:
        def __init__(self, inner: Communicator) -> None:
            self.inner, self.rank, self.size, self.log = inner, inner.rank, inner.size, []

        def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
            self.log.append((sends or receives)[0].name)
            return self.inner.post(sends, receives)

    def rank(communicator: Communicator) -> list[str]:
        recording = Recording(communicator)
        plan = LONG.plan()
        q, k, v, dout = (x[torch.from_numpy(plan.token_index(communicator.rank))] for x in LONG.tensors())
        call = AttentionCall(
            plan.program(communicator.rank),
            ring,
            recording,
            CpuFlashKernel(),
            0.3,
            on_step=lambda step: recording.log.append(f"computed {step}"),
        )
        PlannedAttention.apply(q.requires_grad_(), k, v, call).backward(dout)
        return recording.log

    kv, back = "K/V rows of attention, step {}", "dK/dV rows of attention, step {}"
    forward = [kv.format(1), "computed 0", kv.format(2), "computed 1", "computed 2"]
    backward = [*forward[:3], back.format(1), "computed 1", back.format(2), "computed 2", "computed 3"]
    for log in InMemoryWorld(3).run(rank):
        assert log == forward + backward


def test_half_of_the_own_block_is_computed_after_the_last_gradients_left() -> None:
    """Planted fault: without its second half, gradients are wrong."""
    plan = LONG.plan()
    assert all(len(plan.program(rank).own) == 2 for rank in range(3))
    assert _worst(LONG, plan=plan) <= TOLERANCE
    for rank in range(3):
        program = plan.program(rank)
        plan._cache[rank] = replace(program, own=program.own[:1])
    found = errors(LONG, run_in_memory(LONG, plan=plan))
    assert found["out"] <= TOLERANCE
    assert min(found["dq"], found["dk"], found["dv"]) > 1e-2


class _Poisoned(CpuFlashKernel):
    """Rows before and after those of the slices, which a kernel may leave as they were, are NaN."""

    def forward(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().forward(*args)
        for rows in _outside(args[-2], len(out)):
            out[rows], lse[rows] = torch.nan, torch.nan
        return out, lse

    def backward(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq, dk, dv = super().backward(*args)
        for rows in _outside(args[-2], len(dq)):
            dq[rows] = torch.nan
        return dq, dk, dv


def _outside(slices: Sequence[Slice], num_rows: int) -> tuple[slice, slice]:
    if not slices:
        return slice(0, num_rows), slice(num_rows, num_rows)
    return slice(0, slices[0].q_start), slice(max(s.q_stop for s in slices), num_rows)


def test_rows_that_a_step_did_not_compute_are_not_read() -> None:
    rng = random.Random(77)
    for n in range(60):
        case = random_case(rng, max_ring=6, max_tokens=300)
        if n % 3:
            inner = {4: 2, 6: 3}.get(case.ring, 1)
            case = replace(case, algorithm="allgather") if n % 3 == 1 else replace(case, inner=inner)
        found = errors(case, run_in_memory(case, kernel=_Poisoned()))
        assert max(found.values()) <= TOLERANCE, (case, found)


def test_ranks_without_tokens_take_part() -> None:
    case = Case((2, 1), 5, layout="contiguous")
    assert 0 in [case.plan().num_tokens(rank) for rank in range(5)]
    assert _worst(case) <= TOLERANCE
    empty = Case((), 3)
    assert [list(x.shape) for x in run_in_memory(empty)[1]] == [[0, 4, 8], [0, 4, 8], [0, 2, 8], [0, 2, 8]]


def test_documents_do_not_see_each_other_bit_for_bit() -> None:
    case = Case((20, 31, 9), 3)
    changed_case = Case((20, 31, 9), 3)

    class Changed(Case):
        def tensors(self) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
            tensors = tuple(x.clone() for x in Case.tensors(self))
            for x in tensors:
                x[7] += 1.0
            return tensors

    changed = Changed(changed_case.lengths, changed_case.ring)
    plan = case.plan()
    for rank, (before, after) in enumerate(zip(run_in_memory(case), run_in_memory(changed), strict=True)):
        index = torch.from_numpy(plan.token_index(rank))
        for x, y in zip(before, after, strict=True):
            assert torch.equal(x[index >= 20], y[index >= 20])
    joined = Case((51, 9), 3).plan()
    leaks = []
    for rank, (before, after) in enumerate(
        zip(run_in_memory(case, plan=joined), run_in_memory(changed, plan=joined), strict=True)
    ):
        index = torch.from_numpy(joined.token_index(rank))
        leaks += [not torch.equal(x[index >= 20], y[index >= 20]) for x, y in zip(before, after, strict=True)]
    assert any(leaks), "planted fault: two documents joined in the plan must show"


class _Doubled(CpuFlashKernel):
    """Planted fault: gradients x 2."""

    def backward(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq, dk, dv = super().backward(*args)
        return dq * 2, dk * 2, dv * 2


class _Skipping(CpuFlashKernel):
    """Planted fault: the last slice of a step is not computed."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slices: Sequence[Slice], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().forward(q, k, v, slices, scale)
        for s in slices[-1:]:
            out[s.q_start : s.q_stop], lse[s.q_start : s.q_stop] = 0, -torch.inf
        return out, lse


class _SkippingBackward(CpuFlashKernel):
    """Planted fault: the last slice of a step has no gradient."""

    def backward(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        *tensors, slices, scale = args
        dq, dk, dv = super().backward(*tensors, slices[:-1], scale)
        for s in slices[-1:]:
            dq[s.q_start : s.q_stop] = 0
        return dq, dk, dv


class _OwnStatistics(CpuFlashKernel):
    """Planted fault: backward with the log-sum-exp of the step in place of the merged one."""

    def backward(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dout, q, k, v, out, _, slices, scale = args
        return super().backward(dout, q, k, v, out, super().forward(q, k, v, slices, scale)[1], slices, scale)


@pytest.mark.parametrize("kernel", [_Doubled(), _Skipping(), _SkippingBackward(), _OwnStatistics()])
def test_kernel_faults_show(kernel: CpuFlashKernel) -> None:
    assert _worst(LONG) <= TOLERANCE
    assert _worst(LONG, kernel=kernel) > 1e-2


def test_stale_buffer_shows() -> None:
    assert _worst(LONG, world=InMemoryWorld(3, stale=True)) > 1e-2


def test_leaked_document_shows() -> None:
    joined = Case((1, 91, 1, 33, 7), 3).plan()
    assert joined.pack_length == LONG.plan().pack_length
    found = run_in_memory(LONG, plan=joined)
    whole = Case(joined_lengths := (1, 91, 1, 33, 7), 3)
    assert joined_lengths == tuple(b - a for a, b in zip((0, *joined.doc_ends), joined.doc_ends, strict=False))
    assert max(errors(whole, found).values()) <= TOLERANCE
    assert max(_errors_in(LONG, whole, found).values()) > 1e-2


def _errors_in(case: Case, held_as: Case, parts: list[tuple[torch.Tensor, ...]]) -> dict[str, float]:
    """Errors against the oracle of `case`, of shards that were held as `held_as` says."""

    class View(Case):
        def plan(self) -> AttentionPlan:
            return held_as.plan()

    return errors(View(case.lengths, case.ring), parts)


def test_error_of_a_rank_names_the_rows_that_were_waited_for() -> None:
    class Failing(CpuFlashKernel):
        def forward(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            raise RuntimeError("planted")

    seen: list[str] = []

    def rank(communicator: Communicator) -> None:
        try:
            run_rank(
                LONG,
                Groups(LONG.plan().grid, communicator.rank, communicator),
                kernel=Failing() if communicator.rank == 1 else None,
            )
        except WorkerError as error:
            seen.append(str(error))
            raise

    with pytest.raises(RuntimeError, match="planted"):
        InMemoryWorld(3).run(rank)
    assert len(seen) == 2
    assert all("K/V rows of attention, step" in text and "planted" in text for text in seen)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda q, k, v: (q[:-1], k, v), r"q has shape \[9, 4, 8\].*10 tokens and 4 heads"),
        (lambda q, k, v: (q, k[:, :1], v), r"k has shape \[10, 1, 8\].*2 heads"),
        (lambda q, k, v: (q, k, v[0]), r"v has shape \[2, 8\]"),
        (lambda q, k, v: (q, k.double(), v), "k is torch.float64"),
        (lambda q, k, v: (q.double(), k.double(), v.double()), "q is torch.float64"),
        (lambda q, k, v: (q, k[..., :4], v), "q has head dim 8, k has 4"),
    ],
)
def test_tensors_that_do_not_fit_the_plan_are_refused(change, said: str) -> None:  # type: ignore[no-untyped-def]
    case = Case((10,), 1)
    q, k, v, _ = case.tensors()
    plan = case.plan()
    q, k, v = change(q, k, v)
    with pytest.raises(PlanError, match=said):
        cp_attention(q, k, v, plan=plan, groups=Groups(plan.grid, 0, InMemoryWorld(1).communicator(0)))


def test_plan_and_groups_of_different_grids_are_refused() -> None:
    case = Case((10,), 1)
    q, k, v, _ = case.tensors()
    groups = Groups(RankGrid(2, 1), 0, InMemoryWorld(1).communicator(0))
    with pytest.raises(PlanError, match="use one RankGrid for both"):
        cp_attention(q, k, v, plan=case.plan(), groups=groups)


def test_second_derivative_is_refused() -> None:
    case = Case((10,), 1)
    q, k, v, _ = (x.requires_grad_() for x in case.tensors())
    plan = case.plan()
    out = cp_attention(q, k, v, plan=plan, groups=Groups(plan.grid, 0, InMemoryWorld(1).communicator(0)))
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
