"""Kernels that take many documents a call, without devices: numbers by a documented CPU kernel, shapes by meta."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from raycp.attention.kernels import Kernel, kernel_for
from raycp.attention.kernels.aten import EFFICIENT_LIMITS, AtenEfficientOp, AtenFlashOp, bands, window
from raycp.attention.kernels.aten import FLASH_LIMITS as LIMITS
from raycp.attention.kernels.cuda import ROUTES, CudaKernel, FlashAttnOp, flash_op
from raycp.attention.kernels.matmul import MatmulKernel
from raycp.attention.kernels.npu import NpuOp
from raycp.attention.kernels.reference import ReferenceKernel, visible_in
from raycp.attention.kernels.varlen import VarlenKernel, VarlenLimits, plan_calls
from raycp.errors import ClusterError, PlanError
from raycp.plan import MaskKind, Range, Slice
from tests.unit.attention import documented_flash
from tests.unit.attention.cases import TOLERANCE, errors, run_in_memory
from tests.unit.attention.test_exactness import MASKS, PACK

FIVE: dict[str, dict[str, Any]] = {
    "ring": {"ring": 4, "algorithm": "ring"},
    "double ring": {"ring": 4, "inner": 2, "algorithm": "ring"},
    "allgather": {"ring": 3, "algorithm": "allgather"},
    "ulysses": {"ring": 1, "ulysses": 2, "algorithm": "ulysses"},
    "hybrid": {"ring": 2, "ulysses": 2, "algorithm": "hybrid"},
}
LAYOUTS = ("zigzag", "contiguous", "balanced")


@pytest.fixture
def aten_on_cpu() -> Iterator[None]:
    """CPU kernels under the names of PyTorch's own attention for GPUs, which has none."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", documented_flash.aten_forward, "CPU")
        library.impl("_flash_attention_backward", documented_flash.aten_backward, "CPU")
        library.impl("_efficient_attention_forward", documented_flash.efficient_forward, "CPU")
        library.impl("_efficient_attention_backward", documented_flash.efficient_backward, "CPU")
        yield


@pytest.fixture
def whole_shape_function() -> Iterator[None]:
    """torch 2.13's own shape function of the efficient backward, which lacks the argument `out` and fails without."""
    real = torch._meta_registrations.meta__efficient_attention_backward

    def backward(dout: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, *args: Any, scale: float) -> Any:
        assert out.shape == dout.shape
        return real(dout, q, k, v, bias, *args, scale=scale)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_efficient_attention_backward", backward, "Meta", allow_override=True)
        yield


def _kernels() -> dict[str, Kernel]:
    return {
        "aten": VarlenKernel(AtenFlashOp()),
        "efficient": VarlenKernel(AtenEfficientOp()),
        "flash_attn": VarlenKernel(FlashAttnOp(documented_flash)),
        "matmul": MatmulKernel(),
    }


@pytest.mark.usefixtures("aten_on_cpu")
@pytest.mark.parametrize("kernel", ["aten", "efficient", "flash_attn", "matmul"])
@pytest.mark.parametrize("name", list(FIVE))
def test_every_schedule(kernel: str, name: str) -> None:
    for layout, mask in zip(LAYOUTS, MASKS, strict=True):
        case = replace(PACK, layout=layout, **mask, **FIVE[name])
        found = errors(case, run_in_memory(case, kernel=_kernels()[kernel]))
        assert max(found.values()) <= TOLERANCE, (case, found)


