"""Device table, without any accelerator."""

import pickle
import subprocess
import sys

import pytest

from raycp.errors import ClusterError, ConfigError
from raycp.training.device import compute_dtype, device_memory, host_memory, resolve_device, torch_device


@pytest.mark.parametrize(
    ("resources", "want"),
    [({"CPU": 8}, "cpu"), ({"CPU": 8, "GPU": 2}, "cuda"), ({"NPU": 8, "GPU": 1}, "npu"), ({"NPU": 0.0}, "cpu")],
)
def test_auto_takes_the_best_of_the_cluster(resources, want):
    assert resolve_device("auto", resources).name == want


def test_npu_row():
    spec = resolve_device("npu", {"NPU": 8})
    assert (spec.backend, spec.ray_resource, spec.visible_devices) == ("hccl", "NPU", "ASCEND_RT_VISIBLE_DEVICES")
    assert spec.dtype == "bfloat16"
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_a_device_that_the_cluster_lacks_is_named():
    with pytest.raises(ClusterError, match=r"'NPU'.*\{'CPU': 4\}") as caught:
        resolve_device("npu", {"CPU": 4, "memory": 1e9})
    assert "device='auto'" in caught.value.fix
    with pytest.raises(ConfigError):
        resolve_device("tpu", {})


def test_cpu_device_memory_and_dtype():
    import torch

    device = torch_device(resolve_device("cpu", {}), 3)
    assert device == torch.device("cpu")
    total, available = host_memory()
    assert 0 < available <= total
    assert device_memory(device)[0] == total
    assert compute_dtype("bfloat16") == torch.bfloat16
    with pytest.raises(ConfigError, match="float16"):
        compute_dtype("float16")


@pytest.mark.parametrize(
    "module", ["raycp.training", "raycp.training.device", "raycp.training.spec", "raycp.training.check"]
)
def test_the_driver_side_loads_no_torch(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
