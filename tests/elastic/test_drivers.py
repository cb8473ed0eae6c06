"""Drivers on a cluster that outlives them: killed, terminated, started twice. The same command goes on from memory."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from raycp.driver.lease import Lease
from raycp.errors import ConfigError
from raycp.events import read_events
from tests.elastic.runs import STEPS, make_folder

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
from pathlib import Path
import raycp
from transformers import LlamaConfig
from raycp.driver import fleet
from tests.elastic import faulty_worker
from tests.elastic.runs import config
fleet.TrainWorker = faulty_worker.SlowWorker
folder = Path(sys.argv[1])
model = LlamaConfig.from_pretrained(folder / "model")
data, tokenizer = folder / "rows.jsonl", str(folder / "tokenizer")
result = raycp.fit(model, data, tokenizer=tokenizer, output_dir=sys.argv[2], config=config(checkpoint_every=100))
print("status", result.status, result.steps)
"""
Starter = Callable[[Path], subprocess.Popen[str]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=1)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def start(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """Starts a driver of the tiny run in a folder; none outlives the tests."""
    inputs = tmp_path_factory.mktemp("inputs")
    make_folder(inputs)["model"].save_pretrained(inputs / "model")
    started: list[subprocess.Popen[str]] = []

    def begin(out: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(inputs), str(out)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": cluster.address},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def events(out: Path, *names: str) -> list[dict[str, object]]:
    return [e for e in read_events(out / "events.jsonl") if e["event"] in names]


def losses(out: Path) -> dict[object, object]:
    found = events(out, "step")
    assert [e["step"] for e in found] == list(range(1, len(found) + 1)), "every step once, in order"
    return {e["step"]: e["loss"] for e in found}


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if any(e["step"] == step for e in events(out, "step")):
            return
        time.sleep(0.02)
    raise AssertionError(f"no step {step}: {process.communicate()}")


def finish(start: Starter, out: Path) -> None:
    process = start(out)
    text, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert f"status finished {STEPS}" in text


@pytest.fixture(scope="module")
def unbroken(start: Starter, tmp_path_factory: pytest.TempPathFactory) -> dict[object, object]:
    out = tmp_path_factory.mktemp("unbroken")
    finish(start, out)
    return losses(out)


def test_a_killed_driver_is_followed_by_one_that_continues_from_memory(
    start: Starter, unbroken: dict[object, object], tmp_path: Path
) -> None:
    process = start(tmp_path)
    wait_for_step(tmp_path, 3, process)
    process.kill()
    process.communicate()
    committed = len(losses(tmp_path))
    finish(start, tmp_path)
    assert losses(tmp_path) == unbroken
    (recovered,) = events(tmp_path, "recovered")
    assert recovered["source"] == "memory"
    assert recovered["steps_lost"] == 0
    assert int(str(recovered["step"])) >= committed
    generations = [e["generation"] for e in events(tmp_path, "run_started")]
    assert generations == [1, 2]


@pytest.mark.slow
def test_a_terminated_driver_ends_within_three_seconds_and_keepers_bring_the_step_to_storage(
    start: Starter, unbroken: dict[object, object], tmp_path: Path
) -> None:
    process = start(tmp_path)
    wait_for_step(tmp_path, 3, process)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    while json.loads((tmp_path / "run.json").read_text())["status"] != "stopped":
        assert time.monotonic() - began < 3.0
        time.sleep(0.02)
    process.communicate(timeout=30)
    committed = max(losses(tmp_path), key=lambda step: int(str(step)))
    manifest = tmp_path / "checkpoints" / f"step-{int(str(committed)):08d}" / "manifest.json"
    while not manifest.exists():
        assert time.monotonic() - began < 15.0, "written by keepers, which outlive the driver"
        time.sleep(0.05)
    finish(start, tmp_path)
    assert losses(tmp_path) == unbroken


def test_a_second_driver_is_refused_while_the_first_one_lives(cluster: Cluster) -> None:
    """The lease is of the cluster: a file lock of another host would not be seen."""
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        first = Lease.take("raycp-lease-test", "host a, pid 1")
        table = ray._private.state.state.actor_table(None).values()
        (held,) = [actor for actor in table if actor["ActorClassName"] == "_Holder" and actor["State"] == "ALIVE"]
        mine = ray.get_runtime_context().get_node_id()
        assert held["Address"]["NodeID"] == mine, "the loss of another node would take it, or a zombie keep it"
        began = time.monotonic()
        with pytest.raises(ConfigError, match="another driver of this run is alive: host a, pid 1"):
            Lease.take("raycp-lease-test", "host b, pid 2", wait=1.0)
        assert time.monotonic() - began < 10
        first.give_back()
        Lease.take("raycp-lease-test", "host b, pid 2").give_back()
    finally:
        ray.shutdown()
