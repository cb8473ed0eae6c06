"""States and snapshots for the tests of keepers: what a rank would send, without a model."""

import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raycp.training.manifest import Manifest, ShardRecord
from raycp.training.sharding import ShardSpan, row_range
from raycp.training.state import State
from workers.snapshot import SnapshotWriter
from workers.wire import KeeperAddress

SECRET = b"the secret of this run, 32 bytes"
SHAPES: dict[str, tuple[int, ...]] = {"param/w": (1003, 16), "exp_avg/w": (1003, 16), "param/b": (2,), "half": (37, 3)}


def whole(name: str, step: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> torch.Tensor:
    """The tensor after `step`, whoever computes it."""
    shape = shapes[name]
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float64) * 0.37 + step * 1000 + len(name)
    return values.to(torch.bfloat16 if name == "half" else torch.float32).reshape(shape)


def state_of(rank: int, world: int, step: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> State:
    """What `export_state` gives on a rank; ranks without rows of a tensor leave it out."""
    state: State = {}
    for name in shapes:
        tensor = whole(name, step, shapes)
        start, stop = row_range(tensor.shape[0], rank, world)
        if stop > start:
            state[name] = (ShardSpan(name, tuple(tensor.shape), tensor.dtype, start, stop), tensor[start:stop])
    return state


def manifest_of(
    step: int, shards: Sequence[ShardRecord], *, generation: int = 1, run_id: str = "run", **extra: Any
) -> Manifest:
    """As the driver would make it."""
    return Manifest(
        step=step,
        cursor={"pack": step},
        plan_hash="plan",
        generation=generation,
        run_id=run_id,
        grid={"dp": 1},
        shards=tuple(shards),
        extra=extra,
    )


class Ranks:
    """The snapshot writers of a world, in this process."""

    def __init__(self, addresses: Sequence[KeeperAddress], *, generation: int = 1, secret: bytes = SECRET) -> None:
        self.writers = [
            SnapshotWriter(address, secret=secret, generation=generation, rank=rank)
            for rank, address in enumerate(addresses)
        ]

    def snapshot(self, step: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> None:
        """Begins the copies of a step on all ranks."""
        for rank, writer in enumerate(self.writers):
            writer.begin(step, state_of(rank, len(self.writers), step, shapes))

    def wait(self) -> list[str | None]:
        """Waits for all of them; the problems."""
        for writer in self.writers:
            writer.wait()
        return [writer.problem for writer in self.writers]

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


def child(target: Any, *arguments: Any) -> multiprocessing.process.BaseProcess:
    """A process of its own, that can be killed."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def kill(process: multiprocessing.process.BaseProcess) -> None:
    """SIGKILL, and its end."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
