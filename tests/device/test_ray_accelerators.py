"""Recovery with the back ends of accelerators, on a real Ray: who stays, who is replaced, what is reclaimed.

Ranks compute on CPUs; their groups are those of `tests.accelerators`, which abort as NCCL and HCCL are documented to.
"""

import dataclasses
import gc
import os
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import raycp
from raycp.driver import fleet
from raycp.errors import DeviceError
from raycp.events import read_events
from raycp.training.accelerator import Accelerator
from tests.accelerators import FakeBackend, FakeHccl, FakeNccl, StuckHccl, register
from tests.elastic.runs import config, make_folder
from workers.actor import TrainWorker
from workers.messages import Rendezvous, RunSpec, StepReport, StepRequest

FAULT_STEP = 3


class OnFake(TrainWorker):
    """A rank whose groups are of a fake back end; in the middle of a step, rank 1 is lost once.

    It writes down which process became which rank, and whether its old state was gone when it joined again.
    """

    kind: type[FakeBackend] = FakeNccl

    def __init__(self, spec: RunSpec) -> None:
        device = dataclasses.replace(spec.device, backend=register(self.kind))
        super().__init__(dataclasses.replace(spec, device=device))
        self._old: list[Any] = []

    def note(self, name: str) -> bool:
        """Whether nobody noted it before."""
        try:
            (Path(self._spec.output_dir) / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def join(self, rendezvous: Rendezvous) -> int:
        if self._state is not None:
            self._old = [weakref.ref(self._state.trainee)]
        free = super().join(rendezvous)
        if self._old:
            gc.collect()
            self.note(f"old state {'alive' if self._old[0]() is not None else 'gone'} {os.getpid()}")
        self.note(f"generation {rendezvous.generation} rank {rendezvous.rank} pid {os.getpid()}")
        return free

    def step(self, request: StepRequest) -> StepReport:
        assert self._groups is not None
        if request.step == FAULT_STEP and self._groups.rendezvous.rank == 1 and self.note("fault"):
            self.fail()
        return super().step(request)

    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class OnNccl(OnFake):
    """All groups can be aborted."""


class OnNcclFrozen(OnNccl):
    """Planted fault: the collector is told to leave the model alone."""

    def build(self, generation: int, *, initialise: bool, recompute: bool) -> None:
        super().build(generation, initialise=initialise, recompute=recompute)
        gc.freeze()


class OnHccl(OnFake):
    """The same of HCCL."""

    kind = FakeHccl


class OnStuckHccl(OnFake):
    """Aborts do not come back."""

    kind = StuckHccl


class Sick(Accelerator):
    """A device that computes wrong numbers from now on."""

    def check(self, **_: Any) -> None:
        raise DeviceError("the device computes wrong numbers", fix="take it out")


class OnSickDevice(OnFake):
    """Rank 1 raises; the device that it had fails when it comes back, and with the next process that gets it."""

    def fail(self) -> None:
        (Path(self._spec.output_dir) / "sick").touch()
        raise RuntimeError("a kernel failed")

    def _accelerator(self) -> Accelerator:
        sick = Path(self._spec.output_dir) / "sick"
        if sick.exists() and not (Path(self._spec.output_dir) / "refused twice").exists():
            me = self._groups is None or self._groups.rendezvous.rank == 1
            if me and not self.note("refused once"):
                self.note("refused twice")
            if me:
                return Sick(self._spec.device)
        return super()._accelerator()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_folder(tmp_path_factory.mktemp("inputs"))


def run(
    worker: type[OnFake], inputs: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[raycp.FitResult, dict[int, dict[int, int]]]:
    """The result, and {generation: {rank: pid}}."""
    monkeypatch.setattr(fleet, "TrainWorker", worker)
    folder.mkdir()
    settings = config(workers=2, cp=2, on_loss="wait", heartbeat_timeout=20.0, wait_for_capacity=120.0)
    result = raycp.fit(**inputs, output_dir=folder, config=settings)
    found: dict[int, dict[int, int]] = {}
    for path in folder.glob("generation *"):
        _, generation, _, rank, _, pid = path.name.split()
        found.setdefault(int(generation), {})[int(rank)] = int(pid)
    return result, found


@pytest.mark.slow
def test_groups_that_abort_stay_and_groups_that_do_not_cost_their_process(
    cluster: None, inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {}
    for worker, stays in ((OnNccl, True), (OnHccl, True), (OnStuckHccl, False)):
        folder = tmp_path / worker.__name__
        result, ranks = run(worker, inputs, folder, monkeypatch)
        first, last = ranks[min(ranks)], ranks[max(ranks)]
        assert max(ranks) > min(ranks)
        assert set(first.values()) & set(last.values()) == ({first[0]} if stays else set())
        assert {p.name.split()[2] for p in folder.glob("old state *")} == ({"gone"} if stays else set())
        events = [e for e in read_events(folder / "events.jsonl") if e["event"] == "joined"]
        assert all(len(e["free_bytes"]) == 2 and min(e["free_bytes"]) > 0 for e in events)
        assert len(events) == len(ranks)
        losses[worker] = result.losses
    assert losses[OnNccl] == losses[OnHccl] == losses[OnStuckHccl]


@pytest.mark.slow
def test_memory_that_is_not_reclaimed_shows(
    cluster: None, inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(OnNcclFrozen, inputs, tmp_path / "frozen", monkeypatch)
    assert {p.name.split()[2] for p in (tmp_path / "frozen").glob("old state *")} == {"alive"}


@pytest.mark.slow
def test_a_rank_whose_device_fails_its_probe_is_not_readmitted(
    cluster: None, inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = tmp_path / "sick"
    result, ranks = run(OnSickDevice, inputs, folder, monkeypatch)
    first, last = ranks[min(ranks)], ranks[max(ranks)]
    assert result.steps == 6
    assert set(first.values()) & set(last.values()) == {first[0]}
    assert (folder / "refused twice").exists()
    told = capsys.readouterr().err
    assert "device not used" in told
    assert "computes wrong numbers" in told
