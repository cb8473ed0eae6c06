"""`build_store`: from a user's `data` to a document store, once.

Guarantees: the folder that a store gets is named by a key of everything that decides its content: bytes of the
sources, their weights, tokenizer, chat template, settings, version, and `seq_length` where it matters; a second call
with the same finds it, a changed anything never does. Parts that a killed call wrote are used by the next. The
documents and their order do not depend on where parts were made (`run`). Prints nothing; what was found is in
`store.report`. Cost: one pass over the rows, and one more over bytes that were not seen before.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.encode import Tokenizer
from data_pipeline.formats import detect_format
from data_pipeline.overflow import Overflow, raise_overflow
from data_pipeline.packing import permutation
from data_pipeline.part_progress import Meter, Progress
from data_pipeline.part_worker import SKIPPED, Job, PartReport, PartWorker, Recipe, combined
from data_pipeline.readers import Run, serially
from data_pipeline.rows import Part, Row
from data_pipeline.sources import Weighted, open_sources
from data_pipeline.store import META, DocumentStore, Int64, StorePart, problem_with
from data_pipeline.store_writer import join_parts
from raycp.config import DataConfig
from raycp.errors import DataError, ModelError

VERSION = 2
"""Part of the key: raise it when the same rows give other documents."""
_LOOKS = "looks.json"


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """One source, and how its rows become documents."""

    source: Weighted
    recipe: Recipe
    detected: bool


def build_store(
    data: object,
    tokenizer: Tokenizer,
    *,
    seq_length: int,
    config: DataConfig,
    folder: Path | str,
    progress: Progress | None = None,
    spool: Path | str | None = None,
    run: Run = serially,
) -> DocumentStore:
    """Tokenises `data`, or finds that it was done.

    Args:
        data: what `data_pipeline.sources.open_sources` takes.
        tokenizer: a Hugging Face fast tokenizer.
        seq_length: most tokens of a document.
        config: all but `packing` and `local_copy` is used.
        folder: where stores are kept, one sub-folder each; for workers on other nodes, shared storage.
        progress: called after each batch or part.
        spool: where rows of no file are written meanwhile; default `folder`/spool.
        run: where parts are made; in this process by default, see `data_pipeline.prepare` for a Ray cluster.

    Raises:
        DataError: a source, row or setting that cannot be used; documents over `seq_length` with overflow="raise"; no
            row, or nothing to train.
        ModelError: a tokenizer or chat template that cannot be trained with.
    """
    root = Path(folder)
    Overflow(seq_length, config.overflow)
    sources = open_sources(data, Path(spool) if spool is not None else root / "spool", memory=root / _LOOKS, run=run)
    try:
        planned = [_plan(source, tokenizer, config, seq_length) for source in sources]
        key = _key(planned, tokenizer)
        place = root / key[:24]
        store = (
            _build(planned, tokenizer, place, key, progress, run) if problem_with(place) else DocumentStore.open(place)
        )
    finally:
        for source in sources:
            source.source.close()
    if store.longest > seq_length:  # with overflow="raise" only: nothing else lets them through
        over = int((store.lengths > seq_length).sum())
        raise_overflow(over, store.longest, store.row_id(int(store.lengths.argmax())), seq_length)
    return store


def remove_leftovers(folder: Path | str) -> None:
    """Deletes what a killed call left in `folder` and nothing can use: half-written parts and spooled rows.

    Only for whoever owns the folder: a call that runs in another process would lose its files.
    """
    root = Path(folder)
    for aside in (*root.glob(".*.*"), *root.glob("*/.*.*")):
        if aside.is_dir():
            shutil.rmtree(aside)
        else:
            aside.unlink()
    for rows in root.glob("spool/rows-*.*"):
        rows.unlink()


def _plan(source: Weighted, tokenizer: Tokenizer, config: DataConfig, seq_length: int) -> _Planned:
    """Format and renderer of a source; its first row is rendered, so that what cannot be trained shows at once."""
    problems: list[DataError] = []

    def bad(error: DataError) -> None:
        problems.append(error)
        if config.on_bad_row == "raise":
            raise error

    first = next(iter(source.source.rows(bad)), None)
    if first is None:
        found = f": {problems[0].message}" if problems else ""
        raise DataError(f"data has 0 rows{found}", fix="give at least one row")
    name, detected = config.format, False
    if name == "auto":
        name, detected = detect_format(first, config.columns), True
    recipe = Recipe(
        format=name,
        train_on=config.train_on,
        chat_template=config.chat_template,
        tools=config.tools,
        columns=config.columns,
        eod_token_id=config.eod_token_id,
        vocabulary=len(tokenizer),
        on_bad_row=config.on_bad_row,
        overflow=config.overflow,
        seq_length=seq_length,
    )
    renderer = recipe.renderer(tokenizer)
    _try_first(first, recipe, tokenizer)
    return _Planned(source=source, recipe=replace(recipe, train_on=renderer.train_on), detected=detected)


def _try_first(row: Row, recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Renders one row.

    Raises:
        ModelError: a template that trains no token or no stop token.
    """
    try:
        recipe.renderer(tokenizer).render_batch([(row.id, recipe.parser()(row))])
    except DataError:
        if recipe.on_bad_row == "raise":
            raise


