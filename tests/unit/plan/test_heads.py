import pytest

from raycp.plan import Range, head_shares


def test_nine_heads_on_two_ranks() -> None:
    first, second = head_shares(9, 3, 2)
    assert (first.query, first.kv, first.group_sizes) == (Range(0, 4), Range(0, 2), (3, 1))
    assert (second.query, second.kv, second.group_sizes) == (Range(4, 9), Range(1, 3), (2, 3))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (8, 2), (4, 4), (12, 1), (30, 10)])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_heads_are_dealt_once_and_meet_their_keys(num_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    group = num_heads // num_kv_heads
    shares = head_shares(num_heads, num_kv_heads, num_ranks)
    assert [h for s in shares for h in range(s.query.start, s.query.stop)] == list(range(num_heads))
    assert max(len(s.query) for s in shares) - min(len(s.query) for s in shares) <= 1
    for share in shares:
        read = [head // group for head in range(share.query.start, share.query.stop)]
        assert list(range(share.kv.start, share.kv.stop)) == sorted(set(read))
        assert share.group_sizes == tuple(read.count(head) for head in sorted(set(read)))
