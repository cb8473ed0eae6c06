"""First messages between the ranks of a group: builds the links of every pair before a step needs them.

Guarantees: NCCL and HCCL make what a pair of ranks sends over (connections, or a communicator of its own) when the two
first meet, and the maker waits for the other; all ranks take their pairs in one order here, so that none waits in a
circle, and each pair is alone in its message, whichever way the library runs it. Costs two messages of four bytes a
pair: about twice the group's size of them one after the other, since pairs without a common rank run side by side.
"""

from collections.abc import Sequence

import torch

from raycp.attention.communicator import Communicator, Message
from raycp.attention.groups import Groups
from raycp.errors import ClusterError

Pair = tuple[int, int]


def pair_order(size: int, *, window: int = 1, outer: bool = False) -> list[Pair]:
    """The pairs of a group that exchange rows, in the one order that all its ranks take them in.

    Near pairs first; of those at the same distance, every other block of that many ranks at a time, which have no rank
    in common.

    Args:
        size: ranks of the group.
        window: inner ring of a double ring; 1: none, all pairs.
        outer: of the group that goes between windows: ranks with the same place in them.
    """
    pairs = [(a, b) for b in range(size) for a in range(b)]
    if window > 1:
        pairs = [(a, b) for a, b in pairs if (a % window == b % window if outer else a // window == b // window)]
    return sorted(pairs, key=lambda p: (p[1] - p[0], p[0] // (p[1] - p[0]) % 2, p[0]))


def warm_pairs(groups: Groups, device: torch.device) -> int:
    """Sends a number both ways between each pair of every group of this rank. Collective.

    Args:
        groups: of this rank.
        device: where tensors live.

    Returns:
        Pairs that this rank is one of.

    Raises:
        ClusterError: another number arrived.
        WorkerError: a peer failed or did not answer in time.
    """
    grid = groups.grid
    window = grid.window if grid.window not in (1, grid.ring) else 1
    made = _warm(groups.communicator, pair_order(grid.ring, window=window), device)
    made += _warm(groups.ulysses, pair_order(grid.ulysses), device)
    if window > 1:
        made += _warm(groups.outer, pair_order(grid.ring, window=window, outer=True), device)
    return made


def _warm(communicator: Communicator, order: Sequence[Pair], device: torch.device) -> int:
    rank = communicator.rank
    mine = [pair for pair in order if rank in pair]
    for a, b in mine:
        for sender, receiver in ((a, b), (b, a)):  # in turn: in a group of two, both ways share one stream
            name = "a first message"
            if rank == sender:
                number = torch.full((1,), float(sender), device=device)
                communicator.post([Message(receiver, number, 0, name)], []).wait()
                continue
            number = torch.full((1,), -1.0, device=device)
            communicator.post([], [Message(sender, number, 0, name)]).wait()
            if float(number) != sender:
                raise ClusterError(
                    f"ring index {rank} got {float(number)} from {sender} where {sender} was sent",
                    fix="check the network back end",
                )
    return len(mine)
