"""What happens to a document of more than `seq_length` tokens: a named choice, and an account of what it cost.

Guarantees: tokens in = tokens kept + tokens lost, and the same for targets, for every policy; the report says so before
training starts. "split" keeps every token; each cut loses one target at most (the one that the first token of the next
fragment would have been), and fragments keep running positions, but do not see each other.
Cost: a slice per fragment.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data_pipeline.document import IGNORE, Document
from raycp.config import OVERFLOWS
from raycp.errors import DataError


@dataclass(kw_only=True)
class OverflowReport:
    """Counts over all documents seen. `over`: longer than seq_length; `cut`: of those, split or truncated."""

    policy: str
    seq_length: int
    documents_in: int = 0
    documents_out: int = 0
    over: int = 0
    cut: int = 0
    dropped: int = 0
    tokens_in: int = 0
    tokens_kept: int = 0
    tokens_lost: int = 0
    targets_in: int = 0
    targets_kept: int = 0
    targets_lost: int = 0
    longest: int = 0
    longest_row: str = ""


class Overflow:
    """Applies one policy to documents as they come.

    Args:
        seq_length: most tokens of a document that fit a pack.
        policy: "raise" lets documents through and counts them, so that `check` can report all of them at once;
            "split", "truncate" (keeps the first `seq_length` tokens), "drop".
    """

    def __init__(self, seq_length: int, policy: str) -> None:
        if policy not in OVERFLOWS:
            raise DataError(
                f"data.overflow={policy!r} is not a choice", fix=f"set data.overflow to one of {', '.join(OVERFLOWS)}"
            )
        self.report = OverflowReport(policy=policy, seq_length=seq_length)

    def apply(self, document: Document) -> list[Document]:
        """What is left of one document: itself, its fragments, or nothing."""
        report = self.report
        size, limit = len(document), report.seq_length
        if size <= limit or report.policy == "raise":
            kept = [document]
        elif report.policy == "split":
            kept = list(_fragments(document, limit))
        elif report.policy == "truncate":
            kept = [_cut(document, 0, limit)]
        else:
            kept = []
        report.documents_in += 1
        report.documents_out += len(kept)
        report.over += size > limit
        report.cut += size > limit and report.policy in ("split", "truncate")
        report.dropped += not kept
        tokens, targets = sum(len(d) for d in kept), sum(d.num_targets for d in kept)
        report.tokens_in += size
        report.tokens_kept += tokens
        report.tokens_lost += size - tokens
        report.targets_in += document.num_targets
        report.targets_kept += targets
        report.targets_lost += document.num_targets - targets
        if size > report.longest:
            report.longest, report.longest_row = size, document.row_id
        return kept


def raise_overflow(count: int, longest: int, row_id: str, seq_length: int) -> None:
    """Raises:
    DataError: with the number of documents over `seq_length`, the longest and its row.
    """
    raise DataError(
        f"{count} document(s) have more than seq_length={seq_length} tokens; the longest has {longest}, row {row_id}",
        fix=f"set seq_length to {longest} or more, or data.overflow to 'split' (keeps every token; fragments do not "
        "see each other), 'truncate' or 'drop'",
        count=count,
        longest=longest,
        row=row_id,
    )


def _fragments(document: Document, limit: int) -> Iterator[Document]:
    for start in range(0, len(document), limit):
        yield _cut(document, start, min(start + limit, len(document)))


def _cut(document: Document, start: int, end: int) -> Document:
    targets = np.array(document.targets[start:end])
    targets[-1] = IGNORE
    return Document(
        ids=document.ids[start:end],
        targets=targets,
        weights=None if document.weights is None else document.weights[start:end],
        start_position=document.start_position + start,
        row_id=document.row_id,
    )
