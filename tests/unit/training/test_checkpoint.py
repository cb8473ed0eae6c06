"""Checkpoints: round trip between shard counts, every way of damage, pruning."""

import json
import pickle
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from raycp.errors import CheckpointError
from raycp.training.checkpoint import (
    CheckpointReader,
    Manifest,
    commit,
    committed_run,
    discard_uncommitted,
    load_manifest,
    newest,
    prune,
    step_folder,
    verify,
    write_shard,
)
from raycp.training.sharding import ShardSpan, row_range
from raycp.training.tensorfile import checksum_of, write_tensors


def tensors(step=0):
    g = torch.Generator().manual_seed(step)
    return {
        "param/w": torch.randn(7, 3, generator=g),
        "param/half": torch.randn(5, generator=g).bfloat16(),
        "exp_avg/w": torch.randn(7, 3, generator=g),
        "optimizer/step": torch.tensor([float(step)]),
    }


def shards_of(whole, rank, world_size):
    state = {}
    for name, tensor in whole.items():
        start, stop = row_range(tensor.shape[0], rank, world_size)
        if stop > start:
            state[name] = (ShardSpan(name, tuple(tensor.shape), tensor.dtype, start, stop), tensor[start:stop])
    return state


def save(root, step, world_size=3, generation=1):
    folder = step_folder(root, step)
    records = [
        write_shard(folder, r, shards_of(tensors(step), r, world_size), generation=generation)
        for r in range(world_size)
    ]
    manifest = Manifest(
        step=step,
        cursor={"epoch": 0, "pack_index": step, "plan_hash": "abc"},
        plan_hash="abc",
        generation=generation,
        run_id="run",
        grid={"dp": world_size, "ring": 1},
        shards=tuple(pickle.loads(pickle.dumps(records))),
        fingerprint={"model": "m"},
    )
    return commit(folder, manifest), manifest


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_any_rows_come_back_bit_equal(tmp_path, world_size):
    folder, manifest = save(tmp_path, 12, world_size)
    assert folder.name == "step-00000012"
    assert verify(folder) == manifest == load_manifest(folder)
    reader = CheckpointReader(folder)
    whole = tensors(12)
    assert reader.names == {n: tuple(t.shape) for n, t in whole.items()}
    for name, tensor in whole.items():
        for start in range(tensor.shape[0] + 1):
            for stop in range(start, tensor.shape[0] + 1):
                got = reader.read(name, start, stop)
                assert got.dtype == tensor.dtype
                assert torch.equal(got, tensor[start:stop]), (name, start, stop)


def test_files_are_plain_safetensors_and_json(tmp_path):
    folder, manifest = save(tmp_path, 1, 2)
    first = load_file(folder / manifest.shards[0].file)
    assert torch.equal(first["param/w"], tensors(1)["param/w"][:4])
    assert sorted(p.suffix for p in folder.iterdir()) == [".json", ".safetensors", ".safetensors"]
    assert json.loads((folder / "manifest.json").read_text())["version"] == 1


def test_unknown_names_and_rows_are_errors(tmp_path):
    reader = CheckpointReader(save(tmp_path, 1)[0])
    with pytest.raises(CheckpointError, match="no tensor 'param/x'"):
        reader.read("param/x")
    with pytest.raises(CheckpointError, match=r"rows \[3, 9\) of 7"):
        reader.read("param/w", 3, 9)


def test_nothing_is_committed_with_a_missing_or_double_shard(tmp_path):
    folder, manifest = save(tmp_path, 1)
    missing = Manifest(**{**manifest.__dict__, "shards": manifest.shards[:2]})
    with pytest.raises(CheckpointError, match="missing"):
        commit(folder, missing)
    double = Manifest(**{**manifest.__dict__, "shards": (*manifest.shards, manifest.shards[0])})
    with pytest.raises(CheckpointError, match="given twice"):
        commit(folder, double)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def garble(path):
    (path.parent / "manifest.json").write_text('{"version": 1, "step": 3, "sh')


def lose(path):
    path.unlink()


def forget_shards(path):
    (path.parent / "manifest.json").write_text('{"version": 1, "step": 3}')


