"""Sharded checkpoints on shared storage, committed by a manifest.

Layout: `<root>/step-00000012/` holds one safetensors file per rank that has rows, and `manifest.json`. Guarantees: a
step exists when its manifest is there, which appears by one atomic rename after every shard is on disk; the manifest
names each file with length and checksum, and its rows cover every tensor once; file names carry the generation, so
that a late write of an older one harms nothing. A damaged step is set aside and the one before is used. Safetensors
and JSON only. Costs: verifying reads the whole checkpoint once (CRC-32, about 4 GB/s beside the storage's own speed).
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from raycp.errors import CheckpointError
from raycp.training.manifest import VERSION, Manifest, ShardEntry, ShardRecord, coverage_problem
from raycp.training.sharding import ShardSpan
from raycp.training.tensorfile import checksum_of, sync_folder, write_tensors

__all__ = [
    "VERSION",
    "CheckpointReader",
    "Manifest",
    "Newest",
    "ShardEntry",
    "ShardRecord",
    "commit",
    "committed_run",
    "coverage_problem",
    "discard_uncommitted",
    "load_manifest",
    "newest",
    "prune",
    "step_folder",
    "verify",
    "write_shard",
]

MANIFEST = "manifest.json"
_FIX = "delete or move the folder aside: the checkpoint before it is used"


class Newest(NamedTuple):
    """What `newest` found: path and manifest are None when there is no good checkpoint."""

    path: Path | None
    manifest: Manifest | None
    messages: tuple[str, ...]


def step_folder(root: Path, step: int) -> Path:
    """`<root>/step-00000012`."""
    return root / f"step-{step:08d}"


def write_shard(
    folder: Path, rank: int, state: Mapping[str, tuple[ShardSpan, torch.Tensor]], *, generation: int = 0
) -> ShardRecord:
    """Writes the rows of one rank into the folder of a step, which is made if missing; on disk when it returns.

    Args:
        folder: `step_folder(root, step)`, on storage that all nodes see.
        rank: world rank.
        state: of `export_state`.
        generation: of the process groups; part of the file's name, so that a rank of an older one overwrites nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"shard-g{generation:04d}-{rank:05d}.safetensors"
    entries = tuple(
        ShardEntry(
            name=span.name,
            shape=span.shape,
            dtype=str(span.dtype).removeprefix("torch."),
            start=span.start,
            stop=span.stop,
        )
        for span, _ in state.values()
    )
    announced = {span.name: (tuple(rows.shape), rows.dtype) for span, rows in state.values()}
    size, checksum = write_tensors(folder / name, announced, lambda n: state[n][1])
    sync_folder(folder)
    return ShardRecord(file=name, bytes=size, crc32=checksum, entries=entries)


def commit(folder: Path, manifest: Manifest) -> Path:
    """Makes the step exist: writes the manifest by atomic rename.

    Returns:
        `folder`.

    Raises:
        CheckpointError: the shards do not give every row of every tensor exactly once.
    """
    problem = coverage_problem(manifest.shards)
    if problem:
        raise CheckpointError(f"{folder} cannot be committed: {problem}", fix="collect the record of every rank")
    path = folder / MANIFEST
    aside = folder / f"{MANIFEST}.g{manifest.generation:04d}"
    with aside.open("w", encoding="utf-8") as file:
        json.dump(asdict(manifest), file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(folder)
    sync_folder(folder.parent)
    return folder


def load_manifest(folder: Path) -> Manifest:
    """Raises:
    CheckpointError: there is none, or it cannot be read.
    """
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", fix=_FIX) from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds no object", fix=_FIX)
    return Manifest.from_dict(raw)


def verify(folder: Path) -> Manifest:
    """Reads every byte of a committed step.

    Raises:
        CheckpointError: naming the first file that is missing, cut or changed.
    """
    manifest = load_manifest(folder)
    problem = coverage_problem(manifest.shards)
    if problem:
        raise CheckpointError(f"{folder}: {problem}", fix=_FIX)
    for shard in manifest.shards:
        path = folder / shard.file
        if not path.is_file():
            raise CheckpointError(f"{path} is missing", fix=_FIX)
        size = path.stat().st_size
        if size != shard.bytes:
            raise CheckpointError(f"{path} has {size} bytes, the manifest says {shard.bytes}", fix=_FIX)
        found = checksum_of(path)[1]
        if found != shard.crc32:
            raise CheckpointError(f"{path} has checksum {found:08x}, the manifest says {shard.crc32:08x}", fix=_FIX)
    return manifest


