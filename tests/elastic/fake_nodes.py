"""Ray nodes on one machine that can be killed, frozen and brought back, with real signals.

Each has a folder of its own for everything private (`TMPDIR` too), which is deleted when the node is lost, and which
processes of other nodes may not open (`tests.elastic.victims.stay_at_home`). Drive it from the main thread: Ray's own
processes of a node end with the thread that started them.
"""

import contextlib
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from ray._private import ray_constants
from ray.cluster_utils import Cluster

from tests.elastic import leftovers
from tests.elastic.script import PRIVATE

HEALTH = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}
"""Ray sees a silent node after 2 to 3 s."""
ROOT = Path(__file__).resolve().parents[2]


@dataclass(eq=False)
class FakeNode:
    """One node.

    Attributes:
        name: of its private folder.
        node: Ray's.
        home: the private folder.
    """

    name: str
    node: Any
    home: Path

    @property
    def node_id(self) -> str:
        return str(self.node.node_id)

    @property
    def raylet(self) -> psutil.Process:
        found = self.node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0]
        return psutil.Process(found.process.pid)

    def processes(self) -> list[psutil.Process]:
        """The raylet, and everything under it."""
        try:
            raylet = self.raylet
            return [raylet, *raylet.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


class FakeNodes:
    """A head without workers, and nodes that come and go.

    Args:
        folder: where private folders are made.
        cpus: of each node.
    """

    def __init__(self, folder: Path, *, cpus: int = 1) -> None:
        self.folder = folder / "nodes"
        self.folder.mkdir(parents=True)
        self.cpus = cpus
        self.count = 0
        self.nodes: list[FakeNode] = []
        self.frozen: list[tuple[FakeNode, list[psutil.Process]]] = []
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "_system_config": HEALTH,
                "env_vars": self._environment("head"),
            },
        )

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def _environment(self, name: str) -> dict[str, str]:
        home = self.folder / name
        home.mkdir()
        return {PRIVATE: str(home), "TMPDIR": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def keep(self, count: int) -> None:
        """Brings the number of nodes to `count`."""
        while len(self.nodes) < count:
            self.add()
        while len(self.nodes) > count:
            self.kill(self.nodes[-1])

    def add(self) -> FakeNode:
        self.count += 1
        name = f"node-{self.count}"
        node = self.cluster.add_node(num_cpus=self.cpus, env_vars=self._environment(name))
        self.nodes.append(FakeNode(name=name, node=node, home=self.folder / name))
        return self.nodes[-1]

    def of(self, node_id: str) -> FakeNode:
        return next(n for n in self.nodes if n.node_id == node_id)

    def kill(self, node: FakeNode, *, all_of_it: bool = False) -> None:
        """SIGKILL to the raylet (and, with `all_of_it`, everything under it); its folder is gone."""
        processes = node.processes()
        for process in processes if all_of_it else processes[:1]:
            _send(process, signal.SIGKILL)
        self._lost(node)

    def freeze(self, node: FakeNode) -> None:
        """SIGSTOP to the raylet and everything under it."""
        processes = node.processes()
        for process in processes:
            _send(process, signal.SIGSTOP)
        self.frozen.append((node, processes))
        self._lost(node)

    def thaw(self, seconds: float) -> list[str]:
        """SIGCONT to all frozen ones; returns what of our processes still lives `seconds` later."""
        watched: list[psutil.Process] = []
        for _, processes in self.frozen:
            for process in processes:
                _send(process, signal.SIGCONT)
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "agent" not in " ".join(process.cmdline()):  # Ray's agents look for their raylet for a minute
                        watched.append(process)
        self.frozen = []
        _, alive = psutil.wait_procs(watched, timeout=seconds)
        left = []
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    left.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
                _send(process, signal.SIGKILL)
        return left

    def sweep(self) -> None:
        """Ends what is left of a run that went wrong."""
        for process in leftovers.marked(self.folder):
            with contextlib.suppress(psutil.NoSuchProcess):
                if not leftovers.is_rays(process):
                    _send(process, signal.SIGKILL)

    def close(self) -> None:
        self.thaw(0.0)
        self.cluster.shutdown()

    def _lost(self, node: FakeNode) -> None:
        self.nodes.remove(node)
        shutil.rmtree(node.home, ignore_errors=True)


def send_signal(pid: int, number: int) -> None:
    """To a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def wait_for(condition: Any, seconds: float) -> bool:
    """Whether it becomes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
