"""From a keeper's memory to storage: with the driver's order, or alone when no driver is left. No torch, no ray.

Guarantees: a damaged image makes no file; two keepers that write the same shard write the same bytes, each in one
piece; whoever sees all files of the step with their length commits it, once or several times alike. Costs the bytes of
the shards that are held, and a pass of CRC-32 over them.
"""

import time
import zlib
from collections.abc import Callable, Collection, Iterator

from raycp.errors import CheckpointError
from raycp.training.committed import commit_if_whole, newest_committed, step_folder
from raycp.training.manifest import Manifest, ShardRecord
from raycp.training.storage import Storage

_BLOCK = 1 << 24
_LOOK_SECONDS = 0.2


def verified_pieces(view: memoryview, shard: ShardRecord) -> Iterator[memoryview]:
    """The image in pieces.

    Raises:
        CheckpointError: after the last piece, if the checksum is another one: the file is not made then.
    """
    found = 0
    for start in range(0, len(view), _BLOCK):
        piece = view[start : start + _BLOCK]
        found = zlib.crc32(piece, found)
        yield piece
    if found != shard.crc32:
        raise CheckpointError(
            f"{shard.file} was damaged in memory: checksum {found:08x}, not {shard.crc32:08x}",
            fix="check the memory of that machine; the copy on the next node is intact",
        )


def flush_alone(
    manifest: Manifest,
    checkpoints: Storage,
    *,
    own: Collection[str],
    replicas: Collection[str],
    write: Callable[[Storage, ShardRecord], None],
    grace: float,
) -> None:
    """Writes what is held of a committed step, if storage has nothing newer, and commits it if it is whole then.

    Args:
        manifest: of the step.
        checkpoints: root of the step folders.
        own: files whose originals are held: written at once.
        replicas: files of which replicas are held: written if nobody else has within `grace` seconds.
        write: writes one shard into a folder.
        grace: seconds.

    Raises:
        OSError: the storage refused.
        CheckpointError: a shard was damaged.
        StaleGenerationError: a newer generation committed there.
    """
    stored = newest_committed(checkpoints)
    if stored is not None and stored.run_id == manifest.run_id and stored.age >= manifest.age:
        return
    folder = step_folder(checkpoints, manifest.step)
    for shard in manifest.shards:
        if shard.file in own and folder.size(shard.file) != shard.bytes:
            write(folder, shard)
    deadline = time.monotonic() + grace
    for shard in manifest.shards:
        while shard.file in replicas and folder.size(shard.file) != shard.bytes:
            if time.monotonic() >= deadline:
                write(folder, shard)
                break
            time.sleep(_LOOK_SECONDS)
    commit_if_whole(folder, manifest)