def _build(
    planned: Sequence[_Planned],
    tokenizer: Tokenizer,
    place: Path,
    key: str,
    progress: Progress | None,
    run: Run,
) -> DocumentStore:
    if (place / META).exists():  # torn, or of an older version
        shutil.rmtree(place)
    place.mkdir(parents=True, exist_ok=True)
    jobs: list[Job] = []
    for number, one in enumerate(planned):
        parts: list[Part] = one.source.source.parts()
        jobs += [Job(index=len(jobs) + i, source=number, part=part) for i, part in enumerate(parts)]
    worker = PartWorker(folder=place, key=key, recipes=tuple(p.recipe for p in planned), tokenizer=tokenizer)
    reports = {job.index: found for job in jobs if (found := worker.report_of(job)) is not None}
    meter = None
    if progress is not None:
        sizes = {job.index: job.part.size for job in jobs}
        meter = Meter(sizes, [(index, report.rows) for index, report in reports.items()], progress, place)
        worker.inside = meter.inside
    missing = [job for job in jobs if job.index not in reports]
    for job in missing:  # torn, or of other bytes
        shutil.rmtree(place / job.name, ignore_errors=True)
    try:
        for index, report in run(worker, missing, None if meter is None else meter.look):
            reports[missing[index].index] = report
            if meter is not None:
                meter.done(missing[index].index, report.rows)
        ordered = [reports[job.index] for job in jobs]
        taken = _taken(planned, jobs, place)
        _join_skipped(place, jobs)
        return join_parts(
            place, [job.name for job in jobs], key=key, report=_report(planned, ordered, place, jobs), taken=taken
        )
    except (DataError, ModelError):  # the data will be changed: nobody comes back for these parts
        shutil.rmtree(place, ignore_errors=True)
        raise


def _taken(planned: Sequence[_Planned], jobs: Sequence[Job], place: Path) -> Int64 | None:
    """Stored documents of an epoch by the sources' weights; None where all are 1."""
    if all(one.source.weight == 1 for one in planned):
        return None
    counts = [0] * len(planned)
    for job in jobs:
        counts[job.source] += StorePart.open(place / job.name).num_documents
    chosen, first = [np.zeros(0, np.int64)], 0
    for number, (one, count) in enumerate(zip(planned, counts, strict=True)):
        whole = math.floor(one.source.weight)
        part = round((one.source.weight - whole) * count)
        if not whole and count:
            part = max(1, part)
        own = np.arange(count, dtype=np.int64)
        some = np.sort(permutation(count, seed=0, epoch=number)[:part]) if part else own[:0]
        chosen += [first + ids for ids in (*[own] * whole, some)]
        first += count
    return np.concatenate(chosen)


def _join_skipped(place: Path, jobs: Sequence[Job]) -> None:
    with (place / SKIPPED).open("wb") as target:
        for job in jobs:
            with (place / job.name / SKIPPED).open("rb") as part:
                shutil.copyfileobj(part, target)


def _report(
    planned: Sequence[_Planned], reports: Sequence[PartReport], place: Path, jobs: Sequence[Job]
) -> dict[str, Any]:
    parts = [StorePart.open(place / job.name) for job in jobs]
    overflow = combined(list(reports))
    rows, skipped = sum(r.rows for r in reports), sum(r.skipped for r in reports)
    if not sum(part.num_targets for part in parts):
        _raise_untrained(rows, overflow, next((r.first_skipped for r in reports if r.first_skipped), ""))
    sources = []
    for number, one in enumerate(planned):
        mine = [r for r in reports if r.source == number]
        sources.append(
            {
                "name": one.source.name,
                "weight": one.source.weight,
                "format": one.recipe.format,
                "detected": one.detected,
                "train_on": one.recipe.train_on,
                "mask": next((r.mask for r in mine if r.rows), ""),
                "rows": sum(r.rows for r in mine),
                "skipped": sum(r.skipped for r in mine),
            }
        )
    return {
        "sources": sources,
        **{name: " + ".join(dict.fromkeys(str(s[name]) for s in sources)) for name in ("format", "train_on", "mask")},
        "detected": all(s["detected"] for s in sources),
        "rows": rows,
        "skipped": skipped,
        "skipped_file": str(place / SKIPPED) if skipped else "",
        "rows_cut_at_answer": sum(r.rows_cut for r in reports),
        "rows_ended_inside": sum(r.rows_ended_inside for r in reports),
        "documents": overflow.documents_out,
        "tokens": sum(part.num_tokens for part in parts),
        "targets": sum(part.num_targets for part in parts),
        "longest": overflow.longest,
        "overflow": None if overflow.policy == "raise" else asdict(overflow),
    }


def _key(planned: Sequence[_Planned], tokenizer: Tokenizer) -> str:
    facts: dict[str, Any] = {"version": VERSION, "sources": []}
    for one in planned:
        renderer = one.recipe.renderer(tokenizer)
        recipe = asdict(one.recipe)
        recipe["chat_template"] = one.recipe.chat_template or getattr(tokenizer, "chat_template", None)
        if one.recipe.overflow == "raise":
            recipe.pop("seq_length")
        facts["tokenizer"] = renderer.encoder.digest()
        facts["sources"].append([one.source.source.fingerprint, one.source.weight, recipe])
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _raise_untrained(num_rows: int, report: Any, skipped: str) -> None:
    if report.targets_in:
        raise DataError(
            f"nothing is left to train of {num_rows} rows: {report.over} documents over seq_length={report.seq_length} "
            f"were {'dropped' if report.policy == 'drop' else 'cut'} (data.overflow={report.policy!r})",
            fix=f"set seq_length to {report.longest} or more, or data.overflow to 'split'",
        )
    raise DataError(
        f"none of {num_rows} rows can be used" + (f"; the first problem: {skipped}" if skipped else ""),
        fix="repair the rows, or set data.format, data.columns and data.train_on to what they hold",
    )
