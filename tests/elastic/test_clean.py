"""`raycp clean` on a real Ray cluster: what it ends, what it saves first, what it leaves alone."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from raycp.cli import main
from raycp.driver.clean import clean_run, describe
from raycp.driver.keeper_calls import find_keepers
from raycp.driver.keepers import Keepers
from raycp.driver.lease import Lease
from raycp.driver.record import RunRecord, single_driver
from raycp.errors import ClusterError, ConfigError
from raycp.training.checkpoint import CheckpointReader, newest
from tests.elastic.leftovers import images
from tests.elastic.test_keepers import SECRET, Ranks, collect, ended, keeper_pids, training_nodes
from tests.snapshots import manifest_of

ROOT = Path(__file__).resolve().parents[2]


class Run:
    """A run that was stopped: its record, and keepers that hold `step`."""

    def __init__(self, folder: Path, *, step: int, checkpoint_dir: str | None = None) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"elastic": {"checkpoint_dir": checkpoint_dir}}))
        self.record = RunRecord(folder)
        self.record.open({}, resume="auto")
        self.folder, self.step = folder, step
        self.namespace = self.record.namespace
        keepers = Keepers.start(
            training_nodes(),
            run_id=self.record.run_id,
            namespace=self.namespace,
            secret=SECRET,
            generation=1,
            ttl=300.0,
            checkpoints=checkpoint_dir or str(folder / "checkpoints"),
        )
        homes = [n.node_id for n in training_nodes()]
        keepers.assign(1, homes)
        ranks = Ranks([keepers.addresses[h] for h in homes])
        ranks.snapshot(step)
        keepers.expect(step)
        assert ranks.wait() == [None, None]
        keepers.commit(manifest_of(step, collect(keepers, step).shards, run_id=self.record.run_id))
        ranks.close()
        self.keepers = keepers
        self.addresses = list(keepers.addresses.values())

    def listens(self) -> bool:
        """Whether any of its keepers still does: to other nodes, or on its own."""
        found = []
        for address in self.addresses:
            where: list[tuple[int, Any]] = [
                (socket.AF_INET, (address.host, address.port)),
                (socket.AF_UNIX, f"\0{address.unix}"),
            ]
            for family, name in where:
                with socket.socket(family) as caller:
                    caller.settimeout(5.0)
                    found.append(caller.connect_ex(name) == 0)
        return any(found)

    @property
    def alive(self) -> int:
        return len(find_keepers(self.namespace))


def test_a_step_that_is_only_in_memory_is_written_before_its_keepers_end(three_nodes: Cluster, tmp_path: Path) -> None:
    run, other = Run(tmp_path / "one", step=7), Run(tmp_path / "other", step=3)
    assert run.alive == 2
    assert run.listens()
    pids = keeper_pids(run.namespace.removeprefix("raycp-"))
    assert all(images(psutil.Process(pid)) for pid in pids.values())
    said: list[str] = []
    cleaned = clean_run(run.folder, discard=False, say=said.append)
    assert (cleaned.written, cleaned.discarded, len(cleaned.freed)) == (7, None, 2)
    assert min(cleaned.freed.values()) > 100_000
    assert said == [f"step 7 is in memory only: writing it to {run.folder}/checkpoints"]
    assert run.alive == 0
    assert ended(pids), "and with them their memory, which no file has"
    assert not run.listens()
    found = newest(run.folder / "checkpoints")
    assert found.manifest is not None
    assert found.manifest.step == 7
    assert found.storage is not None
    assert CheckpointReader(found.storage).read("param/w").shape == (1003, 16)
    assert "ended 2 keeper(s)" in describe(cleaned)
    assert "MiB freed" in describe(cleaned)
    again = clean_run(run.folder, discard=False, say=said.append)
    assert describe(again) == f"run {run.record.run_id} has no keepers on this cluster: nothing to end"
    assert other.alive == 2, "another run's keepers are not touched"
    other.keepers.close()


def test_discarding_says_what_is_gone(three_nodes: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path, step=5)
    assert main(["clean", str(tmp_path), "--discard"]) == 0
    assert "step 5 was in memory only and is gone" in capsys.readouterr().out
    assert run.alive == 0
    assert newest(tmp_path / "checkpoints").manifest is None


def test_what_storage_has_is_not_written_again(three_nodes: Cluster, tmp_path: Path) -> None:
    run = Run(tmp_path, step=5)
    point = run.keepers.newest()
    assert point is not None
    assert run.keepers.persist(point.manifest, f"{tmp_path}/checkpoints/step-00000005", commit=True).wait(30.0)
    cleaned = clean_run(tmp_path, discard=False, say=lambda _: None)
    assert (cleaned.written, cleaned.discarded, run.alive) == (None, None, 0)


def test_storage_that_refuses_leaves_the_keepers_alone(three_nodes: Cluster, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("in the way")
    run = Run(tmp_path / "run", step=5, checkpoint_dir=f"{tmp_path}/a file/checkpoints")
    with pytest.raises(ClusterError, match=r"step 5 cannot be written to .*a file") as caught:
        clean_run(run.folder, discard=False, say=lambda _: None)
    assert "--discard" in caught.value.fix
    assert run.alive == 2
    clean_run(run.folder, discard=True, say=lambda _: None)
    assert run.alive == 0


def test_a_live_driver_is_left_alone(three_nodes: Cluster, tmp_path: Path) -> None:
    run = Run(tmp_path, step=5)
    with single_driver(tmp_path), pytest.raises(ConfigError, match="alive"):
        clean_run(tmp_path, discard=True, say=lambda _: None)
    lease = Lease.take(run.namespace, "host other, pid 1")
    with pytest.raises(ConfigError, match="host other, pid 1"):
        clean_run(tmp_path, discard=True, say=lambda _: None)
    assert run.alive == 2
    lease.give_back()
    clean_run(tmp_path, discard=True, say=lambda _: None)
    assert run.alive == 0


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        clean_run(tmp_path, discard=False, say=lambda _: None)
    assert list(tmp_path.iterdir()) == []


def command(folder: Path, address: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RAY_ADDRESS": address}
    words = [sys.executable, "-m", "raycp.cli", "clean", str(folder)]
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_the_command_finds_the_cluster_by_its_address(three_nodes: Cluster, tmp_path: Path) -> None:
    run = Run(tmp_path, step=9)
    done = command(tmp_path, three_nodes.address)
    assert done.returncode == 0, done.stderr
    assert "step 9 is in memory only: writing it" in done.stdout
    assert "ended 2 keeper(s)" in done.stdout
    assert run.alive == 0
    manifest = newest(tmp_path / "checkpoints").manifest
    assert manifest is not None
    assert manifest.step == 9


def test_without_a_cluster_the_error_says_where_it_looked(tmp_path: Path) -> None:
    RunRecord(tmp_path).open({}, resume="auto")
    done = command(tmp_path, "127.0.0.1:9")
    assert done.returncode == 1
    assert "no Ray cluster answers at '127.0.0.1:9'" in done.stderr
    assert "fix: set RAY_ADDRESS" in done.stderr
