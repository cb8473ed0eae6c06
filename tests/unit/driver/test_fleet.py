"""Bookkeeping of a fleet; what it does on a cluster is in tests/elastic."""

from pathlib import Path
from typing import Any

import pytest

from raycp.driver.cluster import ClusterHandle, NodeInfo
from raycp.driver.fleet import Fleet
from raycp.driver.placement import NodeShare, Reservation
from tests.specs import run_spec


class Group:
    """A placement group."""

    def ready(self) -> str:
        return "reference"


def reservation(*nodes: str) -> Reservation:
    shares = [NodeShare(node=NodeInfo(node_id=n, address=n, total={}, free={}), ranks=1) for n in nodes]
    groups: list[Any] = [Group() for _ in nodes]
    return Reservation(shares, groups)


def test_bundles_of_lost_nodes_are_not_kept_for_the_life_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on nodes that come and go kept every reservation that it ever made."""
    given_back: list[Any] = []
    monkeypatch.setattr("raycp.driver.placement.remove_placement_group", given_back.append)
    spec = run_spec(tmp_path)
    cluster = ClusterHandle(started_here=True, in_job=False, driver_address="127.0.0.1")
    fleet = Fleet(spec, cluster, print)
    fleet._add(reservation("home", "first"))
    for name in ("second", "third"):
        fleet._add(reservation(name))
        fleet._forget_dead({"home"})
    assert len(given_back) == 3
    assert [[s.node.node_id for s in r.shares] for r in fleet._reservations] == [["home"]]
