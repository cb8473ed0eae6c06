"""`prepare`: from a user's `data` to a document store, once.

Guarantees: the folder that a store gets is named by a key of everything that decides its content: bytes of the
sources, tokenizer, chat template, settings, version, and `seq_length` where it matters; a second call with the same
finds it, a changed anything never does. Rows stream: memory holds one batch, and about 50 bytes per document. Prints
nothing; what was found is in `store.report`. Cost: one pass over the rows, and one more over the bytes for the key.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_pipeline.encode import Tokenizer
from data_pipeline.formats import Conversation, Example, PromptCompletion, detect_format, parser_of
from data_pipeline.overflow import Overflow, raise_overflow
from data_pipeline.render import Renderer
from data_pipeline.sources import Row, Source, open_source
from data_pipeline.store import DocumentStore, StoreWriter, problem_with
from raycp.config import DataConfig
from raycp.errors import DataError

VERSION = 1
"""Part of the key: raise it when the same rows give other documents."""

_BATCH_ROWS = 256
_BATCH_CHARACTERS = 1 << 20


def prepare(
    data: object,
    tokenizer: Tokenizer,
    *,
    seq_length: int,
    config: DataConfig,
    folder: Path | str,
    progress: Callable[[int], None] | None = None,
    spool: Path | str | None = None,
) -> DocumentStore:
    """Tokenises `data`, or finds that it was done.

    Args:
        data: path, glob, folder, list of those, `datasets.Dataset`, or iterable of dict rows.
        tokenizer: a Hugging Face fast tokenizer.
        seq_length: most tokens of a document.
        config: format, overflow, train_on and chat_template are used.
        folder: where stores are kept, one sub-folder each; for workers on other nodes, shared storage.
        progress: called with the number of rows done, after each batch.
        spool: where the rows of an iterable are written meanwhile; default `folder`/spool.

    Raises:
        DataError: a source, row or setting that cannot be used; documents over `seq_length` with overflow="raise"; no
            row, or nothing to train.
        ModelError: a tokenizer or chat template that cannot be trained with.
    """
    root = Path(folder)
    overflow = Overflow(seq_length, config.overflow)
    source = open_source(data, Path(spool) if spool is not None else root / "spool")
    try:
        format_name, detected = _format_of(source, config.format)
        renderer = Renderer(
            tokenizer, train_on=config.train_on, chat_template=config.chat_template, format_name=format_name
        )
        key = _key(source, renderer, config, format_name, seq_length)
        place = root / key[:24]
        if problem_with(place):
            facts = {"format": format_name, "detected": detected, "train_on": renderer.train_on}
            store = _build(source, renderer, format_name, overflow, place, key, facts, progress)
        else:
            store = DocumentStore.open(place)
    finally:
        source.close()
    if store.longest > seq_length:  # with overflow="raise" only: nothing else lets them through
        over = int((store.lengths > seq_length).sum())
        raise_overflow(over, store.longest, store.row_id(int(store.lengths.argmax())), seq_length)
    return store


def remove_leftovers(folder: Path | str) -> None:
    """Deletes what a killed `prepare` left in `folder`: half-written stores and spooled rows.

    Only for whoever owns the folder: a `prepare` that runs in another process would lose its files.
    """
    root = Path(folder)
    for aside in root.glob(".*.*"):
        shutil.rmtree(aside)
    for rows in root.glob("spool/rows-*.jsonl"):
        rows.unlink()


def _build(
    source: Source,
    renderer: Renderer,
    format_name: str,
    overflow: Overflow,
    place: Path,
    key: str,
    facts: dict[str, Any],
    progress: Callable[[int], None] | None,
) -> DocumentStore:
    num_rows = rows_without_target = 0
    with StoreWriter(place) as writer:
        for batch in _batches(source, parser_of(format_name)):
            for document in renderer.render_batch(batch):
                rows_without_target += not document.num_targets
                for part in overflow.apply(document):
                    writer.append(part)
            num_rows += len(batch)
            if progress is not None:
                progress(num_rows)
        if not writer.num_targets:
            _raise_untrained(num_rows, overflow)
        report = {
            **facts,
            "mask": renderer.mask_source(),
            "rows": num_rows,
            "rows_without_target": rows_without_target,
            "rows_cut_at_answer": renderer.rows_cut,
            "documents": overflow.report.documents_out,
            "tokens": writer.num_tokens,
            "targets": writer.num_targets,
            "longest": overflow.report.longest,
            "overflow": None if overflow.report.policy == "raise" else asdict(overflow.report),
        }
        return writer.commit(key=key, report=report)


def _format_of(source: Source, name: str) -> tuple[str, bool]:
    """(format, whether it was detected)."""
    first = next(iter(source), None)
    if first is None:
        raise DataError("data has 0 rows", fix="give at least one row")
    return (detect_format(first), True) if name == "auto" else (name, False)


def _batches(rows: Iterable[Row], parse: Callable[[Row], Example]) -> Iterator[list[tuple[str, Example]]]:
    batch: list[tuple[str, Example]] = []
    characters = 0
    for row in rows:
        example = parse(row)
        batch.append((row.id, example))
        characters += _num_characters(example)
        if len(batch) >= _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _num_characters(example: Example) -> int:
    if isinstance(example, Conversation):
        return sum(len(message["content"]) for message in example.messages)
    if isinstance(example, PromptCompletion):
        return len(example.prompt) + len(example.completion)
    return len(example.text)


def _key(source: Source, renderer: Renderer, config: DataConfig, format_name: str, seq_length: int) -> str:
    tokenizer = renderer.encoder.tokenizer
    facts = {
        "version": VERSION,
        "source": source.fingerprint,
        "tokenizer": renderer.encoder.digest(),
        "template": config.chat_template or getattr(tokenizer, "chat_template", None),
        "format": format_name,
        "train_on": renderer.train_on,
        "overflow": config.overflow,
        "seq_length": None if config.overflow == "raise" else seq_length,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _raise_untrained(num_rows: int, overflow: Overflow) -> None:
    report = overflow.report
    if report.targets_in:
        raise DataError(
            f"nothing is left to train of {num_rows} rows: {report.over} documents over seq_length={report.seq_length} "
            f"were {'dropped' if report.policy == 'drop' else 'cut'} (data.overflow={report.policy!r})",
            fix=f"set seq_length to {report.longest} or more, or data.overflow to 'split'",
        )
    raise DataError(
        f"none of {num_rows} rows has a token to train",
        fix="check that rows hold more than one token, and what data.train_on trains",
    )
