"""Ascend as Ray sees it, on two nodes of 12 NPUs that are only counted: ids, visibility, rank order, refusals."""

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raycp
from raycp.driver import fleet
from raycp.driver.cluster import live_nodes
from raycp.training.device import local_index, resolve_device
from raycp.training.vendor import process_environment
from tests.elastic.runs import config, make_folder
from workers.actor import TrainWorker
from workers.messages import COLLECTIVE_TIMEOUT, Probe, Rendezvous

NPUS = 12
TAKEN = 9
"""NPUs of each node that somebody else has, so that ranks get the ids 9, 10 and 11."""
LEAVES = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


class TellingWorker(TrainWorker):
    """Writes down which rank it became, on which node, with which accelerator, and what it computes on."""

    def join(self, rendezvous: Rendezvous) -> None:
        context = ray.get_runtime_context()
        (npu,) = context.get_accelerator_ids()["NPU"]
        device = self._spec.device
        name = f"rank {rendezvous.rank} {context.get_node_id()} {npu} {device.name} {device.backend}"
        (Path(self._spec.output_dir) / name).touch()
        super().join(rendezvous)


class EnvironmentWorker(TrainWorker):
    """Writes down what its process was started with."""

    def probe(self, nonce_path: str, nonce: str) -> Probe:
        found = {k: v for k, v in os.environ.items() if any(part in k for part in ("HCCL", "NPU", "TORCH"))}
        (Path(self._spec.output_dir) / f"environment {os.getpid()}.json").write_text(json.dumps(found))
        return super().probe(nonce_path, nonce)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The second node tells Ray to leave the visible devices alone."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.add_node(num_cpus=2, resources={"NPU": NPUS})
    made.add_node(num_cpus=2, resources={"NPU": NPUS, "leaves": 1}, env_vars={LEAVES: "1"})
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_folder(tmp_path_factory.mktemp("inputs"))


def nodes_with_npus() -> list[Any]:
    return [n for n in live_nodes() if n.total.get("NPU")]


def on(node: Any) -> dict[str, Any]:
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False)}


@ray.remote
def see() -> tuple[list[str], str | None]:
    ids = ray.get_runtime_context().get_accelerator_ids().get("NPU", [])
    return list(ids), os.environ.get("ASCEND_RT_VISIBLE_DEVICES")


@ray.remote
class Holder:
    """Somebody else's actor."""

    def ids(self) -> list[str]:
        return list(ray.get_runtime_context().get_accelerator_ids()["NPU"])


def test_physical_ids_and_what_a_process_sees(cluster: Cluster) -> None:
    npu = resolve_device("npu", [(n.address, n.total) for n in live_nodes()])
    for node in nodes_with_npus():
        holder = Holder.options(resources={"NPU": 5}, **on(node)).remote()
        taken = ray.get(holder.ids.remote())
        ids, visible = ray.get(see.options(resources={"NPU": 1}, **on(node)).remote())
        assert ids[0] not in taken
        environ = {} if visible is None else {VISIBLE: visible}
        if node.total.get("leaves"):
            assert visible is None
            assert local_index(npu, ids, environ) == int(ids[0])
        else:
            assert visible == ids[0]
            assert local_index(npu, ids, environ) == 0
        assert ray.get(see.options(**on(node)).remote())[0] == []  # a task without an NPU has none
        ray.kill(holder)


def test_ranks_are_in_order_of_node_and_npu_id(
    cluster: Cluster, inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "TrainWorker", TellingWorker)
    holders = [Holder.options(resources={"NPU": TAKEN}, **on(node)).remote() for node in nodes_with_npus()]
    taken = [set(ids) for ids in ray.get([h.ids.remote() for h in holders])]
    settings = dataclasses.replace(config(workers=4, cp=2), resource="NPU", steps=2)
    try:
        result = raycp.fit(**inputs, output_dir=tmp_path, config=settings)
    finally:
        for holder in holders:
            ray.kill(holder)
    assert result.steps == 2
    found = sorted(path.name.split()[1:] for path in tmp_path.glob("rank *"))
    nodes = [n.node_id for n in nodes_with_npus()]
    assert [(rank, node) for rank, node, *_ in found] == list(
        zip("0123", [n for n in nodes for _ in "01"], strict=True)
    )
    assert {(device, backend) for *_, device, backend in found} == {("cpu", "gloo")}
    for place, node in enumerate(nodes):
        ids = [npu for _, where, npu, *_ in found if where == node]
        assert ids == sorted(ids, key=int)
        assert not taken[place] & set(ids)
        assert any(int(npu) > 9 for npu in ids)


def test_a_device_that_no_node_has_is_refused_with_what_each_has(
    cluster: Cluster, inputs: dict[str, Any], tmp_path: Path
) -> None:
    settings = dataclasses.replace(config(workers=4, cp=2), device="cuda")
    with pytest.raises(raycp.ClusterError, match="takes one GPU a rank") as caught:
        raycp.fit(**inputs, output_dir=tmp_path, config=settings)
    assert str(caught.value).count(f"has 2 CPU, {NPUS} NPU") == 2
    assert list(tmp_path.iterdir()) == []


def test_more_workers_than_npus_are_refused(cluster: Cluster, inputs: dict[str, Any], tmp_path: Path) -> None:
    settings = dataclasses.replace(config(workers=32, cp=2), resource="NPU")
    with pytest.raises(raycp.ConfigError, match="workers=32, and the cluster has 24 NPU in all"):
        raycp.fit(**inputs, output_dir=tmp_path, config=settings)
    assert list(tmp_path.iterdir()) == []


def test_an_npu_that_is_only_counted_is_never_a_silent_run_on_the_cpu(
    cluster: Cluster, inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "TrainWorker", EnvironmentWorker)
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "1234")
    settings = dataclasses.replace(config(workers=2, cp=2), device="npu")
    with pytest.raises(raycp.RaycpError, match="torch_npu does not load"):
        raycp.fit(**inputs, output_dir=tmp_path, config=settings)
    found = [json.loads(path.read_text()) for path in tmp_path.glob("environment *.json")]
    assert len(found) == 2
    spec = resolve_device("npu", [(n.address, n.total) for n in live_nodes()])
    wanted = process_environment(spec, timeout=COLLECTIVE_TIMEOUT)
    assert wanted["HCCL_CONNECT_TIMEOUT"] == "1234"  # what the user exported wins
    for environ in found:  # before anything of the process could import torch_npu or start HCCL
        assert {name: environ.get(name) for name in wanted} == wanted
