"""Every call of our kernel against the real schemas and the real shape functions of torch_npu."""

from typing import Any

import pytest
import torch

from raycp.attention.kernels.npu import LIMITS, NpuOp, StatsOrder
from raycp.attention.kernels.varlen import VarlenKernel, plan_calls
from raycp.plan import MaskKind, Slice
from tests.device.inside.world import CPU, ops

SLICES = (
    Slice(0, 5, 0, 5, MaskKind.CAUSAL),
    Slice(5, 7, 0, 12, MaskKind.FULL),
    Slice(7, 9, 4, 6, MaskKind.DIAGONAL),
    Slice(9, 12, 3, 9, MaskKind.BAND, -1, 2),
)
ARGUMENTS = {
    "npu_fusion_attention": ["query", "key", "value", "head_num", "input_layout", "atten_mask", "scale", "keep_prob",
                             "pre_tockens", "next_tockens", "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode",
                             "softmax_layout"],
    "npu_fusion_attention_grad": ["query", "key", "value", "dy", "head_num", "input_layout", "atten_mask",
                                  "softmax_max", "softmax_sum", "attention_in", "scale_value", "keep_prob",
                                  "pre_tockens", "next_tockens", "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode",
                                  "softmax_layout"],
    "npu_ring_attention_update": ["prev_attn_out", "prev_softmax_max", "prev_softmax_sum", "cur_attn_out",
                                  "cur_softmax_max", "cur_softmax_sum", "actual_seq_qlen", "input_layout",
                                  "input_softmax_layout"],
}  # fmt: skip


class _OnMeta:
    """The real ops on meta tensors: their shape functions answer, and every call is kept."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.outputs: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(ops(), name)

        def call(*args: Any, **kwargs: Any) -> Any:
            names = [a.name for a in real.default._schema.arguments]
            self.calls.append((name, dict(zip(names, args, strict=False)) | kwargs))
            self.outputs.append(real(*args, **kwargs))
            return self.outputs[-1]

        call.default = real.default  # type: ignore[attr-defined]
        return call


def _meta_kernel(*, layout: bool = True, order: StatsOrder = StatsOrder.ROWS) -> tuple[VarlenKernel, _OnMeta]:
    """Our kernel, made on the CPU (its probe needs numbers), then moved to meta tensors."""
    op, seen = NpuOp(CPU), _OnMeta()
    op._forward_op, op._backward_op = seen.npu_fusion_attention, seen.npu_fusion_attention_grad
    op._mask = op._mask.to("meta")
    op.order = order
    if not layout:
        op.without_layout()
    return VarlenKernel(op), seen


def _tensors(dtype: torch.dtype, dim: int, value_dim: int) -> list[torch.Tensor]:
    shapes = ((12, 6, dim), (13, 2, dim), (13, 2, value_dim), (12, 6, value_dim))
    return [torch.empty(s, dtype=dtype, device="meta") for s in shapes]


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_the_real_schema_has_every_argument_that_we_pass(name: str) -> None:
    have = {a.name for a in getattr(ops(), name).default._schema.arguments}
    assert set(ARGUMENTS[name]) <= have


def test_the_package_is_the_one_of_this_torch() -> None:
    import torch_npu

    assert torch_npu.__version__.split(".")[:2] == torch.__version__.split("+")[0].split(".")[:2]
    assert not torch.npu.is_available()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 48), (8, 24)])
@pytest.mark.parametrize(
    ("layout", "order"), [(True, StatsOrder.ROWS), (False, StatsOrder.HEADS_OF_DOCUMENTS), (False, StatsOrder.HEADS)]
)
def test_shapes_and_dtypes_of_the_real_shape_functions(
    dtype: torch.dtype, dim: int, value_dim: int, layout: bool, order: StatsOrder
) -> None:
    kernel, seen = _meta_kernel(layout=layout, order=order)
    q, k, v, dout = _tensors(dtype, dim, value_dim)
    out, lse = kernel.forward(q, k, v, SLICES, 0.3)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((12, 6, value_dim), torch.float32, (12, 6), torch.float32)
    grads = kernel.backward(dout, q, k, v, out.to(dtype), lse, SLICES, 0.3)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, torch.float32) for x in (q, k, v)]
    num_calls = sum(call.kind is not MaskKind.DIAGONAL for call in plan_calls(SLICES, LIMITS))
    assert [name for name, _ in seen.calls] == ["npu_fusion_attention"] * num_calls + [
        "npu_fusion_attention_grad"
    ] * num_calls
    for (name, kwargs), outputs in zip(seen.calls, seen.outputs, strict=True):
        assert set(kwargs) <= set(ARGUMENTS[name])
        assert ("softmax_layout" in kwargs) == layout
        rows, heads = kwargs["query"].shape[:2]
        assert kwargs["actual_seq_qlen"][-1] == rows
        assert kwargs["actual_seq_kvlen"][-1] == len(kwargs["key"]) == len(kwargs["value"])
        assert all(type(n) is int for n in kwargs["actual_seq_qlen"])
        assert (kwargs["atten_mask"] is None) == (kwargs["sparse_mode"] == 0)
        if name == "npu_fusion_attention":
            assert outputs[0].shape == (rows, heads, kwargs["value"].shape[2])
            assert outputs[1].shape == outputs[2].shape == (rows, heads, 8)
            assert outputs[1].dtype == torch.float32
        else:
            assert kwargs["softmax_max"].shape == kwargs["softmax_sum"].shape == (rows, heads, 8)
            assert [x.shape for x in outputs[:3]] == [kwargs[x].shape for x in ("query", "key", "value")]
            assert kwargs["dy"].dtype == kwargs["attention_in"].dtype == dtype


def test_the_modes_of_the_calls() -> None:
    kernel, seen = _meta_kernel()
    q, k, v, _ = _tensors(torch.bfloat16, 16, 16)
    kernel.forward(q, k, v, SLICES, 0.3)
    found = [(c["sparse_mode"], c["pre_tockens"], c["next_tockens"], c["actual_seq_qlen"]) for _, c in seen.calls]
    # the band: 3 queries, keys 0 .. 4 of 6 (none sees the last): from the last key 3 back and none ahead
    assert found == [(3, 2**31 - 1, 0, [5]), (0, 2**31 - 1, 2**31 - 1, [2]), (4, 3, 0, [3])]


@pytest.mark.parametrize("wrong", ["pre_tokens", "scale_value", "softmax_lse"])
def test_an_argument_of_another_version_is_refused(wrong: str) -> None:
    q, k, v, _ = _tensors(torch.bfloat16, 16, 16)
    with pytest.raises(RuntimeError, match=wrong):
        ops().npu_fusion_attention(q, k, v, 6, "TND", **{wrong: 1})


def test_ring_update_has_the_shapes_of_its_inputs() -> None:
    out, stats = torch.empty(12, 6, 16, device="meta"), torch.empty(12, 6, 8, device="meta")
    lengths = torch.empty(3, dtype=torch.int64, device="meta")
    found = ops().npu_ring_attention_update(
        out, stats, stats, out, stats, stats, actual_seq_qlen=lengths, input_layout="TND", input_softmax_layout="TND"
    )
    assert [x.shape for x in found] == [out.shape, stats.shape, stats.shape]
