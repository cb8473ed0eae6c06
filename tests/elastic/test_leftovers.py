"""What a run leaves behind is seen: each kind is planted here, on fake nodes after a whole run."""

import contextlib
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest
import ray

from tests.elastic import leftovers
from tests.elastic.campaign import Campaign, Shape
from tests.elastic.fake_nodes import ROOT, FakeNodes
from tests.elastic.runs import make_folder
from tests.elastic.script import PRIVATE

SLEEPS = "import sys, time; print('ready', flush=True); time.sleep(600)"
LISTENS = "import socket; s = socket.create_server(('127.0.0.1', 0)); " + SLEEPS
LOCAL = "import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0raycp-planted'); s.listen(); " + SLEEPS
HOLDS = "from workers.slots import Image; i = Image(1 << 20); " + SLEEPS
"""What a planted process does."""
RAYS = "/site-packages/ray/planted"
"""An argument by which it passes for one of Ray's own."""


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    """A run of three steps that is over."""
    folder = tmp_path_factory.mktemp("cluster")
    inputs = folder / "inputs"
    inputs.mkdir()
    make_folder(inputs)["model"].save_pretrained(inputs / "model")
    nodes = FakeNodes(folder)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    shape = Shape(nodes=2, elastic={"spares": 0})
    made = Campaign(nodes, inputs, folder / "run", shape, [], steps=3)
    made.run(240.0)
    yield made
    ray.shutdown()
    nodes.close()


@contextlib.contextmanager
def planted(campaign: Campaign, code: str, *words: str, marked: bool = True) -> Iterator[int]:
    """A process that a node of the campaign could have started; its pid."""
    home = {PRIVATE: str(campaign.nodes.nodes[0].home)} if marked else {}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], cwd=ROOT, env=os.environ | home, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def test_a_run_leaves_nothing(campaign: Campaign) -> None:
    assert campaign.left() == []


def test_a_process_is_seen_whoever_its_parent_is(campaign: Campaign) -> None:
    root = campaign.nodes.folder
    with planted(campaign, SLEEPS) as pid:
        assert [p.split()[0] for p in leftovers.processes(root)] == [str(pid)]
    with planted(campaign, SLEEPS, RAYS), planted(campaign, SLEEPS, marked=False):
        assert leftovers.processes(root) == []


def test_a_port_is_seen_and_a_socket_of_ours_in_any_process(campaign: Campaign) -> None:
    root = campaign.nodes.folder
    with planted(campaign, LISTENS) as pid:
        (found,) = leftovers.ports(root)
        assert found.startswith("127.0.0.1:")
        assert found.endswith(f"of {pid}")
    with planted(campaign, LISTENS, RAYS), planted(campaign, LISTENS, marked=False):
        assert leftovers.ports(root) == [], "Ray listens too"
    with planted(campaign, LOCAL, RAYS) as pid:
        assert leftovers.ports(root) == [f"@raycp-planted of {pid}"]


def test_memory_is_seen_in_processes_in_files_and_in_private_folders(campaign: Campaign) -> None:
    root, before = campaign.nodes.folder, campaign.shared
    homes = [n.home for n in campaign.nodes.nodes]
    with planted(campaign, HOLDS, RAYS) as pid:
        (found,) = leftovers.memory(root, before=before, homes=homes)
        assert found.startswith("memfd:raycp-image")
        assert found.endswith(f"in {pid}")
    shared = leftovers.SHARED_MEMORY / f"raycp-planted-{uuid.uuid4().hex}"
    for path in (shared, homes[1] / "flush" / "shard.part"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"left")
        try:
            assert leftovers.memory(root, before=before, homes=homes) == [str(path)]
        finally:
            path.unlink()
    assert leftovers.memory(root, before=before, homes=homes) == []


def test_a_file_of_another_job_on_this_machine_is_not_ours(campaign: Campaign) -> None:
    shared = leftovers.SHARED_MEMORY / f"strangers-{uuid.uuid4().hex}"
    shared.write_bytes(b"x" * 4096)
    maps = f"import mmap; f = open({str(shared)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 0); " + SLEEPS
    try:
        with planted(campaign, maps, marked=False):
            assert leftovers.memory(campaign.nodes.folder, before=campaign.shared, homes=[]) == []
        assert leftovers.memory(campaign.nodes.folder, before=campaign.shared, homes=[]) == [str(shared)]
    finally:
        shared.unlink()


def test_each_kind_is_a_problem_of_the_run(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.elastic import campaign as module

    monkeypatch.setattr(module, "wait_for", lambda condition, seconds: condition())
    with planted(campaign, LISTENS), planted(campaign, HOLDS, RAYS):
        assert [problem.split(":")[0] for problem in campaign.left()] == ["processes", "ports", "memory"]
    campaign.script.say("driver-left", left=["127.0.0.1:1"])
    assert "127.0.0.1:1" in campaign.left()[0]
    campaign.script.say("driver-left", left=[])


def test_a_driver_that_goes_on_listening_is_seen() -> None:
    before = leftovers.of_this_process()
    with socket.create_server(("127.0.0.1", 0)) as server:
        (found,) = leftovers.of_this_process() - before
        assert found == f"127.0.0.1:{server.getsockname()[1]}"
    assert leftovers.of_this_process() == before
