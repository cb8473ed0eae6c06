"""NCCL and HCCL for tests, without their devices: gloo underneath, life and death as their documents say.

A group computes with gloo, on CPU tensors; `ProcessGroups`, attention's communicators and FSDP2 cannot tell it from
another back end. What differs from gloo is what the recovery has to deal with:

* `abort` exists. It frees every operation of this process that waits, and sets `is_aborted`; an operation afterwards is
  an error. Both libraries' own take a while: 0.5 s and more of NCCL, which counts the kernels in flight.
* A watchdog thread sees errors of peers, and ends the process over one unless the library's variable says 0:
  TORCH_NCCL_ASYNC_ERROR_HANDLING (default 3), TORCH_HCCL_ASYNC_ERROR_HANDLING (default 1).
* HCCL has no documented abort of a group that waits. `StuckHccl` does not come back (torchft #152; NCCL 2.25.1 did the
  same), `DeadHccl` raises what a device does that is gone.

Each class is registered under its `name`, which is a back end for `DeviceSpec(backend=name)`: `register()`.
"""

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from workers.sockets import Endpoint, listeners, shut_sockets

MADE: "list[FakeBackend]" = []
"""Every group of this process, oldest first: torch knows their C++ half only."""


class FakeBackend(dist.ProcessGroupGloo):
    """One group of a rank.

    Attributes:
        is_aborted: as `ProcessGroupNCCL.isAborted`: nothing can be done with the group any more.
        error: what the watchdog saw.
    """

    name = "fake"
    variable = ""
    """Tells the watchdog what to do about an error; 0: nothing."""
    handling = "1"
    """Default of the variable."""
    seconds = 0.05
    """That an abort takes."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        before = listeners()
        super().__init__(store, rank, size, timeout)
        self._listening = listeners() - before
        store.set(f"fake/{rank}", json.dumps(sorted(self._listening)))
        told = [json.loads(store.get(f"fake/{peer}")) for peer in range(size)]
        self._peers = frozenset(Endpoint(*one) for found in told for one in found)
        self.is_aborted = False
        self.error = ""
        MADE.append(self)

    def abort(self) -> None:
        """Frees what waits; see the module."""
        time.sleep(self.seconds)
        self.is_aborted = True
        shut_sockets(self._listening, self._peers)

    def watchdog(self, error: str) -> None:
        """The library's own thread has seen an error of a peer."""
        self.error = error
        print(f"[{self.name} watchdog] {error}", file=sys.stderr, flush=True)
        if os.environ.get(self.variable, self.handling) != "0":
            os.kill(os.getpid(), signal.SIGABRT)


class FakeNccl(FakeBackend):
    """Aborts as NCCL since 2.26."""

    name = "fakenccl"
    variable = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    handling = "3"


class FakeHccl(FakeBackend):
    """Where the abort of torch_npu 2.13 works."""

    name = "fakehccl"
    variable = "TORCH_HCCL_ASYNC_ERROR_HANDLING"


class StuckHccl(FakeHccl):
    """Does not come back: in link building, say."""

    name = "stuckhccl"

    def abort(self) -> None:
        """See the class."""
        threading.Event().wait()


class DeadHccl(FakeHccl):
    """The device is gone."""

    name = "deadhccl"

    def abort(self) -> None:
        """See the class."""
        raise RuntimeError("ERR02200 DIST call hccl api failed: HcclCommDestroy, error code 507048")


def register(kind: type[FakeBackend]) -> str:
    """Makes the back end known to torch.distributed in this process. Returns its name."""

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return kind(store, rank, size, timeout)

    if kind.name not in dist.Backend.backend_list:
        dist.Backend.register_backend(kind.name, make, devices=["cpu"])
    return kind.name
