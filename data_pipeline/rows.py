"""A row, a part of a file, and what every reader of rows needs: decoding that says where something is wrong.

Guarantees: an error names file and line; a JSON object with a key twice is refused. Cost: the Python hook that sees
every key makes JSON decoding about 1.5 times as slow (60-100 MB/s a core), far above what a tokenizer takes.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from data_pipeline.files import File
from raycp.errors import DataError


@dataclass(frozen=True)
class Row:
    """One row: `id` is "file:line" (or "rows:3"), `data` its columns."""

    id: str
    data: Mapping[str, Any]


BadRow = Callable[[DataError], None]
"""Takes the error of a row that cannot be used: raises it, or makes a note of it."""
Numbered = Iterator[tuple[int, Mapping[str, Any]]]
"""(line or row number from 1, columns)."""

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A stretch of a file that is read by itself: bytes of a jsonl, row groups of a parquet, batches of an arrow file.

    Args:
        file: where it is.
        start, stop: in that unit; `stop` None: to the end.
        first: number of its first row (or line), from 1.
        size: bytes as stored, for sharing out work and for showing how far it is.
        label: what row ids begin with, instead of the file's name.
        file_size: bytes that the whole file must have; another size is another file.
        whole: the part is all of the file.
    """

    file: File
    start: int = 0
    stop: int | None = None
    first: int = 1
    size: int = 0
    label: str = ""
    file_size: int = -1
    whole: bool = False


def raise_bad(error: DataError) -> None:
    """The `bad` of on_bad_row="raise"."""
    raise error


def broken(file: File, line: int, problem: str, fix: str) -> DataError:
    """An error at a line of a file."""
    return DataError(f"{file.name}:{line}: {problem}", fix=fix, file=file.name, line=line)


def load_row(text: str) -> Any:
    """Decodes JSON; an object with a key twice is refused, since one of the two would be lost.

    Raises:
        ValueError, RecursionError: no JSON, or a key twice.
    """
    return json.loads(text, object_pairs_hook=unique)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of these pairs.

    Raises:
        ValueError: a key is there twice.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def decode(raw: bytes, file: File, first_line: int) -> str:
    """UTF-8 text that begins at a line of a file.

    Raises:
        DataError: with the line of the first wrong byte.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        problem = f"byte {raw[error.start]:#04x} is not UTF-8 (byte {error.start} of this text)"
        raise broken(file, line, problem, "save the file as UTF-8, for instance with iconv") from error


def as_row(value: object, file: File, line: int) -> Mapping[str, Any]:
    """A decoded value, which must be an object."""
    if isinstance(value, dict):
        return value
    shown = json.dumps(value, default=str)
    raise broken(
        file,
        line,
        f"this row is {shown[:60]}, not an object",
        'write one JSON object per row, such as {"text": "..."}',
    )


def json_problem(error: ValueError | RecursionError) -> str:
    """Why JSON could not be decoded, in a few words."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return str(error)  # a key twice, a number of thousands of digits, brackets nested thousands deep


def check_names(file: File, line: int, names: list[str]) -> None:
    """Raises:
    DataError: a column is there twice.
    """
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise broken(
            file, line, f"the column {', '.join(map(repr, twice))} is there twice", "rename one of them, or take it out"
        )
