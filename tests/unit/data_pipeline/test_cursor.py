import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline import Cursor, StepSchedule, assign_packs, attention_cost, plan_packs
from raycp.errors import CheckpointError, ConfigError


def check_epochs(schedule: StepSchedule, steps: list[tuple[int, ...]]) -> None:
    """Whole epochs: each pack id once, in order, no step over an epoch's border or larger than the global batch."""
    ids = [pack for step in steps for pack in step]
    assert ids == list(range(len(ids)))
    assert len(ids) % schedule.num_packs == 0
    for step in steps:
        assert 1 <= len(step) <= schedule.global_batch
        assert len({schedule.locate(pack)[0] for pack in step}) == 1


schedules = st.builds(
    StepSchedule,
    num_packs=st.integers(1, 30),
    global_batch=st.integers(1, 9),
    epochs=st.integers(1, 3).map(float),
    family=st.just("f"),
)


@settings(max_examples=100, deadline=None)
@given(schedules)
def test_every_pack_of_every_epoch_once(schedule):
    steps = [schedule.pack_ids(s) for s in range(1, schedule.total_steps + 1)]
    check_epochs(schedule, steps)
    assert sum(map(len, steps)) == schedule.num_packs * schedule.epochs


@pytest.mark.parametrize("fault", ["skipped", "repeated"])
def test_the_check_sees_a_planted_fault(fault):
    schedule = StepSchedule(num_packs=7, global_batch=3, epochs=2)
    steps = [schedule.pack_ids(s) for s in range(1, schedule.total_steps + 1)]
    steps = steps[:2] + (steps[3:] if fault == "skipped" else steps[1:])
    with pytest.raises(AssertionError):
        check_epochs(schedule, steps)


@settings(max_examples=60, deadline=None)
@given(schedules, st.data())
def test_resume_from_any_cursor_three_times_in_a_row(schedule, data):
    whole = [schedule.pack_ids(s) for s in range(1, schedule.total_steps + 1)]
    done, seen = 0, []
    for _ in range(3):
        stop = data.draw(st.integers(done, schedule.total_steps))
        seen += [schedule.pack_ids(s) for s in range(done + 1, stop + 1)]
        cursor = Cursor.from_dict(schedule.cursor(stop).to_dict())
        assert cursor.epoch * schedule.num_packs + cursor.pack_index == sum(map(len, seen))
        done = schedule.restore(cursor)
        assert done == stop
    seen += [schedule.pack_ids(s) for s in range(done + 1, schedule.total_steps + 1)]
    assert seen == whole


def test_a_cursor_carries_the_hash_of_its_epochs_plan():
    plans = [plan_packs([3, 4, 5, 6, 7], seq_length=8, epoch=e) for e in range(3)]
    schedule = StepSchedule(num_packs=len(plans[0]), global_batch=2, epochs=3, family=plans[0].family)
    for step in range(schedule.total_steps):
        cursor = schedule.cursor(step)
        assert cursor.plan_hash == plans[cursor.epoch].hash
        assert cursor.pack_index < len(plans[0])


def test_steps_win_over_epochs_and_go_on():
    schedule = StepSchedule(num_packs=5, global_batch=2, epochs=1, steps=7)
    assert (schedule.total_steps, schedule.steps_per_epoch) == (7, 3)
    assert [schedule.pack_ids(s) for s in range(1, 8)] == [(0, 1), (2, 3), (4,), (5, 6), (7, 8), (9,), (10, 11)]
    assert StepSchedule(num_packs=5, global_batch=2, epochs=9, steps=2).total_steps == 2


@pytest.mark.parametrize(
    ("epochs", "total"), [(1.0, 3), (0.5, 2), (1.5, 5), (2, 6), (1 / 3, 1), (0.01, 1), (0.1 * 3 * 10, 9)]
)
def test_fractional_epochs(epochs, total):
    assert StepSchedule(num_packs=5, global_batch=2, epochs=epochs).total_steps == total


def test_another_plan_is_refused_with_both_hashes():
    ours = StepSchedule(num_packs=5, global_batch=2, family="ours")
    theirs = StepSchedule(num_packs=5, global_batch=2, family="theirs").cursor(1)
    with pytest.raises(CheckpointError) as error:
        ours.restore(theirs)
    assert theirs.plan_hash in str(error.value)
    assert ours.cursor(1).plan_hash in str(error.value)


def test_a_cursor_between_no_two_steps_is_refused():
    cursor = StepSchedule(num_packs=10, global_batch=3, family="f").cursor(1)
    with pytest.raises(CheckpointError, match="global_batch=2"):
        StepSchedule(num_packs=10, global_batch=2, family="f").restore(cursor)
    with pytest.raises(CheckpointError, match="cannot be read"):
        Cursor.from_dict({"epoch": 0})


def test_steps_outside_the_run_are_refused():
    schedule = StepSchedule(num_packs=5, global_batch=2)
    for step in (0, 4):
        with pytest.raises(ConfigError, match=f"step {step} of a run of 3"):
            schedule.pack_ids(step)
    with pytest.raises(ConfigError, match="global_batch=0"):
        StepSchedule(num_packs=5, global_batch=0)
    with pytest.raises(ConfigError, match="epochs=0"):
        StepSchedule(num_packs=5, global_batch=1, epochs=0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1e6), max_size=24), st.integers(1, 8))
def test_assignment_is_a_partition_with_bounded_counts(costs, dp):
    parts = assign_packs(costs, dp)
    assert len(parts) == dp
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert all(part == sorted(part) and len(part) <= -(-len(costs) // dp) for part in parts)
    assert assign_packs(costs, dp) == parts


def test_assignment_balances_work():
    assert assign_packs([9, 1, 1, 9], 2) == [[0, 1], [2, 3]]
    assert assign_packs([1, 1, 1], 4) == [[0], [1], [2], []]
    costs = [attention_cost(lengths) for lengths in ((8,), (4, 4), (1,) * 8, (7, 1), (2, 6), (5, 3), (3, 3, 2), (8,))]
    loads = [sum(costs[i] for i in part) for part in assign_packs(costs, 4)]
    by_index = [costs[i] + costs[i + 4] for i in range(4)]
    assert max(loads) < max(by_index)
    with pytest.raises(ConfigError, match="dp=0"):
        assign_packs([1], 0)
