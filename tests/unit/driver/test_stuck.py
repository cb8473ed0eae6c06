"""Which rank is stuck, by counters alone: in every call, and never one that merely waits."""

from typing import Any

import pytest

from raycp.driver.stuck import BEGIN, COPY_PATIENCE, FIRST, KEEPER_SECONDS, SLOWER, WHOLE_SECONDS, stuck
from workers import progress as phases
from workers.progress import Progress

LOADING = 10.0
"""The patience that the driver has with ranks that load or write."""


def beat(
    idle: float,
    call: str = phases.STEP,
    *,
    phase: str | None = None,
    longest: float = 0.1,
    done: int = 3,
    seconds: float = 50.0,
) -> dict[str, Any]:
    return {
        "call": call,
        "phase": phase or call,
        "idle_seconds": idle,
        "longest": longest,
        "calls_done": done,
        "call_seconds": seconds,
    }


def found(beats: list[dict[str, Any]], *, patience: float = 1.0, running: float = 1000.0) -> set[int]:
    """`heartbeat_timeout` is one second."""
    reasons = stuck(dict(enumerate(beats)), patience=patience, heartbeat=1.0, running=running)
    assert all("no progress" in str(e) for e in reasons.values())
    return set(reasons)


@pytest.mark.parametrize(
    ("beats", "expected"),
    [
        ([beat(5.0), beat(9.0), beat(5.1)], {1}),  # all wait for the one that stood still first
        ([beat(0.1), beat(9.0), beat(5.1)], set()),  # somebody still works
        ([beat(5.0, longest=3.0), beat(9.0), beat(5.1)], set()),  # pauses of 3 s are usual here
        ([beat(5.0, longest=3.0), beat(SLOWER * 3.0 + 0.1), beat(5.1)], set()),  # and for all of them
        ([beat(5.0, done=0), beat(9.0), beat(5.1)], set()),  # nobody knows yet what is usual
        ([beat(FIRST + 1, done=0), beat(FIRST + 2), beat(FIRST + 3)], {2}),  # which is no excuse for ever
        ([beat(5.0), beat(9.0, phase=phases.COPY), beat(5.1)], set()),  # its copy waits for other nodes
    ],
)
def test_in_a_step_the_rank_whose_counters_stopped_first_is_stuck(
    beats: list[dict[str, Any]], expected: set[int]
) -> None:
    assert found(beats) == expected


@pytest.mark.parametrize("call", [phases.RESTORE, phases.RECALL, phases.SAVE, phases.EXPORT, phases.ATTACH])
@pytest.mark.parametrize("other", [0.1, LOADING + 1])
def test_where_nobody_waits_for_another_each_rank_has_its_own_deadline(call: str, other: float) -> None:
    """One that hangs while another still writes was not seen, since "somebody still works"."""
    expected = {1} if other < LOADING else {0, 1}
    storage = call in (phases.RESTORE, phases.SAVE) and other > LOADING  # every rank stands still: see below
    assert found([beat(other, call), beat(LOADING + 5, call)], patience=LOADING) == (set() if storage else expected)
    assert found([beat(other, call), beat(LOADING - 1, call)], patience=LOADING) == expected - {1}


@pytest.mark.parametrize("call", [phases.RESTORE, phases.SAVE])
def test_storage_that_is_away_for_a_while_does_not_cost_all_ranks_with_the_state_that_they_hold(call: str) -> None:
    """All of them were killed together, and with them steps that were nowhere else."""
    assert found([beat(LOADING + at, call) for at in (1, 5, 9)], patience=LOADING) == set()
    assert found([beat(LOADING + 5, call)], patience=LOADING) == {0}, "the others have written"
    for_ever = [beat(WHOLE_SECONDS + 5, call), beat(WHOLE_SECONDS + 1, call)]
    assert found(for_ever, patience=LOADING, running=1e6) == {0, 1}


def test_a_heavy_pack_after_light_ones_is_no_silence_on_an_accelerator() -> None:
    """The host orders in a second what the device computes in a minute, and then waits for the loss."""
    ahead = [{**beat(idle, longest=0.5), "ahead": True} for idle in (9.0, 8.0)]
    assert found(ahead) == set()
    assert found([{**b, "ahead": False} for b in ahead]) == {0}
    assert found([{**b, "idle_seconds": FIRST + 1} for b in ahead]) == {0}


