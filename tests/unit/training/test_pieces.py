"""Long work tells of every piece that is done, so that whoever looks can tell slow from stuck."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig

from raycp.training import checkpoint, export, storage, tensorfile
from raycp.training.checkpoint import CheckpointReader, step_folder, verify, write_shard
from raycp.training.model import Trainee
from raycp.training.sharding import ShardSpan
from raycp.training.spec import ModelSpec
from raycp.training.weights import empty_model, fill
from tests.unit.training.places import save

ROWS = 64


class Pieces:
    """Counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return step_folder(tmp_path, 1)


def shard(names: int) -> dict[str, tuple[ShardSpan, torch.Tensor]]:
    """Tensors of `ROWS` x 4 fp32."""
    return {
        f"param/{n}": (ShardSpan(f"param/{n}", (ROWS, 4), torch.float32, 0, ROWS), torch.randn(ROWS, 4))
        for n in range(names)
    }


def test_a_large_tensor_is_written_in_pieces_and_the_file_stays_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor of several gigabytes was one piece: minutes without a sign on slow storage."""
    state, whole, cut = shard(3), Pieces(), Pieces()
    expected = write_shard(folder, 0, state, on_piece=whole)
    content = (folder / expected.file).read_bytes()
    monkeypatch.setattr(checkpoint, "PIECE", 256)
    assert write_shard(folder, 0, state, on_piece=cut) == expected
    assert (folder / expected.file).read_bytes() == content
    assert whole.count == 1 + 3
    assert cut.count >= 3 * ROWS * 16 // 256


def test_a_long_file_is_synced_as_it_grows_so_that_the_last_sync_is_no_long_silence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a shard waited for one sync at its end: minutes without a sign, as if the storage had died."""
    monkeypatch.setattr(checkpoint, "PIECE", 256)
    monkeypatch.setattr(storage, "SYNC", 1024)
    pieces, seen, plain = Pieces(), list[int](), os.fdatasync

    def sync(descriptor: int) -> None:
        seen.append(pieces.count)
        plain(descriptor)

    monkeypatch.setattr(os, "fdatasync", sync)
    record = write_shard(folder, 0, shard(5), on_piece=pieces)
    assert len(seen) >= record.bytes // 1024 - 1
    assert max(b - a for a, b in itertools.pairwise([0, *seen, pieces.count])) <= 5


def test_reading_and_verifying_tell_of_every_tensor_and_file(tmp_path: Path) -> None:
    folder, manifest = save(tmp_path, 1, world_size=1)
    pieces = Pieces()
    reader = CheckpointReader(folder, on_piece=pieces)
    for number, name in enumerate(reader.names, 1):
        reader.read(name)
        assert pieces.count == number
    before = pieces.count
    assert verify(folder, on_piece=pieces).shards == manifest.shards
    assert pieces.count == before + 1


def test_filling_a_model_tells_of_every_tensor(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=64, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    lm = empty_model(config, "eager").to_empty(device="cpu")
    lm.save_pretrained(tmp_path / "model")
    made = Trainee(lm, loss_chunk=64, activation_checkpointing=False)
    read, random = Pieces(), Pieces()
    fill(made, ModelSpec.of(tmp_path / "model"), config, 0, on_piece=read)
    assert read.count == len(list(lm.parameters()))
    fill(made, ModelSpec.of(config), config, 0, on_piece=random)
    assert random.count > 2 * 5


def test_a_long_file_of_an_export_is_synced_as_it_grows_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sync of 5 GB was a silence that looks like dead storage, and rank 0 was given up at the end of its run."""
    synced: list[int] = []
    plain = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (synced.append(descriptor), plain(descriptor))[1])
    monkeypatch.setattr(storage, "SYNC", 3 * ROWS * 16)
    tensors = {f"t{n}": torch.randn(ROWS, 4) for n in range(7)}
    announced = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    written, checksum = tensorfile.write_tensors(tmp_path / "a.safetensors", announced, tensors.__getitem__)
    assert len(synced) == 2
    assert (written, checksum) == tensorfile.checksum_of(tmp_path / "a.safetensors")


@pytest.mark.parametrize("there", [True, False])
def test_the_export_of_a_hub_model_fetches_no_weights(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that came later downloaded all of them for generation_config.json, without a sign of progress."""

    def fetch(source: str, **where: Any) -> GenerationConfig:
        assert (source, where) == ("org/model", {"revision": "r1"})
        if not there:
            raise OSError("org/model does not appear to have a file named generation_config.json")
        return GenerationConfig(temperature=0.25, do_sample=True)

    def weights(*_: Any, **__: Any) -> Path:
        raise AssertionError("the weights were asked for")

    monkeypatch.setattr(GenerationConfig, "from_pretrained", fetch)
    monkeypatch.setattr(ModelSpec, "weights_folder", weights)
    spec = ModelSpec(kind="hub", source="org/model", revision="r1")
    made = export._generation_config(spec, LlamaConfig(eos_token_id=7))
    assert made.temperature == (0.25 if there else GenerationConfig().temperature)
    assert there or made.eos_token_id == 7
