"""torch in a rank's process, before anything else of it imports torch: without torch_npu, unless it has an NPU.

Guarantees: those of `raycp.plain_torch`; a process of Ray that was given no NPU never loads torch_npu, so that ranks on
CPUs run on a node without CANN. Importing this module does it: Ray makes an actor by importing its module, before any
line of the actor's own runs, and the module's own imports bring torch. Costs nothing beside the import of torch.
"""

import ray

from raycp.plain_torch import import_torch


def may_have_npu() -> bool:
    """Whether this process is no actor's, or that of an actor that was given an NPU."""
    if not ray.is_initialized():
        return True
    context = ray.get_runtime_context()
    return context.get_actor_id() is None or bool(context.get_accelerator_ids().get("NPU"))


import_torch(npu=may_have_npu())
