"""Pure placement: which node gets how many ranks, and in which order ranks are numbered."""

from hypothesis import given
from hypothesis import strategies as st

from raycp.driver.cluster import NodeInfo
from raycp.driver.placement import allocate, order_ranks
from workers.messages import Probe


def node(name: str, cpus: int, npus: int = 0) -> NodeInfo:
    resources = {"CPU": float(cpus), "NPU": float(npus)}
    return NodeInfo(node_id=name, address=f"10.0.0.{ord(name[0]) - 96}", total=resources, free=resources)


def shares(nodes: list[NodeInfo], workers: int, cp: int, resource: str | None = None) -> dict[str, int] | None:
    found = allocate(nodes, workers, resource, cp=cp)
    return None if found is None else {s.node.node_id: s.ranks for s in found}


def test_one_node_that_holds_everything_gets_everything() -> None:
    assert shares([node("a", 2), node("b", 8)], 4, cp=4) == {"b": 4}


def test_a_cp_group_is_not_cut_over_nodes_where_whole_groups_fit() -> None:
    assert shares([node("a", 6), node("b", 6)], 8, cp=4) == {"a": 4, "b": 4}


def test_a_cp_group_is_cut_where_it_must_be() -> None:
    assert shares([node("a", 3), node("b", 3)], 4, cp=4) == {"a": 3, "b": 1}
    assert shares([node("a", 3), node("b", 3), node("c", 2)], 8, cp=2) == {"a": 3, "b": 3, "c": 2}


def test_accelerators_limit_a_node_not_its_cpus() -> None:
    assert shares([node("a", 64, 2), node("b", 64, 0), node("c", 1, 8)], 3, cp=1, resource="NPU") == {"a": 2, "c": 1}


def test_too_small_a_cluster_is_none() -> None:
    assert shares([node("a", 1), node("b", 2)], 4, cp=2) is None


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 20), st.integers(1, 5))
def test_allocation_is_complete_and_within_every_node(sizes: list[int], workers: int, cp: int) -> None:
    nodes = [node(chr(97 + i), size) for i, size in enumerate(sizes)]
    found = shares(nodes, workers, cp)
    if sum(sizes) < workers:
        assert found is None
        return
    assert found is not None
    assert sum(found.values()) == workers
    assert all(0 < count <= sizes[ord(name) - 97] for name, count in found.items())


def probe(node_id: str, accelerator: str | None) -> Probe:
    ids = () if accelerator is None else (accelerator,)
    return Probe(node_id=node_id, address="10.0.0.1", pid=1, accelerators=ids, cpu_count=1)


def test_ranks_follow_node_then_accelerator_id_as_a_number() -> None:
    probes = [probe("b", "10"), probe("b", "9"), probe("a", "11"), probe("a", "2"), probe("b", "0")]
    assert order_ranks(probes, ["a", "b"]) == [3, 2, 4, 1, 0]


def test_cpu_ranks_keep_the_order_of_their_bundles() -> None:
    probes = [probe("b", None), probe("a", None), probe("b", None)]
    assert order_ranks(probes, ["a", "b"]) == [1, 0, 2]
