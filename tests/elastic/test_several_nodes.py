"""Several Ray nodes (on one host): the driver on a node without workers, ranks in node order, one group a node."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

import raycp
from raycp.driver import fleet, probe
from raycp.driver.cluster import live_nodes
from raycp.driver.placement import Reservation, allocate
from raycp.errors import ClusterError
from tests.elastic.runs import STEPS, config, pack_ids
from workers.actor import TrainWorker
from workers.messages import Probe, Rendezvous


class TellingWorker(TrainWorker):
    """Writes down which rank it became, on which node, with which accelerators."""

    def join(self, rendezvous: Rendezvous) -> None:
        context = ray.get_runtime_context()
        name = f"{rendezvous.rank} {context.get_node_id()}"
        (Path(self._spec.output_dir) / f"rank {name}").touch()
        super().join(rendezvous)


class LonelyWorker(TrainWorker):
    """A node that has a folder of its own under the same path."""

    def probe(self, nonce_path: str, nonce: str) -> Probe:
        return super().probe(nonce_path + "-elsewhere", nonce)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.add_node(num_cpus=2, resources={"NPU": 2})
    made.add_node(num_cpus=2, resources={"NPU": 12})
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


def test_a_run_over_two_nodes_with_the_driver_on_a_third(
    cluster: Cluster, inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "TrainWorker", TellingWorker)
    result = raycp.fit(**inputs, output_dir=tmp_path, config=config(workers=4, cp=2))
    assert result.steps == STEPS
    assert pack_ids(result) == list(range(len(pack_ids(result))))
    where = dict(path.name.split()[1:] for path in sorted(tmp_path.glob("rank *")))
    nodes = [n.node_id for n in live_nodes() if n.total.get("CPU")]
    assert where == {"0": nodes[0], "1": nodes[0], "2": nodes[1], "3": nodes[1]}
    assert ray.get_runtime_context().get_node_id() not in nodes


def test_a_folder_that_is_not_shared_is_named_with_its_nodes(
    cluster: Cluster, inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "TrainWorker", LonelyWorker)
    with pytest.raises(ClusterError, match="output_dir") as caught:
        raycp.fit(**inputs, output_dir=tmp_path, config=config(workers=4, cp=2))
    assert "2 problem(s) on the nodes" in str(caught.value)
    assert "storage that all nodes share" in str(caught.value)


def all_free(seconds: float = 10.0) -> bool:
    """Whether every CPU of every node is free, or becomes free in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(n.free.get("CPU", 0.0) == n.total.get("CPU", 0.0) for n in live_nodes()):
            return True
        time.sleep(0.1)
    return False


def test_reservations_stay_on_their_node_and_give_everything_back(cluster: Cluster) -> None:
    assert all_free()
    shares = allocate(live_nodes(), 3, "NPU", cp=1)
    assert shares is not None
    reservation = Reservation.make(shares, "NPU", timeout=30)
    for node, group, index in reservation.slots():
        table = ray.util.placement_group_table(group)
        assert table["bundles_to_node_id"][index] == node.node_id
    reservation.release()
    assert all_free()


def test_nodes_that_import_the_drivers_packages_pass(cluster: Cluster) -> None:
    probe.check_packages(live_nodes())


@pytest.mark.parametrize(
    ("name", "there", "words"),
    [
        ("workers", ("/job/working_dir/workers", "0" * 64), "shadows raycp's: rename it"),
        ("raycp", ("/opt/old/raycp", "0" * 64), "imports 'raycp' from /opt/old/raycp"),
        ("data_pipeline", ("no such package on its path", ""), "cannot import package 'data_pipeline'"),
    ],
)
def test_a_package_that_differs_on_a_node_is_named(
    cluster: Cluster, name: str, there: tuple[str, str], words: str
) -> None:
    problem = probe.compare(live_nodes()[0], name, ("/driver/" + name, "1" * 64), there)
    assert problem is not None
    assert words in problem.message + problem.fix
