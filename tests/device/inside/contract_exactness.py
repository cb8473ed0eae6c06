"""The NPU path, unchanged, on CPU tensors: every schedule at the bar of the attention tests, and faults that show."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from raycp.attention.kernels.npu import NpuOp, StatsOrder
from raycp.attention.kernels.varlen import VarlenKernel
from raycp.errors import ClusterError, PlanError
from raycp.plan import MaskKind, Slice
from tests.device.inside.contract_golden import MUTANTS, _Mutant
from tests.device.inside.documented_op import DocumentedOp
from tests.device.inside.world import CPU, npu_kernel, version
from tests.unit.attention.cases import TOLERANCE, Case, errors, run_in_memory
from tests.unit.attention.test_exactness import HEADS, MASKS, PACK, pack_lengths
from tests.unit.attention.test_exactness import SCHEDULES as GRIDS

# The grids alone leave ring or all-gather to "auto".
SCHEDULES = {name: grid | {"algorithm": name.removeprefix("double ").split()[0]} for name, grid in GRIDS.items()}
LAYOUTS = ("zigzag", "contiguous", "balanced")
VERSIONS = {
    "rows": DocumentedOp(),
    "no layout argument": DocumentedOp(takes_layout=False),
    "heads": DocumentedOp(takes_layout=False, default_order="heads"),
}


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_schedule(name: str) -> None:
    rng = random.Random(name)
    kernel = npu_kernel()
    heads = list(HEADS.values())
    for n, mask in enumerate(MASKS):
        num_heads, num_kv_heads = heads[n % len(heads)]
        case = Case(
            pack_lengths(rng),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=8,
            value_dim=rng.choice([8, 12]),
            layout=LAYOUTS[(n + len(name)) % len(LAYOUTS)],
            seed=rng.randrange(1 << 30),
            **mask,
            **SCHEDULES[name],
        )
        found = errors(case, run_in_memory(case, kernel=kernel))
        assert max(found.values()) <= TOLERANCE, (case, found)


FIVE = ("ring 4", "double ring 4 of 2", "allgather 3", "ulysses 2", "hybrid 2 x 2")


@pytest.mark.parametrize(("mask", "layout"), list(zip(MASKS, LAYOUTS, strict=True)), ids=str)
@pytest.mark.parametrize("name", FIVE)
def test_a_pack_of_long_and_short_documents(name: str, mask: dict[str, Any], layout: str) -> None:
    case = replace(PACK, layout=layout, **mask, **SCHEDULES[name])
    found = errors(case, run_in_memory(case, kernel=npu_kernel()))
    assert max(found.values()) <= TOLERANCE, (case, found)


@pytest.mark.parametrize("which", list(VERSIONS))
@pytest.mark.parametrize("name", ["ring 3", "hybrid 2 x 2"])
def test_every_order_of_the_statistics(which: str, name: str) -> None:
    with version(VERSIONS[which]):
        kernel = npu_kernel()
        case = replace(PACK, **SCHEDULES[name])
        assert max(errors(case, run_in_memory(case, kernel=kernel)).values()) <= TOLERANCE


def test_the_probe_finds_the_order() -> None:
    found = {}
    for name, op in VERSIONS.items():
        with version(op):
            made = NpuOp(CPU)
            found[name] = (made.order, made.has_layout)
    assert found == {
        "rows": (StatsOrder.ROWS, True),
        "no layout argument": (StatsOrder.HEADS_OF_DOCUMENTS, False),
        "heads": (StatsOrder.HEADS, False),
    }


@pytest.mark.parametrize("wrong", [m for m in MUTANTS if m != "mode 4 from the first key"])
def test_the_probe_refuses_an_op_that_computes_something_else(wrong: str) -> None:
    with version(_Mutant(wrong=wrong)), pytest.raises(ClusterError, match="does not do what its document says"):
        NpuOp(CPU)


def _order_not_measured(op: NpuOp) -> None:
    op.without_layout()  # now statistics come head-major, and are taken for token-major


def _mode_2_for_3(op: NpuOp) -> None:
    good = op._masking
    op._masking = lambda call: (
        dict(good(call))
        | (  # type: ignore[method-assign]
            {"sparse_mode": 2} if call.kind is MaskKind.CAUSAL else {}
        )
    )


def _no_mask(op: NpuOp) -> None:
    good = op._masking
    op._masking = lambda call: dict(good(call)) | {"atten_mask": None}  # type: ignore[method-assign]


def _swapped(op: NpuOp) -> None:
    good = op.raw_forward

    def swap(*args: Any) -> Any:
        out, top, total = good(*args)
        return out, total, top

    op.raw_forward = swap  # type: ignore[method-assign]


def _first_key(op: NpuOp) -> None:
    good = op._masking
    op._masking = lambda call: (
        dict(good(call))
        | (  # type: ignore[method-assign]
            {"pre_tockens": call.before + 1} if call.kind is MaskKind.BAND else {}
        )
    )


def _local_lse(op: NpuOp) -> None:
    good = op.backward

    def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, call: Any, scale: float) -> Any:
        own, own_lse = op.forward(q, k, v, call, scale)
        return good(dout, q, k, v, own, own_lse, call, scale)

    op.backward = backward  # type: ignore[method-assign]


FAULTS: dict[str, tuple[Callable[[NpuOp], None], dict[str, Any]]] = {
    "head-major statistics for token-major": (_order_not_measured, SCHEDULES["ring 4"]),
    "mode 2 for 3": (_mode_2_for_3, SCHEDULES["allgather 3"]),
    "no mask": (_no_mask, SCHEDULES["ring 1"]),
    "max and sum swapped": (_swapped, SCHEDULES["ring 4"]),
    "a band that is one key too wide": (_first_key, SCHEDULES["ring 2"] | {"window": 11}),
    "backward with the statistics of its own block": (_local_lse, SCHEDULES["ring 4"]),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_each_fault_in_our_kernel_shows(name: str) -> None:
    plant, schedule = FAULTS[name]
    case = replace(PACK, **schedule)
    kernel = npu_kernel()
    assert max(errors(case, run_in_memory(case, kernel=kernel)).values()) <= TOLERANCE
    assert isinstance(kernel.op, NpuOp)
    plant(kernel.op)
    found = errors(case, run_in_memory(case, kernel=kernel))
    assert not max(found.values()) <= 100 * TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    case = replace(PACK, dtype=dtype, **SCHEDULES["ring 4"])
    assert max(errors(case, run_in_memory(case, kernel=npu_kernel())).values()) < 1e-2


def test_more_than_a_thousand_documents_are_several_calls() -> None:
    slices = tuple(Slice(2 * i, 2 * i + 2, 2 * i, 2 * i + 2, MaskKind.CAUSAL) for i in range(2500))
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(5000, 2, 16, generator=generator) for _ in range(4))
    kernel = npu_kernel()
    out, lse = kernel.forward(q, k, v, slices, 0.25)
    first = VarlenKernel(kernel.op).forward(q[:2], k[:2], v[:2], slices[:1], 0.25)
    assert torch.equal(out[:2], first[0])
    last = tuple(replace(s, q_start=0, q_stop=2, k_start=0, k_stop=2) for s in slices[-1:])
    assert torch.equal(out[-2:], kernel.forward(q[-2:], k[-2:], v[-2:], last, 0.25)[0])
    grads = kernel.backward(dout, q, k, v, out, lse, slices, 0.25)
    assert all(x.isfinite().all() for x in (out, lse, *grads))


def test_limits_of_the_op_are_errors_with_a_fix() -> None:
    kernel = npu_kernel()
    q = torch.empty(2, 257, 16, device="meta")
    with pytest.raises(PlanError, match="257 query heads"):
        kernel.forward(q, q, q, (Slice(0, 2, 0, 2, MaskKind.CAUSAL),), 1.0)
    q = torch.empty(2, 1, 784, device="meta")
    with pytest.raises(PlanError, match="of dim 784"):
        kernel.forward(q, q, q, (Slice(0, 2, 0, 2, MaskKind.CAUSAL),), 1.0)
    q = torch.empty((1 << 20) + 1, 1, 16, device="meta")
    with pytest.raises(PlanError, match="at most 1048576"):
        kernel.forward(q, q, q, (Slice(0, len(q), 0, len(q), MaskKind.CAUSAL),), 1.0)
