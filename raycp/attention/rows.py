"""Rows of a tensor by ranges: taken together, and put back.

Guarantees: one range is a view, so nothing is copied; several are one copy.
"""

from collections.abc import Iterator, Sequence

import torch

from raycp.plan import Range


def take_rows(x: torch.Tensor, ranges: Sequence[Range]) -> torch.Tensor:
    """The rows of all ranges, one after the other: a view of one range, else a copy."""
    parts = [x[r.start : r.stop] for r in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def row_places(ranges: Sequence[Range]) -> Iterator[tuple[slice, slice]]:
    """Of each range: its rows in the whole tensor, and where `take_rows` has them."""
    offset = 0
    for r in ranges:
        yield slice(r.start, r.stop), slice(offset, offset + len(r))
        offset += len(r)
