"""The DeviceMesh of one generation of process groups.

Guarantees: a mesh is made fresh from the groups that exist now. Process-group names repeat after a destroy and
DeviceMesh resolves groups by name, so a mesh that outlives its generation would silently use the new groups: keep
none. Making one is collective: every rank of the world, in the same order.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh

SHARD = "shard"
REPLICATE = "replicate"


def build_mesh(world_size: int, device_type: str) -> DeviceMesh:
    """1-D mesh over all ranks (dp x cp): what parameters, gradients and optimizer are sharded over.

    Args:
        world_size: `RankGrid.world_size`.
        device_type: "cpu", "cuda" or "npu".
    """
    return DeviceMesh(device_type, torch.arange(world_size), mesh_dim_names=(SHARD,))


def replicated(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks as replicas of shards of one: `ParallelConfig(shard="none")`."""
    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(-1, 1), mesh_dim_names=(REPLICATE, SHARD))
