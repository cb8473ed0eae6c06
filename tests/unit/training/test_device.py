"""Device table, without any accelerator."""

import pickle
import subprocess
import sys
import threading

import pytest

from raycp.errors import ClusterError, ConfigError, DeviceError
from raycp.training.accelerator import Accelerator
from raycp.training.device import (
    compute_dtype,
    host_memory,
    local_accelerators,
    local_index,
    resolve_device,
    torch_device,
)


def one(resources):
    return [("10.0.0.1", resources)]


@pytest.mark.parametrize(
    ("resources", "want"),
    [({"CPU": 8}, "cpu"), ({"CPU": 8, "GPU": 2}, "cuda"), ({"NPU": 8, "GPU": 1}, "npu"), ({"NPU": 0.0}, "cpu")],
)
def test_auto_takes_the_best_of_the_cluster(resources, want):
    assert resolve_device("auto", one(resources)).name == want


def test_npu_row():
    spec = resolve_device("npu", one({"NPU": 8}))
    assert (spec.backend, spec.ray_resource, spec.visible_devices) == ("hccl", "NPU", "ASCEND_RT_VISIBLE_DEVICES")
    assert spec.dtype == "bfloat16"
    assert spec.is_accelerator
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_a_device_that_the_cluster_lacks_is_named_with_what_each_node_has():
    nodes = [("10.0.0.1", {"CPU": 4, "memory": 1e9}), ("10.0.0.2", {"CPU": 8, "GPU": 2})]
    with pytest.raises(ClusterError) as caught:
        resolve_device("npu", nodes)
    assert "takes one NPU a rank" in str(caught.value)
    assert "10.0.0.1 has 4 CPU; 10.0.0.2 has 8 CPU, 2 GPU" in str(caught.value)
    assert "device='auto'" in caught.value.fix
    with pytest.raises(ClusterError, match="no live node"):
        resolve_device("cuda", [])
    with pytest.raises(ConfigError):
        resolve_device("tpu", [])


def test_cpu_ranks_counted_by_another_resource():
    spec = resolve_device("cpu", one({"CPU": 4, "NPU": 8}), resource="NPU")
    assert (spec.name, spec.backend, spec.ray_resource, spec.dtype) == ("cpu", "gloo", "NPU", "float32")
    assert not spec.is_accelerator
    assert local_index(spec, ["7"], {}) == 0
    with pytest.raises(ClusterError, match="takes one NPU a rank"):
        resolve_device("cpu", one({"CPU": 4}), resource="NPU")


@pytest.mark.parametrize(
    ("visible", "want"), [(None, 12), ("4,5,6,7", 4), ("", 0), ("NoDevFiles", 0), (",".join(map(str, range(16))), 12)]
)
def test_npus_of_a_machine_are_counted_without_acl(tmp_path, visible, want):
    for name in [*(f"davinci{i}" for i in range(12)), "davinci_manager", "nvidia0", "nvidiactl", "null"]:
        (tmp_path / name).touch()
    environ = {} if visible is None else {"ASCEND_RT_VISIBLE_DEVICES": visible}
    assert local_accelerators(tmp_path, environ) == {"NPU": want, "GPU": 1}
    assert local_accelerators(tmp_path / "none", environ) == {"NPU": 0, "GPU": 0}


NPU = resolve_device("npu", one({"NPU": 8}))


@pytest.mark.parametrize(
    ("assigned", "environ", "want"),
    [
        (["6"], {"ASCEND_RT_VISIBLE_DEVICES": "6"}, 0),  # Ray sets it
        (["6"], {}, 6),  # Ray leaves it, all are visible
        (["6"], {"ASCEND_RT_VISIBLE_DEVICES": ""}, 6),
        (["6"], {"ASCEND_RT_VISIBLE_DEVICES": "4,5,6,7"}, 2),  # Ray leaves it, the node has four of eight
        (["12"], {"ASCEND_RT_VISIBLE_DEVICES": "2, 12"}, 1),
    ],
)
def test_physical_id_to_index(assigned, environ, want):
    assert local_index(NPU, assigned, environ) == want


