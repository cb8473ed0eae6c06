"""Whether all ranks that share a pack obey the same plan: compared before its first use.

Guarantees: if two context-parallel ranks have different plans, at least one rank raises before it moves any row,
instead of hanging or mixing rows up. Costs one message of 32 bytes to a neighbour in the ring and one in the Ulysses
group, for each micro-batch.
"""

import hashlib
from collections.abc import Sequence

import torch

from raycp.attention.communicator import Communicator, Message
from raycp.attention.groups import Groups
from raycp.errors import PlanError
from raycp.plan import AttentionPlan


def check_agreement(plans: Sequence[AttentionPlan], groups: Groups, device: torch.device) -> None:
    """Compares the hashes of `plans` with those of the ranks before this one; collective over the cp ranks.

    Args:
        plans: of the pack, one or one per kind of layer, in the same order on every rank.
        groups: of this rank.
        device: of the tensors that the groups exchange.

    Raises:
        PlanError: a neighbour has another plan.
        WorkerError: a neighbour failed.
    """
    digest = hashlib.sha256(" ".join(plan.hash for plan in plans).encode()).digest()
    for kind, group in (("ring", groups.communicator), ("Ulysses", groups.ulysses)):
        if group.size > 1:
            _compare(kind, group, digest, groups.cp_rank, device)


def _compare(kind: str, group: Communicator, digest: bytes, cp_rank: int, device: torch.device) -> None:
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    theirs = torch.empty_like(mine)
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    name = "hash of the plan"
    group.post([Message(after, mine, 0, name)], [Message(before, theirs, 0, name)]).wait()
    other = bytes(theirs.tolist())
    if other != digest:
        raise PlanError(
            f"cp rank {cp_rank} has plan {digest.hex()[:16]}, rank {before} of its {kind} group has {other.hex()[:16]}",
            fix="build the plan on every rank from the same pack, grid, layout, algorithm and cost figures",
        )
