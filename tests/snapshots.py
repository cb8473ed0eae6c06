"""States and snapshots for the tests of keepers: what a rank would send, without a model."""

import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raycp.driver.copies import newest_point, replica_homes
from raycp.training.manifest import Manifest, ShardRecord
from raycp.training.sharding import ShardSpan, row_range
from raycp.training.state import State
from workers.keeper import Keeper
from workers.memory_reader import MemoryPoint, MemoryReader
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


class Nodes:
    """Keepers in this process, as if each were on a node of its own, with their real sockets and memory."""

    def __init__(self, names: str, checkpoints: str, *, ttl: float = 300.0, generation: int = 1) -> None:
        self.ended: list[str] = []
        self._options = checkpoints, ttl, generation
        self.keepers = {name: self._make(name, *self._options) for name in names}

    def _make(self, name: str, checkpoints: str, ttl: float, generation: int) -> Keeper:
        return Keeper(
            run_id="run",
            secret=SECRET,
            generation=generation,
            ttl=ttl,
            checkpoints=checkpoints,
            node_id=name,
            host="127.0.0.1",
            end=lambda: self.ended.append(name),
        )

    def __getitem__(self, name: str) -> Keeper:
        return self.keepers[name]

    def assign(self, places: str, *, generation: int = 1) -> Ranks:
        """Ranks 0, 1, ... on the nodes that `places` spells, and their writers."""
        order = list(dict.fromkeys(places))
        homes = replica_homes(order, list(self.keepers))
        live = [k.address() for k in self.keepers.values()]
        for name, keeper in self.keepers.items():
            home = homes[name]
            ranks = [rank for rank, place in enumerate(places) if place == name]
            keeper.assign(generation, ranks, None if home is None else self[home].address(), live)
        return Ranks([self[place].address() for place in places], generation=generation)

    def collect(self, step: int, *, generation: int = 1, timeout: float = 10.0) -> list[ShardRecord]:
        """Records of all ranks; waits for all keepers."""
        shards: list[ShardRecord] = []
        for name, keeper in self.keepers.items():
            found = keeper.collect(generation, step, timeout)
            assert found is not None, f"node {name} has not all of step {step}"
            shards += found
        return sorted(shards, key=lambda s: s.file)

    def commit(self, step: int, *, generation: int = 1, **extra: Any) -> Manifest:
        """Waits for the step and commits it everywhere."""
        manifest = manifest_of(step, self.collect(step, generation=generation), generation=generation, **extra)
        for keeper in self.keepers.values():
            keeper.commit(manifest)
        return manifest

    def point(self) -> MemoryPoint:
        """As the driver finds it."""
        found = newest_point({k.address(): k.inventory() for k in self.keepers.values()}, run_id="run")
        assert found is not None
        return found

    def add(self, name: str) -> None:
        """One more node with a keeper."""
        self.keepers[name] = self._make(name, *self._options)

    def lose(self, name: str) -> None:
        """The node's keeper is gone."""
        self.keepers.pop(name)._close()

    def close(self) -> None:
        for keeper in self.keepers.values():
            keeper._close()


def assert_holds(
    point: MemoryPoint, step: int, *, near: str = "", shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> None:
    """Every row of the step can be read from the holders, and is right."""
    assert point.manifest.step == step
    reader = MemoryReader(point.manifest, point.holders, secret=SECRET, near=near)
    for name in shapes:
        assert torch.equal(reader.read(name), whole(name, step, shapes)), name
    reader.close()