class _FromTheFirstKey(AtenFlashOp):
    """Planted fault: a band told from the first key, as before flash-attn 2.1."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any, scale: float) -> Any:
        if call.kind is MaskKind.CAUSAL:
            keys = tuple(min(a, b) for a, b in zip(call.q_ends, call.k_ends, strict=True))
            call = replace(call, k_ends=(*keys[:-1], call.k_ends[-1]))
        return super().forward(q, k, v, call, scale)


@pytest.mark.usefixtures("aten_on_cpu")
def test_masks_told_from_the_first_key_show() -> None:
    case = replace(PACK, **FIVE["allgather"])
    kernel = VarlenKernel(_FromTheFirstKey())
    assert max(errors(case, run_in_memory(case, kernel=kernel)).values()) > 100 * TOLERANCE


class _OwnLse(AtenEfficientOp):
    """Planted fault: backward with the log-sum-exp of this call alone, not with the merged one."""

    def backward(self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, call: Any, scale: float) -> Any:
        return super().backward(dout, q, k, v, out, self.forward(q, k, v, call, scale)[1], call, scale)


@pytest.mark.usefixtures("aten_on_cpu")
def test_a_log_sum_exp_that_is_not_merged_shows() -> None:
    case = replace(PACK, **FIVE["ring"])
    kernel = VarlenKernel(_OwnLse())
    assert max(errors(case, run_in_memory(case, kernel=kernel)).values()) > 100 * TOLERANCE


@pytest.mark.usefixtures("aten_on_cpu")
@pytest.mark.parametrize("op", [AtenFlashOp, AtenEfficientOp])
def test_gradients_are_the_same_bits_where_deterministic_mode_only_warns(op: Any) -> None:
    """As ranks on accelerators run; there PyTorch's own attention takes a non-deterministic algorithm."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(40, 2, 16, generator=generator) for _ in range(4))
    slices = (Slice(0, 40, 0, 40, MaskKind.CAUSAL),)
    out, lse = VarlenKernel(op()).forward(q, k, v, slices, 0.25)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, second = (VarlenKernel(op()).backward(dout, q, k, v, out, lse, slices, 0.25) for _ in range(2))
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        documented = documented_flash._as_the_mode_says(q, k, v)[0]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(documented, q)


def test_an_op_that_pads_gets_short_documents_apart_from_long_ones() -> None:
    limits = replace(EFFICIENT_LIMITS, padded=100)
    sizes = [90, 5, 5, 5, 120, 3, 3]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    slices = tuple(Slice(e - n, e, e - n, e, MaskKind.CAUSAL) for n, e in zip(sizes, ends, strict=True))
    calls = plan_calls(slices, limits)
    assert [len(c.q_ends) for c in calls] == [1, 3, 1, 2]
    assert all(len(c.q_ends) == 1 or len(c.q_ends) * c.max_q <= 100 for c in calls)
    assert sum(c.q_ends[-1] for c in calls) == sum(sizes)
    assert len(plan_calls(slices, replace(limits, padded=None))) == 1


def test_bands_of_a_call_are_the_slices_again() -> None:
    slices = (Slice(0, 5, 2, 12, MaskKind.BAND, -1, 3), Slice(5, 9, 12, 15, MaskKind.BAND, -3, 1))
    for call in plan_calls(slices, EFFICIENT_LIMITS):
        found = visible_in(bands(call), call.q_ends[-1], call.k_ends[-1], torch.device("cpu"))
        rows = torch.cat([torch.arange(r.start, r.stop) for r in call.rows])
        cols = torch.cat([torch.arange(r.start, r.stop) for r in call.cols])
        wanted = visible_in(slices, 9, 15, torch.device("cpu"))
        assert torch.equal(found, wanted[rows][:, cols])


def _random_slices(rng: random.Random, num_q: int, num_k: int) -> tuple[Slice, ...]:
    """Ascending rows, now and then the same rows against other keys, of all kinds."""
    found, row = [], 0
    while row < num_q:
        size = rng.randint(1, min(6, num_q - row))
        kind = rng.choice(list(MaskKind))
        if kind in (MaskKind.CAUSAL, MaskKind.DIAGONAL):
            start = rng.randint(0, num_k - size)
            found.append(Slice(row, row + size, start, start + size, kind))
        elif kind is MaskKind.FULL:
            start = rng.randint(0, num_k - 1)
            found.append(Slice(row, row + size, start, rng.randint(start + 1, num_k), kind))
        else:
            width = rng.randint(1, num_k)
            start = rng.randint(0, num_k - width)
            upper = rng.randint(0, width + 2)
            lower = min(rng.randint(-size - 2, upper), width - size)
            if lower <= upper:
                found.append(Slice(row, row + size, start, start + width, kind, lower, upper))
        row += size + rng.choice([0, 0, 1])
    return tuple(found)


@pytest.mark.usefixtures("aten_on_cpu")
@pytest.mark.parametrize("seed", range(40))
def test_any_slices_as_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    shapes = ((20, 4, 8), (17, 2, 8), (17, 2, 8), (20, 4, 8))
    q, k, v, dout = (torch.randn(*s, generator=generator) for s in shapes)
    slices = _random_slices(rng, 20, 17)
    ref_out, ref_lse = ReferenceKernel().forward(q, k, v, slices, 0.3)
    grads = ReferenceKernel().backward(dout, q, k, v, ref_out, ref_lse, slices, 0.3)
    for name, kernel in _kernels().items():
        out, lse = kernel.forward(q, k, v, slices, 0.3)
        assert torch.allclose(out, ref_out, atol=2e-6), name
        assert torch.allclose(lse, ref_lse, atol=2e-6), name
        for x, ref in zip(kernel.backward(dout, q, k, v, out, lse, slices, 0.3), grads, strict=True):
            assert torch.allclose(x, ref, atol=2e-5), name


