"""Real Ray: a rank that hangs with a live control thread is seen by its counters, whatever call it is in."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import raycp
from raycp.driver import fleet
from raycp.driver.copies import Room
from raycp.driver.formation import PATIENCE, SOME_PATIENCE, Formation
from raycp.driver.membership import CONTROL, Member, Membership
from raycp.driver.stuck import COPY_PATIENCE, FIRST
from raycp.errors import WorkerError
from raycp.events import read_events
from tests.elastic import hanging_worker
from tests.elastic.runs import STEPS, config, pack_ids
from tests.elastic.small_rank import Hang, SmallRank
from workers import progress as phases
from workers.messages import Probe

HEARTBEAT = 3.0


@pytest.fixture(scope="module")
def actors(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Hang]:
    """Three ranks, and what they hang in."""
    folder = tmp_path_factory.mktemp("ranks")
    made: Any = ray.remote(concurrency_groups={CONTROL: 2})(SmallRank)
    actors = [made.options(num_cpus=0).remote(str(folder), rank) for rank in range(3)]
    ray.get([a.progress.remote() for a in actors])  # they have started
    return actors, Hang(folder)


@pytest.fixture
def ranks(actors: tuple[list[Any], Hang]) -> Iterator[Membership]:
    probe = Probe(node_id="n" * 8, address="10.0.0.1", pid=1, accelerators=(), cpu_count=1)
    members = [Member(rank=r, actor=a, probe=probe) for r, a in enumerate(actors[0])]
    yield Membership(members, generation=1, unresponsive_after=2.0)
    actors[1].end()


@pytest.mark.parametrize("call", [phases.SAVE, phases.BUILD])
def test_a_rank_that_hangs_in_any_call_is_found_in_its_time_and_nobody_else(call: str, ranks: Membership) -> None:
    """Nobody looked at a rank outside a step: in `save` it had no deadline at all."""
    ranks.gather(lambda m: m.actor.work.remote(call, 0.1, None), what="the first")
    began = time.monotonic()
    with pytest.raises(WorkerError, match=f"no progress for . s in {call}") as caught:
        ranks.gather(lambda m: m.actor.work.remote(call, 0.2 + 0.5 * m.rank, 1), what=call, patience=2.0)
    assert caught.value.details["lost_ranks"] == [1]
    assert 4.0 < time.monotonic() - began < 4.0 + 0.7 + 5.0, "its limit, and what blame takes"
    assert caught.value.details["silent_seconds"] == pytest.approx(4.5, abs=1.0)


def test_a_call_that_never_begins_is_found_too(ranks: Membership) -> None:
    with pytest.raises(WorkerError, match="its call does not begin") as caught:
        ranks.gather(lambda m: m.actor.late.remote(phases.SAVE, 2), what="late")
    assert caught.value.details["lost_ranks"] == [2]


def test_slow_work_is_left_alone(ranks: Membership) -> None:
    ranks.gather(lambda m: m.actor.work.remote(phases.SAVE, 0.1, None), what="the first")
    ranks.gather(lambda m: m.actor.work.remote(phases.SAVE, 1.0 + 2.5 * m.rank, None), what="slow")


def test_a_frozen_keeper_holds_up_the_run_no_longer_than_until_it_is_noticed(
    local_ray: None, inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks waited until Ray had ended it, which takes five seconds for a stopped process."""
    monkeypatch.setattr(fleet, "TrainWorker", hanging_worker.KeeperFreezer)
    result = raycp.fit(**inputs, output_dir=tmp_path, config=config(heartbeat_timeout=HEARTBEAT, checkpoint_every=100))
    assert (result.status, result.steps) == ("finished", STEPS)
    packs = pack_ids(result)
    assert packs == list(range(len(packs)))
    events = list(read_events(result.events_path))
    (lost,) = [e for e in events if e["event"] == "keeper_lost"]
    frozen = (tmp_path / "fault-happened").stat().st_mtime
    assert HEARTBEAT - 1 < lost["time"] - frozen < HEARTBEAT + 2.5
    committed = min(e["time"] for e in events if e["event"] == "snapshot" and e["time"] > lost["time"])
    print(f"noticed after {lost['time'] - frozen:.1f} s, the next commit {committed - lost['time']:.1f} s later")
    assert committed - lost["time"] < 5.0, "another keeper is started beside the one that is being ended"
    assert result.recoveries == []


def check(result: raycp.FitResult, unbroken: raycp.FitResult) -> None:
    """Every pack once in the order of an unbroken run, losses bit-equal."""
    assert (result.status, result.steps) == ("finished", STEPS)
    assert pack_ids(result) == pack_ids(unbroken)
    assert result.losses == unbroken.losses


def _no_room(self: Formation, *_: Any) -> Room:
    self.room = Room.NONE
    return self.room


@pytest.mark.slow
@pytest.mark.parametrize("memory", [True, False])
def test_a_rank_lost_while_the_others_read_what_they_restore_from_does_not_cost_them_too(
    memory: bool, unbroken: raycp.FitResult, inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They did not look up from their files, missed the freeze and were ended as well: nobody was left."""
    monkeypatch.setattr(fleet, "TrainWorker", hanging_worker.SlowReader)
    if not memory:
        monkeypatch.setattr(Formation, "_weigh", _no_room)
    began = time.time()
    result = raycp.fit(**inputs, output_dir=tmp_path, config=config(on_loss="shrink", cp=(1, 2)))
    assert (result.status, result.steps) == ("finished", STEPS)
    assert pack_ids(result) == pack_ids(unbroken)
    assert result.losses == pytest.approx(unbroken.losses, rel=1e-5)
    assert len(list(tmp_path.glob("process-*"))) == 2, "the one that was left went on"
    print(f"{time.time() - began:.1f} s, seconds of each phase: {[r['seconds'] for r in result.recoveries]}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worker", "memory", "call", "factor"),
    [
        ("HangingBuilder", True, phases.BUILD, PATIENCE),
        ("HangingReader", False, phases.RESTORE, PATIENCE),
        ("HangingReader", True, phases.RECALL, FIRST),
        ("HangingWriter", False, phases.SAVE, PATIENCE),
        ("HangingCopier", True, f"{phases.STEP} (copy)", COPY_PATIENCE),
    ],
)
def test_a_rank_that_hangs_is_replaced_within_its_limit_and_the_run_goes_on(
    worker: str,
    memory: bool,
    call: str,
    factor: float,
    unbroken: raycp.FitResult,
    inputs: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was waited for: half an hour where others wait in a collective, else for ever."""
    assert factor >= SOME_PATIENCE
    monkeypatch.setattr(fleet, "TrainWorker", getattr(hanging_worker, worker))
    if not memory:
        monkeypatch.setattr(Formation, "_weigh", _no_room)
    result = raycp.fit(**inputs, output_dir=tmp_path, config=config(spares=1, heartbeat_timeout=HEARTBEAT))
    check(result, unbroken)
    lost = [e for e in read_events(result.events_path) if e["event"] == "worker_lost"]
    (stuck,) = [e for e in lost if "no progress" in e["cause"]]
    assert f" s in {call}" in stuck["cause"]
    assert stuck["rank"] == hanging_worker.FAULT_RANK
    waited = stuck["time"] - (tmp_path / "hangs").stat().st_mtime
    print(f"{worker}: seen after {waited:.1f} s, limit {factor * HEARTBEAT:.0f} s")
    assert factor * HEARTBEAT - 1 < waited < factor * HEARTBEAT + 6.0