def newest(root: Path) -> Newest:
    """The newest step that is committed and undamaged. A damaged one is renamed and named in the messages.

    Args:
        root: folder of the step folders; may not exist.
    """
    messages: list[str] = []
    for folder in sorted(_steps(root), reverse=True):
        if not (folder / MANIFEST).exists():
            continue  # was never committed
        try:
            return Newest(folder, verify(folder), tuple(messages))
        except CheckpointError as error:
            aside = folder.with_name(f"damaged-{folder.name}")
            number = 1
            while aside.exists():
                number += 1
                aside = folder.with_name(f"damaged-{folder.name}-{number}")
            folder.rename(aside)
            messages.append(f"checkpoint {folder.name} is damaged and was set aside as {aside.name}: {error.message}")
    return Newest(None, None, tuple(messages))


def committed_run(root: Path) -> str | None:
    """Id of the run that committed the newest step whose manifest can be read; None if there is none."""
    for folder in sorted(_steps(root), reverse=True):
        try:
            return load_manifest(folder).run_id
        except CheckpointError:  # never committed, or damaged: `newest` deals with it
            continue
    return None


def discard_uncommitted(root: Path) -> list[Path]:
    """Deletes steps without a manifest, which a killed or full run left: only while nobody writes a checkpoint.

    Returns:
        The folders that were deleted.
    """
    gone = [folder for folder in _steps(root) if not (folder / MANIFEST).exists()]
    for folder in gone:
        shutil.rmtree(folder, ignore_errors=True)  # a fenced-off rank may still write there: the next start tries again
    return gone


def prune(root: Path, keep: int) -> list[Path]:
    """Deletes all but the newest `keep` committed steps, and uncommitted leftovers older than the newest of them.

    Returns:
        The folders that were deleted.
    """
    folders = sorted(_steps(root), reverse=True)
    committed = [f for f in folders if (f / MANIFEST).exists()]
    kept = set(committed[: max(1, keep)])
    gone = [f for f in folders if f not in kept and (not committed or f < committed[0])] if committed else []
    for folder in gone:
        (folder / MANIFEST).unlink(missing_ok=True)  # first: a half-deleted step must not look committed
        shutil.rmtree(folder)
    return gone


def _steps(root: Path) -> list[Path]:
    return [p for p in root.glob("step-*") if p.is_dir()] if root.is_dir() else []


class CheckpointReader:
    """Reads rows of a committed step, whatever the world size that wrote it. Memory-mapped; does not verify.

    Args:
        folder: a step folder.

    Raises:
        CheckpointError: no manifest.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = load_manifest(folder)
        self._pieces: dict[str, list[tuple[ShardEntry, str]]] = {}
        for shard in self.manifest.shards:
            for entry in shard.entries:
                self._pieces.setdefault(entry.name, []).append((entry, shard.file))
        self._files: dict[str, Any] = {}

    @property
    def names(self) -> dict[str, tuple[int, ...]]:
        """{name: whole shape}."""
        return {name: pieces[0][0].shape for name, pieces in self._pieces.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop) of `name`, on CPU.

        Raises:
            CheckpointError: no such tensor, or rows outside it.
        """
        if name not in self._pieces:
            raise CheckpointError(
                f"{self.folder.name} has no tensor {name!r}",
                fix="resume with the model and the optimizer that wrote the checkpoint",
            )
        pieces = sorted(self._pieces[name], key=lambda p: p[0].start)
        rows = pieces[0][0].shape[0]
        stop = rows if stop is None else stop
        if not 0 <= start <= stop <= rows:
            raise CheckpointError(
                f"{name}: rows [{start}, {stop}) of {rows} were asked for",
                fix="resume with the model and the optimizer that wrote the checkpoint",
            )
        parts: list[torch.Tensor] = []
        for entry, file in pieces:
            low, high = max(start, entry.start), min(stop, entry.stop)
            if low < high:
                parts.append(self._open(file).get_slice(name)[low - entry.start : high - entry.start])
        if not parts:
            parts = [self._open(pieces[0][1]).get_slice(name)[0:0]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _open(self, file: str) -> Any:
        from safetensors import safe_open

        if file not in self._files:
            self._files[file] = safe_open(self.folder / file, framework="pt")
        return self._files[file]
