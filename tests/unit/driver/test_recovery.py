"""Which failures are retried, how often, and what a person reads about one."""

import pytest

from raycp.driver.recovery import MAX_STRIKES, Incident, Phase, Repeaters, Strikes, human
from raycp.errors import WorkerError


def failed(cause: str = "its process died", **details: object) -> WorkerError:
    return WorkerError("step 4 failed: rank 3", fix="look", rank=3, node="10.0.0.7", cause=cause, **details)


def test_failures_without_a_committed_step_between_them_add_up() -> None:
    strikes = Strikes()
    for _ in range(MAX_STRIKES - 1):
        strikes.failed(failed(), committed=7, on_loss="auto")
    with pytest.raises(WorkerError, match=r"3 failures in a row after step 7.*its process died") as caught:
        strikes.failed(failed(), committed=7, on_loss="auto")
    assert caught.value.details["rank"] == 3
    assert caught.value.fix == "look"


def test_progress_clears_the_count() -> None:
    strikes = Strikes()
    for committed in range(20):
        strikes.failed(failed(), committed=committed // 2, on_loss="auto")


@pytest.mark.parametrize(("error", "on_loss"), [(failed(), "stop"), (failed(fatal=True), "auto")])
def test_what_must_not_be_retried_is_raised_as_it_is(error: WorkerError, on_loss: str) -> None:
    with pytest.raises(WorkerError) as caught:
        Strikes().failed(error, committed=1, on_loss=on_loss)
    assert caught.value is error


def test_phases_add_up_over_attempts_and_count_when_they_raise() -> None:
    now = iter([0.0, 1.0, 5.0, 7.5])
    incident = Incident(began=0.0, attempted=4)
    with pytest.raises(RuntimeError), incident.phase(Phase.REBUILD, lambda: next(now)):
        raise RuntimeError
    with incident.phase(Phase.REBUILD, lambda: next(now)):
        pass
    assert incident.seconds == {"rebuild": 3.5}


def test_one_line_says_what_where_how_long_and_what_it_cost() -> None:
    incident = Incident(began=10.0, attempted=4, error=failed())
    incident.note(failed(silent_seconds=2.0))
    incident.note(failed("ValueError: x" + "y" * 300))
    incident.seconds["restore"] = 0.25
    line = human(incident, now=11.0, lost=0, redone=1, grid="dp 1 x cp 3")
    assert "\n" not in line
    for words in ("rank 3 on 10.0.0.7", "its process died", "ValueError: x", "3.0 s", "detect 2.0", "restore 0.2",
                  "steps lost 0", "again 1", "dp 1 x cp 3"):  # fmt: skip
        assert words in line, words
    assert len(line) < 500
    resized = human(Incident(began=10.0, attempted=4), now=10.5, lost=0, redone=0, grid="dp 1 x cp 4")
    assert resized == "resized to dp 1 x cp 4 in 0.5 s (): no step lost"


def test_who_raises_twice_without_a_commit_between_is_named_unless_all_raise() -> None:
    repeaters = Repeaters()
    assert repeaters.again(["a"], of=2, committed=3) == []
    assert repeaters.again(["b"], of=2, committed=3) == []
    assert repeaters.again(["a", "b"], of=2, committed=3) == []
    assert repeaters.again(["a"], of=2, committed=3) == ["a"]
    assert repeaters.again(["a"], of=2, committed=4) == []
    assert repeaters.again(["a"], of=1, committed=4) == ["a"]
