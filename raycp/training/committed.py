"""Which steps a checkpoint folder holds for good: commit, find, verify, prune.

Layout: `<root>/step-00000012/` holds shard files and `manifest.json`; `<root>/latest.json` says what was committed
last. Guarantees: a step exists when its manifest is there, which is written last, in one piece, after every file that
it names was seen with its length; its rows cover every tensor once. Of two steps the one of the later generation is the
newer one, and nothing of an older generation is committed after it, so a zombie neither overwrites nor advances
anything. A torn, cut or changed step is set aside with a message, and the one before it is used; a storage that does
not answer is an `OSError` and sets nothing aside. JSON and lengths only: nothing that is read can run code. No torch
and no ray, so keepers commit by themselves. Costs: a commit asks once for each file's length; verifying reads every
byte (CRC-32, about 3 GB/s beside the storage's own speed, several files at once).
"""

import contextlib
import errno
import functools
import json
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from raycp.errors import CheckpointError, StaleGenerationError
from raycp.training.latest import advance, read_latest
from raycp.training.manifest import Manifest, ShardRecord, coverage_problem
from raycp.training.storage import Storage

MANIFEST = "manifest.json"
_STEP = "step-"
_FIX = "delete or move the folder aside: the checkpoint before it is used"
_READERS = 4

Folder = TypeVar("Folder", Path, str, Storage)


class Newest(NamedTuple):
    """What `newest` found: storage (the step's folder) and manifest are None when there is no good checkpoint."""

    storage: Storage | None
    manifest: Manifest | None
    messages: tuple[str, ...]

    @property
    def path(self) -> Path | None:
        """The step's folder as a path of this machine, if it is one."""
        return None if self.storage is None else self.storage.local_path()


def step_folder(root: Folder, step: int) -> Folder:
    """`<root>/step-00000012`, in the type of `root`."""
    name = f"{_STEP}{step:08d}"
    if isinstance(root, Storage):
        return root.child(name)
    return root / name if isinstance(root, Path) else f"{root.rstrip('/')}/{name}"


def commit(folder: Folder, manifest: Manifest, *, by: int | None = None) -> Folder:
    """Makes the step exist, once all its files are there. Doing it twice, or two doing it at once, is fine.

    Args:
        folder: `step_folder(root, step)`, which holds the shards.
        manifest: what they are.
        by: generation of whoever commits, which may have inherited the step from an older one; default: the step's.

    Returns:
        `folder`.

    Raises:
        CheckpointError: the shards do not give every row of every tensor exactly once, or a file of them is not there
            with its length.
        StaleGenerationError: a later generation has committed, or has fenced off `by` (see `latest.fence`).
        OSError: the storage refused.
    """
    storage = Storage.of(folder)
    fence = read_latest(storage.parent).fence_of(manifest.run_id)
    if fence > (manifest.generation if by is None else by):
        raise _stale(storage, manifest, fence)
    problem = _commit(storage, manifest)
    if problem:
        raise CheckpointError(f"{folder} cannot be committed: {problem}", fix="write the shard again")
    return folder


def commit_if_whole(folder: Storage | Path | str, manifest: Manifest) -> bool:
    """For writers without a driver: whoever has written its shards calls this, and the last one commits.

    A driver that has fenced the step's generation off, and died before it committed anything, does not make this fail:
    what was committed in memory is the run's newest state still.

    Returns:
        Whether the step is committed now; False while files are missing or short.

    Raises:
        CheckpointError: the shards do not give every row of every tensor exactly once.
        StaleGenerationError: a later generation has committed.
        OSError: the storage refused.
    """
    return not _commit(Storage.of(folder), manifest)


def load_manifest(folder: Storage | Path | str) -> Manifest:
    """Raises:
    CheckpointError: there is none, or it cannot be read; `details["version"]` if it is of another version.
    OSError: the storage failed.
    """
    storage = Storage.of(folder)
    try:
        data = storage.read(MANIFEST)
    except FileNotFoundError as error:
        raise CheckpointError(f"{storage}/{MANIFEST} is missing", fix=_FIX) from error
    try:
        return Manifest.from_bytes(data)
    except CheckpointError as error:
        raise CheckpointError(f"{storage}/{MANIFEST}: {error.message}", fix=error.fix, **error.details) from error