@pytest.mark.usefixtures("aten_on_cpu")
def test_rows_of_several_calls_are_merged_and_inputs_left_alone() -> None:
    slices = (
        Slice(0, 6, 0, 6, MaskKind.DIAGONAL),
        Slice(0, 6, 6, 13, MaskKind.FULL),
        Slice(2, 5, 13, 17, MaskKind.BAND, -1, 2),
    )
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, 2, 8, generator=generator) for n in (6, 17, 17))
    before = v.clone()
    ref_out, ref_lse = ReferenceKernel().forward(q, k, v, slices, 0.3)
    for kernel in _kernels().values():
        out, lse = kernel.forward(q, k, v, slices, 0.3)
        assert torch.equal(v, before)
        assert torch.allclose(out, ref_out, atol=2e-6)
        assert torch.allclose(lse, ref_lse, atol=2e-6)


def _visible(slices: tuple[Slice, ...], limits: VarlenLimits, num_q: int, num_k: int) -> torch.Tensor:
    """What the calls of some slices compute: for each pair, how often."""
    seen = torch.zeros(num_q, num_k, dtype=torch.int32)
    for call in plan_calls(slices, limits):
        rows = torch.cat([torch.arange(r.start, r.stop) for r in call.rows])
        cols = torch.cat([torch.arange(r.start, r.stop) for r in call.cols])
        q_first = k_first = 0
        for q_end, k_end in zip(call.q_ends, call.k_ends, strict=True):
            i, j = torch.arange(q_end - q_first)[:, None], torch.arange(k_end - k_first)
            distance = j - i - ((k_end - k_first) - (q_end - q_first))
            match call.kind:
                case MaskKind.FULL:
                    block = torch.ones_like(distance)
                case MaskKind.CAUSAL:
                    block = (distance <= 0).int()
                case MaskKind.DIAGONAL:
                    block = (j == i).int()
                case MaskKind.BAND:
                    assert call.before >= 0
                    assert call.after >= 0
                    block = ((-call.before <= distance) & (distance <= call.after)).int()
            assert (block.sum(1) > 0).all()
            seen[rows[q_first:q_end, None], cols[k_first:k_end]] += block.to(torch.int32)
            q_first, k_first = q_end, k_end
    return seen


@pytest.mark.parametrize("seed", range(200))
def test_calls_compute_exactly_the_slices(seed: int) -> None:
    rng = random.Random(seed)
    slices = _random_slices(rng, 20, 17)
    limits = VarlenLimits(
        documents=rng.choice([1, 3, 100]), rows=rng.choice([17, 40, 1000]), heads=8, dim=8, multiple=1
    )
    assert torch.equal(_visible(slices, limits, 20, 17).bool(), visible_in(slices, 20, 17, torch.device("cpu")))
    for call in plan_calls(slices, limits):
        assert len(call.q_ends) == len(call.k_ends) <= limits.documents
        assert max(call.q_ends[-1], call.k_ends[-1]) <= limits.rows
        assert sum(len(r) for r in call.rows) == call.q_ends[-1]


def test_documents_side_by_side_are_views_and_one_call() -> None:
    slices = tuple(Slice(5 * i, 5 * i + 5, 5 * i, 5 * i + 5, MaskKind.CAUSAL) for i in range(50))
    (call,) = plan_calls(slices, LIMITS)
    assert call.rows == call.cols == (Range(0, 250),)
    assert call.fresh
    assert (call.max_q, call.max_k, len(call.q_ends)) == (5, 5, 50)


def _meta(dtype: torch.dtype, dim: int, value_dim: int) -> list[torch.Tensor]:
    shapes = ((12, 6, dim), (13, 2, dim), (13, 2, value_dim), (12, 6, value_dim))
    return [torch.empty(s, dtype=dtype, device="meta") for s in shapes]


SLICES = (
    Slice(0, 5, 0, 5, MaskKind.CAUSAL),
    Slice(5, 7, 0, 12, MaskKind.FULL),
    Slice(7, 9, 4, 6, MaskKind.DIAGONAL),
    Slice(9, 12, 3, 9, MaskKind.BAND, -1, 2),
)


