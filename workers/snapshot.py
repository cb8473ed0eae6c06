"""The rank's side of a snapshot: copies the state into memory of the node's keeper beside the next step's work.

Guarantees: what is copied is the state at `begin`, as long as the caller runs `wait` before it changes it (parameters
and moments do not change between two `optimizer.step`); the image is a complete safetensors file, the same bytes that
a checkpoint would hold; a lost keeper, a full one or one of a newer generation is told by `problem` and never raises
inside a step; killing this process at any point leaves the step before whole. Costs one thread that copies without
the GIL (memcpy speed; pages are taken by the keeper at the first copy) and the stall that `wait` returns.
"""

import mmap
import os
import threading
import time
from typing import Any

import numpy as np
import torch

from raycp.errors import RaycpError
from raycp.training.state import State
from raycp.training.tensorfile import ImageLayout, image_layout
from workers.wire import Connection, KeeperAddress, accepted, connect_unix

_CLOSED = "the writer was closed"


class SnapshotWriter:
    """Sends the snapshots of one rank of one generation to the node's keeper.

    Args:
        address: of the keeper on this node; kept as an attribute.
        secret: of the run.
        generation: of this rank's process groups; a keeper of a newer one refuses.
        rank: world rank.

    Attributes:
        problem: why the last snapshot was not made, and no later one will be; None while all is well.
        bytes: length of the last image.
    """

    def __init__(self, address: KeeperAddress, *, secret: bytes, generation: int, rank: int) -> None:
        self.problem: str | None = None
        self.bytes = 0
        self.address, self._secret = address, secret
        self._generation, self._rank = generation, rank
        self._connection: Connection | None = None
        self._images: dict[int, mmap.mmap] = {}
        self._closed = False
        self._work: tuple[int, State, Any] | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="raycp-snapshot", daemon=True).start()

    def begin(self, step: int, state: State) -> None:
        """Starts the copy of `state`, the state after `step`, and returns; waits for the copy before, if it runs.

        Args:
            step: optimizer steps done.
            state: of `export_state`; its tensors must not change until `wait` has returned.
        """
        self.wait()
        with self._changed:
            if self._closed or self.problem is not None:
                return
            self._work = (step, state, _event_of(state))
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> float:
        """Waits until the copy in progress is made, or cannot be made (`problem`), at most `timeout` seconds.

        Returns:
            Seconds waited: the stall.
        """
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._work is None, timeout)
        return time.perf_counter() - began

    def close(self) -> None:
        """Abandons what is in progress and frees the memory maps; idempotent, from any thread, at any time."""
        with self._changed:
            self._closed = True
            self.problem = self.problem or _CLOSED
            if self._connection is not None:
                self._connection.close()
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._work is not None)
                    work = self._work
                    if self._closed or work is None:
                        return
                try:
                    self._copy(*work)
                except (OSError, RaycpError) as error:
                    text = error.message if isinstance(error, RaycpError) else f"{type(error).__name__}: {error}"
                    self.problem = f"the keeper of node {self.address.node_id[:8]}: {text}"
                except Exception as error:
                    self.problem = f"the copy failed: {type(error).__name__}: {error}"
                    raise  # a bug: shown by the thread's excepthook, told by `problem`
                finally:
                    del work
                    with self._changed:
                        self._work = None
                        self._changed.notify_all()
        finally:
            with self._changed:
                self._closed = True
                self._work = None
                self.problem = self.problem or _CLOSED
                if self._connection is not None:
                    self._connection.close()
                self._images.clear()  # the maps go with their last view
                self._changed.notify_all()

    def _copy(self, step: int, state: State, event: Any) -> None:
        layout = image_layout({span.name: (tuple(rows.shape), rows.dtype) for span, rows in state.values()})
        connection = self._connected()
        connection.send(
            {
                "op": "grant",
                "generation": self._generation,
                "rank": self._rank,
                "step": step,
                "bytes": layout.total,
                "images": list(self._images),
            }
        )
        # Waits for the commit of the step before; whoever wants to stop that calls `close`.
        answer, descriptor = connection.receive_with_descriptor(timeout=None)
        image = self._map(accepted(answer), descriptor, layout.total)
        if event is not None:
            event.synchronize()
        self._fill(np.frombuffer(image, dtype=np.uint8), layout, state)
        connection.ask(
            {
                "op": "sealed",
                "generation": self._generation,
                "step": step,
                "entries": [vars(state[name][0].entry) for name in layout.places],
            }
        )
        self.bytes = layout.total

    def _fill(self, image: "np.ndarray[Any, np.dtype[np.uint8]]", layout: ImageLayout, state: State) -> None:
        image[: len(layout.header)] = np.frombuffer(layout.header, dtype=np.uint8)
        for name, (start, stop) in layout.places.items():
            if self._closed:
                raise ConnectionError(_CLOSED)
            rows, target = state[name][1].detach(), image[start:stop]
            if rows.device.type == "cpu" and rows.is_contiguous():  # one memcpy, no pool of threads for it
                np.copyto(target, rows.view(-1).view(torch.uint8).numpy())
            else:
                torch.from_numpy(target).view(rows.dtype).view(rows.shape).copy_(rows)

    def _connected(self) -> Connection:
        connection = self._connection
        if connection is None:
            connection = connect_unix(self.address.unix, self._secret)
            with self._changed:
                self._connection = connection
                if self._closed:
                    connection.close()
        return connection

    def _map(self, answer: dict[str, Any], descriptor: int | None, size: int) -> mmap.mmap:
        """The granted image; images that the keeper gave up are unmapped."""
        number = int(answer["image"])
        for gone in set(self._images) - {number, *answer["images"]}:
            del self._images[gone]
        if descriptor is not None:
            try:
                self._images[number] = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        return self._images[number]


def _event_of(state: State) -> Any:
    """A mark in the accelerator's stream behind the update that made `state`; None on CPU."""
    device = next((rows.device for _, rows in state.values() if rows.device.type != "cpu"), None)
    if device is None:
        return None
    event = torch.Event(device)
    event.record()
    return event