def verify(folder: Storage | Path | str, *, on_piece: Callable[[], None] = lambda: None) -> Manifest:
    """Reads every byte of a committed step.

    Args:
        folder: of the step.
        on_piece: called whenever a piece of a file was read, from several threads.

    Raises:
        CheckpointError: naming the first file that is missing, cut or changed.
        OSError: the storage failed.
    """
    storage = Storage.of(folder)
    manifest = load_manifest(storage)
    problem = coverage_problem(manifest.shards)
    if problem:
        raise CheckpointError(f"{storage}: {problem}", fix=_FIX)
    problem = _first_problem(functools.partial(_content_problem, on_piece), storage, manifest)
    if problem:
        raise CheckpointError(f"{storage}/{problem}", fix=_FIX)
    return manifest


def newest(root: Storage | Path | str) -> Newest:
    """The newest step that is committed and undamaged. A damaged one is renamed and named in the messages.

    Args:
        root: folder of the step folders; may not exist.

    Raises:
        CheckpointError: a step was written by another version of raycp.
        OSError: the storage failed: nothing is set aside for that.
    """
    root = Storage.of(root)
    messages: list[str] = []
    good: dict[str, Manifest] = {}
    for name in _steps(root):
        if root.child(name).size(MANIFEST) is None:
            continue  # was never committed
        try:
            good[name] = load_manifest(root.child(name))
        except CheckpointError as error:
            if "version" in error.details:
                raise
            messages.append(_set_aside(root, name, error))
    for name in sorted(good, key=lambda name: good[name].age, reverse=True):
        try:
            return Newest(root.child(name), verify(root.child(name)), tuple(messages))
        except CheckpointError as error:
            messages.append(_set_aside(root, name, error))
    return Newest(None, None, tuple(messages))


def newest_committed(root: Storage | Path | str) -> Manifest | None:
    """The newest step's manifest, without reading its shards and without changing anything; None if there is none.

    Raises:
        OSError: the storage failed.
    """
    root = Storage.of(root)
    found: list[Manifest] = []
    for name in _steps(root):
        try:
            found.append(load_manifest(root.child(name)))
        except CheckpointError:  # never committed, or damaged: `newest` deals with it
            continue
    return max(found, key=lambda manifest: manifest.age, default=None)


def committed_run(root: Storage | Path | str) -> str | None:
    """Id of the run that committed the newest step whose manifest can be read; None if there is none."""
    manifest = newest_committed(root)
    return None if manifest is None else manifest.run_id


def discard_uncommitted(root: Storage | Path | str) -> list[str]:
    """Deletes steps without a manifest, which a killed or full run left, and files that were being written: only while
    nobody writes a checkpoint.

    Returns:
        Names of the step folders that were deleted.
    """
    root = Storage.of(root)
    last = read_latest(root).step
    gone: list[str] = []
    for name in _steps(root):
        if last is not None and name == step_folder("", last).strip("/"):
            continue  # it is committed, whatever a storage that lists late says
        if root.child(name).size(MANIFEST) is None:
            _delete_best(root, name)
            gone.append(name)
    for name in _steps(root):
        for part in root.child(name).names():
            if part.endswith(".part"):
                _delete_best(root.child(name), part)
    return gone


def prune(root: Storage | Path | str, keep: int) -> list[str]:
    """Deletes all but the newest `keep` committed steps, and uncommitted leftovers of steps before the newest of them.

    Returns:
        Names of the step folders that were deleted, newest first.
    """
    root = Storage.of(root)
    ages = {name: _age(root.child(name)) for name in _steps(root)}
    committed = sorted((n for n, age in ages.items() if age is not None), key=lambda n: ages[n] or (0, 0), reverse=True)
    if not committed:
        return []
    kept = set(committed[: max(1, keep)])
    gone = [n for n in sorted(ages, reverse=True) if n not in kept and (ages[n] is not None or n < committed[0])]
    for name in gone:
        root.child(name).delete(MANIFEST)  # first: a half-deleted step must not look committed
        root.delete(name)
    return gone


