"""The driver's side of keepers without Ray: which answers make a step, and which make a lost keeper."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from raycp.driver import keeper_calls
from raycp.driver import keepers as module
from raycp.driver.copies import Layouts
from raycp.driver.keepers import KeeperLost, Keepers
from raycp.driver.pulse import Pulse
from raycp.training.manifest import Manifest, ManifestChange, ShardEntry, ShardRecord, shard_file
from tests.snapshots import Nodes
from workers.keeper import HeldShard, Inventory
from workers.wire import KeeperAddress


def shard(rank: int) -> ShardRecord:
    entry = ShardEntry(name="w", shape=(2,), dtype="float32", start=rank, stop=rank + 1)
    return ShardRecord(file=f"shard-{rank}", bytes=4, crc32=1, entries=(entry,))


def keepers() -> Any:
    """Of two nodes with a rank each, that wait for step 5; `a` has answered."""
    made: Any = Keepers({}, "nowhere", 1)
    made.addresses = {"a": None, "b": None}
    made._ranks = {"a": [0], "b": [1]}
    made._peers = {"a": "b", "b": "a"}
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


class Questions:
    """Keeper `b` is silent, which its beats show after half a second, and answers after `wakes` seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, wakes: float = 1e9) -> None:
        self.keepers = keepers()
        self.keepers._handles = {"a": "A", "b": "B"}
        self.began, self.wakes = time.monotonic(), wakes
        monkeypatch.setattr(keeper_calls, "answers_of", self.answers_of)
        monkeypatch.setattr(module, "answers_of", self.answers_of)
        monkeypatch.setattr(module, "on", lambda *_: SimpleNamespace(remote=lambda *_, **__: None))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def answers_of(self, calls: dict[str, Any], timeout: float) -> dict[str, Any]:
        time.sleep(min(timeout, max(0.0, self.wakes - self.seconds)))
        if self.seconds > 0.5:
            self.keepers._pulse.waits("b", time.monotonic() - 5.0, 4.0)
        return {n: GetTimeoutError() if n == "b" and self.seconds < self.wakes else self.inventory(n) for n in calls}

    def inventory(self, node_id: str) -> Inventory:
        step = {"a": 4, "b": 5}[node_id]
        one = dataclasses.replace(shard(0), entries=(dataclasses.replace(shard(0).entries[0], stop=2),))
        made = dataclasses.replace(manifest(1), step=step, generation=1, shards=(one,))
        held = HeldShard(step=step, generation=1, rank=0, replica=False, replicated=True, record=one)
        return Inventory(generation=1, shards=(held,), manifests=(made,), bytes=4)


@pytest.mark.parametrize("ask", [lambda k: k.newest(), lambda k: k.keep_only(None)])
def test_a_recovery_waits_for_no_keeper_that_is_known_to_be_silent(
    ask: Callable[[Keepers], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keeper that was frozen while ranks connected held up each of its questions: 44 s where 4 s had shown it."""
    asked = Questions(monkeypatch)
    with contextlib.suppress(KeeperLost):
        ask(asked.keepers)
    assert 0.4 < asked.seconds < 2.0


def test_a_silent_keeper_that_alone_may_hold_the_newest_step_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Questions(monkeypatch, wakes=2.5)
    asked.keepers._committed = asked.inventory("b").manifests[0]
    asked.keepers.addresses = {n: KeeperAddress(node_id=n, host="", port=1, unix="") for n in "ab"}
    point = asked.keepers.newest()
    assert point is not None
    assert point.manifest.step == 5
    asked.keepers._committed = asked.inventory("a").manifests[0]
    asked.wakes, asked.began = 1e9, time.monotonic()
    point = asked.keepers.newest()
    assert point is not None
    assert point.manifest.step == 4
    assert asked.seconds < 2.0


def test_a_lost_keeper_is_told_also_where_no_step_is_waited_for() -> None:
    made = keepers()
    made.abandon(5)
    made._pulse.note("b", ActorDiedError())
    with pytest.raises(KeeperLost):
        made.poll()


def test_what_a_keeper_tells_briefly_is_whole_for_the_driver_with_the_same_entries() -> None:
    layouts, first = Layouts(), replace(shard(0), file=shard_file(3, 0))
    assert layouts.sums(3, [0]) == {}
    assert layouts.whole(first) is first
    known = layouts.sums(3, [0, 1])
    again = layouts.whole(replace(first, crc32=9).brief(known[first.file]))
    assert again == replace(first, crc32=9)
    assert again.entries is first.entries


def test_a_keeper_that_lacks_the_manifest_before_is_told_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = keepers()
    made._handles = {"a": "A", "b": "B"}
    told: list[tuple[str, type]] = []
    has = {"a"}

    def tell(handles: dict[str, str], what: Any, patience: float) -> dict[str, bool]:
        told.extend((n, type(what)) for n in handles)
        answers = {n: isinstance(what, Manifest) or n in has for n in handles}
        has.update(n for n in handles if isinstance(what, Manifest))
        return answers

    monkeypatch.setattr(made, "_tell", tell)
    made.commit(manifest(1))
    has.discard("b")  # replaced meanwhile
    made.commit(manifest(2))
    made.commit(manifest(3))
    whole, change = Manifest, ManifestChange
    assert told[:2] == [("a", whole), ("b", whole)]
    assert told[2:5] == [("a", change), ("b", change), ("b", whole)]
    assert told[5:] == [("a", change), ("b", change)]


def manifest(step: int) -> Manifest:
    shards = (shard(0), shard(1))
    return Manifest(step=step, cursor={}, plan_hash="", generation=1, run_id="r", grid={}, shards=shards)


def test_a_driver_whose_order_only_some_keepers_took_is_not_fenced_off_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One keeper was in the new generation, the other had died: the driver spoke as the old one, and wrote nothing."""

    class Dead:
        def __getattr__(self, name: str) -> Any:
            def die(*_: Any, **__: Any) -> None:
                raise ActorDiedError()

            return die

    def on(handle: Any, method: str, group: str) -> Any:
        def remote(*arguments: Any, **options: Any) -> Any:
            try:
                return getattr(handle, method)(*arguments, **options)
            except BaseException as error:
                return error

        return SimpleNamespace(remote=remote)

    for place in (module, keeper_calls):
        monkeypatch.setattr(place, "on", on)
        monkeypatch.setattr(place, "answers_of", lambda calls, timeout: dict(calls))
    monkeypatch.setattr(module, "end_actor", lambda handle: None)
    monkeypatch.setattr(module, "order_flush", lambda handles, *_, by, **__: handles["a"].beat(by))
    nodes = Nodes("ab", str(tmp_path))
    ranks = nodes.assign("aabb")
    ranks.snapshot(3)
    ranks.wait()
    committed = nodes.commit(3)
    ranks.close()
    made: Any = Keepers({"run_id": "run"}, "nowhere", 1)
    made._handles = {"a": nodes["a"], "b": Dead()}
    made.addresses = {n: k.address() for n, k in nodes.keepers.items()}
    with pytest.raises(KeeperLost):
        made.assign(2, ["a", "a", "b", "b"])
    made.drop("b")
    made._where = {(3, s.file): ["a"] for s in committed.shards}
    made.persist(committed, str(tmp_path / "step"), commit=True)
    nodes.close()
