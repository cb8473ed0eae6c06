"""Runs whose nodes have little memory for copies: fewer copies, or none, and nothing else changes."""

from pathlib import Path
from typing import Any

import pytest

from raycp.driver.checkpoints import Checkpoints
from raycp.driver.copies import Room
from raycp.driver.saving import Saving
from raycp.training.manifest import Manifest
from tests.unit.driver.fake_cluster import FakeCluster, FakeKeepers, Fault
from tests.unit.driver.test_controller import TOTAL, TWO_NODES, Run, check_complete, named

STATE = 12
"""Bytes of the state: on two nodes with two ranks each copies need 5 x 2 x 3 bytes."""


def tight(
    faults: list[Fault], *, available: int = 24, slow: int = 0, nodes: dict[str, int] | None = None
) -> FakeCluster:
    cluster = FakeCluster(nodes or TWO_NODES, faults, slow=slow)
    cluster.host_memory = 2 * available
    return cluster


def copied_while_written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(step copied, step written) of each copy that is ordered, or on its way, while a checkpoint is written."""
    found: list[tuple[int, int]] = []
    writing: list[int] = []
    persist, wants_copy = FakeKeepers.persist, Saving.wants_copy

    def watched(keepers: FakeKeepers, manifest: Manifest, folder: str, *, commit: bool = False) -> Any:
        found.extend((step, manifest.step) for step, _ in keepers.awaited)
        handle = persist(keepers, manifest, folder, commit=commit)
        poll, wait = handle.poll, handle.wait
        writing.append(manifest.step)

        def ended(done: bool) -> bool:
            if done:
                writing.clear()
            return done

        handle.poll, handle.wait = lambda: ended(poll()), lambda timeout: ended(wait(timeout))
        return handle

    def wants(saving: Saving, step: int) -> bool:
        wanted = wants_copy(saving, step)
        found.extend((step, written) for written in writing if wanted)
        return wanted

    monkeypatch.setattr(FakeKeepers, "persist", watched)
    monkeypatch.setattr(Saving, "wants_copy", wants)
    return found


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("slow", [0, 2, 4])
def test_with_room_for_four_images_no_copy_is_made_while_a_checkpoint_is_written(
    lag: int, slow: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = copied_while_written(monkeypatch)
    cluster = tight([], slow=slow)
    cluster.lag = lag
    run = Run(tmp_path, cluster, state_bytes=STATE, checkpoint_every=2)
    assert run().status == "finished"
    check_complete(tmp_path, run)
    assert found == []
    assert run.screen.getvalue().count("there is room for 4") == 1
    assert run.controller._formation.room is Room.TIGHT
    assert named(tmp_path, "checkpoint")[-1]["step"] == TOTAL


def test_with_room_for_all_images_copies_are_made_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = copied_while_written(monkeypatch)
    run = Run(tmp_path, tight([], available=30, slow=4), state_bytes=STATE, checkpoint_every=2)
    run()
    check_complete(tmp_path, run)
    assert found, "the test before sees nothing"
    assert "GiB" not in run.screen.getvalue()


def test_a_rank_lost_while_no_copies_are_made_costs_the_steps_since_the_last_one(tmp_path: Path) -> None:
    cluster = tight([Fault("step 6", 0, "die")], slow=30)
    run = Run(tmp_path, cluster, state_bytes=STATE, checkpoint_every=2)
    run()
    check_complete(tmp_path, run)
    (recovered,) = named(tmp_path, "recovered")
    assert (recovered["steps_lost"], recovered["source"]) == (0, "memory")
    assert recovered["steps_redone"] > 1


def test_a_larger_world_is_formed_when_the_checkpoint_is_written_and_no_step_waits_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks stood still for the write, ten times heartbeat_timeout at most."""
    settled: list[bool] = []
    monkeypatch.setattr(Checkpoints, "settle", lambda checkpoints, *_, **__: settled.append(checkpoints.writing))
    cluster = tight([Fault("step 2", 0, "node", rank=3)], slow=3)

    class Late(list[str]):
        def append(self, what: str) -> None:
            super().append(what)
            if what == "step 3":
                cluster.room["c"] = 2

    cluster.calls = Late()
    run = Run(tmp_path, cluster, state_bytes=STATE, checkpoint_every=2)
    run()
    check_complete(tmp_path, run)
    (resized,) = named(tmp_path, "resized")
    assert (resized["steps_lost"], resized["steps_redone"], resized["source"]) == (0, 0, "memory")
    assert resized["step"] > 3, "it could have been after step 3"
    assert settled[0] is False


