import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline import Document, Pack, pack_documents
from data_pipeline.document import IGNORE, shift_targets
from raycp.errors import DataError


def document(size: int, *, first: int = 10, start: int = 0, weights: list[float] | None = None) -> Document:
    ids = np.arange(first, first + size)
    return Document(
        ids=ids,
        targets=shift_targets(ids, np.ones(size, bool)),
        weights=None if weights is None else np.array(weights),
        start_position=start,
        row_id=f"row:{first}",
    )


def golden_documents() -> list[Document]:
    a, b = np.array([ord(c) for c in "abc"]), np.array([ord(c) for c in "defg"])
    return [Document(ids=x, targets=shift_targets(x, np.ones(x.size, bool)), row_id="r") for x in (a, b)]


def check_pack(pack: Pack, documents: list[Document]) -> None:
    """Everything the contract says of a pack without padding."""
    starts = [0, *pack.doc_ends[:-1]]
    assert pack.doc_ends[-1] == len(pack)
    assert len(pack.doc_ends) == len(documents)
    for doc, start, end in zip(documents, starts, pack.doc_ends, strict=True):
        assert pack.ids[start:end].tolist() == doc.ids.tolist()
        assert pack.targets[start:end].tolist() == doc.targets.tolist()
        assert pack.targets[end - 1] == IGNORE
        assert pack.position_ids[start:end].tolist() == [doc.start_position + i for i in range(end - start)]


def test_golden_example_of_the_design():
    pack = pack_documents(golden_documents())
    assert "".join(map(chr, pack.ids)) == "abcdefg"
    assert pack.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert pack.doc_ends == (3, 7)
    assert pack.targets.tolist() == [ord("b"), ord("c"), -100, ord("e"), ord("f"), ord("g"), -100]
    assert pack.weights is None
    assert (pack.num_targets, pack.target_weight, pack.doc_lengths) == (5, 5.0, (3, 4))
    assert [a.dtype for a in (pack.ids, pack.targets, pack.position_ids)] == [np.int32] * 3


def test_golden_example_padded():
    pack = pack_documents(golden_documents(), pad_to=8)
    assert pack.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert pack.doc_ends == (3, 7, 8)
    assert pack.targets[-1] == -100
    assert pack.row_ids == ("r", "r", "")


def test_each_pad_row_is_a_document_of_its_own():
    pack = pack_documents([document(2)], pad_to=6)
    assert pack.doc_ends == (2, 3, 4, 5, 6)
    assert pack.position_ids.tolist() == [0, 1, 0, 0, 0, 0]
    assert pack.num_targets == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 50)), min_size=1, max_size=8))
def test_positions_restart_at_each_document_and_nowhere_else(shape):
    documents = [document(n, first=100 * i, start=start) for i, (n, start) in enumerate(shape)]
    pack = pack_documents(documents)
    check_pack(pack, documents)
    steps = np.flatnonzero(np.diff(pack.position_ids) != 1) + 1
    assert set(steps) <= set(pack.doc_ends)


@pytest.mark.parametrize("fault", ["leaked target", "running positions"])
def test_the_check_sees_a_planted_fault(fault):
    documents = [document(3), document(4, first=50)]
    pack = pack_documents(documents)
    if fault == "leaked target":
        pack.targets[2] = pack.ids[3]
    else:
        pack.position_ids[:] = np.arange(7)
    with pytest.raises(AssertionError):
        check_pack(pack, documents)


def test_weights_of_some_documents_make_ones_of_the_others():
    pack = pack_documents([document(2), document(3, weights=[0.5, 0.25, 9.0])], pad_to=6)
    assert pack.weights is not None
    assert pack.weights.tolist() == [1, 1, 0.5, 0.25, 9.0, 1]
    assert pack.target_weight == 1.75  # the weights of ignored positions do not count


def test_shift_targets_trains_the_token_before():
    ids = np.array([5, 6, 7, 8])
    assert shift_targets(ids, np.array([True, False, True, True])).tolist() == [-100, 7, 8, -100]


def test_pad_id_equal_to_a_real_id_is_harmless():
    zeros = np.zeros(3, np.int32)
    pack = pack_documents([Document(ids=zeros, targets=shift_targets(zeros, np.ones(3, bool)))], pad_to=5)
    assert pack.targets.tolist() == [0, 0, -100, -100, -100]


def test_refusals():
    with pytest.raises(DataError, match="no documents"):
        pack_documents([])
    with pytest.raises(DataError, match="do not fit in pad_to=2"):
        pack_documents([document(3)], pad_to=2)
    with pytest.raises(DataError, match="of the next document"):
        Document(ids=np.array([1, 2]), targets=np.array([2, 3]))
    with pytest.raises(DataError, match="differ in shape"):
        Document(ids=np.array([1, 2]), targets=np.array([-100]))
    with pytest.raises(DataError, match="n >= 1"):
        Document(ids=np.array([]), targets=np.array([]))
