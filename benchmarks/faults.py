"""A Ray cluster of several nodes on this machine, and what can happen to them: used by `benchmarks.recovery`.

Guarantees: signals are real and go to processes that this cluster started, by pid; what was stopped is continued before
the cluster is taken down; Ray's health check has the settings that docs/elastic.md names "tuned".
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from benchmarks.detection import environment

ROOT = Path(__file__).resolve().parents[1]


class Nodes:
    """A head without workers, and nodes that have some. A context manager; use it from the main thread.

    Args:
        cpus: of each node.
    """

    def __init__(self, cpus: Sequence[float]) -> None:
        self._cpus = cpus
        self._stopped: list[psutil.Process] = []

    def __enter__(self) -> Self:
        from ray.cluster_utils import Cluster

        os.environ.update(environment("tuned"))
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.nodes: list[Any] = []
        for number in self._cpus:
            self.add(number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        self._cluster.shutdown()

    @property
    def address(self) -> str:
        """For RAY_ADDRESS."""
        return str(self._cluster.address)

    def add(self, cpus: float) -> None:
        """One more node; returns when it is there."""
        self.nodes.append(self._cluster.add_node(num_cpus=cpus))

    def node_of(self, pid: int) -> Any:
        """The node that started a process."""
        return next(n for n in self.nodes if pid in {p.pid for p in self.processes(n)})

    def processes(self, node: Any) -> list[psutil.Process]:
        """The raylet of a node and all that it started, the raylet first."""
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        return [raylet, *raylet.children(recursive=True)]

    def signal(self, processes: Sequence[psutil.Process], number: signal.Signals) -> float:
        """Sends a signal to all of them at once. Returns the time of it, as `time.time` tells it."""
        if number == signal.SIGSTOP:
            self._stopped += processes
        now = time.time()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return now


@contextlib.contextmanager
def driver(module: str, arguments: Sequence[str], *, address: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m module arguments` in the repository's root, on a cluster; ended with the block if it still runs."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, "RAY_ADDRESS": address},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines; none if it is not there."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[bytes], *, seconds: float, what: str, log: Path
) -> None:
    """Waits until the condition holds.

    Raises:
        RuntimeError: the process ended before that.
        TimeoutError: it does not hold in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            raise RuntimeError(f"the driver ended (exit code {process.returncode}) before: {what}; see {log}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:.0f} s: {what}; see {log}")
        time.sleep(0.01)
