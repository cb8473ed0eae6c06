"""Who is to blame when several ranks report a failure."""

import dataclasses
import pickle
import time
from typing import Any

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, ActorUnavailableError

from raycp.driver.membership import Member, Membership
from raycp.errors import WorkerError
from workers.messages import Probe
from workers.progress import STEP
from workers.wire import KeeperAddress


def membership(ranks: int = 3, *, alive: bool = True) -> Membership:
    members = [
        Member(
            rank=r,
            actor=None,
            probe=Probe(node_id=f"node{r}" * 8, address=f"10.0.0.{r}", pid=100 + r, accelerators=(), cpu_count=1),
        )
        for r in range(ranks)
    ]
    return Membership(members, generation=7, unresponsive_after=1.0, is_alive=lambda node_id: alive)


def raised(time: float, *, communication: bool, cause: str = "ValueError: x") -> WorkerError:
    return WorkerError("rank said so", fix="fix it", time=time, communication=communication, cause=cause)


def blame(failures: dict[int, BaseException]) -> WorkerError:
    return membership()._blame(failures, "step 4")


@pytest.mark.parametrize(
    ("failures", "culprit"),
    [
        ({0: raised(1.0, communication=True), 1: raised(2.0, communication=False)}, 1),
        ({0: raised(1.0, communication=False), 2: ActorDiedError()}, 2),
        ({0: raised(1.0, communication=False), 2: TimeoutError("frozen")}, 2),
        ({1: raised(5.0, communication=False), 2: raised(3.0, communication=False)}, 2),
        ({1: raised(5.0, communication=True), 2: raised(3.0, communication=True)}, 2),
        ({0: ActorUnavailableError("busy", b"0" * 16), 1: raised(9.0, communication=False)}, 0),
        ({0: ActorDiedError(), 1: ActorDiedError()}, 0),
    ],
)
def test_the_culprit_is_not_the_first_rank_that_complains(failures: dict[int, BaseException], culprit: int) -> None:
    error = blame(failures)
    assert error.details["rank"] == culprit
    assert f"rank {culprit} on node 10.0.0.{culprit}" in str(error)
    assert set(error.details["others"]) == set(failures) - {culprit}
    assert error.details["generation"] == 7


def test_a_rank_that_says_its_device_is_of_no_use_is_lost() -> None:
    error = WorkerError("rank said so", fix="take it out", time=2.0, communication=False, unfit=True, cause="0 of 2016")
    found = blame({0: raised(1.0, communication=False), 1: error})
    assert found.details["rank"] == 1
    assert found.details["lost_ranks"] == [1]
    assert found.details["raised_ranks"] == [0]


def test_the_error_names_operation_cause_and_fix_and_survives_pickling() -> None:
    error = blame({1: raised(1.0, communication=False, cause="ValueError: bad row")})
    again: Any = pickle.loads(pickle.dumps(error))
    for one in (error, again):
        assert str(one).startswith("step 4 failed: rank 1 on node 10.0.0.1")
        assert "ValueError: bad row" in str(one)
        assert "fix it" in str(one)
    assert not error.details["lost"]
    assert blame({1: ActorDiedError()}).details["lost"]


@pytest.mark.parametrize(("alive", "words"), [(False, "its node has died"), (True, "it cannot be reached")])
def test_a_node_that_vanished_is_called_lost_and_not_an_error_of_the_rank(alive: bool, words: str) -> None:
    """A killed node shows first as an actor that is "temporarily unavailable"."""
    failures = {0: raised(1.0, communication=True), 1: ActorUnavailableError("socket closed", b"0" * 16)}
    error = membership(alive=alive)._blame(failures, "step 4")
    assert error.details["rank"] == 1
    assert error.details["lost"]
    assert words in error.details["cause"]
    assert words in str(error)


def beat(idle: float) -> dict[str, Any]:
    return {"call": STEP, "phase": STEP, "idle_seconds": idle, "longest": 0.1, "calls_done": 3, "call_seconds": idle}


def test_nobody_is_stuck_before_all_that_are_waited_for_have_told_how_far_they_are() -> None:
    ranks = membership()
    ranks._beats = {0: beat(5.0), 1: beat(9.0)}
    assert ranks._stuck(ranks.members, 1.0) == {}
    ranks._beats[2] = beat(5.1)
    assert set(ranks._stuck(ranks.members, 1.0)) == {1}


