"""Rows from whatever a user has, each with an id that says where it came from.

Takes a path, several paths, a glob or a folder of jsonl / json / parquet / txt; a `datasets.Dataset`; or an iterable of
dict rows. Guarantees: the order is the files' sorted (or given) order and the order inside each; row ids are stable
("file:line"); every problem is a DataError with file and line; a one-shot iterable is written to a spool file first, so
that every source can be read again. Fingerprints are of content: a file that was touched but not changed is the same.
Cost: reads stream row by row, except .json, which is held whole; a fingerprint reads the bytes once more.
"""

import glob
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from raycp.errors import DataError


@dataclass(frozen=True)
class Row:
    """One row: `id` is "file:line" (or "rows:3"), `data` its columns."""

    id: str
    data: Mapping[str, Any]


class Source(Protocol):
    """Rows that can be read again and again, in the same order."""

    @property
    def fingerprint(self) -> str:
        """sha256 of the content."""

    def __iter__(self) -> Iterator[Row]: ...

    def close(self) -> None:
        """Removes what was written aside for reading (the spool file of an iterable)."""


def open_source(data: object, spool: Path) -> Source:
    """Source for the `data` argument of `fit`.

    Args:
        data: path, glob, folder, list of those, `datasets.Dataset`, or iterable of dict rows.
        spool: folder where rows of an iterable are written; made when needed.

    Raises:
        DataError: nothing is there, or `data` is none of these.
    """
    if isinstance(data, str | os.PathLike):
        return FileSource(_find_files(os.fspath(data)))
    if type(data).__module__.partition(".")[0] == "datasets":
        if isinstance(data, Mapping):
            raise DataError(
                f"data is a DatasetDict of {', '.join(map(str, data))}", fix='pass one split: data["train"]'
            )
        if hasattr(data, "__len__") and isinstance(data, Iterable):
            return DatasetSource(data)
    if isinstance(data, Sequence) and data and all(isinstance(item, str | os.PathLike) for item in data):
        files = [file for item in data for file in _find_files(os.fspath(item))]
        return FileSource(list(dict.fromkeys(files)))
    if isinstance(data, Iterable) and not isinstance(data, Mapping | bytes):
        return SpooledSource(data, spool)
    raise DataError(
        f"data is a {type(data).__name__}, from which no rows can be read",
        fix="pass a path, a glob, a list of paths, a datasets.Dataset, or an iterable of dict rows",
    )


