"""A short report on prepared data, for people.

Guarantees: every number comes from the store and the plan; nothing is computed twice or estimated. Cost: one sort of
the lengths.
"""

import numpy as np

from data_pipeline.packing import PackPlan
from data_pipeline.store import DocumentStore


def describe(store: DocumentStore, plan: PackPlan) -> str:
    """A few lines: format, rows, tokens and targets, length percentiles, what overflow cost, packs and how full."""
    report = store.report
    how = "detected" if report["detected"] else "as named"
    p50, p90, p99 = np.percentile(store.lengths, (50, 90, 99), method="higher").tolist()
    lines = [
        f"format    {report['format']} ({how}), trained: {report['train_on']} by {report['mask']}",
        f"rows      {report['rows']:,} -> {len(store):,} documents, {store.num_tokens:,} tokens, "
        f"{int(store.num_targets.sum()):,} targets",
        f"lengths   p50 {p50:,}, p90 {p90:,}, p99 {p99:,}, max {store.longest:,}",
        f"packs     {len(plan):,} of {plan.seq_length:,} tokens ({plan.policy}), {plan.report.efficiency:.2%} full",
    ]
    overflow = report["overflow"]
    if overflow and overflow["over"]:
        lines.append(
            f"overflow  {overflow['over']:,} documents over {overflow['seq_length']:,} tokens ({overflow['policy']}): "
            f"{overflow['cut']:,} cut, {overflow['dropped']:,} dropped; {overflow['tokens_lost']:,} tokens and "
            f"{overflow['targets_lost']:,} targets lost"
        )
    if report["rows_without_target"]:
        lines.append(f"note      {report['rows_without_target']:,} rows have no target")
    if report["rows_cut_at_answer"]:
        lines.append(f"note      in {report['rows_cut_at_answer']:,} rows a token was cut where the answer starts")
    return "\n".join(lines)
