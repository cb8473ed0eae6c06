"""Manifests: what they refuse, and that no changed bit goes unseen."""

import json
import pickle
import random
import re
import time
from dataclasses import replace

import pytest

from raycp.errors import CheckpointError
from raycp.training.manifest import (
    Manifest,
    ShardEntry,
    ShardRecord,
    ShardSum,
    coverage_problem,
    is_plain,
    layout_sum,
    shard_file,
    whole,
)


def entry(name="param/w", rows=4, start=0, stop=4, dtype="float32"):
    return ShardEntry(name=name, shape=(rows, 2), dtype=dtype, start=start, stop=stop)


def record(file="shard-g0001-00000.safetensors", *entries):
    return ShardRecord(file=file, bytes=100, crc32=7, entries=entries or (entry(),))


def manifest(**change):
    fields = {
        "step": 3,
        "cursor": {"epoch": 0, "pack_index": 3},
        "plan_hash": "abc",
        "generation": 1,
        "run_id": "run",
        "grid": {"dp": 1},
        "shards": (record(),),
        "extra": {"step_events": [{"loss": 0.1, "pack_ids": (1, 2), 7: None}]},
    }
    return Manifest(**{**fields, **change})


def test_round_trips():
    m = manifest(extra={})
    assert Manifest.from_bytes(m.to_bytes()) == m
    assert Manifest.from_dict(json.loads(json.dumps(m.to_dict()))) == m
    assert ShardRecord.from_dict(record().to_dict()) == record()
    odd = manifest()
    assert Manifest.from_bytes(odd.to_bytes()).to_bytes() == odd.to_bytes(), "tuples and numbers as keys become JSON's"
    assert Manifest.from_bytes(odd.to_bytes()).extra["step_events"][0]["loss"] == 0.1


def test_no_changed_bit_goes_unseen():
    data = manifest().to_bytes()
    good = Manifest.from_bytes(data)
    unseen = []
    for at in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            try:
                if Manifest.from_bytes(bytes(changed)).to_bytes() != good.to_bytes():
                    unseen.append((at, bit))
            except CheckpointError:
                continue
    assert unseen == []


def test_without_the_checksum_many_changed_bits_would_go_unseen():
    """The planted fault of the test above."""
    text = json.dumps(manifest().to_dict()).encode()
    changed = text.replace(b'"pack_index": 3', b'"pack_index": 2')
    assert Manifest.from_bytes(changed).cursor["pack_index"] == 2


def test_no_cut_goes_unseen():
    data = manifest().to_bytes()
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            Manifest.from_bytes(data[:length])


@pytest.mark.parametrize(
    "name", ["../other/shard", "a/b", "/etc/passwd", "..", ".", "", ".hidden", "a\\b", "a\0b", None, 3, ["x"]]
)
def test_a_file_name_that_leaves_the_folder_is_refused(name):
    assert not is_plain(name)
    raw = manifest().to_dict()
    raw["shards"][0]["file"] = name
    with pytest.raises(CheckpointError):
        Manifest.from_dict(raw)


def values():
    return [None, -1, 1.5, "x", [], {}, [[]], True, "../x", {"a": {}}, [None], 10**30]


def paths(tree, at=()):
    yield at
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from paths(value, (*at, key))


def test_hostile_values_are_refused_or_harmless():
    """Any field becomes anything: a CheckpointError, or a manifest that keeps the types."""
    rng = random.Random(0)
    whole = json.loads(json.dumps(manifest(extra={}).to_dict()))
    places = [p for p in paths(whole) if p]
    for place in places:
        for value in values():
            raw = json.loads(json.dumps(whole))
            target = raw
            for key in place[:-1]:
                target = target[key]
            if rng.random() < 0.1:
                del target[place[-1]]
            else:
                target[place[-1]] = value
            try:
                made = Manifest.from_dict(raw)
            except CheckpointError:
                continue
            assert isinstance(made.step, int)
            assert isinstance(made.generation, int)
            for shard in made.shards:
                assert is_plain(shard.file)
                assert isinstance(shard.bytes, int)
                assert all(isinstance(n, int) for e in shard.entries for n in (*e.shape, e.start, e.stop))
            coverage_problem(made.shards)
            made.to_bytes()


