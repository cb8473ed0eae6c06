"""Workers that hang on purpose: one rank, once, in a call whose control thread goes on answering.

What they hang in is a read that never returns (`tests.elastic.small_rank.Hang`).
"""

import os
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Any

from raycp.training.checkpoint import CheckpointReader
from tests.elastic.faulty_worker import FAULT_RANK, FAULT_STEP, RaisingWorker, _Faulty
from tests.elastic.script import put
from tests.elastic.small_rank import Hang
from workers import actor
from workers.actor import TrainWorker
from workers.memory_reader import MemoryPoint, MemoryReader
from workers.messages import Rendezvous, StepReport, StepRequest
from workers.snapshot import SnapshotWriter


class _Hanging(TrainWorker):
    def hang(self, *_: Any) -> None:
        """On rank `FAULT_RANK`, once."""
        folder, groups = Path(self._spec.output_dir), self._groups
        marker = folder / "hangs"
        if groups is not None and groups.rendezvous.rank == FAULT_RANK and not marker.exists():
            marker.touch()
            Hang(folder)()


class HangingBuilder(_Hanging):
    """In the middle of `build`: the model is there, the data is not."""

    def _open(self, *args: Any, **kwargs: Any) -> Any:
        self.hang()
        return super()._open(*args, **kwargs)


class HangingWriter(_Hanging):
    """In the middle of a shard's file."""

    def save(self, generation: int, step: int, folder: str) -> Any:
        plain = actor.write_shard

        def write(*args: Any, **kwargs: Any) -> Any:
            return plain(*args, **{**kwargs, "on_piece": self.hang})

        put(actor, "write_shard", write)
        try:
            return super().save(generation, step, folder)
        finally:
            put(actor, "write_shard", plain)


class HangingReader(RaisingWorker, _Hanging):
    """In the middle of a checkpoint, or of what a keeper gives, after it has raised in a step."""

    def restore(self, generation: int, checkpoint: str) -> None:
        worker = self

        class Reader(actor.CheckpointReader):
            def _bytes(self, *args: Any) -> Any:
                worker.hang()
                return super()._bytes(*args)

        put(actor, "CheckpointReader", Reader)
        super().restore(generation, checkpoint)

    def restore_memory(self, generation: int, point: MemoryPoint, secret: bytes) -> None:
        worker = self

        class Reader(MemoryReader):
            def read(self, *args: Any) -> Any:
                rows = super().read(*args)
                worker.hang()
                return rows

        put(actor, "MemoryReader", Reader)
        super().restore_memory(generation, point, secret)


class SlowReader(RaisingWorker):
    """Takes its time with a checkpoint, or with what keepers give, until one rank dies meanwhile."""

    def _slow(self, reader: type) -> type:
        folder, groups = Path(self._spec.output_dir), self._groups
        died, rank = folder / "died", None if groups is None else groups.rendezvous.rank

        class Reader(reader):  # type: ignore[misc]
            def read(self, *args: Any) -> Any:
                if rank == FAULT_RANK:
                    died.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(2.0)
                return super().read(*args)

        (folder / f"process-{os.getpid()}").touch()
        return reader if died.exists() else Reader

    def restore(self, generation: int, checkpoint: str) -> None:
        put(actor, "CheckpointReader", self._slow(CheckpointReader))
        super().restore(generation, checkpoint)

    def restore_memory(self, generation: int, point: MemoryPoint, secret: bytes) -> None:
        put(actor, "MemoryReader", self._slow(MemoryReader))
        super().restore_memory(generation, point, secret)


class HangingCopier(_Hanging):
    """In the copy of its state, which the keeper has granted."""

    def step(self, request: StepRequest) -> StepReport:
        if request.step == FAULT_STEP and self._snapshots is not None:
            plain, writer = self._snapshots._fill, self._snapshots

            def fill(*args: Any) -> None:
                self.hang()
                plain(*args)

            put(writer, "_fill", fill)
        return super().step(request)


class KeeperFreezer(_Faulty):
    """SIGSTOP to the keeper of its node, with a copy on its way to it."""

    def join(self, rendezvous: Rendezvous) -> int:
        class Writer(SnapshotWriter):
            pid = 0

            def _fill(self, *args: Any) -> None:
                super()._fill(*args)
                assert self._connection is not None
                told = self._connection._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                (self.pid, _, _) = struct.unpack("3i", told)

        put(actor, "SnapshotWriter", Writer)
        return super().join(rendezvous)

    def fault(self, request: StepRequest) -> StepReport:
        snapshots: Any = self._require(self._snapshots)
        snapshots.wait()
        os.kill(snapshots.pid, signal.SIGSTOP)
        return super().step(request)
