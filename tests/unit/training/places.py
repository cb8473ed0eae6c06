"""Checkpoints for tests: small states cut over ranks, written as a run writes them, on any storage."""

import json
import uuid
from collections.abc import Callable
from pathlib import Path

import torch

import tests.unit.training.flaky_storage  # noqa: F401  (registers flaky://)
from raycp.training.checkpoint import Manifest, ShardRecord, commit, step_folder, write_shard
from raycp.training.sharding import ShardSpan, row_range
from raycp.training.storage import Storage

KINDS = ("path", "file", "memory", "flaky")


def place(kind: str, folder: Path) -> Storage:
    """A fresh folder on a storage of this kind."""
    if kind in ("path", "file"):
        return Storage.of(folder / "root" if kind == "path" else f"file://{folder}/root")
    return Storage.of(f"{kind}://runs/{uuid.uuid4().hex}")


def tensors(step: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return {
        "param/w": torch.randn(7, 3, generator=g),
        "param/half": torch.randn(5, generator=g).bfloat16(),
        "exp_avg/w": torch.randn(7, 3, generator=g),
        "optimizer/step": torch.tensor([float(step)]),
    }


def shards_of(whole: dict[str, torch.Tensor], rank: int, world_size: int) -> dict[str, tuple[ShardSpan, torch.Tensor]]:
    state = {}
    for name, tensor in whole.items():
        start, stop = row_range(tensor.shape[0], rank, world_size)
        if stop > start:
            state[name] = (ShardSpan(name, tuple(tensor.shape), tensor.dtype, start, stop), tensor[start:stop])
    return state


def write(root: Storage | Path, step: int, world_size: int = 3, generation: int = 1) -> Manifest:
    """Shards of a step, and the manifest that would commit them."""
    folder = step_folder(Storage.of(root), step)
    records = [
        write_shard(folder, r, shards_of(tensors(step), r, world_size), generation=generation)
        for r in range(world_size)
    ]
    sent = [ShardRecord.from_dict(json.loads(json.dumps(r.to_dict()))) for r in records]
    return Manifest(
        step=step,
        cursor={"epoch": 0, "pack_index": step, "plan_hash": "abc"},
        plan_hash="abc",
        generation=generation,
        run_id="run",
        grid={"dp": world_size, "ring": 1},
        shards=tuple(sent),
        fingerprint={"model": "m"},
        extra={"step_events": [{"step": step, "loss": 0.1, "pack_ids": (1, 2)}]},
    )


def save(root: Storage | Path, step: int, world_size: int = 3, generation: int = 1) -> tuple[Storage, Manifest]:
    """A committed step: its folder and its manifest."""
    manifest = write(root, step, world_size, generation)
    return commit(step_folder(Storage.of(root), step), manifest), manifest


def overwrite(folder: Storage, file: str, change: Callable[[bytes], bytes]) -> None:
    """Damages a file as no writer of ours would."""
    folder.write(file, [change(folder.read(file))])


def flip(folder: Storage, file: str) -> None:
    overwrite(folder, file, lambda data: data[:-1] + bytes([data[-1] ^ 1]))


def cut(folder: Storage, file: str) -> None:
    overwrite(folder, file, lambda data: data[:-1])


def lose(folder: Storage, file: str) -> None:
    folder.delete(file)


def garble_manifest(folder: Storage, file: str) -> None:
    overwrite(folder, "manifest.json", lambda _: b'{"version": 1, "step": 3, "sh')


def tear_manifest(folder: Storage, file: str) -> None:
    overwrite(folder, "manifest.json", lambda data: data[: len(data) // 2])


def empty_manifest(folder: Storage, file: str) -> None:
    overwrite(folder, "manifest.json", lambda _: b"")


def forget_shards(folder: Storage, file: str) -> None:
    overwrite(folder, "manifest.json", lambda _: b'{"version": 1, "step": 3}')


def move_cursor(folder: Storage, file: str) -> None:
    overwrite(folder, "manifest.json", lambda data: data.replace(b'"pack_index":3', b'"pack_index":2'))


DAMAGES = (flip, cut, lose, garble_manifest, tear_manifest, empty_manifest, forget_shards, move_cursor)
