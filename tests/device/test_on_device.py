"""On a machine with an NPU or a GPU: our kernel in every schedule, and the device's interface; skipped elsewhere."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from raycp.attention.kernels import Kernel, ReferenceKernel, kernel_for
from raycp.plan import MaskKind, Slice
from raycp.training.accelerator import Accelerator
from raycp.training.device import resolve_device
from tests.unit.attention.cases import TOLERANCE, errors, run_in_memory
from tests.unit.attention.test_exactness import MASKS, PACK
from tests.unit.attention.test_varlen_kernels import FIVE, _random_slices

HALF = 2e-2
"""Of bf16 kernels: inputs, probabilities and outputs are rounded to 8 bits."""
DEVICES = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("npu", "cuda")]


class OnDevice:
    """A kernel of a device for tensors on the host; follows `Kernel`."""

    def __init__(self, kernel: Kernel, device: torch.device) -> None:
        self._kernel, self._device = kernel, device

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slices: Sequence[Slice], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (x.to(self._device) for x in (q, k, v))
        out, lse = self._kernel.forward(q, k, v, slices, scale)
        return out.cpu(), lse.cpu()

    def backward(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        *tensors, slices, scale = args
        dq, dk, dv = self._kernel.backward(*(x.to(self._device) for x in tensors), slices, scale)
        return dq.cpu(), dk.cpu(), dv.cpu()


def accelerator(name: str) -> Accelerator:
    return Accelerator(resolve_device(name, [("this machine", {"NPU": 1.0, "GPU": 1.0})]))


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("schedule", list(FIVE))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_schedule(name: str, schedule: str, dtype: torch.dtype) -> None:
    device = accelerator(name).device
    kernel = OnDevice(kernel_for(device), device)
    limit = HALF if dtype == torch.bfloat16 else 10 * TOLERANCE if name == "cuda" else HALF
    for mask in MASKS:
        case = replace(PACK, dtype=dtype, **mask, **FIVE[schedule])
        found = errors(case, run_in_memory(case, kernel=kernel))
        assert max(found.values()) <= limit, (case, found)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("dim", [64, 80, 128, 320])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_any_slices_as_the_reference(name: str, dim: int, dtype: torch.dtype) -> None:
    limit = 1e-4 if name == "cuda" and dtype == torch.float32 else HALF
    device = accelerator(name).device
    kernel = OnDevice(kernel_for(device), device)
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        shapes = ((300, 8, dim), (280, 2, dim), (280, 2, dim), (300, 8, dim))
        q, k, v, dout = (torch.randn(*s, generator=generator).to(dtype) for s in shapes)
        slices = _random_slices(random.Random(seed), 300, 280)
        ref, ref_lse = ReferenceKernel().forward(q, k, v, slices, dim**-0.5)
        out, lse = kernel.forward(q, k, v, slices, dim**-0.5)
        rows = ref_lse[:, 0] > -torch.inf
        pairs = [(out[rows], ref[rows]), (lse[rows], ref_lse[rows])]
        given = (dout, q, k, v, ref.to(dtype), ref_lse, slices, dim**-0.5)
        (dq, *grads), (dq_ref, *wanted) = kernel.backward(*given), ReferenceKernel().backward(*given)
        for x, y in [*pairs, (dq[rows], dq_ref[rows]), *zip(grads, wanted, strict=True)]:
            assert float((x - y).norm() / y.norm()) < limit


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("warn_only", [False, True])
def test_the_same_bits_twice_in_deterministic_mode(name: str, dtype: torch.dtype, warn_only: bool) -> None:
    """With `warn_only`, as ranks run: there PyTorch's own attention would take a non-deterministic algorithm."""
    device = accelerator(name).device
    kernel = OnDevice(kernel_for(device), device)
    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(2048, 8, 64, generator=generator).to(dtype) for _ in "qo")
    k, v = (torch.randn(2048, 2, 64, generator=generator).to(dtype) for _ in "kv")
    slices = (Slice(0, 2048, 0, 2048, MaskKind.CAUSAL),)
    out, lse = kernel.forward(q, k, v, slices, 0.125)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        first, second = (kernel.backward(dout, q, k, v, out.to(dtype), lse, slices, 0.125) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", DEVICES)
def test_the_interface(name: str) -> None:
    used = accelerator(name)
    used.check()
    total, free = used.memory()
    assert 0 < free <= total
    assert used.sku
    state = used.rng_state()
    first = torch.rand(4, device=used.device).cpu()
    used.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=used.device).cpu(), first)
    with used.using(used.stream()):
        x = torch.ones(4, device=used.device) * 2
    used.synchronize()
    assert x.cpu().tolist() == [2.0] * 4
    assert used.release() > 0
