"""A document store where it is read: in its folder, or copied to the node's own disk first.

Guarantees: a node copies once, whatever the number of its ranks (the first to come copies, the others wait for the
rename); a copy is found again by the documents' fingerprint, so a restarted rank does not copy again; a copy that is
torn is made anew; where the disk has no room the store is read where it is. Copies of the last few stores are kept,
older ones are removed. Cost: the store's bytes once per node; nothing where the folder is on a disk of the node's own.
"""

import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from data_pipeline.store import DocumentStore, problem_with

_NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "gpfs",
    "ceph",
    "glusterfs",
    "beegfs",
    "fuse.",
    "9p",
    "afs",
    "wekafs",
    "pvfs",
)
_KEPT = 4
_PIECE = 1 << 24
_SPARE = 1.5  # times its size that must be free


def open_near(
    folder: Path | str,
    *,
    mode: str = "auto",
    cache: Path | str | None = None,
    on_piece: Callable[[], None] = lambda: None,
) -> DocumentStore:
    """Opens a store for reading many times.

    Args:
        folder: where it is.
        mode: as `DataConfig.local_copy`.
        cache: where copies are kept; by default a folder of this user's below the system's one for temporary files.
        on_piece: called whenever a piece of a file was copied.

    Raises:
        DataError: the folder is no whole store.
    """
    store = DocumentStore.open(folder)
    if mode == "never" or (mode == "auto" and not on_network(store.folder)):
        return store
    root = Path(cache) if cache is not None else Path(tempfile.gettempdir()) / f"raycp-data-{os.getuid()}"
    root.mkdir(parents=True, exist_ok=True)
    place = root / store.fingerprint[:32]
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if problem_with(place):
            if shutil.disk_usage(root).free < _SPARE * store.num_bytes:
                return store
            aside = root / f".{place.name}.{os.getpid()}"
            for old in (place, *root.glob(f".{place.name}.*")):
                shutil.rmtree(old, ignore_errors=True)
            shutil.copytree(store.folder, aside, copy_function=functools.partial(_copy, on_piece))
            aside.rename(place)
        os.utime(place)
        copies = sorted((p for p in root.iterdir() if p.is_dir() and p != place), key=lambda p: p.stat().st_mtime)
        for old in copies[: max(0, len(copies) - _KEPT + 1)]:
            shutil.rmtree(old, ignore_errors=True)  # a process that has it mapped keeps its bytes
    return DocumentStore.open(place)


def _copy(on_piece: Callable[[], None], source: str, target: str) -> str:
    with Path(source).open("rb") as read, Path(target).open("wb") as write:
        while piece := read.read(_PIECE):
            write.write(piece)
            on_piece()
    return target


def on_network(folder: Path, mounts: str = "/proc/mounts") -> bool:
    """Whether a folder is on a network file system; False where the system does not say."""
    try:
        lines = Path(mounts).read_text("utf-8").splitlines()
    except OSError:
        return False
    best, kind = "", ""
    path = f"{folder.resolve()}/"
    for line in lines:
        words = line.split()
        point = words[1].replace("\\040", " ").rstrip("/") + "/"
        if path.startswith(point) and len(point) >= len(best):
            best, kind = point, words[2].lower()
    return kind.startswith(_NETWORK)
