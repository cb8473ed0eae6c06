import json

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


def brute(lengths, seq_length, num_open):
    """First fit with the definition's own words: slow, and without the class."""
    packs, out = [], []
    for document, length in enumerate(lengths):
        pack = next((p for p in packs if sum(lengths[d] for d in p) + length <= seq_length), None)
        if pack is None:
            if len(packs) == num_open:
                fullest = max(packs, key=lambda p: sum(lengths[d] for d in p))
                packs = [p for p in packs if p is not fullest]
                out.append(tuple(fullest))
            pack = []
            packs.append(pack)
        pack.append(document)
        if sum(lengths[d] for d in pack) == seq_length:
            packs = [p for p in packs if p is not pack]
            out.append(tuple(pack))
    return out + [tuple(p) for p in packs]


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(1, 5))
def test_it_is_first_fit(case, num_open):
    lengths, seq_length = case
    packs = OpenPacks(seq_length, num_open)
    got = [pack for d, n in enumerate(lengths) for pack in packs.add(d, n)] + packs.flush()
    assert got == brute(lengths, seq_length, num_open)


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
    state = packs.state() | {"rooms": [], "members": []}
    packs = OpenPacks.restored(state)
    got += [p for d, n in enumerate(lengths[2:], 2) for p in packs.add(d, n)]
    assert got + packs.flush() != list(pack_stream(lengths, 10))


def test_the_plan_of_the_policy_is_the_stream_and_its_beginning_does_not_change():
    lengths = [(i * 37) % 90 + 1 for i in range(400)]
    plan = plan_packs(lengths, seq_length=100, policy="first_fit", epoch=3)
    assert plan.packs == tuple(pack_stream(lengths, 100))
    packs = OpenPacks(100)
    closed = [p for d, n in enumerate(lengths[:250]) for p in packs.add(d, n)]
    assert plan.packs[: len(closed)] == tuple(closed)
    assert len(json.dumps(packs.state())) < 2000


def test_refusals():
    with pytest.raises(PlanError, match="document 3 has 11 tokens"):
        OpenPacks(10).add(3, 11)
    with pytest.raises(PlanError, match="set both to 1"):
        OpenPacks(0)
    with pytest.raises(CheckpointError, match="cannot be read"):
        OpenPacks.restored({"seq_length": 4})
