import pickle

import numpy as np
import pytest

from data_pipeline import Document, DocumentStore, PackLoader, StepSchedule, assign_packs, pack_documents
from data_pipeline.store_writer import StoreWriter
from raycp.errors import PlanError


@pytest.fixture
def store(tmp_path) -> DocumentStore:
    rng = np.random.default_rng(0)
    with StoreWriter(tmp_path / "store") as writer:
        for i, size in enumerate(rng.integers(1, 17, 40)):
            targets = np.where(rng.random(size) < 0.5, 5, -100)
            targets[-1] = -100
            writer.append(Document(ids=rng.integers(0, 99, size), targets=targets, row_id=f"f:{i}"))
        return writer.commit(key="k", report={})


@pytest.fixture
def loader(store):
    return PackLoader(store, seq_length=16, seed=3)


def same(a, b) -> bool:
    return a.doc_ends == b.doc_ends and a.row_ids == b.row_ids and np.array_equal(a.ids, b.ids)


def test_an_epoch_reads_every_document_once(store, loader):
    for epoch in (0, 1, 5):
        first = epoch * loader.packs_per_epoch
        packs = [loader.pack(i) for i in range(first, first + loader.packs_per_epoch)]
        assert sorted(r for p in packs for r in p.row_ids) == sorted(store.row_id(i) for i in range(len(store)))
        assert sum(p.num_targets for p in packs) == store.num_targets.sum()


def test_sums_without_reading_are_the_packs_own(loader):
    for pack_id in range(loader.packs_per_epoch * 2):
        pack = loader.pack(pack_id)
        assert loader.weight(pack_id) == pack.target_weight
        assert loader.num_targets(pack_id) == pack.num_targets
        assert loader.num_tokens(pack_id) == len(pack)
        assert loader.doc_lengths(pack_id) == pack.doc_lengths
        assert loader.cost(pack_id) == sum(n * n for n in pack.doc_lengths)


def test_step_weight_is_the_sum_over_any_split_of_the_step(loader):
    schedule = StepSchedule(num_packs=loader.packs_per_epoch, global_batch=5, epochs=2)
    for step in range(1, schedule.total_steps + 1):
        ids = schedule.pack_ids(step)
        parts = assign_packs([loader.cost(p) for p in ids], 3)
        assert loader.step_weight(ids) == sum(loader.pack(ids[i]).target_weight for part in parts for i in part)


def test_any_pack_is_read_by_itself(store, loader):
    wanted = pack_documents([store.document(d) for d in loader.documents(5)])
    assert same(loader.pack(5), wanted)
    assert not same(loader.pack(4), wanted)


def test_another_process_sees_the_same_packs(store, loader):
    other = PackLoader(pickle.loads(pickle.dumps(store)), seq_length=16, seed=3)
    assert other.plan(2).hash == loader.plan(2).hash
    assert same(other.pack(7), loader.pack(7))


def test_negative_pack_ids_are_refused(loader):
    with pytest.raises(PlanError, match="-1 is negative"):
        loader.pack(-1)