def test_the_causes_that_ray_merely_lists_are_not_taken_for_the_cause() -> None:
    """A SIGKILL was reported as "SIGSEGV", which Ray names among the usual suspects."""
    told = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: TrainWorker\nWorker exit type: "
        "SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some "
        "common causes include: (1) the process was killed by the OOM killer, (3) SIGSEGV or another unexpected error."
    )
    context = ActorDiedErrorContext(error_message=told, actor_id=b"0" * 16, class_name="TrainWorker")
    error = blame({1: ActorDiedError(context)})
    assert "SIGSEGV" not in str(error)
    assert "OOM" not in str(error)
    assert error.details["cause"].startswith("its process died")
    assert error.details["lost_ranks"] == [1]


@pytest.mark.parametrize(
    ("error", "seconds"),
    [(ActorDiedError(), 0.0), (TimeoutError("no answer"), 5.0), (TimeoutError("no progress"), 9.0)],
)
def test_the_time_since_a_killed_rank_last_spoke_is_not_the_time_to_see_its_end(
    error: BaseException, seconds: float
) -> None:
    ranks = membership()
    ranks._heard = {1: time.monotonic() - 5.0}
    ranks._beats = {1: beat(9.0)} if "progress" in str(error) else {}
    assert ranks._blame({1: error}, "step 4").details["silent_seconds"] == pytest.approx(seconds, abs=0.5)


class Ordered:
    """An actor that notes what it is ordered."""

    def __init__(self) -> None:
        self.orders: list[Any] = []

    def options(self, *, concurrency_group: str) -> "Ordered":
        assert concurrency_group == "control", "the rank is inside a step"
        return self

    def remote(self, *order: Any) -> None:
        self.orders.append(order)

    @property
    def let_go(self) -> "Ordered":
        return self


def test_only_the_ranks_of_its_node_are_told_to_wait_no_more_for_a_lost_keeper() -> None:
    ranks = membership()
    actors = [Ordered() for _ in ranks.members]
    ranks.members = [dataclasses.replace(m, actor=a) for m, a in zip(ranks.members, actors, strict=True)]
    keeper = KeeperAddress(node_id=ranks.members[1].probe.node_id, host="", port=1, unix="")
    ranks.let_go(keeper)
    assert [a.orders for a in actors] == [[], [(7, keeper)], []]
    ranks.pass_over([keeper])
    ranks.pass_over([keeper])
    assert [len(a.orders) for a in actors] == [1, 2, 1], "any rank may read from it, and is told once"


class LateAnswers:
    """Ray as far as `freeze` needs it: references that are answered at a time; a question takes `slow` seconds."""

    def __init__(self, slow: float) -> None:
        self.slow = slow

    def wait(self, references: list[float], *, timeout: float, num_returns: int = 1) -> tuple[list[float], list[float]]:
        end = time.monotonic() + timeout
        while time.monotonic() < end and any(r > time.monotonic() for r in references):
            time.sleep(0.01)
        done = [r for r in references if r <= time.monotonic()]
        return done, [r for r in references if r not in done]

    def get(self, reference: float) -> dict[str, Any]:
        return beat(0.0)

    def remote(self) -> float:
        return time.monotonic() + self.slow

    def options(self, *, concurrency_group: str) -> "LateAnswers":
        return self

    @property
    def progress(self) -> "LateAnswers":
        return self


@pytest.mark.parametrize(("slow", "lost"), [(1.2, []), (60.0, [1])])
def test_a_survivor_has_its_time_to_answer_also_where_nobody_was_asked_before(
    slow: float, lost: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that failed in its first half second: survivors were lost half a second after the first question."""
    cluster = LateAnswers(slow)
    monkeypatch.setattr("raycp.driver.membership.ray", cluster)
    ranks = membership()
    ranks.members = [Member(rank=1, actor=cluster, probe=ranks.members[1].probe)]
    ranks._heard = {1: time.monotonic() - 3.4}  # when the call began; blame took three seconds
    ranks._open = {time.monotonic() + 1.5: ranks.members[0]}
    assert ranks.freeze(10.0) == lost
