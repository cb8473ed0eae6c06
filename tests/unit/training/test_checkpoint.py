"""Shards: any rows come back bit-equal from any storage; files are plain; a zombie's shard harms nothing."""

import json

import pytest
import torch
from safetensors.torch import load_file

from raycp.errors import CheckpointError
from raycp.training.checkpoint import CheckpointReader, load_manifest, newest, step_folder, verify, write_shard
from raycp.training.tensorfile import checksum_of, write_tensors
from tests.unit.training.places import KINDS, place, save, shards_of, tensors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_any_rows_come_back_bit_equal(tmp_path, kind, world_size):
    folder, manifest = save(place(kind, tmp_path), 12, world_size)
    assert folder.name == "step-00000012"
    assert verify(folder).to_bytes() == manifest.to_bytes() == load_manifest(folder).to_bytes()
    reader = CheckpointReader(folder)
    whole = tensors(12)
    assert reader.names == {n: tuple(t.shape) for n, t in whole.items()}
    for name, tensor in whole.items():
        for start in range(tensor.shape[0] + 1):
            for stop in range(start, tensor.shape[0] + 1):
                got = reader.read(name, start, stop)
                assert got.dtype == tensor.dtype
                assert torch.equal(got, tensor[start:stop]), (name, start, stop)


def test_only_the_bytes_of_the_rows_are_asked_of_a_remote_storage(tmp_path, monkeypatch):
    folder, _ = save(place("flaky", tmp_path), 1, 2)
    asked = []
    ask = type(folder).read_range

    def counted(self, name, start, stop):
        asked.append((name, stop - start))
        return ask(self, name, start, stop)

    monkeypatch.setattr(type(folder), "read_range", counted)
    reader = CheckpointReader(folder)
    assert asked == []
    assert torch.equal(reader.read("param/w", 3, 5), tensors(1)["param/w"][3:5])
    assert asked == [("shard-g0001-00000.safetensors", 12), ("shard-g0001-00001.safetensors", 12)]


def test_what_is_read_may_be_changed_without_changing_the_file(tmp_path):
    folder, _ = save(tmp_path, 1)
    CheckpointReader(folder).read("param/w", 0, 2).zero_()
    assert torch.equal(CheckpointReader(folder).read("param/w"), tensors(1)["param/w"])
    verify(folder)


def test_a_shard_cut_after_it_was_verified_is_an_error_and_not_the_death_of_the_process(tmp_path):
    folder, manifest = save(tmp_path, 1)
    path = folder.local_path() / manifest.shards[0].file
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="the manifest says"):
        CheckpointReader(folder).read("param/w")


def test_files_are_plain_safetensors_and_json(tmp_path):
    folder, manifest = save(tmp_path, 1, 2)
    first = load_file(folder.local_path() / manifest.shards[0].file)
    assert torch.equal(first["param/w"], tensors(1)["param/w"][:4])
    assert folder.names() == ["manifest.json", *(s.file for s in manifest.shards)]
    assert json.loads(folder.read("manifest.json"))["version"] == 1


def test_unknown_names_and_rows_are_errors(tmp_path):
    reader = CheckpointReader(save(tmp_path, 1)[0])
    with pytest.raises(CheckpointError, match="no tensor 'param/x'"):
        reader.read("param/x")
    with pytest.raises(CheckpointError, match=r"rows \[3, 9\) of 7"):
        reader.read("param/w", 3, 9)


def test_a_late_write_of_an_older_generation_harms_nothing(tmp_path):
    folder, _ = save(tmp_path, 5, generation=2)
    write_shard(folder, 0, shards_of(tensors(99), 0, 3), generation=1)
    assert newest(tmp_path).storage == folder
    assert torch.equal(CheckpointReader(folder).read("param/w"), tensors(5)["param/w"])


def test_paths_and_texts_are_taken_too(tmp_path):
    save(tmp_path, 3)
    folder = step_folder(tmp_path, 3)
    assert folder == tmp_path / "step-00000003"
    assert step_folder(str(tmp_path), 3) == str(folder)
    assert newest(str(tmp_path)).path == folder
    assert CheckpointReader(folder).folder == CheckpointReader(str(folder)).folder


def test_tensor_file_checksum_and_announced_shape(tmp_path):
    path = tmp_path / "x.safetensors"
    data = {"a": torch.arange(3, dtype=torch.int32), "b": torch.randn(2, 0), "c": torch.randn(3, 2).bfloat16()}
    announced = {n: (tuple(t.shape), t.dtype) for n, t in data.items()}
    assert write_tensors(path, announced, lambda n: data[n], {"format": "pt"}) == checksum_of(path)
    loaded = load_file(path)
    assert all(torch.equal(loaded[n], t) for n, t in data.items())
    with pytest.raises(ValueError, match="announced"):
        write_tensors(path, {"a": ((4,), torch.int32)}, lambda n: data[n])