def _steps(root: Storage) -> list[str]:
    """Names of the step folders; the last committed one too where a storage lists late."""
    names = {name for name in root.names() if name.startswith(_STEP) and name.removeprefix(_STEP).isdigit()}
    last = read_latest(root).step
    if last is not None:
        name = step_folder(root, last).name
        if root.child(name).size(MANIFEST) is not None:
            names.add(name)
    return sorted(names)


def _commit(storage: Storage, manifest: Manifest) -> str:
    """What is missing of the files of the step; "" if it is committed now."""
    problem = coverage_problem(manifest.shards)
    if problem:
        raise CheckpointError(f"{storage} cannot be committed: {problem}", fix="collect the record of every rank")
    data = manifest.to_bytes()
    there = _replaceable(storage, manifest)
    problem = _first_problem(_length_problem, storage, manifest)
    if problem:
        return problem
    if there != data:
        storage.replace(MANIFEST, data)
        if _replaceable(storage, manifest) != data:
            raise OSError(errno.EIO, "the manifest reads otherwise than it was written", f"{storage}/{MANIFEST}")
    advance(storage.parent, manifest.run_id, manifest.generation, manifest.step)
    return ""


def _replaceable(storage: Storage, manifest: Manifest) -> bytes:
    """Bytes of the manifest that is there (none: empty), if this one may replace it."""
    latest = read_latest(storage.parent)
    newer = latest.generation if latest.run_id == manifest.run_id else 0
    try:
        there = storage.read(MANIFEST)
    except FileNotFoundError:
        there = b""
    if there:
        with contextlib.suppress(CheckpointError):  # a torn one is to be replaced
            old = Manifest.from_bytes(there)
            newer = max(newer, old.generation if old.run_id == manifest.run_id else 0)
    if newer > manifest.generation:
        raise _stale(storage, manifest, newer)
    return there


def _stale(storage: Storage, manifest: Manifest, newer: int) -> StaleGenerationError:
    return StaleGenerationError(
        f"step {manifest.step} of generation {manifest.generation} is not committed to {storage}: generation {newer} "
        "has taken over",
        fix="nothing: the run goes on in the newer generation",
        generation=newer,
    )


def _first_problem(check: Callable[[Storage, ShardRecord], str], storage: Storage, manifest: Manifest) -> str:
    """The first shard's problem, in the order of the manifest; "" if there is none."""
    with ThreadPoolExecutor(_READERS) as pool:
        return next(filter(None, pool.map(functools.partial(check, storage), manifest.shards)), "")


def _length_problem(storage: Storage, shard: ShardRecord) -> str:
    size = storage.size(shard.file)
    if size is None:
        return f"{shard.file} is missing"
    return "" if size == shard.bytes else f"{shard.file} has {size} bytes, the manifest says {shard.bytes}"


def _content_problem(on_piece: Callable[[], None], storage: Storage, shard: ShardRecord) -> str:
    problem = _length_problem(storage, shard)
    if problem:
        return problem
    found = 0
    try:
        for block in storage.blocks(shard.file):
            found = zlib.crc32(block, found)
            on_piece()
    except OSError as error:
        if error.errno != errno.EIO or storage.local_path() is None:
            raise
        return f"{shard.file} cannot be read: {error}"  # a bad sector, not a server that is away
    return "" if found == shard.crc32 else f"{shard.file} has checksum {found:08x}, the manifest says {shard.crc32:08x}"


def _set_aside(root: Storage, name: str, error: CheckpointError) -> str:
    taken = set(root.names())
    aside, number = f"damaged-{name}", 1
    while aside in taken:
        number += 1
        aside = f"damaged-{name}-{number}"
    root.rename(name, aside)
    return f"checkpoint {name} is damaged and was set aside as {aside}: {error.message}"


def _delete_best(storage: Storage, name: str) -> None:
    """A fenced-off rank may still write there: the next start tries again."""
    try:
        storage.delete(name)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EBUSY, errno.EEXIST):
            raise


def _age(storage: Storage) -> tuple[int, int] | None:
    """(generation, step) of a committed step, without building its manifest; None if it is not committed."""
    try:
        raw = json.loads(storage.read(MANIFEST))
        return int(raw["generation"]), int(raw["step"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return -1, -1  # damaged: the first to go
