"""What else of the real package is relied on: its device module, its back end, its group options, its errors."""

import pytest
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401  the real package

from raycp.attention.kernels import kernel_for
from raycp.errors import ClusterError
from raycp.training.accelerator import Accelerator
from raycp.training.device import resolve_device, torch_device
from raycp.training.vendor import group_options

NPU = resolve_device("npu", [("10.0.0.1", {"NPU": 8})])


def test_the_module_has_what_the_interface_calls() -> None:
    module = torch.get_device_module("npu")
    wanted = ("device_count", "is_available", "set_device", "get_device_name", "mem_get_info", "synchronize", "Stream")
    wanted += ("stream", "get_rng_state", "set_rng_state", "empty_cache")
    assert [name for name in wanted if not hasattr(module, name)] == []


def test_a_process_without_an_npu_is_refused() -> None:
    with pytest.raises(ClusterError, match="which sees 0"):
        torch_device(NPU)
    with pytest.raises(ClusterError, match="which sees 0"):
        Accelerator(NPU)


def test_the_back_end_is_registered_under_our_name() -> None:
    assert dist.Backend.default_device_backend_map["npu"] == NPU.backend


def test_group_options_are_those_of_the_package() -> None:
    options = group_options(NPU.backend, message_bytes=40 << 20)
    assert dict(options.hccl_config) == {"hccl_buffer_size": 40}


def test_the_back_end_can_be_aborted() -> None:
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    assert hasattr(ProcessGroupHCCL, "abort")


def test_cpu_tensors_keep_the_cpu_kernel_beside_torch_npu() -> None:
    assert type(kernel_for(torch.device("cpu"))).__name__ == "CpuFlashKernel"
