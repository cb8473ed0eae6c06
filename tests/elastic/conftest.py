"""What several files of this folder share."""

from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

import raycp
from tests.elastic.matrix import Matrix
from tests.elastic.runs import config, make_folder


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A Ray of one node with four CPUs."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[Cluster]:
    """A head without CPUs, where the driver is, and two nodes with two."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=2)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Model, rows and tokenizer, for `fit`."""
    return make_folder(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def unbroken(local_ray: None, inputs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> raycp.FitResult:
    """The run that nothing happens to."""
    return raycp.fit(**inputs, output_dir=tmp_path_factory.mktemp("unbroken"), config=config())


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    """A live cluster for the kill matrix."""
    made = Matrix(tmp_path_factory.mktemp("matrix"))
    yield made
    made.close()
