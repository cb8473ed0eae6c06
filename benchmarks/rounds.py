"""Measures several ways to do the same on the ranks of a process group, in turn, round by round.

Guarantees: all ways see the same machine, since a round runs each once, every round begins with another, and rounds
repeat; a way begins on all ranks together (barrier) and its time is that of the slowest rank; processor time is the sum
over ranks. Rounds before the first that counts warm up. On a machine that does other things too, minima and processor
time say more than medians.
"""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Times:
    """Of one way, by round: seconds of the slowest rank, processor seconds of all ranks."""

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]

    @property
    def least(self) -> float:
        """Shortest round."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """Median round."""
        return median(self.seconds)

    @property
    def cpu(self) -> float:
        """Least processor time."""
        return min(self.cpu_seconds)


def interleave(ways: Mapping[str, Callable[[], object]], *, rounds: int, warm_up: int = 1) -> dict[str, Times]:
    """Runs every way once a round; collective, with the same ways in the same order on every rank.

    Args:
        ways: what to run; a rank that has no part in a way has a function that does nothing.
        rounds: that count.
        warm_up: rounds before them.

    Returns:
        Times by name, the same on every rank.
    """
    world = dist.get_world_size()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    names = list(ways)
    gc.collect()
    gc.disable()
    for turn in range(warm_up + rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            way = ways[name]
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            way()
            mine = torch.tensor([time.perf_counter() - began, time.process_time() - cpu], dtype=torch.float64)
            parts = [torch.empty_like(mine) for _ in range(world)]
            dist.all_gather(parts, mine)
            if turn >= warm_up:
                seconds, cpus = zip(*(part.tolist() for part in parts), strict=True)
                taken[name].append((max(seconds), sum(cpus)))
        gc.collect()
    gc.enable()
    return {name: Times(*(tuple(column) for column in zip(*rows, strict=True))) for name, rows in taken.items()}
