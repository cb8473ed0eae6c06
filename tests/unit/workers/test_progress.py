"""Counters of a rank: what moves them, and what they remember of each call."""

import pytest

from raycp.errors import WorkerError
from workers import progress as phases
from workers.progress import Progress


def pause(progress: Progress, seconds: float) -> None:
    progress.moved -= seconds


def test_a_call_counts_as_done_when_it_does_not_raise() -> None:
    progress = Progress()
    for _ in range(2):
        with progress.during(phases.BUILD):
            assert (progress.call, progress.phase) == (phases.BUILD, phases.BUILD)
    with pytest.raises(ValueError, match="planted"), progress.during(phases.SAVE):
        raise ValueError("planted")
    assert progress.done == {phases.BUILD: 2}
    assert (progress.call, progress.phase) == (phases.IDLE, phases.IDLE), "a call that raised is over too"


def test_pauses_are_remembered_by_call_and_a_slow_build_makes_no_slow_step() -> None:
    """The longest pause of a first build would have let a stuck step stand still for four times as long."""
    progress = Progress()
    with progress.during(phases.BUILD):
        pause(progress, 100.0)
        progress.move()
    with progress.during(phases.STEP):
        pause(progress, 2.0)
        progress.ring_step()
        assert progress.snapshot()["longest"] == pytest.approx(2.0, abs=0.1)
    assert progress.longest[phases.BUILD] == pytest.approx(100.0, abs=0.1)


@pytest.mark.parametrize("part", [phases.COPY, phases.MEET, phases.KEEPER, phases.WHOLE])
def test_a_wait_is_no_pause_of_the_work(part: str) -> None:
    progress = Progress()
    with progress.during(phases.STEP):
        pause(progress, 1.0)
        progress.enter(part)
        pause(progress, 60.0)
        assert progress.snapshot()["idle_seconds"] == pytest.approx(60.0, abs=0.1)
        progress.enter("update")
        assert progress.snapshot()["longest"] == pytest.approx(1.0, abs=0.1)


def test_what_is_told_is_of_the_call_that_runs() -> None:
    progress = Progress()
    with progress.during(phases.STEP):
        progress.begin(7, 3)
        progress.next_micro_batch()
        told = progress.snapshot()
    assert (told["step"], told["micro_batch"], told["micro_batches"]) == (7, 1, 3)
    assert (told["call"], told["phase"], told["calls_done"]) == (phases.STEP, phases.STEP, 0)
    pause(progress, 60.0)
    with progress.during(phases.EVAL):
        told = progress.snapshot()
        assert told["idle_seconds"] < 1, "time between calls is nobody's"
        assert told["call_seconds"] < 1


def test_what_reads_alone_ends_at_the_next_piece_once_it_is_of_no_use() -> None:
    progress = Progress()
    progress.cancel(3)
    progress.cancel(2)
    with progress.during(phases.RESTORE, 3):
        progress.move()
        with pytest.raises(WorkerError, match="restore was given up"):
            progress.piece()
    with progress.during(phases.RESTORE, 4):
        progress.piece()
    assert progress.done == {phases.RESTORE: 2}


def test_a_step_that_is_aborted_ends_by_its_groups_and_a_finished_one_stays_finished() -> None:
    """Its copy may be complete on all ranks: then the step is committed."""
    progress = Progress()
    with progress.during(phases.STEP, 1):
        progress.cancel(1)
        for move in (progress.move, progress.ring_step, progress.next_micro_batch):
            move()
        progress.enter("update")
        progress.begin(2, 1)
    assert progress.done == {phases.STEP: 1}


def test_pauses_in_a_pack_heavier_than_all_before_it_are_expected_to_be_longer() -> None:
    """A whole document after packs of small ones: its steps of the ring took longer than four times theirs."""
    progress = Progress()
    with progress.during(phases.STEP):
        progress.next_micro_batch(10.0)
        pause(progress, 6.0)
        progress.ring_step()
        progress.next_micro_batch(2.0)
        assert progress.snapshot()["longest"] == pytest.approx(6.0, abs=0.1), "a lighter one"
        progress.next_micro_batch(100.0)
        assert progress.snapshot()["longest"] == pytest.approx(60.0, abs=1.0)
        pause(progress, 50.0)
        progress.ring_step()
        progress.next_micro_batch()
        assert progress.snapshot()["longest"] == pytest.approx(50.0, abs=0.1), "it is known now"
    with progress.during(phases.EVAL):
        progress.next_micro_batch(1000.0)
        assert progress.snapshot()["longest"] == pytest.approx(0.0, abs=0.1), "nothing is known of an evaluation"
