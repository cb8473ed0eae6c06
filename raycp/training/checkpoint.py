"""Sharded checkpoints on shared storage: what ranks write and read. What is committed, and how, is in `committed.py`.

Guarantees: a shard is whole and durable when `write_shard` returns, and its name carries the generation, so that a late
write of an older one harms nothing; any rows of any tensor can be read back, whatever the world size that wrote them.
Safetensors and JSON only. Costs: writing streams, with one tensor beside the caller's in memory; reading maps a local
file into memory, and asks a remote one for the bytes of the rows.
"""

import mmap
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from raycp.errors import CheckpointError
from raycp.training.committed import (
    MANIFEST,
    Newest,
    commit,
    commit_if_whole,
    committed_run,
    discard_uncommitted,
    load_manifest,
    newest,
    newest_committed,
    prune,
    step_folder,
    verify,
)
from raycp.training.latest import fence
from raycp.training.manifest import VERSION, Manifest, ShardEntry, ShardRecord, coverage_problem, shard_file
from raycp.training.rows import RowReader
from raycp.training.sharding import ShardSpan
from raycp.training.storage import PIECE, Storage
from raycp.training.tensorfile import tensor_chunks

__all__ = [
    "MANIFEST",
    "VERSION",
    "CheckpointReader",
    "Manifest",
    "Newest",
    "ShardEntry",
    "ShardRecord",
    "commit",
    "commit_if_whole",
    "committed_run",
    "coverage_problem",
    "discard_uncommitted",
    "fence",
    "load_manifest",
    "newest",
    "newest_committed",
    "prune",
    "shard_file",
    "step_folder",
    "verify",
    "write_shard",
]


def write_shard(
    folder: Storage | Path | str,
    rank: int,
    state: Mapping[str, tuple[ShardSpan, torch.Tensor]],
    *,
    generation: int = 0,
    on_piece: Callable[[], None] = lambda: None,
) -> ShardRecord:
    """Writes the rows of one rank into the folder of a step, which is made if missing; durable when it returns.

    Args:
        folder: `step_folder(root, step)`, on storage that all nodes see.
        rank: world rank.
        state: of `export_state`.
        generation: of the process groups; part of the file's name, so that a rank of an older one overwrites nothing.
        on_piece: called whenever the storage has taken a piece (`storage.PIECE` bytes at most).

    Raises:
        OSError: the storage refused (full, read-only, away); nothing of that name is left.
    """
    name = shard_file(generation, rank)
    entries = tuple(span.entry for span, _ in state.values())
    announced = {span.name: (tuple(rows.shape), rows.dtype) for span, rows in state.values()}
    size = checksum = 0

    def counted() -> Iterator[bytes | memoryview]:
        nonlocal size, checksum
        for chunk in tensor_chunks(announced, lambda n: state[n][1]):
            for at in range(0, len(chunk), PIECE):
                piece = memoryview(chunk)[at : at + PIECE]
                checksum = zlib.crc32(piece, checksum)
                size += len(piece)
                yield piece
                on_piece()

    Storage.of(folder).write(name, counted())
    return ShardRecord(file=name, bytes=size, crc32=checksum, entries=entries)


class CheckpointReader(RowReader):
    """Reads rows of a committed step. Does not verify.

    Args:
        folder: a step folder.
        on_piece: as of `RowReader`.

    Raises:
        CheckpointError: no manifest.
    """

    def __init__(self, folder: Storage | Path | str, *, on_piece: Callable[[], None] = lambda: None) -> None:
        self.folder = Storage.of(folder)
        super().__init__(load_manifest(self.folder), self._bytes, title=self.folder.name, on_piece=on_piece)
        self._maps: dict[str, memoryview] = {}

    def _bytes(self, shard: ShardRecord, start: int, stop: int) -> bytes | memoryview:
        path = self.folder.local_path()
        if path is None:
            return self.folder.read_range(shard.file, start, stop)
        if shard.file not in self._maps:
            with (path / shard.file).open("rb") as file:
                # Private and writable, for torch wants that; pages that nobody writes stay those of the file.
                mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
            if len(mapped) != shard.bytes:  # reading behind the end would kill the process
                raise CheckpointError(
                    f"{path / shard.file} has {len(mapped)} bytes, the manifest says {shard.bytes}",
                    fix="run the same command again: a damaged step is set aside then",
                )
            self._maps[shard.file] = mapped
        return self._maps[shard.file][start:stop]
