"""What a snapshot of the training state costs: the copy, the stall, the replica, the way back, the way to storage.

Two keepers in processes of their own stand for two nodes (their sockets and memory are the real ones; the network is
loopback), and this process is one rank whose shard has the size of a 135M model's on four ranks (fp32 weights and two
moments). A step is arithmetic of a stated length on one core; the stall is what `wait` returns at its end. Throughputs
are of the whole path, median of the rounds after the first one, which also takes the pages.
"""

import dataclasses
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Report, parser, table
from raycp.training.manifest import Manifest
from raycp.training.sharding import ShardSpan
from raycp.training.state import State
from workers.keeper import Keeper
from workers.memory_reader import MemoryReader
from workers.snapshot import SnapshotWriter

SECRET = b"benchmark"
WIDTH = 576
STALL_BAR = 0.03
"""Largest share of a step that the training thread may wait."""


def serve(orders: Connection, name: str, checkpoints: str) -> None:
    """A keeper in a process of its own, called over a pipe instead of through Ray."""
    keeper = Keeper(
        run_id="benchmark",
        secret=SECRET,
        generation=1,
        ttl=600.0,
        checkpoints=checkpoints,
        node_id=name,
        host="127.0.0.1",
    )
    while True:
        method, arguments, options = orders.recv()
        orders.send(getattr(keeper, method)(*arguments, **options))


class Node:
    """A keeper process, and the driver's end of its pipe."""

    def __init__(self, name: str, checkpoints: str) -> None:
        self._orders, other = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=serve, args=(other, name, checkpoints), daemon=True)
        self._process.start()

    def __call__(self, method: str, *arguments: Any, **options: Any) -> Any:
        self._orders.send((method, arguments, options))
        return self._orders.recv()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def nodes(checkpoints: str) -> Iterator[list[Node]]:
    """Two keepers."""
    made = [Node(name, checkpoints) for name in "ab"]
    try:
        yield made
    finally:
        for node in made:
            node.end()


