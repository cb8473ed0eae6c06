"""Documents on storage: written once, read by memory map from any process that sees the folder.

Guarantees: a folder appears whole or not at all (written aside, fsync, one rename); a torn, foreign or older one is
recognised by its sizes and version, and never read. `fingerprint` is a hash of the documents themselves. A store
travels to another process as its path. Cost: 8 bytes per token (12 with weights) and about 50 per document; opening
reads the per-document arrays only.
"""

import hashlib
import json
import os
import shutil
import uuid
from array import array
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from data_pipeline.document import Document
from raycp.errors import DataError

VERSION = 1
META = "meta.json"

_TOKEN_FILES = {"ids": np.int32, "targets": np.int32, "weights": np.float32}
_DOCUMENT_FILES = {
    "lengths": np.int64,
    "start_positions": np.int64,
    "num_targets": np.int64,
    "target_weights": np.float64,
    "row_id_ends": np.int64,
}


class DocumentStore:
    """A written store, see `open`."""

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
        """What preparation found: format, rows, documents, tokens, targets, longest, what overflow cost."""
        self.lengths = self._document_array("lengths")
        """[documents] int64 tokens."""
        self.start_positions = self._document_array("start_positions")
        """[documents] int64."""
        self.num_targets = self._document_array("num_targets")
        """[documents] int64 trained positions."""
        self.target_weights = self._document_array("target_weights")
        """[documents] float64 sums of target weights."""
        self._ends = np.cumsum(self.lengths)

    def __len__(self) -> int:
        return int(self.lengths.size)

    def __reduce__(self) -> tuple[Any, ...]:
        return (DocumentStore.open, (str(self.folder),))

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self._ends[-1])

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
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of a store of {len(self)}")
        span = slice(int(self._ends[index] - self.lengths[index]), int(self._ends[index]))
        return Document(
            ids=self._tokens["ids"][span],
            targets=self._tokens["targets"][span],
            weights=self._tokens["weights"][span] if "weights" in self._tokens else None,
            start_position=int(self.start_positions[index]),
            row_id=self.row_id(index),
        )

    def row_id(self, index: int) -> str:
        """Row that document `index` came from."""
        ends, text = self._row_ids
        return (
            text[int(ends[index - 1]) if index else 0 : int(ends[index])].tobytes().decode("utf-8", "surrogateescape")
        )

    @cached_property
    def _tokens(self) -> dict[str, npt.NDArray[Any]]:
        files = {name: self.folder / f"{name}.bin" for name in _TOKEN_FILES}
        return {n: np.memmap(f, dtype=_TOKEN_FILES[n], mode="r") for n, f in files.items() if f.exists()}

    @cached_property
    def _row_ids(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        return self._document_array("row_id_ends"), np.fromfile(self.folder / "row_ids.bin", dtype=np.uint8)

    def _document_array(self, name: str) -> npt.NDArray[Any]:
        return np.fromfile(self.folder / f"{name}.bin", dtype=_DOCUMENT_FILES[name])


def problem_with(folder: Path) -> str:
    """Why `folder` cannot be opened as a store, or "" if it can."""
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
    return ""


class StoreWriter:
    """Writes a store beside its final folder; nothing of it is visible before `commit`.

    A context manager: what was not committed is removed at its end.

    Args:
        folder: final place; its parent is made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._aside = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
        self._aside.mkdir()
        self._files: dict[str, BinaryIO] = {}
        self._hashes: dict[str, Any] = {}
        self._columns = {name: array("d" if kind is np.float64 else "q") for name, kind in _DOCUMENT_FILES.items()}
        self._row_id_bytes = 0
        self.num_tokens = 0
        self.num_targets = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        shutil.rmtree(self._aside, ignore_errors=True)

    def append(self, document: Document) -> None:
        """Adds one document."""
        if document.weights is not None and "weights" not in self._files and self.num_tokens:
            self._put("weights", np.ones(self.num_tokens, np.float32))
        self._put("ids", document.ids)
        self._put("targets", document.targets)
        if document.weights is not None:
            self._put("weights", document.weights)
        elif "weights" in self._files:
            self._put("weights", np.ones(len(document), np.float32))
        row_id = np.frombuffer(document.row_id.encode("utf-8", "surrogateescape"), dtype=np.uint8)
        self._put("row_ids", row_id)
        self._row_id_bytes += row_id.size
        num_targets = document.num_targets
        values: dict[str, Any] = {
            "lengths": len(document),
            "start_positions": document.start_position,
            "num_targets": num_targets,
            "target_weights": document.target_weight,
            "row_id_ends": self._row_id_bytes,
        }
        for name, value in values.items():
            self._columns[name].append(value)
        self.num_tokens += len(document)
        self.num_targets += num_targets

    def commit(self, *, key: str, report: dict[str, Any]) -> DocumentStore:
        """Makes the store visible, and opens it. If another process was first with the same key, theirs is opened.

        Raises:
            DataError: no document was written.
        """
        if not self.num_tokens:
            raise DataError("no document is left to store", fix="check the rows, and data.overflow")
        for name, column in self._columns.items():
            self._put(name, np.array(column, dtype=_DOCUMENT_FILES[name]))
        digest = hashlib.sha256()
        for name in ("ids", "targets", "weights", "lengths", "start_positions"):
            digest.update(self._hashes[name].digest() if name in self._hashes else b"none")
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {f"{name}.bin": file.tell() for name, file in self._files.items()}
        meta = {
            "version": VERSION,
            "key": key,
            "fingerprint": digest.hexdigest(),
            "num_documents": len(self._columns["lengths"]),
            "num_tokens": self.num_tokens,
            "num_targets": self.num_targets,
            "files": sizes,
            "report": report,
        }
        with (self._aside / META).open("w", encoding="utf-8") as stream:
            json.dump(meta, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        _sync_folder(self._aside)
        self._publish()
        return DocumentStore.open(self.folder)

    def _publish(self) -> None:
        if self.folder.exists() and problem_with(self.folder):
            shutil.rmtree(self.folder)
        try:
            self._aside.rename(self.folder)
        except OSError:
            if problem_with(self.folder):
                raise
        _sync_folder(self.folder.parent)

    def _put(self, name: str, values: npt.NDArray[Any]) -> None:
        if name not in self._files:
            self._files[name] = (self._aside / f"{name}.bin").open("wb")
            self._hashes[name] = hashlib.sha256()
        raw = np.ascontiguousarray(values).tobytes()
        self._files[name].write(raw)
        self._hashes[name].update(raw)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
