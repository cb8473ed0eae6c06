"""Rules that hold for any data and any world: isolation, conservation, restarts of positions, determinism, resume."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipeline import (
    Cursor,
    Document,
    PackLoader,
    StepSchedule,
    assign_packs,
    pack_documents,
    plan_packs,
    split_pack,
)
from data_pipeline.document import IGNORE
from data_pipeline.overflow import Overflow
from data_pipeline.store_writer import StoreWriter
from raycp.errors import CheckpointError
from raycp.plan import AttentionPlan, RankGrid

POLICIES = ("best_fit", "first_fit", "sequential", "none")
OVERFLOWS = ("split", "split_restart", "truncate", "truncate_left", "drop")


@st.composite
def documents(draw, longest=60):
    """Documents whose ids say where they come from: 1000 * document + position."""
    sizes = draw(st.lists(st.integers(1, longest), min_size=1, max_size=25))
    seed = draw(st.integers(0, 9))
    rng = np.random.default_rng(seed)
    found = []
    for number, size in enumerate(sizes):
        ids = 1000 * number + np.arange(size)
        targets = np.where(rng.random(size) < 0.7, np.append(ids[1:], 0), IGNORE)
        targets[-1] = IGNORE
        weights = rng.random(size).astype(np.float32) if number % 3 == 0 else None
        found.append(Document(ids=ids, targets=targets, weights=weights, row_id=f"f:{number}"))
    return found


def packs_of(docs, seq_length, policy, seed=0, epoch=0):
    plan = plan_packs([len(d) for d in docs], seq_length=seq_length, policy=policy, seed=seed, epoch=epoch)
    return [pack_documents([docs[i] for i in pack]) for pack in plan.packs]


def check_pack(pack) -> None:
    """Positions count up inside documents; no document predicts another; each id is in its place."""
    starts = [0, *pack.doc_ends[:-1]]
    for a, b in zip(starts, pack.doc_ends, strict=True):
        ids = pack.ids[a:b]
        assert len(set((ids // 1000).tolist())) == 1, "one document"
        assert (np.diff(ids) == 1).all()
        first = int(pack.position_ids[a])
        assert pack.position_ids[a:b].tolist() == list(range(first, first + b - a))
        assert pack.targets[b - 1] == IGNORE
        trained = np.flatnonzero(pack.targets[a:b] != IGNORE)
        assert (pack.targets[a:b][trained] == ids[trained] + 1).all()


@settings(max_examples=80, deadline=None)
@given(documents(), st.sampled_from(POLICIES), st.integers(60, 200), st.integers(0, 3))
def test_packs_keep_documents_apart_and_lose_nothing(docs, policy, seq_length, epoch):
    packs = packs_of(docs, seq_length, policy, epoch=epoch)
    for pack in packs:
        check_pack(pack)
        assert len(pack) <= seq_length
        assert (pack.position_ids[[0, *pack.doc_ends[:-1]]] == 0).all(), "positions start again at every document"
    ids = np.sort(np.concatenate([p.ids for p in packs]))
    assert ids.tolist() == sorted(itertools.chain.from_iterable(d.ids.tolist() for d in docs))
    assert sum(p.num_targets for p in packs) == sum(d.num_targets for d in docs)
    assert sum(p.target_weight for p in packs) == pytest.approx(sum(d.target_weight for d in docs))


@pytest.mark.parametrize("fault", ["position", "leak", "swap"])
def test_the_check_of_a_pack_sees_a_planted_fault(fault):
    one = Document(ids=np.arange(5), targets=[1, 2, 3, 4, IGNORE])
    pack = pack_documents([one, Document(ids=[1000, 1001], targets=[1001, IGNORE])])
    if fault == "position":
        pack.position_ids[5:] += np.array([5, 5], np.int32) * [1, 0]
    elif fault == "leak":
        pack.targets[4] = 1000
    else:
        pack.ids[[4, 5]] = pack.ids[[5, 4]]
    with pytest.raises(AssertionError):
        check_pack(pack)


@settings(max_examples=60, deadline=None)
@given(documents(longest=200), st.sampled_from(OVERFLOWS), st.integers(1, 50))
def test_overflow_accounts_for_every_token_and_target(docs, policy, limit):
    overflow = Overflow(limit, policy)
    kept = [part for d in docs for part in overflow.apply(d)]
    report = overflow.report
    assert all(len(d) <= limit and d.targets[-1] == IGNORE for d in kept)
    assert (report.documents_in, report.documents_out) == (len(docs), len(kept))
    assert report.tokens_in == sum(map(len, docs)) == report.tokens_kept + report.tokens_lost
    assert report.tokens_kept == sum(map(len, kept))
    assert report.targets_in == sum(d.num_targets for d in docs) == report.targets_kept + report.targets_lost
    assert report.targets_kept == sum(d.num_targets for d in kept)
    by_row = {d.row_id: d for d in docs}
    for d in kept:
        whole = by_row[d.row_id].ids.tolist()
        at = whole.index(int(d.ids[0]))
        assert d.ids.tolist() == whole[at : at + len(d)]
        if policy == "split":
            assert d.start_position == at, "positions run on over the cut"
        else:
            assert d.start_position == 0
        if policy == "truncate_left" and len(whole) > limit:
            assert at + len(d) == len(whole)
    if policy in ("split", "split_restart"):
        assert report.tokens_lost == 0
        assert report.targets_lost <= len(kept) - len(docs)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    documents(),
    st.sampled_from(("contiguous", "zigzag", "balanced")),
    st.integers(1, 5),
    st.integers(60, 150),
)
def test_the_shards_of_any_world_are_the_pack(docs, layout, cp, seq_length):
    for pack in packs_of(docs, seq_length, "best_fit")[:3]:
        plan = AttentionPlan.build(
            pack.doc_ends, RankGrid(dp=1, ring=cp), layout=layout, algorithm="ring", num_heads=1, num_kv_heads=1
        )
        shards = [split_pack(pack, plan, rank) for rank in range(cp)]
        index = np.concatenate([s.token_index for s in shards])
        assert sorted(index.tolist()) == list(range(len(pack)))
        order = np.argsort(index)
        for name in ("ids", "targets", "position_ids"):
            whole = np.concatenate([getattr(s, name) for s in shards])[order]
            assert whole.tolist() == getattr(pack, name).tolist()
        assert sum(s.target_weight for s in shards) == pytest.approx(pack.target_weight)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(0)
    with StoreWriter(tmp_path_factory.mktemp("s") / "store") as writer:
        for number, size in enumerate(rng.integers(1, 40, 150)):
            ids = 1000 * number + np.arange(size)
            writer.append(Document(ids=ids, targets=np.append(ids[1:], IGNORE), row_id=f"f:{number}"))
        return writer.commit(key="k", report={})


def consumed(store, schedule, start: int, stop: int, dp: int, *, policy: str, seed: int) -> list[list[str]]:
    """Rows of each pack of steps start + 1 to stop, as a world of dp replicas reads them, in pack order."""
    loader = PackLoader(store, seq_length=64, policy=policy, seed=seed)
    found = []
    for step in range(start + 1, stop + 1):
        ids = schedule.pack_ids(step)
        parts = assign_packs([loader.cost(p) for p in ids], dp)
        read = {ids[i]: list(loader.pack(ids[i]).row_ids) for part in parts for i in part}
        assert len(read) == len(ids)
        found += [read[p] for p in ids]
    return found


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(POLICIES),
    st.integers(1, 9),
    st.lists(st.integers(1, 6), min_size=4, max_size=4),
    st.data(),
)
def test_three_resumes_in_a_row_on_any_world_read_what_an_unbroken_run_reads(store, policy, batch, worlds, data):
    plan = plan_packs(store.lengths, seq_length=64, policy=policy, seed=5)
    schedule = StepSchedule(num_packs=len(plan), global_batch=batch, epochs=2.0, family=plan.family)
    total = schedule.total_steps
    stops = sorted(data.draw(st.lists(st.integers(0, total), min_size=3, max_size=3)))
    unbroken = consumed(store, schedule, 0, total, 1, policy=policy, seed=5)
    broken, done = [], 0
    for stop, dp in zip([*stops, total], worlds, strict=True):
        broken += consumed(store, schedule, done, stop, dp, policy=policy, seed=5)
        raw = schedule.cursor(stop).to_dict()
        done = stop if stop == total else schedule.restore(Cursor.from_dict(raw))
        assert done == stop
    assert broken == unbroken
    rows = sorted(store.row_id(i) for i in range(len(store)))
    half = len(plan)
    assert sorted(itertools.chain.from_iterable(unbroken[:half])) == rows, "an epoch has every row once"
    assert sorted(itertools.chain.from_iterable(unbroken[half:])) == rows


def test_a_resume_that_is_one_pack_late_would_be_seen(store):
    plan = plan_packs(store.lengths, seq_length=64)
    schedule = StepSchedule(num_packs=len(plan), global_batch=1, family=plan.family)
    whole = consumed(store, schedule, 0, 6, 1, policy="best_fit", seed=0)
    late = consumed(store, schedule, 0, 3, 1, policy="best_fit", seed=0)
    late += consumed(store, schedule, 4, 6, 1, policy="best_fit", seed=0)
    assert late != whole


@pytest.mark.parametrize("change", [{"seed": 1}, {"seq_length": 65}, {"policy": "first_fit"}, {"lengths": None}])
def test_a_cursor_of_other_data_or_settings_is_refused_with_both_values(store, change):
    base = {"lengths": store.lengths, "seq_length": 64, "policy": "best_fit", "seed": 0}
    if "lengths" in change:
        change = {"lengths": store.lengths[:-1]}
    mine, theirs = plan_packs(**base), plan_packs(**{**base, **change})
    schedule = StepSchedule(num_packs=len(mine), global_batch=2, family=mine.family)
    other = StepSchedule(num_packs=len(theirs), global_batch=2, family=theirs.family)
    with pytest.raises(CheckpointError) as error:
        schedule.restore(other.cursor(2))
    assert error.value.details == {"found": theirs.hash, "expected": mine.hash}
    assert theirs.hash in str(error.value)
    assert mine.hash in str(error.value)


def test_any_step_is_reached_by_a_seek(tmp_path):
    """The last step of a long run costs what the first does: nothing before it is read."""
    import time

    with StoreWriter(tmp_path / "store") as writer:
        for number in range(20_000):
            writer.append(Document(ids=[number, 1, 2], targets=[1, 2, IGNORE], row_id=f"f:{number}"))
        store = writer.commit(key="k", report={})
    loader = PackLoader(store, seq_length=30)
    schedule = StepSchedule(num_packs=loader.packs_per_epoch, global_batch=4, epochs=1000.0)
    loader.plan(999)

    def seconds(step: int) -> float:
        began = time.perf_counter()
        for pack_id in schedule.pack_ids(step):
            loader.pack(pack_id)
        return time.perf_counter() - began

    seconds(1)
    last = min(seconds(schedule.total_steps) for _ in range(5))
    assert last < 0.05
