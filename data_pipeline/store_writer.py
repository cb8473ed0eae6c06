"""Writes documents to storage: part by part, in any number of processes, and the store that names the parts.

Guarantees: a part appears whole or not at all (written aside, fsync, one rename), and so does the store, which is there
when its `meta.json` is. Of two processes that write the same, one wins and both read that. Cost: the bytes, once.
"""

import hashlib
import json
import os
import shutil
import uuid
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from data_pipeline.document import Document
from data_pipeline.store import DOCUMENT_FILES, META, TAKEN, VERSION, DocumentStore, Int64, StorePart, problem_with
from raycp.errors import DataError

_DIGEST_BYTES = 16


def join_parts(
    folder: Path, names: Sequence[str], *, key: str, report: dict[str, Any], taken: Int64 | None = None
) -> DocumentStore:
    """Makes written parts, folders inside `folder`, a store; they are named, not copied.

    Args:
        folder: of the store.
        names: parts in the order of their documents.
        key, report: as for `StoreWriter.commit`.
        taken: numbers of the stored documents that an epoch has, in order; None: each once.

    Raises:
        DataError: a part cannot be used, or no document is left.
    """
    parts = [StorePart.open(folder / name) for name in names]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.digests())
    files = {}
    (folder / TAKEN).unlink(missing_ok=True)
    if taken is not None:
        taken.astype(np.int64).tofile(folder / TAKEN)
        digest.update(taken.astype("<i8").tobytes())
        files[TAKEN] = (folder / TAKEN).stat().st_size
    if not sum(part.num_tokens for part in parts) or (taken is not None and not taken.size):
        raise DataError("no document is left to store", fix="check the rows, data.overflow and the sources' weights")
    _write_meta(folder, names=names, key=key, report=report, fingerprint=digest.hexdigest(), files=files, parts=parts)
    return DocumentStore.open(folder)


class StoreWriter:
    """Writes one part, or a store of one, beside its final folder; nothing of it is visible before `commit`.

    A context manager: what was not committed is removed at its end.

    Args:
        folder: final place; its parent is made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.aside = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
        """Where it is written; further files in it become part of the folder."""
        self.aside.mkdir()
        self._files: dict[str, BinaryIO] = {}
        self._columns = {name: array("d" if kind is np.float64 else "q") for name, kind in DOCUMENT_FILES.items()}
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
        shutil.rmtree(self.aside, ignore_errors=True)

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
        self._put("digests", np.frombuffer(_digest(document), dtype=np.uint8))
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
        """Makes a store of one part visible, and opens it. If another process was first, theirs is opened.

        Args:
            key: what it was built from.
            report: what was found.

        Raises:
            DataError: no document was written.
        """
        if not self.num_tokens:
            raise DataError("no document is left to store", fix="check the rows, and data.overflow")
        self.commit_part(key=key, report=report)
        return DocumentStore.open(self.folder)

    def commit_part(self, *, key: str, report: dict[str, Any]) -> None:
        """Makes a part visible, which may be empty; see `commit`."""
        for name, column in self._columns.items():
            self._put(name, np.array(column, dtype=DOCUMENT_FILES[name]))
        for name in ("ids", "targets", "digests", "row_ids"):
            self._put(name, np.zeros(0, np.uint8))
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        digests = (self.aside / "digests.bin").read_bytes()
        _write_meta(
            self.aside,
            names=(),
            key=key,
            report=report,
            fingerprint=hashlib.sha256(digests).hexdigest(),
            files={f"{name}.bin": file.tell() for name, file in self._files.items()},
            counts=(len(self._columns["lengths"]), self.num_tokens, self.num_targets),
        )
        self._publish()

    def _publish(self) -> None:
        if self.folder.exists() and problem_with(self.folder):
            shutil.rmtree(self.folder)
        try:
            self.aside.rename(self.folder)
        except OSError:
            if problem_with(self.folder):
                raise
        _sync_folder(self.folder.parent)

    def _put(self, name: str, values: npt.NDArray[Any]) -> None:
        if name not in self._files:
            self._files[name] = (self.aside / f"{name}.bin").open("wb")
        self._files[name].write(np.ascontiguousarray(values).tobytes())


def _digest(document: Document) -> bytes:
    """Hash of all that training sees of a document."""
    digest = hashlib.sha256(document.ids.astype("<i4").tobytes())
    digest.update(document.targets.astype("<i4").tobytes())
    if document.weights is not None and (document.weights != 1).any():
        digest.update(b"weights" + document.weights.astype("<f4").tobytes())
    digest.update(b"%d" % document.start_position)
    return digest.digest()[:_DIGEST_BYTES]


def _write_meta(
    folder: Path,
    *,
    names: Sequence[str],
    key: str,
    report: dict[str, Any],
    fingerprint: str,
    files: dict[str, int],
    counts: tuple[int, int, int] | None = None,
    parts: Sequence[StorePart] = (),
) -> None:
    documents, tokens, targets = counts or (
        sum(p.num_documents for p in parts),
        sum(p.num_tokens for p in parts),
        sum(p.num_targets for p in parts),
    )
    meta = {
        "version": VERSION,
        "key": key,
        "fingerprint": fingerprint,
        "num_documents": documents,
        "num_tokens": tokens,
        "num_targets": targets,
        "files": files,
        "parts": list(names),
        "report": report,
    }
    aside = folder / f".{META}.{uuid.uuid4().hex}"
    with aside.open("w", encoding="utf-8") as stream:
        json.dump(meta, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(folder / META)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
