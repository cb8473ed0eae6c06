"""What was found in prepared data, as numbers: `describe` for a log, `Inspection` for whoever shows it.

Guarantees: every number comes from the store and the plan; nothing is estimated. Cost: one sort of the lengths.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.packing import PackPlan
from data_pipeline.store import DocumentStore

_BARS = 16


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """How many documents are how long: `edges` [bars + 1] tokens, ascending, `counts` [bars]."""

    edges: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    @classmethod
    def of(cls, lengths: npt.NDArray[np.int64]) -> "Histogram":
        """Bars of equal width on a logarithmic axis, from the shortest to the longest."""
        low, high = int(lengths.min()), int(lengths.max()) + 1
        edges = np.unique(np.geomspace(low, high, _BARS + 1).round().astype(np.int64))
        counts, _ = np.histogram(lengths, edges)
        return cls(edges=edges, counts=counts.astype(np.int64))


def percentiles(lengths: npt.NDArray[np.int64]) -> tuple[int, int, int, int]:
    """p50, p90, p99 and the longest; each is the length of a document."""
    p50, p90, p99 = np.percentile(lengths, (50, 90, 99), method="higher").tolist()
    return int(p50), int(p90), int(p99), int(lengths.max())


def describe(store: DocumentStore, plan: PackPlan) -> str:
    """A few lines: format, rows, tokens and targets, length percentiles, what overflow cost, packs and how full."""
    report = store.report
    lines = [_line("detected" if s["detected"] else "format", _of_source(s)) for s in report["sources"]]
    p50, p90, p99, longest = percentiles(store.lengths)
    lines += [
        _line(
            "rows",
            f"{report['rows']:,} -> {len(store):,} documents, {store.num_tokens:,} tokens, "
            f"{int(store.num_targets.sum()):,} targets",
        ),
        _line("lengths", f"p50 {p50:,}, p90 {p90:,}, p99 {p99:,}, max {longest:,}"),
        _line(
            "packs",
            f"{len(plan):,} of {plan.seq_length:,} tokens ({plan.policy}), {plan.report.efficiency:.2%} full",
        ),
    ]
    overflow = report["overflow"]
    if overflow and overflow["over"]:
        lines.append(
            _line(
                "overflow",
                f"{overflow['over']:,} documents over {overflow['seq_length']:,} tokens ({overflow['policy']}): "
                f"{overflow['cut']:,} cut, {overflow['dropped']:,} dropped; {overflow['tokens_lost']:,} tokens and "
                f"{overflow['targets_lost']:,} targets lost",
            )
        )
    if report["skipped"]:
        lines.append(_line("skipped", f"{report['skipped']:,} rows that cannot be used: {report['skipped_file']}"))
    if report["rows_cut_at_answer"]:
        lines.append(_line("note", f"in {report['rows_cut_at_answer']:,} rows a token was cut where the answer starts"))
    if report.get("rows_ended_inside"):
        lines.append(
            _line(
                "note",
                f"{report['rows_ended_inside']:,} rows of token ids go on behind an end-of-sequence token: turns of "
                "one document, or documents that see each other; if so, set data.eod_token_id",
            )
        )
    return "\n".join(lines)


def _of_source(source: dict[str, Any]) -> str:
    weight = "" if source["weight"] == 1 else f", weight {source['weight']:g}"
    named = "" if source["detected"] else " (as named)"
    return (
        f"{source['format']}{named}, {source['rows']:,} rows{weight} ({source['name']}); "
        f"trained: {source['train_on']} by {source['mask']}"
    )


def _line(head: str, words: str) -> str:
    return f"{head:9} {words}"
