"""The process in which torch_npu is the real one and its attention ops have a CPU kernel: import this first.

Guarantees: names, schemas, defaults and shape functions are those of the wheel; only the CPU kernels are the tests'.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch_npu  # noqa: F401  the real package: registers the ops
from torch_npu.op_plugin.meta import _meta_registrations

from raycp.attention.kernels.npu import NpuOp
from raycp.attention.kernels.varlen import VarlenKernel
from tests.device.inside.documented_op import DocumentedOp, ring_update

torch.set_num_threads(1)
_meta_registrations._npu_fusion_attention_warning_printed = True  # a warning about torch.compile, which asks the chip
CPU = torch.device("cpu")
_chosen = [DocumentedOp()]
_library = torch.library.Library("npu", "IMPL")
_library.impl("npu_fusion_attention", lambda *a, **k: _chosen[-1].forward(*a, **k), "CPU")
_library.impl("npu_fusion_attention_grad", lambda *a, **k: _chosen[-1].backward(*a, **k), "CPU")
_library.impl("npu_ring_attention_update", ring_update, "CPU")


@contextmanager
def version(op: DocumentedOp) -> Iterator[None]:
    """Another version of CANN, for a while."""
    _chosen.append(op)
    try:
        yield
    finally:
        _chosen.pop()


def npu_kernel(op: DocumentedOp | None = None) -> VarlenKernel:
    """Our kernel as it is made on an NPU, probe included."""
    with version(op or _chosen[-1]):
        return VarlenKernel(NpuOp(CPU))


def ops() -> Any:
    """The real ops."""
    return torch.ops.npu
