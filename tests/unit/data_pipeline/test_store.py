import json
import os
import pickle

import numpy as np
import pytest

from data_pipeline import Document, DocumentStore
from data_pipeline.store import META, problem_with
from data_pipeline.store_writer import StoreWriter
from raycp.errors import DataError


def documents() -> list[Document]:
    return [
        Document(ids=np.array([1, 2, 3]), targets=np.array([2, -100, -100]), row_id="a.jsonl:1"),
        Document(ids=np.array([9]), targets=np.array([-100]), start_position=4, row_id="a.jsonl:2"),
        Document(
            ids=np.array([4, 5]), targets=np.array([5, -100]), weights=np.array([0.5, 3.0]), row_id="caf\u00e9.jsonl:3"
        ),
        Document(ids=np.array([6, 7]), targets=np.array([7, -100])),
    ]


def write(folder, docs) -> DocumentStore:
    with StoreWriter(folder) as writer:
        for document in docs:
            writer.append(document)
        return writer.commit(key="key", report={"format": "text"})


def check_same(store: DocumentStore, docs: list[Document]) -> None:
    assert len(store) == len(docs)
    for i, want in enumerate(docs):
        got = store.document(i)
        assert (got.ids.tolist(), got.targets.tolist()) == (want.ids.tolist(), want.targets.tolist())
        assert (got.start_position, got.row_id) == (want.start_position, want.row_id)
        assert got.target_weight == want.target_weight == store.target_weights[i]
        assert store.num_targets[i] == want.num_targets


def test_a_file_name_that_is_not_unicode_is_kept(tmp_path):
    name = os.fsdecode(b"caf\xe9.jsonl:1")
    store = write(tmp_path / "s", [Document(ids=np.array([1, 2]), targets=np.array([2, -100]), row_id=name)])
    assert store.row_id(0) == name


def test_round_trip_with_weights_that_start_late(tmp_path):
    store = write(tmp_path / "s", documents())
    check_same(store, documents())
    assert store.document(0).weights.tolist() == [1, 1, 1]
    assert (store.num_tokens, store.longest, store.max_positions) == (8, 3, 5)
    assert store.report == {"format": "text"}
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_the_check_sees_a_planted_fault(tmp_path):
    store = write(tmp_path / "s", documents()[:2])
    raw = bytearray((tmp_path / "s" / "ids.bin").read_bytes())
    raw[0] ^= 1
    (tmp_path / "s" / "ids.bin").write_bytes(raw)
    with pytest.raises(AssertionError):
        check_same(store, documents()[:2])


def test_without_weights_there_is_no_weights_file(tmp_path):
    store = write(tmp_path / "s", documents()[:2])
    assert store.document(0).weights is None
    assert not (tmp_path / "s" / "weights.bin").exists()


def test_a_store_travels_as_its_path(tmp_path):
    store = write(tmp_path / "s", documents())
    raw = pickle.dumps(store)
    assert len(raw) < 500
    check_same(pickle.loads(raw), documents())


def test_fingerprint_is_of_the_documents(tmp_path):
    first = write(tmp_path / "a", documents())
    assert write(tmp_path / "b", documents()).fingerprint == first.fingerprint
    assert write(tmp_path / "c", documents()[:3]).fingerprint != first.fingerprint


@pytest.mark.parametrize("damage", ["cut", "missing", "meta", "version", "no meta"])
def test_a_damaged_folder_is_recognised_and_replaced(tmp_path, damage):
    folder = tmp_path / "s"
    write(folder, documents())
    assert problem_with(folder) == ""
    meta = folder / META
    if damage == "cut":
        (folder / "targets.bin").write_bytes(b"1234")
    elif damage == "missing":
        (folder / "lengths.bin").unlink()
    elif damage == "meta":
        meta.write_text(meta.read_text()[:20])
    elif damage == "version":
        meta.write_text(json.dumps({**json.loads(meta.read_text()), "version": 0}))
    else:
        meta.unlink()
    with pytest.raises(DataError, match="no usable document store"):
        DocumentStore.open(folder)
    check_same(write(folder, documents()), documents())


def test_nothing_is_visible_before_commit_and_nothing_stays_after_a_failure(tmp_path):
    def fail_halfway() -> None:
        with StoreWriter(tmp_path / "s") as writer:
            writer.append(documents()[0])
            assert not (tmp_path / "s").exists()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    assert list(tmp_path.iterdir()) == []


def test_who_comes_second_takes_what_is_there(tmp_path):
    first = write(tmp_path / "s", documents())
    before = (tmp_path / "s" / META).stat().st_mtime_ns
    assert write(tmp_path / "s", documents()).fingerprint == first.fingerprint
    assert (tmp_path / "s" / META).stat().st_mtime_ns == before
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_refusals(tmp_path):
    with StoreWriter(tmp_path / "s") as writer, pytest.raises(DataError, match="no document is left"):
        writer.commit(key="", report={})
    store = write(tmp_path / "t", documents())
    with pytest.raises(IndexError, match="document 4 of a store of 4"):
        store.document(4)
