import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline import plan_packs
from data_pipeline.streams import OpenPacks, pack_stream
from raycp.errors import CheckpointError, PlanError


@st.composite
def cases(draw):
    seq_length = draw(st.integers(1, 40))
    return draw(st.lists(st.integers(1, seq_length), min_size=1, max_size=120)), seq_length


def check_stream(lengths, seq_length, num_open, closed_by_add, flushed):
    """Each document once; no pack too long; each has the document that waited longest; few wait."""
    packs = [pack for closed in closed_by_add for pack in closed] + flushed
    assert sorted(d for pack in packs for d in pack) == list(range(len(lengths)))
    assert all(sum(lengths[d] for d in pack) <= seq_length for pack in packs)
    given_out = set()
    for pack in packs:
        oldest = next(d for d in range(len(lengths)) if d not in given_out)
        assert oldest in pack
        given_out.update(pack)
    waiting = 0
    for document, closed in enumerate(closed_by_add):
        waiting += lengths[document] - sum(lengths[d] for pack in closed for d in pack)
        assert waiting <= num_open * seq_length


def streamed(lengths, seq_length, num_open):
    packs = OpenPacks(seq_length, num_open)
    return [packs.add(d, n) for d, n in enumerate(lengths)], packs.flush()


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(1, 5))
def test_every_document_once_and_few_wait(case, num_open):
    lengths, seq_length = case
    check_stream(lengths, seq_length, num_open, *streamed(lengths, seq_length, num_open))


@pytest.mark.parametrize("fault", ["lost", "twice", "too long", "starved", "too many wait"])
def test_the_check_sees_a_planted_fault(fault):
    lengths = [6, 3, 5, 4, 4, 2] * 4
    closed, flushed = streamed(lengths, 8, 2)
    assert sum(map(len, closed)) > 2
    if fault == "lost":
        flushed[-1] = flushed[-1][1:]
    elif fault == "twice":
        flushed.append(flushed[-1])
    elif fault == "too long":
        flushed = [tuple(d for pack in flushed for d in pack)]
    elif fault == "starved":
        flushed.reverse()
    else:
        flushed, closed = [p for c in closed for p in c] + flushed, [[] for _ in closed]
    with pytest.raises(AssertionError):
        check_stream(lengths, 8, 2, closed, flushed)


@pytest.mark.parametrize(
    ("median", "sigma", "seq_length"), [(600, 0.9, 8192), (4000, 1.4, 131_072), (40_000, 0.7, 131_072)]
)
def test_full_to_995_permille(median, sigma, seq_length):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(median), sigma, 20_000), 1, seq_length).astype(np.int64).tolist()
    packs = list(pack_stream(lengths, seq_length))
    assert sum(lengths) / (len(packs) * seq_length) > 0.995


def test_very_short_documents_do_not_all_wait():
    packs, most = OpenPacks(131_072), 0
    for document in range(40_000):
        packs.add(document, 50)
        most = max(most, len(packs.state()["documents"]) if document % 1000 == 0 else 0)
    assert most <= 131_072 // 50 * 2 + 1, "of 64 packs it would be 167 772"
    full = [sum(50 for _ in pack) for pack in packs.flush()[:-1]]
    assert min(full) > 131_072 - 50


def test_lengths_that_never_fit_together_do_not_take_for_ever():
    lengths = [50_001 + i * 7 % 10_000 for i in range(3000)]
    start = time.process_time()
    packs = list(pack_stream(lengths, 131_072))
    assert time.process_time() - start < 2.0
    assert len(packs) == 1500


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_a_stream_that_stops_anywhere_goes_on_exactly_three_times_over(case, data):
    lengths, seq_length = case
    stops = sorted(data.draw(st.lists(st.integers(0, len(lengths)), min_size=3, max_size=3)))
    packs, got = OpenPacks(seq_length), []
    for document, length in enumerate(lengths):
        for _ in range(stops.count(document)):
            packs = OpenPacks.restored(json.loads(json.dumps(packs.state())))
        got += packs.add(document, length)
    assert got + packs.flush() == list(pack_stream(lengths, seq_length))


def test_a_lost_open_pack_would_be_seen():
    packs, lengths = OpenPacks(10), [4, 4, 9, 2, 1]
    got = [p for d, n in enumerate(lengths[:2]) for p in packs.add(d, n)]
    state = packs.state() | {"documents": [], "lengths": []}
    packs = OpenPacks.restored(state)
    got += [p for d, n in enumerate(lengths[2:], 2) for p in packs.add(d, n)]
    assert got + packs.flush() != list(pack_stream(lengths, 10))


def test_the_plan_of_the_policy_is_the_stream_and_its_beginning_does_not_change():
    lengths = [(i * 37) % 90 + 1 for i in range(400)]
    plan = plan_packs(lengths, seq_length=100, policy="first_fit", epoch=3)
    assert plan.packs == tuple(pack_stream(lengths, 100))
    packs = OpenPacks(100)
    closed = [p for d, n in enumerate(lengths[:250]) for p in packs.add(d, n)]
    assert closed
    assert plan.packs[: len(closed)] == tuple(closed)
    assert len(json.dumps(packs.state())) < 2000


def test_refusals():
    with pytest.raises(PlanError, match="document 3 has 11 tokens"):
        OpenPacks(10).add(3, 11)
    with pytest.raises(PlanError, match="set both to 1"):
        OpenPacks(0)
    with pytest.raises(CheckpointError, match="cannot be read"):
        OpenPacks.restored({"seq_length": 4})