class FileSource:
    """Rows of files, one after the other."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        for file in self.files:
            if file.suffix.lower() not in READERS:
                raise DataError(
                    f"{file} is of a kind that cannot be read",
                    fix=f"use one of {', '.join(READERS)}, or load it with `datasets` and pass the Dataset",
                    file=str(file),
                )
            if file.stat().st_size == 0:
                raise _empty(file)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the kind and the bytes of every file, in order."""
        digest = hashlib.sha256()
        for file in self.files:
            with file.open("rb") as stream:
                digest.update(file.suffix.lower().encode() + hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()

    def __iter__(self) -> Iterator[Row]:
        for file in self.files:
            line = None
            for line, data in READERS[file.suffix.lower()](file):
                yield Row(f"{file}:{line}", data)
            if line is None:
                raise _empty(file)

    def close(self) -> None:
        """Nothing was written aside."""


class DatasetSource:
    """Rows of a map-style `datasets.Dataset`; ids are "rows:1" and so on."""

    def __init__(self, dataset: Iterable[Any]) -> None:
        self.dataset = dataset

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the rows as JSON."""
        digest = hashlib.sha256()
        for row in self.dataset:
            digest.update(_dump(row))
        return digest.hexdigest()

    def __iter__(self) -> Iterator[Row]:
        for number, row in enumerate(self.dataset, 1):
            yield Row(f"rows:{number}", row)

    def close(self) -> None:
        """Nothing was written aside."""


class SpooledSource:
    """Rows of an iterable, written to a jsonl file of their own first; ids are "rows:1" and so on."""

    def __init__(self, rows: Iterable[object], spool: Path) -> None:
        spool.mkdir(parents=True, exist_ok=True)
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

    def __iter__(self) -> Iterator[Row]:
        for number, data in _read_jsonl(self.file):
            yield Row(f"rows:{number}", data)

    def close(self) -> None:
        """Deletes the spool file."""
        self.file.unlink(missing_ok=True)


def _dump(row: Mapping[str, Any]) -> bytes:
    """One JSON line; values that JSON does not know (dates, ...) become strings."""
    return json.dumps(dict(row), sort_keys=True, default=str).encode() + b"\n"


def _find_files(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in READERS and not _hidden(p, path))
        if not files:
            raise DataError(f"folder {path} holds no {', '.join(READERS)} file", fix="point data at another folder")
        return files
    if path.exists():
        return [path]
    if glob.has_magic(name):
        files = sorted(Path(p) for p in glob.glob(os.path.expanduser(name), recursive=True) if os.path.isfile(p))
        if not files:
            raise DataError(f"the pattern {name!r} matches no file", fix="check the pattern, and quote it in a shell")
        return files
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, siblings, n=3)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise DataError(
        f"there is no file or folder {path} (looked from {Path.cwd()})",
        fix=f"{hint}check the path; rows of a hub data set are passed as datasets.load_dataset(...)",
        file=str(path),
    )


def _hidden(path: Path, root: Path) -> bool:
    return not path.is_file() or any(part.startswith(".") for part in path.relative_to(root).parts)


def _empty(file: Path) -> DataError:
    return DataError(f"{file} is empty: it has no rows", fix="fill it, or leave it out of data", file=str(file))


def _broken(file: Path, line: int, problem: str, fix: str) -> DataError:
    return DataError(f"{file}:{line}: {problem}", fix=fix, file=str(file), line=line)


def _decode(raw: bytes, file: Path, first_line: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        problem = f"byte {raw[error.start]:#04x} is not UTF-8 (byte {error.start} of this text)"
        raise _broken(file, line, problem, "save the file as UTF-8, for instance with iconv") from error


def _as_row(value: object, file: Path, line: int) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    shown = json.dumps(value, default=str)
    raise _broken(
        file,
        line,
        f"this row is {type(value).__name__} {shown[:60]}, not an object",
        'write one JSON object per row, such as {"text": "..."}',
    )


def _json_problem(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return str(error)  # a number of thousands of digits, brackets nested thousands deep


def _read_jsonl(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with file.open("rb") as stream:
        for line, raw in enumerate(stream, 1):
            if line == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if not raw.strip():
                continue
            text = _decode(raw, file, line)
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise _broken(
                    file,
                    line,
                    f"broken JSON, {_json_problem(error)}: {text.strip()[:80]!r}",
                    "repair or remove the line; a .jsonl file has one JSON object per line",
                ) from error
            yield line, _as_row(value, file, line)


def _read_json(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """A list of rows, or JSON lines in a file named .json."""
    text = _decode(file.read_bytes().removeprefix(b"\xef\xbb\xbf"), file, 1)
    start = len(text) - len(text.lstrip())
    if text[start : start + 1] != "[":
        yield from _read_jsonl(file)
        return
    decoder = json.JSONDecoder()
    place, line, counted, separator = start + 1, 1, 0, False
    while True:
        place = _skip_space(text, place)
        line += text.count("\n", counted, place)
        counted = place
        if text[place : place + 1] == "]":
            return
        if separator:
            if text[place : place + 1] != ",":
                raise _broken(file, line, f"want ',' or ']' here: {text[place : place + 40]!r}", "repair the JSON list")
            place = _skip_space(text, place + 1)
            line += text.count("\n", counted, place)
            counted = place
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            at = error.lineno if isinstance(error, json.JSONDecodeError) else line
            raise _broken(file, at, f"broken JSON, {_json_problem(error)}", "repair the JSON list of rows") from error
        yield line, _as_row(value, file, line)
        place, separator = end, True


def _skip_space(text: str, place: int) -> int:
    while text[place : place + 1] in (" ", "\n", "\r", "\t"):
        place += 1
    return place


def _read_parquet(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        number = 0
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pa.ArrowInvalid, OSError) as error:
        raise _broken(file, number + 1, f"not readable as parquet: {error}", "write the file again") from error


def _read_txt(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    yield 1, {"text": _decode(file.read_bytes().removeprefix(b"\xef\xbb\xbf"), file, 1)}


READERS: dict[str, Callable[[Path], Iterator[tuple[int, Mapping[str, Any]]]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
}
"""Suffix -> reader of (line or row number from 1, columns)."""
