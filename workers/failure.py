"""What a rank tells the driver about an exception: whose fault it was, and whether it will come again.

Guarantees: every exception becomes a `WorkerError` that survives pickling and names rank, node, cause and fix; a broken
connection, which is most likely a consequence of a failure elsewhere, is told from an error of the rank's own.
"""

import traceback

import ray
import torch.distributed as dist

from raycp.errors import CheckpointError, ConfigError, DataError, DeviceError, ModelError, RaycpError, WorkerError
from workers.step import NonFiniteError
from workers.storage import storage_fix

_FATAL = (NonFiniteError, ConfigError, DataError, ModelError, CheckpointError)
"""Errors that come again when the same step is computed again."""


def failure_of(
    error: Exception, *, rank: int | None, step: int | None, generation: int, happened: float
) -> WorkerError:
    """The error for the driver. Call it where `error` is handled: its traceback is told too.

    Args:
        error: what was raised.
        rank: of this process, if it has one.
        step: of the run, inside a step.
        generation: of the call.
        happened: seconds since the epoch.
    """
    node = ray.util.get_node_ip_address()
    cause = f"{type(error).__name__}: {error.message if isinstance(error, RaycpError) else error}"
    return WorkerError(
        f"rank {rank} on {node}: {cause}",
        fix=error.fix if isinstance(error, RaycpError) else storage_fix(error),
        rank=rank,
        node=node,
        node_id=ray.get_runtime_context().get_node_id(),
        cause=cause,
        step=step,
        generation=generation,
        time=happened,
        communication=is_communication(error),
        fatal=isinstance(error, _FATAL),
        damaged=isinstance(error, CheckpointError),
        unfit=isinstance(error, DeviceError),
        traceback="".join(traceback.format_exception(error)),
    )


def is_communication(error: BaseException) -> bool:
    """Whether the error is a broken connection to a peer.

    Attention's communicators raise `WorkerError` for exactly that; FSDP2's collectives raise what torch raises.
    """
    if isinstance(error, WorkerError | dist.DistBackendError | dist.DistNetworkError | ConnectionError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        word in text for word in ("gloo", "connection closed", "connection reset", "broken pipe", "nccl", "hccl")
    )