@pytest.mark.usefixtures("whole_shape_function")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (20, 24), (320, 64)])
def test_shapes_by_the_real_shape_functions(dtype: torch.dtype, dim: int, value_dim: int) -> None:
    kernel = CudaKernel(AtenFlashOp())
    q, k, v, dout = _meta(dtype, dim, value_dim)
    served = kernel.serving(q, v)
    assert isinstance(served, VarlenKernel)
    flash = dtype != torch.float32 and max(dim, value_dim) <= 256
    assert isinstance(served.op, AtenFlashOp if flash else AtenEfficientOp)
    out, lse = kernel.forward(q, k, v, SLICES, 0.3)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((12, 6, value_dim), torch.float32, (12, 6), torch.float32)
    grads = kernel.backward(dout, q, k, v, out.to(dtype), lse, SLICES, 0.3)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, torch.float32) for x in (q, k, v)]


@pytest.mark.parametrize(
    ("dtype", "dim", "capability", "wanted"),
    [
        (torch.bfloat16, 128, (8, 0), "flash"),
        (torch.float16, 256, (9, 0), "flash"),
        (torch.bfloat16, 264, (9, 0), "efficient"),
        (torch.float32, 128, (9, 0), "efficient"),
        (torch.float32, 512, (7, 5), "efficient"),
        (torch.float16, 128, (7, 0), "efficient"),
        (torch.bfloat16, 128, (7, 5), "matmul"),
        (torch.float32, 64, (3, 7), "matmul"),
    ],
)
def test_what_serves_what_on_which_gpu(dtype: torch.dtype, dim: int, capability: tuple[int, int], wanted: str) -> None:
    kernel = CudaKernel(AtenFlashOp(), capability=capability)
    assert kernel.route(dtype, dim).name == wanted
    q, _, v, _ = _meta(dtype, dim, 64)
    assert isinstance(kernel.serving(q, v), MatmulKernel if wanted == "matmul" else VarlenKernel)


def test_the_choice_is_told_with_its_reason() -> None:
    bf16, fp32 = CudaKernel(AtenFlashOp()).explain()
    assert bf16.startswith("bfloat16: AtenFlashOp, head dims up to 256")
    assert fp32.startswith("float32: AtenEfficientOp, any head dim")
    assert all(route.why for route in ROUTES)


def test_the_arguments_that_we_pass_are_in_the_real_schemas() -> None:
    for op in (torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward):
        names = {a.name for a in op.default._schema.arguments}
        assert {"cum_seq_q", "cum_seq_k", "max_q", "max_k", "is_causal", "scale", "window_size_left"} <= names
    for op in (torch.ops.aten._efficient_attention_forward, torch.ops.aten._efficient_attention_backward):
        names = {a.name for a in op.default._schema.arguments}
        assert {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "custom_mask_type", "scale"} <= names


def test_windows() -> None:
    found = {call.kind: window(call) for call in plan_calls(SLICES, LIMITS)}
    assert found == {
        MaskKind.CAUSAL: (-1, 0),
        MaskKind.FULL: (-1, -1),
        MaskKind.DIAGONAL: (-1, -1),
        MaskKind.BAND: (3, 0),
    }


def test_without_the_package_pytorch_serves() -> None:
    assert isinstance(flash_op(), AtenFlashOp)


def test_limits_are_errors_with_a_fix() -> None:
    kernel = VarlenKernel(AtenFlashOp())
    q = torch.empty(2, 1, 320, dtype=torch.bfloat16, device="meta")
    with pytest.raises(PlanError, match="of dim 320"):
        kernel.forward(q, q, q, (Slice(0, 2, 0, 2, MaskKind.CAUSAL),), 1.0)
    with pytest.raises(PlanError, match="at most 4"):
        plan_calls((Slice(0, 5, 0, 5, MaskKind.CAUSAL),), replace(LIMITS, rows=4))


def test_an_npu_without_torch_npu_is_named() -> None:
    with pytest.raises(ClusterError, match="torch_npu is not loaded"):
        NpuOp(torch.device("cpu"))


def test_a_device_without_a_kernel_is_named() -> None:
    with pytest.raises(PlanError, match=r"'xpu:1'.*cpu, cuda, npu"):
        kernel_for(torch.device("xpu", 1))
