"""How long Ray takes to see a dead worker, a dead node and a frozen node, by its health-check settings.

A cluster of a head and two nodes on this machine for each setting; an actor waits in a call, something is killed
(SIGKILL) or frozen (SIGSTOP), and the time to the error of that call is taken. No torch, hardly any CPU. A frozen
worker on a healthy node is not in the table: Ray never reports it, raycp's own `elastic.heartbeat_timeout` does.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import Report, parser, table

SETTINGS: dict[str, dict[str, int]] = {
    "Ray's defaults": {},
    "large cluster": {"initial_delay_ms": 0, "period_ms": 1000, "timeout_ms": 3000, "failure_threshold": 5},
    "tuned": {"initial_delay_ms": 0, "period_ms": 1000, "timeout_ms": 1000, "failure_threshold": 3},
}
FAULTS = ("worker killed", "node killed", "node frozen")
LIMIT = 120.0
"""Seconds after which a fault counts as not seen."""


def environment(setting: str) -> dict[str, str]:
    """Variables that `ray start` (of the head above all) has to see."""
    return {f"RAY_health_check_{name}": str(value) for name, value in SETTINGS[setting].items()}


def measure() -> dict[str, float]:
    """Seconds by fault, on a cluster of this process that lives under its environment."""
    import ray
    from ray.cluster_utils import Cluster
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    @ray.remote(num_cpus=0)
    class Waiting:
        def pid(self) -> int:
            return os.getpid()

        def wait(self) -> None:
            time.sleep(3600)

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    found: dict[str, float] = {}
    try:
        for fault, node in zip(FAULTS, (nodes[0], nodes[0], nodes[1]), strict=True):
            place = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
            actor = Waiting.options(scheduling_strategy=place).remote()  # type: ignore[attr-defined]
            worker = ray.get(actor.pid.remote(), timeout=60)
            call = actor.wait.remote()
            time.sleep(7.0)  # longer than the default initial delay of a new node's checks
            raylet = node.all_processes["raylet"][0].process.pid
            with frozen_until_the_end([raylet, worker] if fault == "node frozen" else []):
                began = time.monotonic()
                if fault != "node frozen":
                    os.kill(worker if fault == "worker killed" else raylet, signal.SIGKILL)
                found[fault] = seen_after(ray, call, began)
    finally:
        ray.shutdown()
        cluster.shutdown()
    return found


@contextlib.contextmanager
def frozen_until_the_end(pids: list[int]) -> Iterator[None]:
    """SIGSTOP now, SIGCONT afterwards, so that the cluster can be taken down."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def seen_after(ray: Any, call: Any, began: float) -> float:
    """Seconds until the call fails because its actor is lost; infinity if it does not."""
    try:
        ray.get(call, timeout=LIMIT)
    except ray.exceptions.GetTimeoutError:
        return float("inf")
    except ray.exceptions.RayActorError:
        return time.monotonic() - began
    raise AssertionError("the call came back")


def in_a_process_of_its_own(setting: str) -> dict[str, float]:
    """`measure` under the environment of a setting."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.detection", "--child"],
        cwd=Path(__file__).resolve().parents[1],
        env={**os.environ, **environment(setting)},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    """Exit code 1 if a bar was missed."""
    options = parser(__doc__)
    options.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.child:
        print(json.dumps(measure()))
        return 0
    report = Report()
    report.header("detection")
    found = {name: in_a_process_of_its_own(name) for name in SETTINGS if not arguments.quick or name == "tuned"}
    table(["seconds until Ray reports", *found], [[fault, *(f[fault] for f in found.values())] for fault in FAULTS])
    report.at_most("worker killed, tuned", found["tuned"]["worker killed"], 1.0, " s")
    report.at_most("node killed, tuned", found["tuned"]["node killed"], 4.0, " s")
    report.at_most("node frozen, tuned", found["tuned"]["node frozen"], 8.0, " s")
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