def test_a_world_too_small_for_copies_goes_on_with_checkpoints_and_a_larger_one_with_copies(tmp_path: Path) -> None:
    """Only the first world was weighed: in the smaller one each copy was refused by the full nodes."""
    nodes = {"a": 1, "b": 1, "c": 1}
    cluster = tight([Fault("step 2", 0, "node", rank=2)], available=20, nodes=nodes)  # 3 ranks: 5 x 4; 2 ranks: 5 x 6
    run = Run(tmp_path, cluster, size=3, state_bytes=STATE, checkpoint_every=2)
    run()
    check_complete(tmp_path, run)
    assert [e["step"] for e in named(tmp_path, "snapshot")] == [1]
    assert [e["step"] for e in named(tmp_path, "checkpoint")] == [2, 4, 6]
    assert named(tmp_path, "snapshot_failed") == []
    assert run.screen.getvalue().count("steps are saved by checkpoints only") == 1
    assert cluster.memory is not None
    assert not any(cluster.memory.held.values()), "what was of the larger world takes no memory"


def test_without_room_a_rank_lost_is_restored_from_the_checkpoint(tmp_path: Path) -> None:
    nodes = {"a": 1, "b": 1, "c": 1}
    faults = [Fault("step 2", 0, "node", rank=2), Fault("step 6", 0, "die")]
    run = Run(tmp_path, tight(faults, available=20, nodes=nodes), size=3, state_bytes=STATE, checkpoint_every=2)
    run()
    check_complete(tmp_path, run)
    last = named(tmp_path, "recovered")[-1]
    assert (last["source"], last["step"], last["steps_lost"], last["steps_redone"]) == ("checkpoint", 4, 0, 2)


def test_a_driver_that_continues_finds_its_copies_on_nodes_that_are_full_of_them(tmp_path: Path) -> None:
    """It found too little memory, took no copies, did not look for those that there were, and lost their steps."""
    cluster = tight([Fault("step 5", 0, "fatal")], available=30)
    run = Run(tmp_path, cluster, state_bytes=STATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saving, "last_words", lambda saving, **_: setattr(saving, "_unsaved", True))
        with pytest.raises(Exception, match="step 5"):
            run()
    cluster.workers, cluster.host_memory = [], 2
    again = Run(tmp_path, cluster, state_bytes=STATE)
    again()
    check_complete(tmp_path, again)
    (recovered,) = named(tmp_path, "recovered")
    assert (recovered["source"], recovered["step"], recovered["steps_lost"]) == ("memory", 4, 0)


@pytest.mark.parametrize("room", [2 * 2 * STATE, 2 * 2 * STATE - 1])
def test_the_node_of_a_spare_takes_replicas_only_where_it_has_the_memory(room: int, tmp_path: Path) -> None:
    """Its keeper refused each of them, so that no step was ever committed in memory."""
    cluster = FakeCluster({"a": 4, "b": 1}, [Fault("step", 3, "die", rank=1)])
    cluster.host_memory, cluster.memory_of = 1000, {"b": room}
    run = Run(tmp_path, cluster, state_bytes=STATE, spares=1)
    homes: list[str | None] = []
    assign = FakeKeepers.assign

    def watched(keepers: FakeKeepers, *arguments: Any) -> None:
        assign(keepers, *arguments)
        homes.append(keepers.peers["a"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeKeepers, "assign", watched)
        run()
    check_complete(tmp_path, run)
    assert homes[0] == ("b" if room >= 2 * 2 * STATE else None)
    assert run.screen.getvalue().count("take no replicas") == (room < 2 * 2 * STATE)
