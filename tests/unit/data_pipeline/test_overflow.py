import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline import Document
from data_pipeline.document import IGNORE, shift_targets
from data_pipeline.overflow import Overflow, OverflowReport, raise_overflow
from raycp.errors import DataError


def document(size: int, trained: list[bool] | None = None, row: str = "f:1") -> Document:
    ids = np.arange(size) + 7
    mask = np.ones(size, bool) if trained is None else np.array(trained)
    weights = np.arange(size) / 8
    return Document(ids=ids, targets=shift_targets(ids, mask), weights=weights, row_id=row)


def check_conservation(report: OverflowReport) -> None:
    assert report.tokens_in == report.tokens_kept + report.tokens_lost
    assert report.targets_in == report.targets_kept + report.targets_lost
    assert min(report.tokens_lost, report.targets_lost) >= 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=25), min_size=1, max_size=6),
    st.integers(1, 12),
    st.sampled_from(["raise", "split", "truncate", "drop"]),
)
def test_conservation(masks, limit, policy):
    documents = [document(len(mask), mask, row=f"f:{i}") for i, mask in enumerate(masks)]
    overflow = Overflow(limit, policy)
    kept = [part for d in documents for part in overflow.apply(d)]
    report = overflow.report
    check_conservation(report)
    assert report.tokens_in == sum(map(len, documents))
    assert report.tokens_kept == sum(map(len, kept))
    assert report.targets_kept == sum(d.num_targets for d in kept)
    assert report.documents_out == len(kept)
    if policy != "raise":
        assert all(len(d) <= limit for d in kept)
    assert report.over == sum(len(d) > limit for d in documents)
    if policy == "split":
        assert report.tokens_lost == 0
        assert report.targets_lost <= sum(-(-len(d) // limit) - 1 for d in documents)
        for d in documents:
            parts = [p for p in kept if p.row_id == d.row_id]
            assert np.concatenate([p.ids for p in parts]).tolist() == d.ids.tolist()
            assert np.concatenate([p.weights for p in parts if p.weights is not None]).tolist() == d.weights.tolist()
            assert [p.start_position for p in parts] == list(range(0, len(d), limit))
            assert all(p.targets[-1] == IGNORE for p in parts)
            whole = np.concatenate([p.targets for p in parts])
            inside = [i for i in range(len(d)) if (i + 1) % limit]
            assert whole[inside].tolist() == d.targets[inside].tolist()


def test_the_check_sees_a_planted_fault():
    overflow = Overflow(4, "truncate")
    overflow.apply(document(9))
    overflow.report.tokens_lost -= 1
    with pytest.raises(AssertionError):
        check_conservation(overflow.report)


def test_exact_fit_is_kept_whole_by_every_policy():
    for policy in ("raise", "split", "truncate", "drop"):
        assert [len(d) for d in Overflow(5, policy).apply(document(5))] == [5]


def test_truncate_and_drop():
    (cut,) = Overflow(3, "truncate").apply(document(5))
    assert (cut.ids.tolist(), cut.targets.tolist()) == ([7, 8, 9], [8, 9, IGNORE])
    overflow = Overflow(3, "drop")
    assert overflow.apply(document(5)) == []
    assert (overflow.report.dropped, overflow.report.tokens_lost, overflow.report.targets_lost) == (1, 5, 4)


def test_fragments_of_a_fragment_keep_running_positions():
    parts = Overflow(2, "split").apply(
        Document(ids=np.arange(3), targets=np.full(3, IGNORE), start_position=10, row_id="f:1")
    )
    assert [p.start_position for p in parts] == [10, 12]


def test_errors_say_count_longest_and_row():
    with pytest.raises(DataError, match=r"3 document\(s\) .* seq_length=8 .* longest has 20, row a.jsonl:4") as error:
        raise_overflow(3, 20, "a.jsonl:4", 8)
    assert "'split'" in error.value.fix
    with pytest.raises(DataError, match="'cut' is not a choice"):
        Overflow(4, "cut")
