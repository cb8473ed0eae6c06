"""From a Hugging Face model to a sharded, restartable training state. No Ray.

device.py       DeviceSpec: cpu, cuda or npu, with its collective back end and Ray resource
accelerator.py  the device of this process: memory, streams, random numbers, whether it is healthy
peak.py         peak FLOP/s by the name of a device, and the user's own
vendor.py       what HCCL, NCCL and the allocators are told, each with its reason
abort.py        frees a process from collectives of NCCL and HCCL, all groups at once, with a deadline
mesh.py         the DeviceMesh of one generation
spec.py         ModelSpec: where a model comes from (folder, hub, GGUF, random initialisation)
check.py        which models are trained, how long a document may be; every refusal has a name and a reason
model.py        Trainee: the sharded model with its chunked loss; build_trainee
weights.py      fills the own rows of every parameter
loss.py         chunked cross-entropy: logits of target rows only, gradients made in forward
optim.py        AdamW and SGD, learning-rate schedule, clipping by the global norm
collectives.py  FSDP2's all-gather and reduce-scatter, and a sum over ranks, by P2P, for gloo
replicas.py     whole parameters on every rank, gradients summed once a step
sharding.py     ShardSpan: rows of a named tensor; who holds which
state.py        training state by logical offsets, out of and into any world size
tensorfile.py   safetensors files written without a second copy in memory, with length and checksum
manifest.py     what a committed step is, on disk and in memory; needs no torch
storage.py      one folder, at a path or (remote.py) at a URL; needs no torch
latest.py       what was committed last, and which generation may commit; needs no torch
committed.py    which steps a checkpoint folder holds for good; needs no torch
checkpoint.py   shards of a checkpoint: what ranks write and read
rows.py         rows of named tensors out of shards, wherever their bytes are
export.py       a committed checkpoint as a plain Hugging Face folder

Names are loaded when first used: importing this package loads no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycp.training.check import check_model, positions_limit
    from raycp.training.checkpoint import CheckpointReader, Newest, commit, newest, prune, step_folder, write_shard
    from raycp.training.device import DeviceSpec, host_memory, resolve_device, torch_device
    from raycp.training.export import export_hf
    from raycp.training.manifest import Manifest, ShardRecord
    from raycp.training.mesh import build_mesh
    from raycp.training.model import Trainee, build_trainee
    from raycp.training.optim import build_optimizer, clip_by_global_norm, learning_rate, set_learning_rate
    from raycp.training.sharding import ShardSpan
    from raycp.training.spec import ModelSpec
    from raycp.training.state import export_state, import_state

_HOME = {
    "check": ("check_model", "positions_limit"),
    "checkpoint": ("CheckpointReader", "Newest", "commit", "newest", "prune", "step_folder", "write_shard"),
    "device": ("DeviceSpec", "host_memory", "resolve_device", "torch_device"),
    "export": ("export_hf",),
    "manifest": ("Manifest", "ShardRecord"),
    "mesh": ("build_mesh",),
    "model": ("Trainee", "build_trainee"),
    "optim": ("build_optimizer", "clip_by_global_norm", "learning_rate", "set_learning_rate"),
    "sharding": ("ShardSpan",),
    "spec": ("ModelSpec",),
    "state": ("export_state", "import_state"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "CheckpointReader",
    "DeviceSpec",
    "Manifest",
    "ModelSpec",
    "Newest",
    "ShardRecord",
    "ShardSpan",
    "Trainee",
    "build_mesh",
    "build_optimizer",
    "build_trainee",
    "check_model",
    "clip_by_global_norm",
    "commit",
    "export_hf",
    "export_state",
    "host_memory",
    "import_state",
    "learning_rate",
    "newest",
    "positions_limit",
    "prune",
    "resolve_device",
    "set_learning_rate",
    "step_folder",
    "torch_device",
    "write_shard",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
