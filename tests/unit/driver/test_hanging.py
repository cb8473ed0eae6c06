"""A rank that answers and gets no further, in every call of the state machine: found within its limit, and replaced."""

from pathlib import Path
from typing import Any

import pytest

from raycp.driver.copies import Room
from raycp.driver.formation import PATIENCE, SOME_PATIENCE, Formation
from raycp.driver.stuck import COPY_PATIENCE, FIRST
from tests.unit.driver.fake_cluster import HEARTBEAT, FakeCluster, Fault
from tests.unit.driver.test_controller import TWO_NODES, Run, check_complete, named

LOOK = 3.0


def no_room(self: Formation, *_: Any) -> Room:
    """No copies: ranks write checkpoints, and read them."""
    self.room = Room.NONE
    return self.room


@pytest.mark.parametrize(
    ("faults", "copies", "factor"),
    [
        ([("connecting", 0)], True, FIRST),
        ([("building", 0)], True, PATIENCE),
        ([("step 1", 0)], True, FIRST),
        ([("step 4", 0)], True, 1.0),
        ([("step 3", 0, "die"), ("connecting", 1)], True, SOME_PATIENCE),
        ([("step 3", 0, "die"), ("restoring", 0)], True, FIRST),
        ([("step 5", 0, "die"), ("loading", 0)], False, PATIENCE),
        ([("checkpoint of step 3", 0)], False, PATIENCE),
        ([("export", 0)], True, PATIENCE),
        ([("step 3", 0, "keeper"), ("attaching", 0)], True, FIRST),
    ],
)
def test_a_rank_that_hangs_is_found_within_its_limit_and_the_run_goes_on(
    faults: list[tuple[Any, ...]], copies: bool, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looked at a rank outside its steps: it was waited for half an hour, or for ever."""
    if not copies:
        monkeypatch.setattr(Formation, "_weigh", no_room)
    script = [Fault(*f) if len(f) > 2 else Fault(*f, kind="hang") for f in faults]
    cluster = FakeCluster(TWO_NODES, script)
    run = Run(tmp_path, cluster)
    run()
    check_complete(tmp_path, run)
    ((what, waited),) = cluster.hung.items()
    assert what.startswith(faults[-1][0])
    assert factor * HEARTBEAT < waited < factor * HEARTBEAT + LOOK
    assert len(cluster.killed) == sum(f[-1] != "keeper" for f in faults), "the process that hangs is ended"
    assert {e["steps_lost"] for e in named(tmp_path, "recovered")} <= ({0} if copies else {0, 1, 3})


def test_two_that_hang_in_files_of_their_own_are_found_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Formation, "_weigh", no_room)
    faults = [Fault("checkpoint of step 3", 0, "hang", rank=r) for r in (1, 3)]
    run = Run(tmp_path, FakeCluster(TWO_NODES, faults))
    run()
    check_complete(tmp_path, run)
    assert len(named(tmp_path, "worker_lost")) == 1
    assert len(run.cluster.killed) == 2


def test_a_copy_that_hangs_in_the_rank_is_found_after_the_driver_has_given_it_up(tmp_path: Path) -> None:
    """A rank that waits for its copy was never stuck: the step had no end."""
    run = Run(tmp_path, FakeCluster(TWO_NODES, [Fault("step 4", 0, "hang in copy", rank=1)]), checkpoint_every=100)
    run()
    check_complete(tmp_path, run)
    ((what, waited),) = run.cluster.hung.items()
    assert what.startswith("step 4")
    assert COPY_PATIENCE * HEARTBEAT < waited < COPY_PATIENCE * HEARTBEAT + LOOK
    assert len(run.cluster.killed) == 1
    (found,) = named(tmp_path, "recovered")
    assert (found["source"], found["steps_lost"]) == ("memory", 0)
