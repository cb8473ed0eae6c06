"""What HCCL, NCCL and the vendors' allocators are told: environment variables of a rank, and options of its groups.

Guarantees: every such setting is in the tables below, each with its reason, and nowhere else; a variable that the user
exported where the driver runs keeps the user's value, and travels to every rank. Costs nothing: no torch is imported
until options of a group are asked for.
"""

import importlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from raycp.training.device import DeviceSpec

START_SKEW = 600
"""Seconds that ranks may differ in when they reach a group's first use: actors of a large job start minutes apart."""
SLACK = 60
"""Seconds by which the innermost time-out is shorter, so that it comes first and names the peer (at most half)."""
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Variable:
    """One environment variable. `value` is a template of {connect}, {execute}, {event} and {group}, in seconds."""

    name: str
    value: str
    why: str


COMMON = (
    Variable(
        "TORCH_DEVICE_BACKEND_AUTOLOAD",
        "0",
        "torch does not load torch_npu by itself, which breaks `import torch` on a node without CANN; a rank with an "
        "NPU imports it",
    ),
)
NPU = (
    Variable("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", "packs differ in length: segments that can grow"),
    Variable("HCCL_CONNECT_TIMEOUT", "{connect}", "building a link waits for the slowest start (default 120 s)"),
    Variable("HCCL_EXEC_TIMEOUT", "{execute}", "a peer that does not come: less than the group's own time-out"),
    Variable("HCCL_EVENT_TIMEOUT", "{event}", "must be above HCCL_EXEC_TIMEOUT"),
    Variable("HCCL_HOST_SOCKET_PORT_RANGE", "auto", "several ranks and jobs share a host: no fixed port"),
    Variable("HCCL_NPU_SOCKET_PORT_RANGE", "auto", "the same on the device's own network card"),
    Variable("HCCL_WHITELIST_DISABLE", "1", "no list of allowed hosts is written where nodes come and go"),
    Variable("HCCL_DETERMINISTIC", "true", "sums in one order: a run that goes on has the same losses to the bit"),
    Variable("HCCL_BUFFSIZE", "64", "MiB of a group without its own figure; each group takes twice that"),
    Variable("P2P_HCCL_BUFFSIZE", "20", "MiB of each pair of ranks that send to each other (twice that)"),
    Variable("TORCH_HCCL_ASYNC_ERROR_HANDLING", "0", "the driver decides what an error of a peer means"),
)
CUDA = (
    Variable("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "packs differ in length: segments that can grow"),
    Variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8", "products have the same bits each time"),
    Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "abort is called by us, not by the watchdog"),
    Variable("TORCH_NCCL_ENABLE_MONITORING", "0", "its monitor kills a process that is being recovered"),
    Variable("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0", "an error of an aborted group does not end the process"),
    Variable("TORCH_NCCL_PROPAGATE_ERROR", "0", "blame comes from the driver"),
    Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", "no minutes of dumping before a rank can rejoin"),
    Variable("TORCH_NCCL_NONBLOCKING_TIMEOUT", "{group}", "a non-blocking start that waits 30 min is a hang"),
    Variable("NCCL_NVLS_ENABLE", "0", "groups with NVLink SHARP cannot be aborted reliably"),
)
_TABLES: Mapping[str, tuple[Variable, ...]] = {"npu": (*COMMON, *NPU), "cuda": (*COMMON, *CUDA), "cpu": ()}


def process_environment(spec: DeviceSpec, *, timeout: float, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables that a rank's process must start with: for the actor's `runtime_env`.

    Args:
        spec: of the run.
        timeout: seconds that a collective may wait (`Rendezvous.timeout`).
        environ: of the driver; what the user exported there wins.
    """
    group = max(1, math.ceil(timeout))
    connect = min(7200, max(START_SKEW, group))
    seconds = {"group": group, "connect": connect, "execute": max(1, group // 2, group - SLACK), "event": group}
    return {v.name: environ.get(v.name, v.value.format(**seconds)) for v in _TABLES[spec.name]}


def explain(spec: DeviceSpec, *, timeout: float = 1800.0, environ: Mapping[str, str] = os.environ) -> list[str]:
    """One line for each variable: its value, and why."""
    values = process_environment(spec, timeout=timeout, environ=environ)
    return [f"{v.name}={values[v.name]}  # {v.why}" for v in _TABLES[spec.name]]


def buffer_mebibytes(message_bytes: int, *, low: int = 16, high: int = 200) -> int:
    """HCCL buffer of a group, MiB: what its largest message needs, between `low` and HCCL's own default of 200.

    A group takes twice this of device memory, so ten groups at the default take 4 of 64 GB.
    """
    return min(high, max(low, math.ceil(message_bytes / MEBIBYTE)))


def largest_messages(
    *, tokens: int, ring: int, ulysses: int, heads: int, kv_heads: int, head_dim: int, value_dim: int, itemsize: int
) -> dict[str, int]:
    """Bytes of the largest message of a rank in the groups of attention: {"ring": ..., "ulysses": ...}.

    A ring moves K and V of a rank's tokens, and their gradients in fp32, each tensor a message; Ulysses trades its
    tokens' queries for heads. Documents that are split unevenly may need more: HCCL then sends in parts.

    Args:
        tokens: of a pack.
        ring: ranks of a ring.
        ulysses: ranks of a Ulysses group.
        heads: query heads of the model.
        kv_heads: key/value heads of the model.
        head_dim: of queries and keys.
        value_dim: of values.
        itemsize: bytes of a number in the compute dtype.
    """
    dim = max(head_dim, value_dim)
    ring_rows, own_rows = math.ceil(tokens / ring), math.ceil(tokens / (ring * ulysses))
    return {
        "ring": ring_rows * math.ceil(kv_heads / ulysses) * dim * 4 if ring > 1 else 0,
        "ulysses": own_rows * math.ceil(heads / ulysses) * dim * itemsize if ulysses > 1 else 0,
    }


def group_options(backend: str, *, message_bytes: int = 0) -> Any:
    """`pg_options` of a process group; None where the back end has none that we set.

    Args:
        backend: "hccl", "nccl" or "gloo".
        message_bytes: of the largest message that one rank sends in it.
    """
    if backend == "hccl":
        options: Any = importlib.import_module("torch_npu._C._distributed_c10d").ProcessGroupHCCL.Options()
        options.hccl_config = {"hccl_buffer_size": buffer_mebibytes(message_bytes)}
        return options
    if backend == "nccl":
        import torch.distributed as dist

        options = cast(Any, dist.ProcessGroupNCCL.Options())
        options.config.blocking = 0  # communicators start without blocking, so that a start can be aborted too
        return options
    return None
