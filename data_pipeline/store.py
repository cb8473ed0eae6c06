"""Documents on storage, read by memory map from any process that sees the folder.

Guarantees: a torn, foreign or older store is recognised by its sizes and version, and never read (`store_writer` lets
none be seen half written). `fingerprint` is a hash of the documents themselves, however they were divided into parts. A
store travels to another process as its path. A document may be seen several times in an epoch, or left out of it
(weighted sources): that is an index, not a copy.
Cost: 8 bytes per token (12 with weights) and about 70 per document; opening reads the per-document arrays only.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from data_pipeline.document import Document
from raycp.errors import DataError

VERSION = 2
META = "meta.json"
TAKEN = "taken.bin"
"""int64 numbers of the stored documents that an epoch has, in order; missing: each once."""

Int64 = npt.NDArray[np.int64]

TOKEN_FILES: dict[str, type[np.generic]] = {"ids": np.int32, "targets": np.int32, "weights": np.float32}
DOCUMENT_FILES: dict[str, type[np.generic]] = {
    "lengths": np.int64,
    "start_positions": np.int64,
    "num_targets": np.int64,
    "target_weights": np.float64,
    "row_id_ends": np.int64,
}


class StorePart:
    """The documents of one folder, see `DocumentStore`."""

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        self.folder = folder
        self.report: dict[str, Any] = meta["report"]
        self.num_documents = int(meta["num_documents"])
        self.num_tokens = int(meta["num_tokens"])
        self.num_targets = int(meta["num_targets"])

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Opens a written part.

        Raises:
            DataError: it is no whole part of this version.
        """
        problem = problem_with(folder)
        if problem:
            raise DataError(f"{folder} is no usable part of a document store: {problem}", fix="run again")
        return cls(folder, json.loads((folder / META).read_text("utf-8")))

    def column(self, name: str) -> npt.NDArray[Any]:
        """A per-document array."""
        return np.fromfile(self.folder / f"{name}.bin", dtype=DOCUMENT_FILES[name])

    def digests(self) -> bytes:
        """Hashes of the documents, one after the other."""
        return (self.folder / "digests.bin").read_bytes()

    @cached_property
    def tokens(self) -> dict[str, npt.NDArray[Any]]:
        """Memory maps of the per-token arrays."""
        files = {name: self.folder / f"{name}.bin" for name in TOKEN_FILES}
        return {
            n: np.memmap(f, dtype=TOKEN_FILES[n], mode="r") for n, f in files.items() if f.exists() and self.num_tokens
        }

    @cached_property
    def _row_ids(self) -> tuple[Int64, npt.NDArray[np.uint8]]:
        return self.column("row_id_ends"), np.fromfile(self.folder / "row_ids.bin", dtype=np.uint8)

    def row_id(self, index: int) -> str:
        """Row that document `index` of this part came from."""
        ends, text = self._row_ids
        start = int(ends[index - 1]) if index else 0
        return text[start : int(ends[index])].tobytes().decode("utf-8", "surrogateescape")


class DocumentStore:
    """A written store, see `open`. Documents are counted as an epoch has them."""

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """Opens a store for reading, in any process.

        Args:
            folder: where it is.

        Raises:
            DataError: the folder is not a whole store of this version.
        """
        return cls(folder)

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        problem = problem_with(self.folder)
        if problem:
            raise DataError(f"{self.folder} is no usable document store: {problem}", fix="run prepare again")
        meta = json.loads((self.folder / META).read_text("utf-8"))
        self.fingerprint: str = meta["fingerprint"]
        """sha256 of all documents, in order."""
        self.key: str = meta["key"]
        """What it was built from, see `build`."""
        self.report: dict[str, Any] = meta["report"]
        """What preparation found: sources, rows, documents, tokens, targets, longest, what overflow cost."""
        self._parts = [StorePart.open(self.folder / name) for name in meta["parts"]] or [StorePart(self.folder, meta)]
        self._first = np.cumsum([0, *(part.num_documents for part in self._parts)])
        columns = {name: np.concatenate([p.column(name) for p in self._parts]) for name in DOCUMENT_FILES}
        ends = np.concatenate([np.cumsum(part.column("lengths")) for part in self._parts])
        taken = self.folder / TAKEN
        self._taken: Int64 | None = np.fromfile(taken, dtype=np.int64) if taken.exists() else None
        pick = slice(None) if self._taken is None else self._taken
        self.lengths: Int64 = columns["lengths"][pick]
        """[documents] int64 tokens."""
        self.start_positions: Int64 = columns["start_positions"][pick]
        """[documents] int64."""
        self.num_targets: Int64 = columns["num_targets"][pick]
        """[documents] int64 trained positions."""
        self.target_weights: npt.NDArray[np.float64] = columns["target_weights"][pick]
        """[documents] float64 sums of target weights."""
        self._ends: Int64 = ends[pick]  # in the document's part

    def __len__(self) -> int:
        return int(self.lengths.size)

    def __reduce__(self) -> tuple[Any, ...]:
        return (DocumentStore.open, (str(self.folder),))

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self.lengths.max())

    @property
    def max_positions(self) -> int:
        """Positions that the model must know: the largest position id plus 1."""
        return int((self.start_positions + self.lengths).max())

    def document(self, index: int) -> Document:
        """Document `index`; its arrays are read-only views of the files."""
        part, place = self._find(index)
        span = slice(int(self._ends[index] - self.lengths[index]), int(self._ends[index]))
        tokens = part.tokens
        return Document(
            ids=tokens["ids"][span],
            targets=tokens["targets"][span],
            weights=tokens["weights"][span] if "weights" in tokens else None,
            start_position=int(self.start_positions[index]),
            row_id=part.row_id(place),
        )

    def row_id(self, index: int) -> str:
        """Row that document `index` came from."""
        part, place = self._find(index)
        return part.row_id(place)

    def _find(self, index: int) -> tuple[StorePart, int]:
        """Part that holds document `index`, and its number there."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of a store of {len(self)}")
        stored = index if self._taken is None else int(self._taken[index])
        number = int(np.searchsorted(self._first, stored, side="right")) - 1
        return self._parts[number], stored - int(self._first[number])


def problem_with(folder: Path) -> str:
    """Why `folder` cannot be opened as a store or part, or "" if it can."""
    try:
        meta = json.loads((folder / META).read_text("utf-8"))
    except FileNotFoundError:
        return f"it has no {META}"
    except ValueError as error:
        return f"{META} is torn: {error}"
    if meta.get("version") != VERSION:
        return f"it has version {meta.get('version')}, this code reads {VERSION}"
    for name, size in meta["files"].items():
        file = folder / name
        found = file.stat().st_size if file.exists() else -1
        if found != size:
            return f"{name} has {found} bytes, not {size}" if found >= 0 else f"{name} is missing"
    for name in meta["parts"]:
        problem = problem_with(folder / name)
        if problem:
            return f"{name}: {problem}"
    return ""
