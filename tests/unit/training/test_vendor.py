"""Environment and group options of a device: what is set, and that the user's own values win."""

import pytest

from raycp.training.device import resolve_device
from raycp.training.vendor import (
    CUDA,
    NPU,
    buffer_mebibytes,
    explain,
    group_options,
    largest_messages,
    process_environment,
)

DEVICES = {
    name: resolve_device(name, [("10.0.0.1", {"NPU": 8, "GPU": 8, "CPU": 8})]) for name in ("npu", "cuda", "cpu")
}


@pytest.mark.parametrize("timeout", [1.0, 30.0, 600.0, 1800.0, 9000.0])
def test_npu_timeouts_nest(timeout):
    found = process_environment(DEVICES["npu"], timeout=timeout, environ={})
    execute, event = int(found["HCCL_EXEC_TIMEOUT"]), int(found["HCCL_EVENT_TIMEOUT"])
    assert 1 <= execute <= event <= timeout + 1
    assert execute < event or timeout <= 1
    assert 120 <= int(found["HCCL_CONNECT_TIMEOUT"]) <= 7200


def test_npu_environment():
    found = process_environment(DEVICES["npu"], timeout=600.0, environ={})
    assert found["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:True"
    assert found["HCCL_DETERMINISTIC"] == "true"
    assert found["HCCL_HOST_SOCKET_PORT_RANGE"] == found["HCCL_NPU_SOCKET_PORT_RANGE"] == "auto"
    assert "ASCEND_RT_VISIBLE_DEVICES" not in found  # Ray's


def test_only_what_belongs_to_the_device():
    cuda, cpu = (process_environment(DEVICES[name], timeout=600.0, environ={}) for name in ("cuda", "cpu"))
    assert cpu == {}  # ranks on CPUs start with the environment of their node
    assert cuda["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "600"
    assert not any(name.startswith(("HCCL", "TORCH_HCCL")) for name in cuda)


def test_what_the_user_exported_wins_and_travels():
    own = {"HCCL_CONNECT_TIMEOUT": "1200", "HOME": "/somewhere"}
    found = process_environment(DEVICES["npu"], timeout=600.0, environ=own)
    assert found["HCCL_CONNECT_TIMEOUT"] == "1200"
    assert "HOME" not in found


def test_every_variable_has_a_reason_and_is_there_once():
    assert all(v.why for v in (*NPU, *CUDA))
    assert len({v.name for v in (*NPU, *CUDA)}) == len(NPU) + len(CUDA)
    lines = explain(DEVICES["npu"], timeout=600.0, environ={})
    assert any(line.startswith("HCCL_CONNECT_TIMEOUT=600  # ") for line in lines)


def test_buffer_of_a_group_is_what_its_messages_need():
    assert [buffer_mebibytes(n) for n in (0, 1 << 20, 40 << 20, (40 << 20) + 1, 1 << 40)] == [16, 16, 40, 41, 200]


def test_gloo_has_no_options():
    assert group_options("gloo", message_bytes=1 << 30) is None


def test_largest_messages_of_a_llama_8b_at_128k():
    model = {"heads": 32, "kv_heads": 8, "head_dim": 128, "value_dim": 128, "itemsize": 2}
    found = largest_messages(tokens=131_072, ring=2, ulysses=4, **model)
    # ring: 65 536 rows x 2 K/V heads x 128 x fp32; Ulysses: 16 384 rows x 8 query heads x 128 x bf16
    assert found == {"ring": 65_536 * 2 * 128 * 4, "ulysses": 16_384 * 8 * 128 * 2}
    assert [buffer_mebibytes(n) for n in found.values()] == [64, 32]
    assert largest_messages(tokens=131_072, ring=1, ulysses=8, **model)["ring"] == 0
    assert largest_messages(tokens=131_072, ring=8, ulysses=1, **model)["ulysses"] == 0
