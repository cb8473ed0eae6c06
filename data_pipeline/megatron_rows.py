"""Rows of Megatron's indexed data: what MindSpeed-LLM's and Megatron-LM's `preprocess_data.py` write.

A data set is a pair of files for each column: `NAME.bin` has the tokens of all sequences, `NAME.idx` says where they
are. MindSpeed's instruction data are three pairs, PREFIX_packed_input_ids_document, PREFIX_packed_labels_document and
PREFIX_packed_attention_mask_document; pre-training data are one, PREFIX_text_document.

Guarantees: a row is a sequence, as it is for Megatron's own data sets; files that do not fit together are refused
before a row is read. Files are mapped into memory, not read as a whole. Local disks only. Cost: 12 bytes of index for
each sequence, read for every part.

    idx: "MMIDIDX", two zero bytes, version u64 = 1, code of the type u8, sequences u64, documents u64,
         lengths int32[sequences], where each begins int64[sequences], documents int64[documents]
    bin: the numbers, one sequence after the other

Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

import struct
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.files import File
from data_pipeline.megatron_files import megatron_columns
from data_pipeline.rows import BadRow, Numbered, Part
from raycp.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_FLOATS = {6: "float64", 7: "float32"}


class IndexedColumn:
    """One pair of files.

    Args:
        path: of the .idx file.

    Raises:
        DataError: one of the two is missing, torn, or of another format.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._tokens = str(Path(path).with_suffix(".bin"))
        raw = Path(path).read_bytes()
        if len(raw) < _HEAD.size or not raw.startswith(_MAGIC):
            raise self._broken("does not begin as Megatron's indexes do", "name an .idx file of preprocess_data.py")
        _, version, code, count, documents = _HEAD.unpack_from(raw)
        if version != 1:
            raise self._broken(f"is of version {version}, and version 1 is known", "write it with Megatron-LM core")
        if code not in _TYPES:
            what = f"holds {_FLOATS[code]}, not token ids" if code in _FLOATS else f"has the unknown type {code}"
            raise self._broken(what, "name the file of the token ids, ..._input_ids_document or ..._text_document")
        self.dtype = np.dtype(_TYPES[code]).newbyteorder("<")
        wanted = _HEAD.size + 12 * count + 8 * documents
        if len(raw) < wanted:
            raise self._broken(
                f"has {len(raw)} bytes, and {count} sequences in {documents} documents take {wanted}",
                "copy it again: it was cut off",
            )
        self.lengths = np.frombuffer(raw, "<i4", count, _HEAD.size).astype(np.int64)
        self._begins = np.frombuffer(raw, "<i8", count, _HEAD.size + 4 * count)
        have = Path(self._tokens).stat().st_size if Path(self._tokens).is_file() else -1
        if have < 0:
            raise self._broken(f"has no {Path(self._tokens).name} beside it", "keep the two files of a pair together")
        if count and (self.lengths.min() < 0 or self._begins.min() < 0):
            raise self._broken("has a negative length or place", "write it again")
        needed = int((self._begins + self.lengths * self.dtype.itemsize).max(initial=0))
        if needed > have:
            raise self._broken(
                f"names tokens up to byte {needed} of {Path(self._tokens).name}, which has {have}",
                "copy the .bin file again: it was cut off, or is of another data set",
            )

    def __len__(self) -> int:
        return int(self.lengths.size)

    @cached_property
    def _map(self) -> Any:
        return np.memmap(self._tokens, dtype=np.uint8, mode="r")

    def sequence(self, index: int) -> npt.NDArray[np.int64]:
        """[n] numbers of one sequence."""
        if not self.lengths[index]:
            return np.zeros(0, np.int64)
        start = int(self._begins[index])
        stop = start + int(self.lengths[index]) * self.dtype.itemsize
        return np.frombuffer(self._map[start:stop].tobytes(), self.dtype).astype(np.int64)

    def _broken(self, problem: str, fix: str) -> DataError:
        return DataError(f"{self.path} {problem}", fix=fix, file=self.path)


def _columns(file: File) -> dict[str, IndexedColumn]:
    """The columns of a data set by name.

    Raises:
        DataError: they have other numbers of sequences, or sequences of other lengths.
    """
    found = {name: IndexedColumn(path) for name, path in megatron_columns(file.path).items()}
    ids = found["input_ids"]
    for name, column in found.items():
        if len(column) != len(ids):
            problem = f"{len(column)} sequences, and {Path(ids.path).name} {len(ids)}"
        elif (differ := np.flatnonzero(column.lengths != ids.lengths)).size:
            at = int(differ[0])
            problem = f"{column.lengths[at]} numbers in sequence {at + 1}, and {Path(ids.path).name} {ids.lengths[at]}"
        else:
            continue
        raise DataError(
            f"{column.path} ({name}) has {problem}",
            fix="keep the files that one call of preprocess_data.py wrote together",
            file=column.path,
        )
    return found


def _sizes(columns: dict[str, IndexedColumn]) -> npt.NDArray[np.int64]:
    """[sequences] bytes of each, in all columns."""
    return columns["input_ids"].lengths * sum(column.dtype.itemsize for column in columns.values())


def read_megatron(part: Part, bad: BadRow) -> Numbered:
    """Sequences `part.start` to `part.stop`, with labels and attention mask where there are such files."""
    columns = _columns(part.file)
    count = len(columns["input_ids"])
    sizes = _sizes(columns)
    for index in range(part.start, count if part.stop is None else part.stop):
        if part.file.on_read is not None:
            part.file.on_read(int(sizes[index]))
        yield index + 1, {name: column.sequence(index) for name, column in columns.items()}


def megatron_parts(file: File, part_bytes: int) -> list[tuple[int, int | None, int, int]]:
    """(first sequence, end, number of the first row, bytes) of parts of at least `part_bytes`.

    Raises:
        DataError: the files cannot be read, or do not fit together.
    """
    sizes = np.cumsum(_sizes(_columns(file)))
    parts: list[tuple[int, int | None, int, int]] = []
    start, before = 0, 0
    while start < sizes.size:
        stop = min(int(np.searchsorted(sizes, before + part_bytes)) + 1, int(sizes.size))
        parts.append((start, stop, start + 1, int(sizes[stop - 1]) - before))
        start, before = stop, int(sizes[stop - 1])
    return parts or [(0, 0, 1, 0)]
