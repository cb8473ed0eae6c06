"""`on_loss="wait"` on real nodes: a run that lost one waits for another, in its own size; not for ever."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from raycp.events import read_events
from raycp.training.checkpoint import newest
from tests.elastic.campaign import Shape, unbroken_run
from tests.elastic.fake_nodes import ROOT, FakeNodes
from tests.elastic.runs import make_folder
from tests.elastic.script import Script

pytestmark = pytest.mark.slow

STEPS = 24
WAITING: dict[str, Any] = {"spares": 0, "on_loss": "wait"}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeNodes]:
    made = FakeNodes(tmp_path_factory.mktemp("cluster"))
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.close()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_folder(folder)["model"].save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def unbroken(nodes: FakeNodes, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    return unbroken_run(
        nodes, inputs, tmp_path_factory.mktemp("unbroken") / "run", Shape(nodes=2, elastic=WAITING), steps=STEPS
    )


class Run:
    """One run of two ranks; each `start` is the same command."""

    def __init__(self, nodes: FakeNodes, inputs: Path, out: Path, **elastic: Any) -> None:
        self.out = out
        out.mkdir(parents=True)
        Script(out / "script").write([])
        settings = {"address": nodes.address, "inputs": str(inputs), "output_dir": str(out), "steps": STEPS}
        (out / "settings.json").write_text(
            json.dumps({**settings, "workers": 2, "cp": [1, 2], "elastic": WAITING | elastic})
        )

    @contextlib.contextmanager
    def start(self) -> Iterator[subprocess.Popen[bytes]]:
        with (self.out / "driver.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.elastic.scripted_driver", str(self.out / "settings.json")],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    @property
    def log(self) -> str:
        return (self.out / "driver.log").read_text()

    def events(self, *names: str) -> list[dict[str, Any]]:
        return [e for e in read_events(self.out / "events.jsonl") if e["event"] in names]

    def until(self, true: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)

    def lose_a_node(self, nodes: FakeNodes, process: subprocess.Popen[bytes]) -> None:
        """In the middle of the run."""
        self.until(lambda: len(self.events("step")) >= 4, process)
        nodes.kill(nodes.nodes[-1], all_of_it=True)

    def check(self, unbroken: dict[int, dict[str, Any]]) -> None:
        """Every step once, in the world of the start, bit-equal."""
        steps = self.events("step")
        assert [e["step"] for e in steps] == list(range(1, STEPS + 1))
        for name in ("loss", "pack_ids", "grid"):
            assert [e[name] for e in steps] == [unbroken[e["step"]][name] for e in steps]
        assert self.events("resized") == []


def test_a_run_that_waits_says_so_and_goes_on_in_its_size_when_a_node_joins(
    nodes: FakeNodes, inputs: Path, unbroken: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    nodes.keep(2)
    run = Run(nodes, inputs, tmp_path / "run")
    with run.start() as process:
        run.lose_a_node(nodes, process)
        said = (
            "1 healthy workers are left for the run, and it keeps its 2 ranks (elastic.on_loss='wait'): waiting up to"
        )
        run.until(lambda: said in run.log, process)
        before = len(run.events("step"))
        time.sleep(2.0)
        assert process.poll() is None
        assert len(run.events("step")) == before < STEPS
        nodes.add()
        assert process.wait(120) == 0, run.log
    run.check(unbroken)
    (recovered,) = run.events("recovered")
    assert (recovered["source"], recovered["steps_lost"]) == ("memory", 0)
    assert recovered["steps_redone"] <= 2
    assert recovered["seconds"]["plan"] > 2.0


@pytest.mark.slow
def test_a_run_that_waited_in_vain_says_what_to_do_and_the_same_command_continues(
    nodes: FakeNodes, inputs: Path, unbroken: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    nodes.keep(2)
    run = Run(nodes, inputs, tmp_path / "run", wait_for_capacity=8.0)
    with run.start() as process:
        run.lose_a_node(nodes, process)
        assert process.wait(120) == 1
    assert "1 healthy workers are left after waiting 8 s, and the run keeps its 2 ranks" in run.log
    assert "elastic.on_loss='auto'" in run.log
    assert json.loads((run.out / "run.json").read_text())["status"] == "failed"
    committed = max(e["step"] for e in run.events("step"))
    (failed,) = run.events("run_failed")
    assert failed["step"] == committed
    manifest = newest(run.out / "checkpoints").manifest
    assert manifest is not None
    assert manifest.step == committed, "what was committed in memory is on storage"
    nodes.add()
    with run.start() as process:
        assert process.wait(120) == 0, run.log
    run.check(unbroken)
    (recovered,) = run.events("recovered")
    assert (recovered["step"], recovered["steps_lost"]) == (committed, 0)