def test_a_rank_that_hangs_while_it_builds_is_to_blame_and_not_those_that_wait_for_it_longer() -> None:
    """A rank that read fast stands still first, in a collective; the one that hangs in its files stops later."""
    waits, hangs = beat(40.0, phases.BUILD, phase=phases.MEET), beat(30.0, phases.BUILD)
    assert found([waits, hangs, waits], patience=LOADING) == {1}
    assert found([waits, beat(1.0, phases.BUILD), waits], patience=LOADING) == set()
    assert found([waits, beat(50.0, phases.BUILD, phase=phases.MEET)], patience=LOADING) == {1}, "nobody works"


@pytest.mark.parametrize("call", [phases.JOIN, phases.BUILD])
def test_the_first_time_has_as_long_as_loading_and_not_ten_times_that(call: str) -> None:
    """The limit of a first build was to be 10 x 10 x 30 s: longer than a collective waits."""
    assert found([beat(FIRST - 1, call, done=0)], patience=3.0) == set()
    assert found([beat(FIRST + 1, call, done=0)], patience=3.0) == {0}
    assert found([beat(LOADING + 1, call, done=0)], patience=LOADING) == {0}
    assert found([beat(3.5, call)], patience=3.0) == {0}


def test_a_call_that_does_not_begin_is_bounded_too_and_hides_nobody_for_ever() -> None:
    idle = beat(1000.0, phases.IDLE, done=0)
    assert found([idle, beat(1.5)], running=BEGIN - 1) == set(), "what was before the call does not count"
    assert found([idle, beat(BEGIN + 0.5), beat(BEGIN + 0.6)], running=BEGIN + 1) == {0}
    assert found([idle, beat(0.1, phases.SAVE)], patience=LOADING, running=LOADING + 1) == {0}


def test_a_rank_that_still_ends_the_call_before_is_not_blamed_for_it_at_once() -> None:
    """After an abort: what stood still for minutes before the new call was made has its time from there on."""
    before = beat(500.0, phases.SAVE, seconds=600.0)
    assert found([before, beat(2.0, seconds=2.0)], running=2.0) == set()
    assert found([before, beat(FIRST - 1, seconds=FIRST - 1)], running=FIRST - 1) == set()
    assert found([before, beat(FIRST + 1, seconds=FIRST + 1)], running=FIRST + 1) == {0}
    assert found([beat(0.5, phases.SAVE, seconds=600.0)], running=300.0) == set(), "it moves"


def test_a_copy_that_hangs_in_its_own_part_is_seen_when_nobody_can_hold_it_up_any_more() -> None:
    """A device copy that never returned was not seen at all."""
    for call in (phases.STEP, phases.SNAPSHOT):
        assert found([beat(COPY_PATIENCE - 0.5, call, phase=phases.COPY)]) == set()
        assert found([beat(COPY_PATIENCE + 0.5, call, phase=phases.COPY)]) == {0}


def test_a_keeper_that_is_silent_is_not_held_against_the_rank_that_will_pass_over_it() -> None:
    waits = beat(KEEPER_SECONDS - 1, phases.RECALL, phase=phases.KEEPER)
    assert found([waits, beat(KEEPER_SECONDS - 1, phases.RECALL)], patience=3.0) == {1}
    assert found([{**waits, "idle_seconds": KEEPER_SECONDS + 1}], patience=3.0) == {0}


def test_a_library_that_loads_a_whole_model_silently_has_as_long_as_the_others_wait_for_it() -> None:
    assert found([beat(WHOLE_SECONDS - 1, phases.BUILD, phase=phases.WHOLE)], running=1e6) == set()
    assert found([beat(WHOLE_SECONDS + 1, phases.BUILD, phase=phases.WHOLE)], running=1e6) == {0}


def test_the_reason_names_the_call_and_its_part() -> None:
    (reason,) = stuck({0: beat(50.0, phases.STEP, phase="update")}, patience=1, heartbeat=1, running=99).values()
    assert str(reason) == "no progress for 50 s in step (update)"
    (reason,) = stuck({0: beat(50.0, phases.SAVE)}, patience=1, heartbeat=1, running=99).values()
    assert str(reason) == "no progress for 50 s in save"


def test_the_counters_of_a_process_are_what_the_rules_ask_for() -> None:
    progress = Progress()
    with progress.during(phases.SAVE):
        assert found([progress.snapshot()]) == set()
        progress.moved -= 2 * FIRST
        assert found([progress.snapshot()]) == {0}
        progress.move()
        assert found([progress.snapshot()]) == set()
