"""A person or a scheduler stops the driver; a driver is killed; the same command continues."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from raycp.events import read_events
from tests.elastic.leftovers import alive
from tests.elastic.runs import STEPS, make_folder

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
from pathlib import Path
import raycp
from transformers import LlamaConfig
from tests.elastic.runs import config
folder = Path(sys.argv[1])
model = LlamaConfig.from_pretrained(folder / "model")
data, tokenizer = folder / "rows.jsonl", str(folder / "tokenizer")
result = raycp.fit(model, data, tokenizer=tokenizer, output_dir=sys.argv[2], config=config())
print(result.status, result.steps)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_folder(folder)["model"].save_pretrained(folder / "model")
    return folder


Starter = Callable[[Path, Path], subprocess.Popen[str]]


@pytest.fixture(scope="module")
def start() -> Iterator[Starter]:
    """Starts a driver; none outlives the tests."""
    started: list[subprocess.Popen[str]] = []

    def begin(inputs: Path, out: Path) -> subprocess.Popen[str]:
        started.append(_driver(inputs, out))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def _driver(inputs: Path, out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(inputs), str(out)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> list[int]:
    """Returns the pids below the driver once a step is in the log.

    Without Ray's two agents: when their raylet is killed they try to report it for a minute, and then end.
    """
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if any(e["event"] == "step" and e["step"] >= step for e in read_events(out / "events.jsonl")):
            children = psutil.Process(process.pid).children(recursive=True)
            return [child.pid for child in children if not any("Agent" in word for word in child.cmdline())]
        time.sleep(0.02)
    raise AssertionError(f"no step {step}: {process.communicate()}")


def left_alive(pids: list[int], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        left = [p for p in pids if alive(p)]
        if not left:
            return []
        time.sleep(0.1)
    return left


@pytest.mark.slow
def test_a_local_ray_leaves_no_token_that_later_clusters_would_ask_for(
    start: Starter, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    finish(start, inputs, tmp_path / "run")
    assert not (home / ".ray").exists()


def status(out: Path) -> str:
    return str(json.loads((out / "run.json").read_text())["status"])


def losses(out: Path) -> dict[int, float]:
    events = [e for e in read_events(out / "events.jsonl") if e["event"] == "step"]
    assert len(events) == len({e["step"] for e in events}), "a step was written twice"
    return {e["step"]: e["loss"] for e in events}


def finish(start: Starter, inputs: Path, out: Path) -> None:
    process = start(inputs, out)
    text, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert text.split() == ["finished", str(STEPS)]


@pytest.fixture(scope="module")
def unbroken(start: Starter, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    out = tmp_path_factory.mktemp("unbroken")
    finish(start, inputs, out)
    return losses(out)


def test_ctrl_c_ends_the_step_saves_and_the_same_command_goes_on(
    start: Starter, inputs: Path, tmp_path: Path, unbroken: dict[int, float]
) -> None:
    process = start(inputs, tmp_path)
    pids = wait_for_step(tmp_path, 1, process)
    process.send_signal(signal.SIGINT)
    text, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    word, step = text.split()
    assert word == status(tmp_path) == "stopped"
    assert 1 <= int(step) < STEPS
    assert (tmp_path / "checkpoints" / f"step-{int(step):08d}" / "manifest.json").exists()
    assert left_alive(pids, 10) == []
    finish(start, inputs, tmp_path)
    assert losses(tmp_path) == unbroken


@pytest.mark.slow
def test_sigterm_ends_at_once_and_a_killed_driver_leaves_nothing_behind(
    start: Starter, inputs: Path, tmp_path: Path, unbroken: dict[int, float]
) -> None:
    process = start(inputs, tmp_path)
    pids = wait_for_step(tmp_path, 2, process)
    began = time.monotonic()
    process.terminate()
    process.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert process.returncode != 0
    assert status(tmp_path) == "stopped"
    assert left_alive(pids, 10) == []

    process = start(inputs, tmp_path)
    pids = wait_for_step(tmp_path, 3, process)
    process.kill()
    process.communicate(timeout=30)
    assert left_alive(pids, 20) == []
    finish(start, inputs, tmp_path)
    assert losses(tmp_path) == unbroken
