"""Where workers are hired while a run goes on, on a real Ray cluster: not where a node is lost, or was refused."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from raycp.driver import fleet
from raycp.driver.cluster import ClusterHandle, live_nodes
from raycp.driver.fleet import Fleet
from raycp.driver.placement import NodeShare, Reservation, slots
from raycp.driver.signals import Stopped, StopSignal
from tests.specs import run_spec
from workers.messages import Probe, RunSpec

pytestmark = pytest.mark.slow


class Applicant:
    """A worker that writes down where it was hired, and finds its node bad where a file says so."""

    def __init__(self, spec: RunSpec) -> None:
        self.folder = Path(spec.output_dir)

    def probe(self, nonce_path: str, nonce: str) -> Probe:
        node_id = ray.get_runtime_context().get_node_id()
        (self.folder / f"hired-{node_id}-{os.getpid()}").touch()
        bad = (self.folder / f"bad-{node_id}").exists()
        while (self.folder / "slow").exists():
            time.sleep(0.1)
        return Probe(
            node_id=node_id,
            address=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            accelerators=(),
            cpu_count=1,
            problems=(("its clock runs backwards", "turn it round"),) if bad else (),
        )

    def progress(self) -> None:
        return


def fleet_in(folder: Path, say: Callable[[str], None]) -> Fleet:
    handle = ClusterHandle(started_here=True, in_job=False, driver_address="127.0.0.1")
    return Fleet(run_spec(folder), handle, say)


class Hiring:
    """A fleet whose first worker is there; `home` is its node, `other` the one that has none.

    Attributes:
        said: messages.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, list[str]()
        self.fleet = fleet_in(folder, self.said.append)
        self.fleet.staff(1, spares=0, cp=1, timeout=60.0)
        (worker,) = self.fleet.workers
        self.home = worker.probe.node_id
        self.other = next(n.node_id for n in live_nodes() if n.total.get("CPU") and n.node_id != self.home)

    def hired(self, node_id: str) -> int:
        """How many workers ever began there."""
        return len(list(self.folder.glob(f"hired-{node_id}-*")))

    def recruit(self, until: Callable[[], bool], seconds: float, *, target: int = 3) -> bool:
        """Asks for so many workers, as a run does after each step; whether it came to that in time."""
        deadline = time.monotonic() + seconds
        while not until() and time.monotonic() < deadline:
            self.fleet.recruit(target)
            time.sleep(0.1)
        return until()


@pytest.fixture
def hiring(three_nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hiring]:
    monkeypatch.setattr(fleet, "TrainWorker", Applicant)
    made = Hiring(tmp_path)
    yield made
    made.fleet.close()


def test_nobody_is_hired_on_a_node_that_is_known_to_be_lost_before_ray_sees_it(
    hiring: Hiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New workers were sent to a node that was cut off, and the run waited for them until Ray saw its end."""
    monkeypatch.setattr(fleet, "AVOID_SECONDS", 15.0)
    avoided = time.monotonic()
    hiring.fleet.avoid(hiring.other)
    assert hiring.recruit(lambda: len(hiring.fleet.workers) == 2, 60.0)
    hiring.recruit(lambda: False, max(0.0, avoided + 14.0 - time.monotonic()))
    assert {w.probe.node_id for w in hiring.fleet.workers} == {hiring.home}
    assert hiring.hired(hiring.other) == 0
    assert hiring.recruit(lambda: hiring.hired(hiring.other) == 1, 60.0), "it was silent for a while, and lives"


def test_nobody_is_hired_again_on_a_node_that_was_refused(hiring: Hiring) -> None:
    """Its seat was free: the next look at the cluster hired there again, for ever."""
    (hiring.folder / f"bad-{hiring.other}").touch()
    assert hiring.recruit(lambda: len(hiring.fleet.workers) == 2, 90.0, target=2)
    (said,) = hiring.said
    assert "its clock runs backwards" in said
    assert not hiring.recruit(lambda: hiring.hired(hiring.other) > 1, 8.0), "a third is wanted, and home is full"
    assert {w.probe.node_id for w in hiring.fleet.workers} == {hiring.home}


class Person(StopSignal):
    """Presses Ctrl-C once a condition holds; `after`: seconds from then until the wait was given up."""

    def __init__(self, when: Callable[[], bool]) -> None:
        super().__init__(lambda text: None)
        self._when, self._asked = when, 0.0

    def check(self) -> None:
        if not self.requested and self._when():
            self.requested, self._asked = True, time.monotonic()
        super().check()

    @property
    def after(self) -> float:
        return time.monotonic() - self._asked


def free(seconds: float) -> int:
    """Slots that are free, after so many seconds at most, when all four are."""
    deadline = time.monotonic() + seconds
    while True:
        found = sum(slots(n, None, free=True) for n in live_nodes())
        if found == 4 or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def test_ctrl_c_is_heard_while_there_is_no_room_for_the_first_workers(three_nodes: Cluster, tmp_path: Path) -> None:
    """It was not heard for `wait_for_capacity`, which may be hours."""
    said: list[str] = []
    made, person = fleet_in(tmp_path, said.append), Person(lambda: bool(said))
    with pytest.raises(Stopped):
        made.staff(9, spares=0, cp=1, timeout=60.0, check_stop=person.check)
    assert person.after < 2.0
    made.close()
    assert free(10.0) == 4


def test_ctrl_c_is_heard_while_the_cluster_does_not_give_what_it_has(three_nodes: Cluster) -> None:
    node = next(n for n in live_nodes() if n.total.get("CPU"))
    began = time.monotonic()
    person = Person(lambda: time.monotonic() > began + 1.0)
    with pytest.raises(Stopped):
        Reservation.make([NodeShare(node=node, ranks=3)], None, timeout=60.0, check_stop=person.check)
    assert person.after < 2.0
    assert free(10.0) == 4, "nothing is asked for any more"


def test_ctrl_c_is_heard_while_the_first_workers_import(
    three_nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "TrainWorker", Applicant)
    (tmp_path / "slow").touch()
    made, person = fleet_in(tmp_path, print), Person(lambda: len(list(tmp_path.glob("hired-*"))) == 2)
    with pytest.raises(Stopped):
        made.staff(2, spares=0, cp=1, timeout=60.0, check_stop=person.check)
    assert person.after < 2.0
    made.close()
    assert free(10.0) == 4
    pids = [int(p.name.rsplit("-", 1)[1]) for p in tmp_path.glob("hired-*")]
    assert psutil.wait_procs([p for p in psutil.process_iter() if p.pid in pids], timeout=10.0)[1] == []
