"""The driver's side of keepers without Ray: which answers make a step, and which make a lost keeper."""

import time
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from raycp.driver.keepers import KeeperLost, Keepers
from raycp.driver.pulse import Pulse
from raycp.training.manifest import ShardEntry, ShardRecord


def shard(rank: int) -> ShardRecord:
    entry = ShardEntry(name="w", shape=(2,), dtype="float32", start=rank, stop=rank + 1)
    return ShardRecord(file=f"shard-{rank}", bytes=4, crc32=1, entries=(entry,))


def keepers() -> Any:
    """Of two nodes with a rank each, that wait for step 5; `a` has answered."""
    made: Any = Keepers({}, "nowhere", 1)
    made.addresses = {"a": None, "b": None}
    made._ranks = {"a": [0], "b": [1]}
    made.expect(5)
    made._expected[5].answers["a"] = [shard(0)]
    return made


def test_a_step_of_which_a_node_was_lost_is_not_collected() -> None:
    """The other node's answer alone was "all", and the end of the run stumbled over half a state."""
    made = keepers()
    made.drop("b")
    assert made.poll() == []


def test_a_step_is_collected_when_all_have_answered() -> None:
    made = keepers()
    made._expected[5].answers["b"] = [shard(1)]
    (found,) = made.poll()
    assert (found.step, [s.file for s in found.shards]) == (5, ["shard-0", "shard-1"])


def test_a_keeper_that_stands_still_is_lost_after_the_stated_time_and_not_before() -> None:
    pulse = Pulse(unresponsive_after=4.0)
    pulse.waits("a", time.monotonic() - 3.5, 4.0)
    pulse.check()
    pulse.waits("a", time.monotonic() - 5.2, 4.0)
    with pytest.raises(KeeperLost, match="no answer for 5 s") as caught:
        pulse.check()
    assert caught.value.node_id == "a"
    pulse.forget("a")
    pulse.check()


def test_a_keeper_that_died_is_lost_at_once_and_one_out_of_reach_gets_a_moment() -> None:
    pulse = Pulse(unresponsive_after=4.0)
    pulse.note("a", ActorUnavailableError("the connection broke", None))
    pulse.check()
    pulse.note("a", None)
    pulse.note("a", ActorDiedError())
    with pytest.raises(KeeperLost):
        pulse.check()


def test_a_lost_keeper_is_told_also_where_no_step_is_waited_for() -> None:
    made = keepers()
    made.abandon(5)
    made._pulse.note("b", ActorDiedError())
    with pytest.raises(KeeperLost):
        made.poll()
