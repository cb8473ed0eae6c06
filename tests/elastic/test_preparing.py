"""Preparing data while a node is lost: what it was doing is done by the others."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from data_pipeline.prepare import Tasks


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


def check(found: dict[int, str], made: list[str]) -> None:
    """All 14 parts are there, of two nodes; `made` has the number of each part as often as it was begun."""
    assert sorted(found) == list(range(14))
    assert len(set(found.values())) == 2, "both nodes worked"
    assert set(made) == {str(number) for number in range(14)}
    assert 14 < len(made) <= 16, "one part, or the two of a moment, was made again"


@pytest.mark.parametrize("fault", ["none", "lost", "not begun again", "all made again", "one node"])
def test_the_check_sees_a_planted_fault(fault: str) -> None:
    found = {number: "ab"[number % 2] for number in range(14)}
    made = [str(number) for number in [*range(14), 6]]
    if fault == "lost":
        del found[6]
    elif fault == "not begun again":
        made.pop()
    elif fault == "all made again":
        made += [str(number) for number in range(14)]
    elif fault == "one node":
        found = dict.fromkeys(found, "a")
    if fault == "none":
        check(found, made)
    else:
        with pytest.raises(AssertionError):
            check(found, made)


def test_a_node_that_is_lost_costs_only_the_parts_that_it_was_making(cluster: Cluster, tmp_path: Path) -> None:
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    folder = str(tmp_path)

    def work(item: int) -> str:
        where = str(ray.get_runtime_context().get_node_id())
        (Path(folder) / f"{item}-{time.time()}").touch()
        time.sleep(0.5)
        return where

    def lose() -> None:
        while len(list(tmp_path.glob("*-*"))) < 6:
            time.sleep(0.1)
        for process in node.live_processes():
            process[1].kill()

    killer = threading.Thread(target=lose)
    killer.start()
    found = dict(Tasks(tmp_path)(work, list(range(14))))
    killer.join()
    cluster.remove_node(node, allow_graceful=False)
    check(found, [path.name.partition("-")[0] for path in tmp_path.glob("*-*")])
