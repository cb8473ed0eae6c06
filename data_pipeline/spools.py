"""Sources that are no files: a `datasets.Dataset`, or any iterable of dict rows, each written to one when it is needed.

Guarantees: rows are those that iteration shows, in that order, and can be read again, in parts, in any process that
sees the spool folder; a one-shot iterable is asked once. The spool file is removed by `close`, and after a kill by
`build.remove_leftovers`. Cost: the disk space of the rows while they are prepared; a data set is spooled only if it was
not prepared before.
"""

import hashlib
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from data_pipeline.files import File
from data_pipeline.readers import look_at, read_part
from data_pipeline.rows import BadRow, Part, Row
from raycp.errors import DataError

_DATASET_ROWS = 1000  # rows of one record batch
_SPOOL_PART = 32 << 20


class DatasetSource:
    """Rows of a map-style `datasets.Dataset`; ids are "rows:1" and so on."""

    def __init__(self, dataset: Any, spool: Path, *, label: str = "rows") -> None:
        self._dataset, self._spool, self._label = dataset, spool, label
        self._file: Path | None = None

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the rows in Arrow's form."""
        digest = hashlib.sha256()
        for batch in self._batches():
            digest.update(batch.schema.serialize())
            digest.update(batch.serialize())
        return digest.hexdigest()

    def _batches(self) -> Iterator[Any]:
        for table in self._dataset.with_format("arrow").iter(batch_size=_DATASET_ROWS):
            yield from table.replace_schema_metadata(None).combine_chunks().to_batches()

    def parts(self) -> list[Part]:
        """Parts of the spooled table."""
        import pyarrow as pa

        if self._file is None:
            self._spool.mkdir(parents=True, exist_ok=True)
            self._file = self._spool / f"rows-{uuid.uuid4().hex}.arrow"
            writer = None
            with pa.OSFile(str(self._file), "wb") as stream:
                for batch in self._batches():
                    writer = writer or pa.ipc.new_file(stream, batch.schema)
                    writer.write_batch(batch)
                if writer is not None:
                    writer.close()
        file = File(str(self._file))
        return look_at(file, _SPOOL_PART).parts(file, self._label) if file.size() else []

    def rows(self, bad: BadRow) -> Iterator[Row]:
        """All rows, from the data set itself."""
        number = 0
        for batch in self._batches():
            for row in batch.to_pylist():
                number += 1
                yield Row(f"{self._label}:{number}", row)

    def close(self) -> None:
        """Deletes the spool file."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)


class SpooledSource:
    """Rows of an iterable, written to a jsonl file of their own first; ids are "rows:1" and so on."""

    def __init__(self, rows: Iterable[object], spool: Path, *, label: str = "rows") -> None:
        spool.mkdir(parents=True, exist_ok=True)
        self._label = label
        self.file = spool / f"rows-{uuid.uuid4().hex}.jsonl"
        try:
            self.fingerprint = self._write(rows)
        except BaseException:
            self.close()
            raise

    def _write(self, rows: Iterable[object]) -> str:
        digest = hashlib.sha256()
        with self.file.open("wb") as stream:
            for number, row in enumerate(rows, 1):
                if not isinstance(row, Mapping):
                    raise DataError(
                        f"row {number} is a {type(row).__name__}, not a dict of columns",
                        fix='give rows like {"text": ...}, {"messages": [...]} or {"prompt": ..., "completion": ...}',
                        line=number,
                    )
                line = _dump(row)
                digest.update(line)
                stream.write(line)
        return digest.hexdigest()

    def parts(self) -> list[Part]:
        """Parts of the spool file."""
        file = File(str(self.file))
        return look_at(file, _SPOOL_PART).parts(file, self._label) if file.size() else []

    def rows(self, bad: BadRow) -> Iterator[Row]:
        """All rows, from the spool file."""
        return read_part(Part(file=File(str(self.file)), label=self._label), bad)

    def close(self) -> None:
        """Deletes the spool file."""
        self.file.unlink(missing_ok=True)


def _dump(row: Mapping[str, Any]) -> bytes:
    """One JSON line; arrays become lists, and values that JSON does not know (dates, ...) strings."""

    def plain(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else str(value)

    return json.dumps(dict(row), default=plain).encode() + b"\n"
