"""A driver that finds less than the log says does not go back without a word."""

from pathlib import Path
from typing import Any

import pytest

from raycp.driver.saving import Saving
from raycp.errors import WorkerError
from tests.unit.driver.fake_cluster import FakeCluster, Fault
from tests.unit.driver.test_controller import TWO_NODES, Run, check_complete, named


def killed(folder: Path, step: int, **elastic: Any) -> Run:
    """The driver, and with it all memory, was lost in this step."""
    run = Run(folder, FakeCluster(TWO_NODES, [Fault(f"step {step}", 0, "fatal")]), **elastic)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saving, "last_words", lambda saving, **_: None)
        with pytest.raises(WorkerError):
            run()
    return run


def test_a_driver_that_finds_neither_copies_nor_checkpoints_says_that_it_starts_over(tmp_path: Path) -> None:
    """Steps 1 to 4 were in the log, and were computed again without a message or an event."""
    killed(tmp_path, 5, checkpoint_every=50)
    again = Run(tmp_path, FakeCluster(TWO_NODES), checkpoint_every=50)
    again()
    check_complete(tmp_path, again)
    (found,) = named(tmp_path, "recovered")
    assert (found["source"], found["step"], found["path"]) == ("start", 0, None)
    assert (found["steps_lost"], found["steps_redone"]) == (4, 4)
    said = f"no copy in memory and no checkpoint of the 4 logged steps was found in {again.checkpoints.root.where}"
    assert said in again.screen.getvalue()
    generations = [e["generation"] for e in named(tmp_path, "step")]
    assert generations == [1, 1, 1, 1, 2, 2], "what is computed again is not logged again"


def test_a_driver_that_goes_back_to_an_older_checkpoint_says_how_far(tmp_path: Path) -> None:
    first = killed(tmp_path, 6)
    again = Run(tmp_path, FakeCluster(TWO_NODES))
    again.cluster.disk, again.checkpoints.manifests = first.cluster.disk, first.checkpoints.manifests
    again()
    check_complete(tmp_path, again)
    (found,) = named(tmp_path, "recovered")
    assert (found["source"], found["step"], found["steps_lost"]) == ("checkpoint", 3, 2)
    said = "continuing after step 3 (from checkpoint step-00000003); the logged steps after it, up to 5, are computed"
    assert said in again.screen.getvalue()


def test_a_new_run_says_nothing_of_the_kind(tmp_path: Path) -> None:
    run = Run(tmp_path, FakeCluster(TWO_NODES))
    run()
    assert named(tmp_path, "recovered") == []
    assert "computed again" not in run.screen.getvalue()
