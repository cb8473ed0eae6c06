"""Prepared data for people's eyes: packed rows with trained, masked and padding tokens told apart, and the sawtooth.

Guarantees: what is shown is what a rank would read: ids, targets and document ends of the pack itself, each token
decoded by itself. Long documents show their beginning and end, and say how much is between. Text from data is escaped
on the page and has no control characters in the terminal. Cost: one decoding per shown token.
"""

import html
import itertools
import os
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_pipeline import picture
from data_pipeline.document import IGNORE, Pack
from data_pipeline.inspect import Histogram
from data_pipeline.packing import PackPlan
from data_pipeline.picture import Sawtooth
from data_pipeline.store import DocumentStore

_LONGEST_CHARACTER = 4  # tokens: a byte each
TRAINED, MASKED, PAD = "trained", "masked", "pad"
_ANSI = {TRAINED: "32", MASKED: "90", PAD: "7;90"}
_STYLE = """body{font-family:sans-serif;margin:2em;max-width:1100px} pre,.tokens{font-family:monospace;font-size:13px}
.tokens{white-space:pre-wrap;overflow-wrap:anywhere;border-left:3px solid #ccbb44;padding-left:8px;margin:2px 0 12px}
.trained{background:#cdeccd}.masked{color:#999}.pad{background:#ddd;color:#888}.gap{color:#aa3377;font-style:italic}
h3{font-size:13px;margin:6px 0 0;font-weight:normal;color:#555}table{border-spacing:2px}td.bar{background:#4477aa}"""


@dataclass(frozen=True)
class Token:
    """One token: its text, and whether the model learns to produce it."""

    text: str
    kind: str


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One document of a pack: what is shown of it; `skipped` tokens lie between `head` and `tail`."""

    row_id: str
    size: int
    num_trained: int
    head: tuple[Token, ...]
    tail: tuple[Token, ...]
    skipped: int


def documents_of(pack: Pack, tokenizer: Any, limit: int) -> Iterator[Shown]:
    """The documents of a pack in order, of each at most `limit` tokens; padding is put together to one."""
    start, pads = 0, 0
    for row_id, end in zip(pack.row_ids, pack.doc_ends, strict=True):
        if row_id == "" and end - start == 1 and pack.targets[start] == IGNORE:
            pads += 1
        else:
            yield _shown(pack, tokenizer, row_id, start, end, limit)
        start = end
    if pads:
        yield Shown(
            row_id="", size=pads, num_trained=0, head=(Token(f"pad x {pads:,}", PAD),), tail=(), skipped=pads - 1
        )


def _shown(pack: Pack, tokenizer: Any, row_id: str, start: int, end: int, limit: int) -> Shown:
    size = end - start
    trained = np.append(
        False, pack.targets[start : end - 1] != IGNORE
    )  # a token is learnt where its predecessor stands
    half = size if size <= limit else max(1, limit // 2)

    def tokens(a: int, b: int) -> tuple[Token, ...]:
        ids = pack.ids[start + a : start + b].tolist()
        texts = _texts(tokenizer, ids)
        return tuple(Token(text, TRAINED if trained[a + i] else MASKED) for i, text in enumerate(texts))

    return Shown(
        row_id=row_id,
        size=size,
        num_trained=int(trained.sum()),
        head=tokens(0, half),
        tail=() if half == size else tokens(size - half, size),
        skipped=0 if half == size else size - 2 * half,
    )


def _texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Text of each token; that of a character in several tokens stands at the last of them."""
    texts: list[str] = []
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        text = str(tokenizer.decode(pending))
        if text.endswith("\ufffd") and len(pending) < _LONGEST_CHARACTER:
            texts.append("")
            continue
        texts.append(text)
        pending = []
    if pending:
        texts[-1] = str(tokenizer.decode(pending))
    return texts


def terminal(pack: Pack, sawtooth: Sawtooth | None, tokenizer: Any, *, limit: int = 160, colour: bool = True) -> str:
    """A pack for the terminal. Without colour trained tokens stand in square brackets."""
    lines = [_legend(colour)]
    for number, shown in enumerate(documents_of(pack, tokenizer, limit), 1):
        lines.append(_bold(f"| {number}: {_head(shown)}", colour))
        gap = f" ... {shown.skipped:,} tokens ... " if shown.skipped and shown.row_id else ""
        lines.append(_painted(shown.head, colour) + gap + _painted(shown.tail, colour))
    if sawtooth is not None:
        lines.append(picture.text(sawtooth, colour=colour))
    return "\n".join(lines)