def make_state(num_bytes: int) -> State:
    """A shard of that size: thirty tensors of three kinds."""
    rows = max(1, num_bytes // (30 * WIDTH * 4))
    state: State = {}
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        for layer in range(10):
            name = f"{kind}/layer.{layer}"
            state[name] = (ShardSpan(name, (rows, WIDTH), torch.float32, 0, rows), torch.randn(rows, WIDTH))
    return state


@dataclasses.dataclass(frozen=True)
class Round:
    """Seconds of one snapshot, each from `begin` on."""

    begin: float
    copied: float
    complete: float


def snapshot(writer: SnapshotWriter, state: State, step: int, held: list[Node]) -> tuple[Round, Manifest]:
    """One snapshot with nothing beside it, committed."""
    began = time.perf_counter()
    writer.begin(step, state)
    begin = time.perf_counter() - began
    writer.wait()
    copied = time.perf_counter() - began
    if writer.problem is not None:
        raise RuntimeError(f"no snapshot: {writer.problem}")
    manifest = collected(step, held)
    complete = time.perf_counter() - began
    commit(manifest, held)
    return Round(begin, copied, complete), manifest


def run(report: Report, *, num_bytes: int, rounds: int, step_seconds: float, checkpoints: str) -> None:
    """Everything, one rank."""
    state = make_state(num_bytes)
    with nodes(checkpoints) as held:
        addresses = [node("address") for node in held]
        held[1]("assign", 1, [], None, addresses)
        held[0]("assign", 1, [0], addresses[1], addresses)
        writer = SnapshotWriter(addresses[0], secret=SECRET, generation=1, rank=0)
        taken = [snapshot(writer, state, step, held) for step in range(1, rounds + 3)]
        first, later, manifest = taken[0][0], [r for r, _ in taken[2:]], taken[-1][1]
        size = writer.bytes / 1e9
        copied, complete = (statistics.median(getattr(r, n) for r in later) for n in ("copied", "complete"))
        print(f"one rank, {size * 1e3:.0f} MB, {rounds} rounds, nothing beside it:")
        table(
            ["what", "seconds", "GB/s"],
            [
                ["first copy (takes the pages)", first.copied, size / first.copied],
                ["copy into the keeper's memory", copied, size / copied],
                ["checksum, replica, checksum there", complete - copied, size / (complete - copied)],
                ["from begin to complete on two nodes", complete, size / complete],
                *[[what, s, size / s] for what, s in way_back(manifest, addresses)],
                ["to storage (fsync)", *to_storage(held[0], manifest, checkpoints, size)],
            ],
        )
        report.at_most("`begin` returns after", 1e3 * max(r.begin for r in later), 10.0, " ms")
        beside(report, writer, state, held, start=rounds + 3, rounds=rounds, step_seconds=step_seconds)
        writer.close()


def beside(
    report: Report,
    writer: SnapshotWriter,
    state: State,
    held: list[Node],
    *,
    start: int,
    rounds: int,
    step_seconds: float,
) -> None:
    """Stall and slow-down of a step that computes on one core while copy, checksum and replica go on."""
    torch.set_num_threads(1)
    stalls, steps = [], []
    alone = statistics.median(iterations(step_seconds) for _ in range(3))
    with_copy = []
    for step in range(start, start + rounds):
        writer.begin(step, state)
        driver = threading.Thread(target=lambda s=step: commit(collected(s, held), held))
        driver.start()
        with_copy.append(iterations(step_seconds))
        stalls.append(writer.wait())
        steps.append(step_seconds + stalls[-1])
        driver.join()
    print(f"beside a step of {step_seconds:g} s of arithmetic on one core:")
    report.at_most("stall / step, worst", max(s / t for s, t in zip(stalls, steps, strict=True)), STALL_BAR)
    report.at_most("arithmetic lost to copy, checksum and replica", 1 - statistics.median(with_copy) / alone, None)


def iterations(seconds: float) -> int:
    """How often a fixed piece of arithmetic runs in that time."""
    left, count = torch.randn(256, 256), 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        left = torch.tanh(left @ left)
        count += 1
    return count


def collected(step: int, held: list[Node]) -> Manifest:
    """What the driver makes of a step that is complete."""
    shards = None
    while shards is None:
        shards = held[0]("collect", 1, step, 60.0)
    return Manifest(step=step, cursor={}, plan_hash="", generation=1, run_id="benchmark", grid={}, shards=tuple(shards))


def commit(manifest: Manifest, held: list[Node]) -> None:
    """The step counts from now on."""
    for node in held:
        node("commit", manifest)


def way_back(manifest: Manifest, addresses: list[Any]) -> list[tuple[str, float]]:
    """Seconds to read the whole shard from each node; the first read also compares the checksum."""
    found = []
    for near, what in (("a", "rows from the own node"), ("-", "rows from another node")):
        holder = addresses[:1] if near == "a" else addresses[1:]
        reader = MemoryReader(manifest, {s.file: holder for s in manifest.shards}, secret=SECRET, near=near)
        began = time.perf_counter()
        for name in reader.names:
            reader.read(name)
        found.append((what, time.perf_counter() - began))
        reader.close()
    return found


def to_storage(node: Node, manifest: Manifest, checkpoints: str, size: float) -> tuple[float, float]:
    """Seconds and GB/s of writing the shard to a checkpoint."""
    began = time.perf_counter()
    files = [s.file for s in manifest.shards]
    node("persist", manifest, str(Path(checkpoints) / "step"), files, commit=False, order="", by=1)
    seconds = time.perf_counter() - began
    return seconds, size / seconds


def main() -> int:
    """Command line."""
    options = parser(__doc__).parse_args()
    report = Report()
    report.header("snapshot")
    with tempfile.TemporaryDirectory() as folder:
        size, rounds, seconds = (4 << 20, 2, 0.3) if options.quick else (404_000_000, 8, 3.0)
        run(report, num_bytes=size, rounds=rounds, step_seconds=seconds, checkpoints=folder)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
