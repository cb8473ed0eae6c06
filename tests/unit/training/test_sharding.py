"""Row ranges: every row once, for every world size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raycp.training.sharding import ShardSpan, row_range


@given(rows=st.integers(0, 200), world_size=st.integers(1, 17))
def test_rows_are_cut_as_torch_chunk_cuts_them(rows, world_size):
    ranges = [row_range(rows, r, world_size) for r in range(world_size)]
    covered = [i for start, stop in ranges for i in range(start, stop)]
    assert covered == list(range(rows))
    chunks = [c.numel() for c in torch.arange(rows).chunk(world_size)] if rows else []
    assert [stop - start for start, stop in ranges if stop > start] == chunks


def test_a_span_outside_its_tensor_is_refused():
    for start, stop in ((-1, 2), (3, 2), (0, 5)):
        with pytest.raises(ValueError, match="rows"):
            ShardSpan("w", (4, 2), torch.float32, start, stop)
