"""One live driver per run on a cluster, whichever machine and folder it is on; a killed one blocks nobody."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import ray

from raycp.driver.cluster import live_nodes
from raycp.driver.lease import Lease
from raycp.errors import ConfigError

HOLDER = """
import sys, time
import ray
from raycp.driver.lease import Lease
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
lease = Lease.take(sys.argv[2], "host elsewhere, pid 7")
print("taken", flush=True)
time.sleep(120)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    context = ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield str(context.address_info["gcs_address"])
    ray.shutdown()


def holder(address: str, namespace: str) -> "subprocess.Popen[str]":
    """Another driver's process that has the lease."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, address, namespace],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "taken"
    return process


def test_a_second_live_driver_is_refused_by_name_and_a_killed_one_blocks_nobody(cluster: str) -> None:
    process = holder(cluster, "raycp-one")
    try:
        began = time.monotonic()
        with pytest.raises(ConfigError, match="another driver of this run is alive: host elsewhere, pid 7"):
            Lease.take("raycp-one", "host here, pid 8", wait=1.0)
        assert time.monotonic() - began < 10.0
        Lease.take("raycp-two", "host here, pid 8", wait=1.0).give_back()  # another run's
        process.send_signal(signal.SIGKILL)
        process.wait()
        began = time.monotonic()
        lease = Lease.take("raycp-one", "host here, pid 8")
        assert time.monotonic() - began < 15.0
        lease.give_back()
        Lease.take("raycp-one", "host here, pid 9", wait=5.0).give_back()
    finally:
        process.kill()
        process.communicate()


def test_a_lease_takes_no_place_of_a_worker(cluster: str) -> None:
    lease = Lease.take("raycp-three", "host here, pid 8")
    time.sleep(0.5)
    assert [n.free.get("CPU") for n in live_nodes()] == [1.0]
    lease.give_back()
