"""A keeper whose storage is slow, and which is slow itself from its first write on. Without torch, as ours."""

import time
from pathlib import Path
from typing import Any

from raycp.training.manifest import ShardRecord
from raycp.training.storage import Storage
from workers.keeper import Keeper
from workers.wire import KeeperAddress

SLOW_SECONDS = 3.0
"""Longer than a keeper of a node that is in doubt may take to answer."""


class SlowKeeper(Keeper):
    """Says by a file `writing` beside the checkpoints that it has begun to write."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._mark = Path(options["checkpoints"]).parent / "writing"

    def address(self) -> KeeperAddress:
        if self._mark.exists():
            time.sleep(SLOW_SECONDS)
        return super().address()

    def _write(self, storage: Storage, step: int, shard: ShardRecord, order: str = "") -> None:
        self._mark.touch()
        time.sleep(SLOW_SECONDS)
        super()._write(storage, step, shard, order)
