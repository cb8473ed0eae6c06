"""Workers that fail on purpose: at a given step, one rank raises, dies, freezes, or computes something wrong.

Each fault happens once per marker file, so that the same command, run again, goes through.
"""

import os
import signal
import time
from pathlib import Path

import torch

from workers.actor import TrainWorker
from workers.memory_reader import MemoryPoint
from workers.messages import RunSpec, StepReport, StepRequest
from workers.progress import STEP

FAULT_STEP = 3
FAULT_RANK = 1


class _Faulty(TrainWorker):
    """`fault()` is called on rank `FAULT_RANK` at the start of step `FAULT_STEP`, once."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self._marker = Path(spec.output_dir) / "fault-happened"

    def step(self, request: StepRequest) -> StepReport:
        groups = self._require_groups(request.generation)
        if request.step == FAULT_STEP and groups.rendezvous.rank == FAULT_RANK and not self._marker.exists():
            self._marker.touch()
            return self._guard(STEP, request.generation, lambda: self.fault(request), step=request.step)
        return super().step(request)

    def fault(self, request: StepRequest) -> StepReport:
        raise NotImplementedError


class RaisingWorker(_Faulty):
    """An error of this rank's own, in the middle of the step: the peers are already waiting for it."""

    def fault(self, request: StepRequest) -> StepReport:
        raise ValueError("planted: this rank alone cannot go on")


class DyingWorker(_Faulty):
    """SIGKILL, as from the kernel's out-of-memory killer."""

    def fault(self, request: StepRequest) -> StepReport:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


class FrozenWorker(_Faulty):
    """SIGSTOP: the process is there and never answers."""

    def fault(self, request: StepRequest) -> StepReport:
        os.kill(os.getpid(), signal.SIGSTOP)
        raise AssertionError("woken up")


class FrozenLoader(_Faulty):
    """SIGSTOP while the model is built, where libraries may hold the interpreter for long."""

    def build(self, generation: int, *, initialise: bool, recompute: bool) -> None:
        if self._require_groups(generation).rendezvous.rank == FAULT_RANK and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        super().build(generation, initialise=initialise, recompute=recompute)


class UncopiedWorker(_Faulty):
    """The connection to its keeper breaks before step `FAULT_STEP`, whose copy and the next one are not made, since the
    driver hears of it with the next report. When the copy after these is made, it dies.
    """

    def step(self, request: StepRequest) -> StepReport:
        if request.step == FAULT_STEP + 3 and self._marker.exists() and self._snapshots is not None:
            here = self._require_groups(request.generation).rendezvous
            if (here.rank, request.generation) == (FAULT_RANK, 1):
                self._snapshots.wait()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(request)

    def fault(self, request: StepRequest) -> StepReport:
        snapshots = self._require(self._snapshots)
        snapshots.wait()
        snapshots._connected().close()
        return super().step(request)


class DyingWriter(TrainWorker):
    """SIGKILL in a step, while keepers write an earlier one to storage (`tests.elastic.slow_keeper`)."""

    def step(self, request: StepRequest) -> StepReport:
        folder = Path(self._spec.output_dir)
        rank = self._require_groups(request.generation).rendezvous.rank
        if request.step == FAULT_STEP + 1 and rank == FAULT_RANK and not (folder / "fault-happened").exists():
            while not (folder / "writing").exists():
                time.sleep(0.01)
            (folder / "fault-happened").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(request)


class DivergingWorker(_Faulty):
    """A parameter becomes NaN, after the copy of the step before was made."""

    def fault(self, request: StepRequest) -> StepReport:
        state = self._require_state(request.generation)
        self._require(self._snapshots).wait()
        with torch.no_grad():
            for parameter in state.trainee.parameters():
                parameter.fill_(float("nan"))
        return super().step(request)


class ForgetfulWorker(_Faulty):
    """A planted fault in the arithmetic: this rank's optimizer state is lost at one step. Nothing raises."""

    def fault(self, request: StepRequest) -> StepReport:
        state = self._require_state(request.generation)
        self._require(self._snapshots).wait()
        for entry in state.optimizer.state.values():
            entry["exp_avg"].zero_()
        return super().step(request)


class StaleWorker(RaisingWorker):
    """A planted fault in recovery: one rank keeps its moments at zero instead of those of the restored step."""

    def restore_memory(self, generation: int, point: MemoryPoint, secret: bytes) -> None:
        super().restore_memory(generation, point, secret)
        state = self._require_state(generation)
        if self._require_groups(generation).rendezvous.rank == FAULT_RANK:
            for entry in state.optimizer.state.values():
                entry["exp_avg"].zero_()


class SlowWorker(TrainWorker):
    """Steps that last long enough for somebody to act between two of them."""

    def step(self, request: StepRequest) -> StepReport:
        time.sleep(0.5)
        return super().step(request)