@pytest.mark.parametrize("data", [b"[]", b"3", b"null", b"", b"\xff", b"[" * 100_000, b'{"version": 1}'])
def test_what_is_no_manifest(data):
    with pytest.raises(CheckpointError):
        Manifest.from_bytes(data)


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([], "no shard"),
        ([entry(stop=2)], r"rows \[2, 4\) are missing"),
        ([entry(start=1)], "missing or given twice"),
        ([entry(), entry()], "given twice"),
        ([entry(stop=2), entry(start=2, dtype="bfloat16")], "several"),
        ([entry(stop=2), entry(start=2)], None),
    ],
)
def test_coverage(entries, problem):
    found = coverage_problem([record(f"shard-{i}", e) for i, e in enumerate(entries)])
    assert found == "" if problem is None else re.search(problem, found)


def large(step, ranks, tensors, *, before=None):
    """A manifest of that many ranks, as a keeper or the driver makes it from what it is told."""
    if before is not None:
        shards = tuple(replace(s, crc32=s.crc32 + 1) for s in before.shards)
        return replace(before, step=step, shards=shards)
    names = [f"exp_avg/model.layers.{t % 80}.mlp.gate_proj.weight{t}" for t in range(tensors)]
    shards = tuple(
        ShardRecord(
            file=shard_file(1, r),
            bytes=100,
            crc32=r,
            entries=tuple(
                ShardEntry(name=n, shape=(ranks * 4, 4096), dtype="float32", start=r * 4, stop=r * 4 + 4) for n in names
            ),
        )
        for r in range(ranks)
    )
    return manifest(step=step, shards=shards)


def test_entries_of_a_generation_do_not_travel_with_each_step():
    """128 ranks of 873 tensors: 9.5 MB to each keeper for each snapshot, and seconds of pickling."""
    first = large(1, 128, 873)
    second = large(2, 128, 873, before=first)
    began = time.perf_counter()
    told = pickle.dumps(second.since(first))
    there = whole(pickle.loads(told), [first])
    assert time.perf_counter() - began < 0.3  # 3 ms
    assert there == second
    assert len(told) < 10_000 < len(pickle.dumps(first)) / 100
    assert all(a.entries is b.entries for a, b in zip(there.shards, first.shards, strict=True))


def test_a_change_is_told_only_where_it_says_all_and_understood_only_with_its_base():
    first = large(1, 2, 3)
    second = large(2, 2, 3, before=first)
    assert whole(second.since(first), [second]) is None
    assert whole(second, []) is second
    assert second.since(None) is None
    assert replace(second, generation=9).since(first) is None
    assert second.since(large(1, 3, 3)) is None
    moved = replace(second.shards[1], entries=second.shards[1].entries[1:])
    assert replace(second, shards=(second.shards[0], moved)).since(first) is None


def test_a_record_is_brief_only_for_who_has_its_entries():
    (one, other) = large(1, 2, 3).shards
    assert one.brief(None) is one
    assert one.brief(layout_sum(other.entries)) is one
    told = replace(one, crc32=7).brief(layout_sum(one.entries))
    assert isinstance(told, ShardSum)
    assert told.of(one) == replace(one, crc32=7)


def test_the_file_is_canonical_json_of_the_manifest_whatever_is_in_it():
    extra = {"z": 1, "a": {"shards": [], "é": None, 3: [1.5, True]}}
    for one in (manifest(shards=()), replace(large(3, 2, 5), extra=extra)):
        text = json.dumps(json.loads(json.dumps(one.to_dict())), sort_keys=True, separators=(",", ":"))
        assert one.to_bytes().decode().startswith(f'{text[:-1]},"checksum":')
        assert Manifest.from_bytes(one.to_bytes()).to_bytes() == one.to_bytes()
