"""What happens to a document of more than `seq_length` tokens: a named choice, and an account of what it cost.

Guarantees: tokens in = tokens kept + tokens lost, and the same for targets, for every policy; the report says so before
training starts. "split" and "split_restart" keep every token; each cut loses one target at most (the one that the first
token of the next fragment would have been). Fragments do not see each other; their positions run on over the cut, or
start at 0 again with "split_restart".
Cost: a slice per fragment.
"""

from dataclasses import dataclass, fields

import numpy as np

from data_pipeline.document import IGNORE, Document
from raycp.config import OVERFLOWS
from raycp.errors import DataError

_SPLITS = ("split", "split_restart")


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

    def add(self, other: "OverflowReport") -> None:
        """Takes in the counts of another part of the same data."""
        if other.longest > self.longest:
            self.longest, self.longest_row = other.longest, other.longest_row
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_NO_COUNTS = ("policy", "seq_length", "longest", "longest_row")
_COUNTS = tuple(f.name for f in fields(OverflowReport) if f.name not in _NO_COUNTS)


class Overflow:
    """Applies one policy to documents as they come.

    Args:
        seq_length: most tokens of a document that fit a pack.
        policy: "raise" lets documents through and counts them, so that `check` can report all of them at once;
            "split" and "split_restart" (fragments), "truncate" (keeps the first `seq_length` tokens), "truncate_left"
            (the last ones), "drop".
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
        elif report.policy in _SPLITS:
            restart = report.policy == "split_restart"
            kept = [_cut(document, a, min(a + limit, size), restart=restart) for a in range(0, size, limit)]
        elif report.policy == "truncate":
            kept = [_cut(document, 0, limit)]
        elif report.policy == "truncate_left":
            kept = [_cut(document, size - limit, size, restart=True)]
        else:
            kept = []
        report.documents_in += 1
        report.documents_out += len(kept)
        report.over += size > limit
        report.cut += size > limit and report.policy != "drop" and report.policy != "raise"
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
        "see each other), 'truncate', 'truncate_left' or 'drop'",
        count=count,
        longest=longest,
        row=row_id,
    )


def _cut(document: Document, start: int, end: int, *, restart: bool = False) -> Document:
    targets = np.array(document.targets[start:end])
    targets[-1] = IGNORE
    return Document(
        ids=document.ids[start:end],
        targets=targets,
        weights=None if document.weights is None else document.weights[start:end],
        start_position=0 if restart else document.start_position + start,
        row_id=document.row_id,
    )
