"""One part of a source to one part of a store: what runs in each process that prepares data.

Guarantees: a part is written whole or not at all, and says so in its key, so preparation that was killed goes on with
the parts that are missing; memory holds one batch of rows, and about 50 bytes per document of the part. With
on_bad_row="skip" every row that was left out is in `skipped.jsonl` with what is wrong with it.
Cost: rendering and tokenizing; travels to other processes as a pickle of the tokenizer's size.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from data_pipeline.encode import Tokenizer
from data_pipeline.examples import Conversation, Example, num_characters
from data_pipeline.formats import Parser, parser_of
from data_pipeline.overflow import Overflow, OverflowReport
from data_pipeline.part_progress import Inside, ProgressFile
from data_pipeline.readers import read_part
from data_pipeline.render import Renderer
from data_pipeline.rows import BadRow, Part, Row, raise_bad
from data_pipeline.store import StorePart, problem_with
from data_pipeline.store_writer import StoreWriter
from data_pipeline.tool_text import tools_as_text
from raycp.errors import DataError

SKIPPED = "skipped.jsonl"
_BATCH_ROWS = 256
_BATCH_CHARACTERS = 1 << 20
_SHOWN = 500  # characters of an error in the file of skipped rows


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How rows of one source become documents: plain values, part of a store's key."""

    format: str
    train_on: str
    chat_template: str | None
    tools: str
    columns: str
    eod_token_id: int | None
    vocabulary: int
    on_bad_row: str
    overflow: str
    seq_length: int

    def parser(self) -> Parser:
        """The function that turns rows into examples."""
        parse = parser_of(self.format, columns=self.columns, eod_token_id=self.eod_token_id, vocabulary=self.vocabulary)
        if self.tools == "template":
            return parse

        def parse_as_text(row: Row) -> Example:
            example = parse(row)
            return tools_as_text(example) if isinstance(example, Conversation) else example

        return parse_as_text

    def renderer(self, tokenizer: Tokenizer) -> Renderer:
        """What turns examples into documents."""
        return Renderer(tokenizer, train_on=self.train_on, chat_template=self.chat_template, format_name=self.format)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One part to write: number `index` of all, from source number `source`."""

    index: int
    source: int
    part: Part

    @property
    def name(self) -> str:
        """Folder of the part in that of the store."""
        return f"part-{self.index:05d}"

    def key(self, store_key: str) -> str:
        """What the part is made of."""
        part = self.part
        facts = [store_key, self.source, part.start, part.stop, part.first, part.size]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


@dataclass(kw_only=True)
class PartReport:
    """Counts of one part."""

    index: int
    source: int
    rows: int = 0
    skipped: int = 0
    first_skipped: str = ""
    rows_cut: int = 0
    rows_ended_inside: int = 0
    mask: str = ""
    overflow: dict[str, Any] = field(default_factory=dict)


@dataclass
class PartWorker:
    """Writes parts; called with a `Job`.

    Args:
        folder: of the store, which all processes see.
        key: of the store.
        recipes: by source.
        tokenizer: a fast one.
        inside: called after each batch; stays in the process that set it. Another writes a `ProgressFile`.
    """

    folder: Path
    key: str
    recipes: tuple[Recipe, ...]
    tokenizer: Tokenizer
    inside: Inside | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "inside": None}

    def report_of(self, job: Job) -> PartReport | None:
        """The report of a part that is written already, or None."""
        place = self.folder / job.name
        if problem_with(place):
            return None
        meta = StorePart.open(place)
        return PartReport(**meta.report["part"]) if meta.report["key"] == job.key(self.key) else None

    def __call__(self, job: Job) -> PartReport:
        """Reads, renders and writes one part.

        Raises:
            DataError: a row that cannot be used, with on_bad_row="raise".
            ModelError: a tokenizer or template that cannot be trained with.
        """
        recipe = self.recipes[job.source]
        renderer, overflow = recipe.renderer(self.tokenizer), Overflow(recipe.seq_length, recipe.overflow)
        report = PartReport(index=job.index, source=job.source)
        bytes_read = 0

        def count(num_bytes: int) -> None:
            nonlocal bytes_read
            bytes_read += num_bytes

        part = replace(job.part, file=replace(job.part.file, on_read=count))
        with StoreWriter(self.folder / job.name) as writer, ProgressFile(writer.aside) as told:
            skipped = (writer.aside / SKIPPED).open("w", encoding="utf-8")

            def note(error: DataError) -> None:
                report.skipped += 1
                report.first_skipped = report.first_skipped or error.message
                row = error.details.get("row") or f"{error.details.get('file')}:{error.details.get('line')}"
                line = {"row": row, "problem": error.message[:_SHOWN], "fix": error.fix}
                skipped.write(json.dumps(line) + "\n")

            def note_unread(error: DataError) -> None:
                report.rows += 1
                note(error)

            skip = recipe.on_bad_row == "skip"
            bad: BadRow = note if skip else raise_bad
            with skipped:
                rows = read_part(part, note_unread if skip else raise_bad)
                for batch in _batches(rows, recipe.parser(), bad, report):
                    for document in renderer.render_batch(batch, bad):
                        for kept in overflow.apply(document):
                            writer.append(kept)
                    (self.inside or told)(job.index, report.rows, min(bytes_read, part.size))
            told.close()
            report.rows_cut, report.mask = renderer.rows_cut, renderer.mask_source()
            report.rows_ended_inside = renderer.rows_ended_inside
            report.overflow = asdict(overflow.report)
            writer.commit_part(key=self.key, report={"key": job.key(self.key), "part": asdict(report)})
        return report


def combined(reports: list[PartReport]) -> OverflowReport:
    """The overflow reports of all parts as one."""
    total = OverflowReport(**reports[0].overflow)
    for report in reports[1:]:
        total.add(OverflowReport(**report.overflow))
    return total


def _batches(
    rows: Iterator[Row], parse: Parser, bad: BadRow, report: PartReport
) -> Iterator[list[tuple[str, Example]]]:
    """Examples, a few hundred or about a megabyte of text at a time; `report.rows` counts the rows."""
    batch: list[tuple[str, Example]] = []
    characters = 0
    for row in rows:
        report.rows += 1
        try:
            example = parse(row)
        except DataError as error:
            bad(error)
            continue
        batch.append((row.id, example))
        characters += num_characters(example)
        if len(batch) >= _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