def test_an_actor_without_its_device_is_told_so():
    with pytest.raises(ClusterError, match="got no NPU"):
        local_index(NPU, [], {})
    with pytest.raises(ClusterError, match="hides it") as caught:
        local_index(NPU, ["3"], {"ASCEND_RT_VISIBLE_DEVICES": "4,5"})
    assert "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES" in caught.value.fix


def test_an_npu_process_without_torch_npu_is_an_error_and_not_a_cpu_run():
    with pytest.raises(ClusterError, match="torch_npu does not load"):
        torch_device(NPU, 0)


def test_a_gpu_that_is_not_there_is_an_error_and_not_a_cpu_run():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ClusterError, match="which sees 0"):
        torch_device(resolve_device("cuda", one({"GPU": 1})), 0)


def test_the_interface_on_a_cpu():
    import torch

    used = Accelerator(resolve_device("cpu", []))
    assert (used.sku, used.device, used.module) == ("cpu", torch.device("cpu"), torch.cpu)
    assert used.memory() == (host_memory()[0], used.memory()[1])
    state = used.rng_state()
    first = torch.rand(3)
    used.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    with used.using(used.stream()):
        used.synchronize()
    assert used.release() > 0
    used.check()


def test_a_device_that_computes_wrong_numbers_is_not_used_again(monkeypatch):
    import torch

    used = Accelerator(resolve_device("cpu", []))
    monkeypatch.setattr(torch, "eye", lambda n, device: torch.ones(n, n))
    with pytest.raises(ClusterError, match="computes wrong numbers"):
        used.check()


def test_a_device_that_does_not_answer_is_given_up_at_the_deadline(monkeypatch):
    used = Accelerator(resolve_device("cpu", []))
    released = threading.Event()
    monkeypatch.setattr(used, "_multiply", lambda: released.wait(30.0))
    with pytest.raises(DeviceError, match="did not finish"):
        used.check(deadline=0.1)
    released.set()


class Memory:
    """A device's module, of whose 100 GiB so many are in use that each look frees some; counts what it is asked for."""

    def __init__(self, used, freed):
        self.used, self.freed, self.asked = used, freed, []

    def mem_get_info(self, device):
        return (100 - self.used) * 2**30, 100 * 2**30

    def empty_cache(self):
        self.asked.append("empty_cache")
        self.used = max(0, self.used - self.freed)

    def synchronize(self):
        self.asked.append("synchronize")

    def get_device_name(self, device):
        return "Ascend910B3"


def device_with(memory):
    used = Accelerator(resolve_device("cpu", []))
    used.spec, used.module = NPU, memory
    return used


def test_memory_of_a_process_that_was_killed_is_waited_for():
    memory = Memory(used=90, freed=30)
    assert device_with(memory).reclaim(patience=20.0) == 100 * 2**30
    assert memory.asked == ["synchronize", "empty_cache"] * 3


def test_a_device_that_stays_full_is_no_ranks():
    memory = Memory(used=30, freed=0)
    with pytest.raises(DeviceError, match=r"Ascend910B3.*70.0 of 100.0 GiB free"):
        device_with(memory).reclaim(patience=0.2)
    assert device_with(memory).reclaim(share=0.6) == 70 * 2**30
    assert device_with(memory).memory() == (100 * 2**30, 70 * 2**30)


def test_cpu_memory_and_dtype():
    import torch

    device = torch_device(resolve_device("cpu", []), 3)
    assert device == torch.device("cpu")
    total, available = host_memory()
    assert 0 < available <= total
    assert Accelerator(resolve_device("cpu", [])).memory()[0] == total
    assert compute_dtype("bfloat16") == torch.bfloat16
    with pytest.raises(ConfigError, match="float16"):
        compute_dtype("float16")


@pytest.mark.parametrize(
    "module",
    [
        "raycp.training",
        "raycp.training.accelerator",
        "raycp.training.device",
        "raycp.training.vendor",
        "raycp.training.spec",
        "raycp.training.check",
    ],
)
def test_the_driver_side_loads_no_torch(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
