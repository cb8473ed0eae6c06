"""The life cycle of process groups on back ends that abort as NCCL and HCCL do (`tests.accelerators`)."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from raycp.driver.store import open_store
from raycp.plan import RankGrid
from raycp.training.abort import DEADLINE
from raycp.training.device import DeviceSpec, resolve_device
from raycp.training.vendor import process_environment
from tests import accelerators
from tests.accelerators import DeadHccl, FakeBackend, FakeHccl, FakeNccl, StuckHccl, register
from tests.multiproc.launcher import run_ranks
from tests.multiproc.test_process_groups import rendezvous, total
from workers.process_groups import ProcessGroups, backends_of

LOOPBACK = "127.0.0.1"
ROOT = Path(__file__).resolve().parents[2]
SPECS = {name: resolve_device(name, [("here", {"NPU": 1.0, "GPU": 1.0})]) for name in ("npu", "cuda")}


def on(kind: type[FakeBackend]) -> DeviceSpec:
    return replace(resolve_device("cpu", {}), backend=register(kind))


def _freed_and_rebuilt(rank: int, world_size: int, port: int, kind: type[FakeBackend]) -> tuple[object, ...]:
    """Rank 0 waits for a message that nobody sends until a control thread aborts; then all meet again, in place."""
    dist.barrier()
    dist.destroy_process_group()  # the launcher's own
    grid, spec = RankGrid(dp=1, ring=2, ulysses=world_size // 2), on(kind)
    groups = ProcessGroups.create(rendezvous(rank, grid, port), device=spec, address=LOOPBACK)
    groups.warm()
    found = sorted(backends_of(groups._all()))
    if rank == 0:
        threading.Timer(0.3, groups.abort).start()
    began, error = time.monotonic(), ""
    try:
        if rank == 0:
            dist.recv(torch.empty(4), src=1)
        else:
            total()
    except RuntimeError as raised:
        error = type(raised).__name__
        groups.abort()
    took = time.monotonic() - began
    states = [g.is_aborted for g in accelerators.MADE]
    groups = groups.rebuild(rendezvous(rank, grid, port, generation=2), device=spec, address=LOOPBACK)
    groups.warm()
    return found, bool(error), took < 5.0, states, total(), [g.is_aborted for g in accelerators.MADE[3:]]


@pytest.mark.parametrize("kind", [FakeNccl, FakeHccl])
def test_all_groups_are_aborted_and_made_again_in_the_same_process(kind: type[FakeBackend]) -> None:
    store = open_store(LOOPBACK)
    wanted = (["group 0", "group 1", "group 2"], True, True, [True] * 3, 4.0, [False] * 3)
    assert run_ranks(_freed_and_rebuilt, 4, store.port, kind) == [wanted] * 4


ABORT = """
import sys, time
from raycp.driver.store import open_store
from tests.multiproc.test_accelerator_groups import LOOPBACK, RankGrid, accelerators, on, rendezvous
from workers.process_groups import ProcessGroups

kind = getattr(accelerators, sys.argv[1])
store = open_store(LOOPBACK)
groups = ProcessGroups.create(rendezvous(0, RankGrid(dp=1, ring=1), store.port), device=on(kind), address=LOOPBACK)
groups.warm()
groups.abort()
print("alive", [g.is_aborted for g in accelerators.MADE])
"""
WATCH = """
import sys
from tests.multiproc.test_accelerator_groups import LOOPBACK, RankGrid, accelerators, on, open_store, rendezvous
from workers.process_groups import ProcessGroups

kind = getattr(accelerators, sys.argv[1])
store = open_store(LOOPBACK)
groups = ProcessGroups.create(rendezvous(0, RankGrid(dp=1, ring=1), store.port), device=on(kind), address=LOOPBACK)
accelerators.MADE[0].watchdog("remote process has exited or there was a network error")
print("alive", accelerators.MADE[0].error)
"""


def run(
    code: str, kind: type[FakeBackend], environ: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    plain = {k: v for k, v in os.environ.items() if "ASYNC_ERROR_HANDLING" not in k}
    words = [sys.executable, "-c", code, kind.__name__]
    return subprocess.run(words, cwd=ROOT, env=plain | (environ or {}), capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("kind", [StuckHccl, DeadHccl])
def test_a_process_that_cannot_abort_says_so_and_ends_for_another_to_take_its_place(kind: type[FakeBackend]) -> None:
    began = time.monotonic()
    done = run(ABORT, kind)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "groups not aborted within" in done.stderr
    assert "group 0" in done.stderr
    assert "alive" not in done.stdout
    assert ("ERR02200" in done.stderr) == (kind is DeadHccl)
    assert time.monotonic() - began < DEADLINE + 60


@pytest.mark.parametrize(("kind", "device"), [(FakeNccl, "cuda"), (FakeHccl, "npu")])
def test_a_librarys_watchdog_ends_no_process_that_the_driver_recovers(kind: type[FakeBackend], device: str) -> None:
    done = run(WATCH, kind, process_environment(SPECS[device], timeout=60.0, environ={}))
    assert done.stdout.strip() == "alive remote process has exited or there was a network error", done.stderr
    assert run(WATCH, kind).returncode == -signal.SIGABRT  # what it does by itself
