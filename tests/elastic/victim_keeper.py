"""The keeper that a tester hits: ours, with a stop where it replicates and where it writes. Without torch, as ours."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raycp.training.manifest import ShardRecord
from raycp.training.storage import Storage
from tests.elastic.script import Script, node_of_this, put, stay_at_home
from workers.flush import verified_pieces
from workers.keeper import Keeper
from workers.slots import Slot
from workers.wire import KeeperAddress


class VictimKeeper(Keeper):
    """A keeper that says where it is, and stops where it replicates and writes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        stay_at_home()
        self.script = Script(Path(options["checkpoints"]).parent / "script")
        self.script.say(f"keeper-{node_of_this()}", pid=os.getpid())
        plain = self._exchange._send

        def send(slot: Slot, peer: KeeperAddress, generation: int) -> None:
            self.script.hit("replication", step=slot.step, node=node_of_this())
            plain(slot, peer, generation)

        put(self._exchange, "_send", send)

    def _write(self, storage: Storage, step: int, shard: ShardRecord, order: str = "") -> None:
        with self._image(step, shard, order) as view:
            storage.write(shard.file, self._pieces(verified_pieces(view, shard)))

    def _pieces(self, pieces: Iterator[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            half = len(piece) // 2
            yield piece[:half]
            self.script.hit("disk write", node=node_of_this())
            yield piece[half:]