def histogram_text(histogram: Histogram, width: int = 50) -> str:
    """Bars of `#`, one line for each range of lengths."""
    most = max(1, int(histogram.counts.max()))
    lines = []
    for low, high, count in zip(histogram.edges[:-1], histogram.edges[1:], histogram.counts, strict=True):
        lines.append(f"{low:>9,} - {high - 1:>9,} {count:>9,} " + "#" * round(width * int(count) / most))
    return "\n".join(lines)


def page(
    report: str,
    histogram: Histogram,
    plan: PackPlan,
    packs: Sequence[tuple[int, Pack, Sawtooth | None]],
    tokenizer: Any,
    *,
    limit: int = 2000,
    title: str = "data",
) -> str:
    """Everything as one HTML page without scripts or outside resources.

    Args:
        report: of `describe`.
        histogram: of the lengths of all documents.
        plan: the packs.
        packs: (index, pack, how it is split or None) of those to show.
        tokenizer: decodes.
        limit: most tokens of a document.
        title: of the page.
    """
    most = max(1, int(histogram.counts.max()))
    bars = "".join(
        f"<tr><td align=right>{low:,} - {high - 1:,}</td><td align=right>{count:,}</td>"
        f'<td class=bar style="width:{1 + 400 * int(count) // most}px"></td></tr>'
        for low, high, count in zip(histogram.edges[:-1], histogram.edges[1:], histogram.counts, strict=True)
    )
    body = [
        f"<h1>{html.escape(title)}</h1><pre>{html.escape(report)}</pre>",
        f"<h2>lengths of documents, in tokens</h2><table>{bars}</table>",
    ]
    for index, pack, sawtooth in packs:
        free = plan.seq_length - len(pack)
        body.append(
            f"<h2>pack {index} of {len(plan):,}: {len(pack.doc_ends):,} documents, {len(pack):,} tokens"
            f"{f', {free:,} free (never computed)' if free > 0 else ''}</h2>"
        )
        if sawtooth is not None:
            body.append(picture.svg(sawtooth))
        body.append("<p>" + " ".join(f"<span class={kind}>{kind}</span>" for kind in (TRAINED, MASKED, PAD)) + "</p>")
        body += [_document_html(shown) for shown in documents_of(pack, tokenizer, limit)]
    return (
        f'<!doctype html>\n<html><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _document_html(shown: Shown) -> str:
    gap = f"<span class=gap> ... {shown.skipped:,} tokens ... </span>" if shown.skipped and shown.row_id else ""
    return f"<h3>{html.escape(_head(shown))}</h3><div class=tokens>{_spans(shown.head)}{gap}{_spans(shown.tail)}</div>"


def _spans(tokens: Sequence[Token]) -> str:
    return "".join(f"<span class={t.kind}>{html.escape(t.text)}</span>" for t in tokens)


def _head(shown: Shown) -> str:
    if not shown.row_id:
        return f"padding, {shown.size:,} tokens"
    return f"{shown.row_id}, {shown.size:,} tokens, {shown.num_trained:,} trained"


def _legend(colour: bool) -> str:
    words = (Token("trained", TRAINED), Token("masked", MASKED), Token("pad", PAD))
    return " ".join(_painted((word,), colour) for word in words)


def _bold(text: str, colour: bool) -> str:
    return f"\x1b[1;33m{_clean(text)}\x1b[0m" if colour else _clean(text)


def _painted(tokens: Sequence[Token], colour: bool) -> str:
    if colour:
        return "".join(f"\x1b[{_ANSI[t.kind]}m{_clean(t.text)}\x1b[0m" for t in tokens)
    pieces = []
    for kind, group in itertools.groupby(tokens, key=lambda t: t.kind):
        words = "".join(_clean(t.text) for t in group)
        pieces.append(f"[{words}]" if kind == TRAINED else words)
    return "".join(pieces)


def _clean(text: str) -> str:
    """Text without characters that a terminal would obey; line breaks are shown, and break the line."""
    shown = text.replace("\n", "\\n\n") if text != "\n" else "\\n\n"
    return "".join(c if c == "\n" or unicodedata.category(c)[0] != "C" else repr(c)[1:-1] for c in shown)


def use_colour(stream: Any) -> bool:
    """Whether a stream is a terminal that shows colours, and nobody asked for none (NO_COLOR)."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR")


def histogram_of(store: DocumentStore) -> Histogram:
    """Of the documents of an epoch."""
    return Histogram.of(store.lengths)
