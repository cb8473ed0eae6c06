"""Rows of jsonl, csv, tsv and txt files.

Guarantees: memory holds one row, which for .txt is the file; a bad line goes to `bad` and reading goes on with the
next.
"""

import csv
from collections.abc import Iterator
from typing import BinaryIO

from data_pipeline.files import File
from data_pipeline.rows import BOM, BadRow, Numbered, Part, as_row, broken, check_names, decode, json_problem, load_row
from raycp.errors import DataError

_LONGEST_FIELD = 1 << 30


def _lines(stream: BinaryIO, part: Part) -> Iterator[tuple[int, bytes]]:
    """Numbered lines of a part; a part begins and ends at a line's start."""
    if part.start:
        stream.seek(part.start)
    left = None if part.stop is None else part.stop - part.start
    for line, raw in enumerate(stream, part.first):
        if left is not None:
            if left <= 0:
                return
            left -= len(raw)
        yield line, raw.removeprefix(BOM) if line == 1 else raw


def read_jsonl(part: Part, bad: BadRow) -> Numbered:
    """An object a line, of the bytes `part.start` to `part.stop`."""
    file = part.file
    with file.open() as stream:
        for line, raw in _lines(stream, part):
            if not raw.strip():
                continue
            try:
                text = decode(raw, file, line)
                row = as_row(load_row(text.rstrip()), file, line)
            except DataError as error:
                bad(error)
            except (ValueError, RecursionError) as error:
                found = broken(
                    file,
                    line,
                    f"broken JSON, {json_problem(error)}: {text.strip()[:80]!r}",
                    "repair or remove the line; a .jsonl file has one JSON object per line",
                )
                found.__cause__ = error
                bad(found)
            else:
                yield line, row


def read_csv(part: Part, bad: BadRow) -> Numbered:
    """Rows of strings under the names of the first line; quoted fields may hold line breaks."""
    file = part.file
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_FIELD))  # a process-wide limit of the module, 128 KB
    with file.open() as stream:
        counted = _Counted(_lines(stream, part), file, bad)
        reader = csv.reader(counted, delimiter="\t" if file.kind == ".tsv" else ",", strict=True)
        header: list[str] | None = None
        while True:
            counted.first = 0
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                found = broken(file, counted.first, f"broken CSV: {error}", "repair the quotes of this row")
                found.__cause__ = error
                bad(found)
                continue
            line = counted.first
            if not fields:
                continue
            if header is None:
                header = fields
                check_names(file, line, header)
            elif len(fields) != len(header):
                bad(
                    broken(
                        file,
                        line,
                        f"this row has {len(fields)} fields, the first line names {len(header)} columns",
                        "put fields with commas or line breaks in double quotes",
                    )
                )
            else:
                yield line, dict(zip(header, fields, strict=True))


class _Counted:
    """Lines for `csv.reader`, with the number of the first of a row; a line that is no text goes to `bad`."""

    def __init__(self, lines: Iterator[tuple[int, bytes]], file: File, bad: BadRow) -> None:
        self._lines, self._file, self._bad = lines, file, bad
        self.first = 0
        """Line where the current row begins; the reader of rows sets it to 0 before each."""

    def __iter__(self) -> "_Counted":
        return self

    def __next__(self) -> str:
        while True:
            line, raw = next(self._lines)
            try:
                text = decode(raw, self._file, line)
            except DataError as error:
                self._bad(error)
            else:
                self.first = self.first or line
                return text


def read_txt(part: Part, bad: BadRow) -> Numbered:
    """The whole file as column `text` of one row."""
    with part.file.open() as stream:
        try:
            row = {"text": decode(stream.read().removeprefix(BOM), part.file, 1)}
        except DataError as error:
            bad(error)
            return
    yield 1, row
