"""Rows of named tensors out of the shards of a manifest, wherever their bytes are: disk, object store, a keeper.

Guarantees: any rows, whatever the world size that wrote them; only the bytes of these rows are asked for; where they
lie in a file follows from the manifest alone: no header is read, and nothing that is read is more than numbers.
Costs: what comes from one shard is a view of the buffer that was fetched; rows from several are copied once.
"""

from collections.abc import Callable

import torch

from raycp.errors import CheckpointError
from raycp.training.manifest import Manifest, ShardEntry, ShardRecord
from raycp.training.tensorfile import DTYPES, ImageLayout, image_layout

Fetch = Callable[[ShardRecord, int, int], bytes | bytearray | memoryview]
"""(shard, start, stop) -> bytes [start, stop) of its file; a writable buffer is used as it is, another one copied."""
_FIX = "resume with the model and the optimizer that wrote the checkpoint"


class RowReader:
    """Reads tensors of a committed step.

    Args:
        manifest: of the step.
        fetch: gives bytes of a shard; what it raises goes through.
        title: of the step, for messages.
        on_piece: called whenever bytes have come.

    Raises:
        CheckpointError: a shard of the manifest cannot have the length that it says.
    """

    def __init__(
        self, manifest: Manifest, fetch: Fetch, *, title: str, on_piece: Callable[[], None] = lambda: None
    ) -> None:
        self.manifest = manifest
        self._fetch = fetch
        self._on_piece = on_piece
        self._title = title
        self._layouts: dict[str, ImageLayout] = {}
        self._pieces: dict[str, list[tuple[ShardEntry, ShardRecord]]] = {}
        for shard in manifest.shards:
            layout = image_layout({e.name: (_rows_shape(e), _dtype(e)) for e in shard.entries})
            if layout.total != shard.bytes:
                raise CheckpointError(
                    f"{title}: {shard.file} has {shard.bytes} bytes by the manifest, {layout.total} by its tensors",
                    fix="use the raycp that wrote the checkpoint",
                )
            self._layouts[shard.file] = layout
            for entry in shard.entries:
                self._pieces.setdefault(entry.name, []).append((entry, shard))

    @property
    def names(self) -> dict[str, tuple[int, ...]]:
        """{name: whole shape}."""
        return {name: pieces[0][0].shape for name, pieces in self._pieces.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop) of `name`, on CPU.

        Raises:
            CheckpointError: no such tensor, or rows outside it.
        """
        if name not in self._pieces:
            raise CheckpointError(f"{self._title} has no tensor {name!r}", fix=_FIX)
        pieces = sorted(self._pieces[name], key=lambda p: p[0].start)
        first = pieces[0][0]
        stop = first.shape[0] if stop is None else stop
        if not 0 <= start <= stop <= first.shape[0]:
            raise CheckpointError(f"{name}: rows [{start}, {stop}) of {first.shape[0]} were asked for", fix=_FIX)
        parts: list[torch.Tensor] = []
        for entry, shard in pieces:
            low, high = max(start, entry.start), min(stop, entry.stop)
            if low < high:
                parts.append(self._rows(entry, shard, low - entry.start, high - entry.start))
        if not parts:
            return torch.empty((0, *first.shape[1:]), dtype=_dtype(first))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _rows(self, entry: ShardEntry, shard: ShardRecord, low: int, high: int) -> torch.Tensor:
        place, stop = self._layouts[shard.file].places[entry.name]
        each = (stop - place) // (entry.stop - entry.start)
        shape, dtype = (high - low, *entry.shape[1:]), _dtype(entry)
        if each == 0:
            return torch.empty(shape, dtype=dtype)
        data = memoryview(self._fetch(shard, place + low * each, place + high * each))
        self._on_piece()
        if data.nbytes != (high - low) * each:
            raise CheckpointError(
                f"{self._title}: {(high - low) * each} bytes of {shard.file} were asked for, {data.nbytes} came",
                fix="run the same command again: a damaged step is set aside then",
            )
        return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=dtype).view(shape)


def _rows_shape(entry: ShardEntry) -> tuple[int, ...]:
    return (entry.stop - entry.start, *entry.shape[1:])


def _dtype(entry: ShardEntry) -> torch.dtype:
    """By name from a list: a manifest from storage says which of these, and nothing else."""
    for dtype in DTYPES:
        if str(dtype) == f"torch.{entry.dtype}":
            return dtype
    raise CheckpointError(f"{entry.name} has dtype {entry.dtype!r}", fix="use the raycp that wrote the checkpoint")
