"""Aborting groups of accelerators, with back ends that behave as NCCL and HCCL are known to misbehave."""

import threading
import time

import pytest

from raycp.training.abort import abort_all


class Plain:
    """Comes back at once."""

    def __init__(self):
        self.calls = 0

    def abort(self):
        self.calls += 1


class Slow(Plain):
    """NCCL with kernels in flight."""

    def abort(self):
        time.sleep(0.3)
        super().abort()


class Hanging(Plain):
    """HCCL while links are built, NCCL 2.25.1: the call does not come back."""

    def __init__(self):
        super().__init__()
        self.released = threading.Event()

    def abort(self):
        self.released.wait(30.0)
        super().abort()


class Raising(Plain):
    """A device that is gone."""

    def abort(self):
        raise RuntimeError("ERR02200 DIST call hccl api failed")


class Crossed(Plain):
    """Two communicators with sends to each other: each abort waits until the other has begun."""

    def __init__(self, barrier):
        super().__init__()
        self.barrier = barrier
        self.patience = 2.0

    def abort(self):
        self.barrier.wait(self.patience)
        super().abort()


def test_all_groups_are_aborted():
    groups = {name: Plain() for name in ("world", "ring", "ulysses")}
    found = abort_all(groups)
    assert found.clean
    assert [g.calls for g in groups.values()] == [1, 1, 1]


def test_they_are_aborted_at_the_same_time():
    found = abort_all({str(i): Slow() for i in range(8)}, deadline=2.0)
    assert found.clean
    assert found.seconds < 1.0


def test_groups_that_wait_for_each_other():
    barrier = threading.Barrier(2)
    assert abort_all({"ring": Crossed(barrier), "outer": Crossed(barrier)}, deadline=2.0).clean


def test_one_after_the_other_they_hang():
    barrier = threading.Barrier(2)
    first = Crossed(barrier)
    first.patience = 0.2
    with pytest.raises(threading.BrokenBarrierError):
        first.abort()


def test_one_that_hangs_is_named_at_the_deadline_and_the_others_are_done():
    hanging, plain = Hanging(), Plain()
    found = abort_all({"world": hanging, "ring": plain}, deadline=0.2)
    hanging.released.set()
    assert not found.clean
    assert found.stuck == ("world",)
    assert found.seconds < 1.0
    assert plain.calls == 1


def test_one_that_raises_is_named():
    found = abort_all({"world": Raising(), "ring": Plain()}, deadline=0.5)
    assert found.failed == (("world", "RuntimeError: ERR02200 DIST call hccl api failed"),)
    assert found.stuck == ()
    assert not found.clean


def test_no_group_is_fine():
    assert abort_all({}).clean