@pytest.mark.parametrize("damage", [flip, cut, garble, lose, forget_shards])
def test_a_damaged_step_is_set_aside_and_the_older_is_used(tmp_path, damage):
    save(tmp_path, 2)
    folder, manifest = save(tmp_path, 3)
    assert newest(tmp_path).path == folder
    damage(folder / manifest.shards[1].file)
    found = newest(tmp_path)
    assert found.path == step_folder(tmp_path, 2)
    assert found.manifest is not None
    assert found.manifest.step == 2
    assert len(found.messages) == 1
    assert "step-00000003" in found.messages[0]
    assert (tmp_path / "damaged-step-00000003").is_dir()
    assert not newest(tmp_path).messages
    save(tmp_path, 3)
    assert newest(tmp_path).path == folder


def test_the_same_step_damaged_twice_is_set_aside_twice(tmp_path):
    for _ in range(2):
        folder, manifest = save(tmp_path, 3)
        flip(folder / manifest.shards[0].file)
        assert newest(tmp_path).manifest is None
    assert (tmp_path / "damaged-step-00000003-2").is_dir()


def test_a_step_without_manifest_was_never_committed(tmp_path):
    assert newest(tmp_path / "nothing here") == (None, None, ())
    save(tmp_path, 1)
    write_shard(step_folder(tmp_path, 2), 0, shards_of(tensors(2), 0, 2))
    found = newest(tmp_path)
    assert found.path == step_folder(tmp_path, 1)
    assert found.messages == ()


def test_a_late_write_of_an_older_generation_harms_nothing(tmp_path):
    folder, _ = save(tmp_path, 5, generation=2)
    write_shard(folder, 0, shards_of(tensors(99), 0, 3), generation=1)
    assert newest(tmp_path).path == folder
    assert torch.equal(CheckpointReader(folder).read("param/w"), tensors(5)["param/w"])


def test_pruning_keeps_the_newest_and_what_is_being_written(tmp_path):
    for step in (1, 2, 4):
        save(tmp_path, step)
    write_shard(step_folder(tmp_path, 3), 0, shards_of(tensors(3), 0, 2))
    write_shard(step_folder(tmp_path, 5), 0, shards_of(tensors(5), 0, 2))
    gone = prune(tmp_path, keep=2)
    assert gone == ["step-00000003", "step-00000001"]
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000002", "step-00000004", "step-00000005"]
    assert prune(tmp_path / "none", keep=2) == []


def test_half_written_steps_are_discarded_so_that_a_full_disk_does_not_stay_full(tmp_path):
    save(tmp_path, 2)
    for step in (1, 4):
        write_shard(step_folder(tmp_path, step), 0, shards_of(tensors(), 0, 1))
    half = step_folder(tmp_path, 2) / ".shard.part"
    half.write_bytes(b"a writer was killed")
    assert discard_uncommitted(tmp_path) == ["step-00000001", "step-00000004"]
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-00000002"]
    assert not half.exists()
    assert newest(tmp_path).manifest.step == 2
    assert discard_uncommitted(tmp_path / "missing") == []


def test_whose_checkpoints_these_are(tmp_path):
    assert committed_run(tmp_path / "missing") is None
    write_shard(step_folder(tmp_path, 9), 0, shards_of(tensors(), 0, 1))
    assert committed_run(tmp_path) is None
    save(tmp_path, 2)
    assert committed_run(tmp_path) == "run"
    (step_folder(tmp_path, 2) / "manifest.json").write_text("torn")
    assert committed_run(tmp_path) is None


def test_another_version_stops_the_run_and_is_not_taken_for_damage(tmp_path):
    save(tmp_path, 1)
    folder, manifest = save(tmp_path, 2)
    (folder / "manifest.json").write_bytes(replace(manifest, version=2).to_bytes())
    with pytest.raises(CheckpointError, match="version 2"):
        load_manifest(folder)
    with pytest.raises(CheckpointError, match="use the raycp that wrote"):
        newest(tmp_path)
    assert folder.is_dir()


def test_tensor_file_checksum_and_announced_shape(tmp_path):
    path = tmp_path / "x.safetensors"
    data = {"a": torch.arange(3, dtype=torch.int32), "b": torch.randn(2, 0), "c": torch.randn(3, 2).bfloat16()}
    announced = {n: (tuple(t.shape), t.dtype) for n, t in data.items()}
    assert write_tensors(path, announced, lambda n: data[n], {"format": "pt"}) == checksum_of(path)
    loaded = load_file(path)
    assert all(torch.equal(loaded[n], t) for n, t in data.items())
    with pytest.raises(ValueError, match="announced"):
        write_tensors(path, {"a": ((4,), torch.int32)}, lambda n: data[n])
