"""Which reader reads which file, and one look at a file before that: its fingerprint, and parts to share out.

Guarantees: a fingerprint is of the bytes; parts are a function of the bytes and `part_bytes` alone, so a second start
cuts a file in the same places. Looks are remembered by size and time of change, so that a second start does not read
the bytes again; a file that changed within two seconds of the look is not trusted (as git does). Compressed files,
csv, json and txt are one part each.
Cost: one pass over the bytes at 1-2 GB/s a core, where they were not seen before.
"""

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from data_pipeline.files import File
from data_pipeline.json_rows import read_json
from data_pipeline.megatron_rows import megatron_parts, read_megatron
from data_pipeline.rows import BadRow, Numbered, Part, Row, raise_bad
from data_pipeline.table_rows import arrow_parts, parquet_parts, read_arrow, read_parquet
from data_pipeline.text_rows import read_csv, read_jsonl, read_txt
from raycp.errors import DataError

READERS: dict[str, Callable[[Part, BadRow], Numbered]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".txt": read_txt,
    ".idx": read_megatron,
}
"""Suffix -> reader."""
PART_BYTES = 32 << 20
"""Least bytes of a part, where a file is cut."""
_MOST_PARTS = 512
_BLOCK = 1 << 20
_SETTLED = 2.0  # seconds after which a change of a file shows in its time


class Run(Protocol):
    """Calls a function on items, somewhere."""

    def __call__(
        self, function: Callable[[Any], Any], items: list[Any], meanwhile: Callable[[], None] | None = None
    ) -> Iterable[tuple[int, Any]]:
        """Gives (index, result) as they come; calls `meanwhile` every few seconds where they are made elsewhere."""


def serially(
    function: Callable[[Any], Any], items: list[Any], meanwhile: Callable[[], None] | None = None
) -> Iterator[tuple[int, Any]]:
    """One after the other, in this process."""
    for index, item in enumerate(items):
        yield index, function(item)


def read_rows(part: Part, bad: BadRow) -> Numbered:
    """(number, columns) of each row of a part; `bad` gets what cannot be read.

    Raises:
        DataError: the file is not the one that was looked at, or is broken as a whole.
    """
    if part.file_size >= 0 and part.file.size() != part.file_size:
        raise DataError(
            f"{part.file.name} has {part.file.size()} bytes here, and had {part.file_size} when the run looked at it",
            fix="do not write to data files while a run prepares them, and give every node the same file",
            file=part.file.name,
        )
    return READERS[part.file.kind](part, bad)


def read_part(part: Part, bad: BadRow = raise_bad) -> Iterator[Row]:
    """Rows of one part; a whole file without any is an error."""
    label = part.label or part.file.name
    found = False

    def noted(error: DataError) -> None:
        nonlocal found
        found = True
        bad(error)

    for number, data in read_rows(part, noted):
        found = True
        yield Row(f"{label}:{number}", data)
    if part.whole and not found:
        raise part.file.empty()


@dataclass(frozen=True, kw_only=True)
class Look:
    """What one look at a file found: sha256 of its bytes, its size, and (start, stop, first, size) of its parts."""

    digest: str
    size: int
    cuts: tuple[tuple[int, int | None, int, int], ...]

    def parts(self, file: File, label: str = "") -> list[Part]:
        """The parts of the file."""
        common: dict[str, Any] = {"file": file, "label": label, "file_size": self.size, "whole": len(self.cuts) == 1}
        return [Part(start=a, stop=b, first=first, size=size, **common) for a, b, first, size in self.cuts]


def look_at(file: File, part_bytes: int) -> Look:
    """Reads a file once."""
    digest, size, first = hashlib.sha256(), 0, 1
    cuts: list[tuple[int, int | None, int, int]] = []
    start, line = 0, 1
    divide = file.kind in (".jsonl", ".ndjson") and not file.compression
    for path in file.stored():
        with (file if path == file.path else File(path)).open_raw() as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
                if divide and size + len(block) - start >= part_bytes and (end := block.rfind(b"\n") + 1):
                    line += block.count(b"\n", 0, end)
                    cuts.append((start, size + end, first, size + end - start))
                    start, first = size + end, line
                    line += block.count(b"\n", end)
                elif divide:
                    line += block.count(b"\n")
                size += len(block)
    if size > start or not cuts:
        cuts.append((start, size if divide else None, first, size - start))
    if not file.remote:
        divided = {".parquet": parquet_parts, ".arrow": arrow_parts, ".idx": megatron_parts}.get(file.kind)
        cuts = divided(file, part_bytes) if divided else cuts
    return Look(digest=digest.hexdigest(), size=size, cuts=tuple(cuts))


def look_at_all(files: list[File], *, memory: Path | None = None, run: Run = serially) -> list[Look]:
    """A look at each file; those in the `memory` file whose size and time did not change are not read again."""
    total = sum(max(0, file.size()) for file in files)
    part_bytes = max(PART_BYTES, total // _MOST_PARTS)
    known = _remembered(memory)
    looks: dict[str, Look] = {}
    stamps = {file.name: file.stamp() for file in files}
    for file in files:
        entry = known.get(file.path)
        if entry and entry["stamp"] == stamps[file.name] and entry["part_bytes"] == part_bytes:
            looks[file.name] = Look(
                digest=entry["digest"], size=entry["size"], cuts=tuple(tuple(cut) for cut in entry["cuts"])
            )
    missing = [file for file in files if file.name not in looks]
    for index, look in run(partial(look_at, part_bytes=part_bytes), missing):
        file = missing[index]
        looks[file.name] = look
        changed = file.changed_at()
        if stamps[file.name] is not None and (changed is None or time.time() - changed > _SETTLED):
            known[file.path] = {"stamp": stamps[file.name], "part_bytes": part_bytes, **asdict(look)}
    if missing and memory is not None:
        _remember(memory, known)
    return [looks[file.name] for file in files]


def _remembered(memory: Path | None) -> dict[str, dict[str, Any]]:
    if memory is None or not memory.exists():
        return {}
    with contextlib.suppress(ValueError):  # torn: looked at again
        return dict(json.loads(memory.read_text("utf-8")))
    return {}


def _remember(memory: Path, known: dict[str, dict[str, Any]]) -> None:
    memory.parent.mkdir(parents=True, exist_ok=True)
    aside = memory.with_name(f".{memory.name}.{uuid.uuid4().hex}")
    aside.write_text(json.dumps(known), "utf-8")
    os.replace(aside, memory)
