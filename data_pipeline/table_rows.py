"""Rows of parquet and arrow files, a batch at a time.

Guarantees: memory holds one batch of `_BATCH_ROWS` rows and what the format needs to find them (a row group of parquet,
a record batch of arrow). Both forms of arrow are read: the file, and the stream that `datasets` writes.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO

from data_pipeline.files import File
from data_pipeline.rows import BadRow, Numbered, Part, broken, check_names

_BATCH_ROWS = 256


def read_parquet(part: Part, bad: BadRow) -> Numbered:
    """Rows of row groups `part.start` to `part.stop`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = part.first
    try:
        with part.file.open_raw() as raw, pq.ParquetFile(raw, pre_buffer=False) as parquet:  # else it holds all groups
            check_names(part.file, 1, list(parquet.schema_arrow.names))
            groups = range(part.start, parquet.num_row_groups if part.stop is None else part.stop)
            for batch in parquet.iter_batches(batch_size=_BATCH_ROWS, row_groups=groups):
                for row in batch.to_pylist():
                    yield number, row
                    number += 1
    except (pa.ArrowInvalid, OSError) as error:
        raise broken(part.file, number, f"not readable as parquet: {error}", "write the file again") from error


def read_arrow(part: Part, bad: BadRow) -> Numbered:
    """Rows of record batches `part.start` to `part.stop`; a stream is read whole."""
    import pyarrow as pa

    number = part.first
    try:
        with part.file.open_raw() as raw:
            for batch in _arrow_batches(raw, part):
                check_names(part.file, 1, list(batch.schema.names))
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    for row in batch.slice(start, _BATCH_ROWS).to_pylist():
                        yield number, row
                        number += 1
    except (pa.ArrowInvalid, OSError) as error:
        raise broken(part.file, number, f"not readable as arrow: {error}", "write the file again") from error


def _arrow_batches(raw: BinaryIO, part: Part) -> Iterator[Any]:
    """Record batches of either form: a file, of which a part can be read, or a stream (as `datasets` writes)."""
    import pyarrow as pa

    magic = raw.read(6)
    raw.seek(0)
    if magic != b"ARROW1":
        yield from pa.ipc.open_stream(raw)
        return
    reader = pa.ipc.open_file(raw)
    for index in range(part.start, reader.num_record_batches if part.stop is None else part.stop):
        yield reader.get_batch(index)


def parquet_parts(file: File, part_bytes: int) -> list[tuple[int, int | None, int, int]]:
    """(first row group, end, number of the first row, bytes as stored) of parts that hold at least `part_bytes`.

    Raises:
        DataError: no parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file.path) as parquet:
            groups = [parquet.metadata.row_group(i) for i in range(parquet.num_row_groups)]
            stored = [sum(g.column(c).total_compressed_size for c in range(g.num_columns)) for g in groups]
            return _grouped(
                [(g.num_rows, g.total_byte_size, n) for g, n in zip(groups, stored, strict=True)], part_bytes
            )
    except (pa.ArrowInvalid, OSError) as error:
        raise broken(file, 1, f"not readable as parquet: {error}", "write the file again") from error


def arrow_parts(file: File, part_bytes: int) -> list[tuple[int, int | None, int, int]]:
    """(first record batch, end, number of the first row, bytes) of parts; a stream is one part.

    Raises:
        DataError: no arrow file.
    """
    import pyarrow as pa

    try:
        with pa.memory_map(file.path) as raw:
            if raw.read(6) != b"ARROW1":
                return [(0, None, 1, raw.size())]
            reader = pa.ipc.open_file(raw)
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
            return _grouped([(b.num_rows, b.nbytes, b.nbytes) for b in batches], part_bytes)
    except (pa.ArrowInvalid, OSError) as error:
        raise broken(file, 1, f"not readable as arrow: {error}", "write the file again") from error


def _grouped(sizes: list[tuple[int, int, int]], part_bytes: int) -> list[tuple[int, int | None, int, int]]:
    """Consecutive (rows, bytes, bytes as stored) put together to parts, which say the latter."""
    parts: list[tuple[int, int | None, int, int]] = []
    start, first, rows, size, stored = 0, 1, 0, 0, 0
    for index, (num_rows, num_bytes, num_stored) in enumerate(sizes, 1):
        rows, size, stored = rows + num_rows, size + num_bytes, stored + num_stored
        if size >= part_bytes or index == len(sizes):
            parts.append((start, index, first, stored))
            start, first, rows, size, stored = index, first + rows, 0, 0, 0
    return parts or [(0, 0, 1, 0)]
