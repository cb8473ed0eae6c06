import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycp.plan.layout import LAYOUTS, make_shards

lengths_lists = st.lists(st.integers(1, 40), min_size=0, max_size=12)


@settings(max_examples=200, deadline=None)
@given(lengths=lengths_lists, num_ranks=st.integers(1, 9), layout=st.sampled_from(LAYOUTS))
def test_shards_are_a_partition_in_ascending_order(lengths: list[int], num_ranks: int, layout: str) -> None:
    ends = np.cumsum(lengths).tolist()
    shards = make_shards(ends, num_ranks, layout)
    indices = [s.token_index() for s in shards]
    assert np.array_equal(np.sort(np.concatenate(indices)), np.arange(sum(lengths)))
    for shard, index in zip(shards, indices, strict=True):
        assert index.dtype == np.int64
        assert len(index) == shard.num_tokens
        assert (np.diff(index) > 0).all()


@settings(max_examples=100, deadline=None)
@given(lengths=lengths_lists, num_ranks=st.integers(1, 5), layout=st.sampled_from(LAYOUTS))
def test_rows_before_counts_local_tokens(lengths: list[int], num_ranks: int, layout: str) -> None:
    for shard in make_shards(np.cumsum(lengths).tolist(), num_ranks, layout):
        positions = np.arange(sum(lengths) + 2)
        expected = (shard.token_index()[None, :] < positions[:, None]).sum(1)
        assert np.array_equal(shard.rows_before(positions), expected)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_zigzag_spreads_one_token_documents_over_all_ranks(num_ranks: int) -> None:
    shards = make_shards(list(range(1, 4 * num_ranks + 1)), num_ranks, "zigzag")
    assert [s.num_tokens for s in shards] == [4] * num_ranks


def test_zigzag_gives_every_rank_two_mirrored_pieces_of_a_document() -> None:
    first, second = make_shards([16], 2, "zigzag")
    assert first.token_index().tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert second.token_index().tolist() == [4, 5, 6, 7, 8, 9, 10, 11]


def test_contiguous_cuts_where_documents_do_not_end() -> None:
    first, second = make_shards([3, 7], 2, "contiguous")
    assert first.document.tolist() == [0]
    assert second.document.tolist() == [1]
    third = make_shards([3, 8], 2, "contiguous")[0]
    assert third.stop.tolist() == [3, 4]
