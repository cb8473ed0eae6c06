"""One folder of a file system: an absolute path, or a URL that fsspec knows (s3://, gs://, hdfs://, memory://, ...).

Guarantees: a file that was written under its name is whole, and for paths on disk (file and folder synced) when
`write` returns; a failed or killed write leaves no file of that name on a path, and none of the announced length
elsewhere; every failure is an `OSError` with a number; what other nodes changed is seen, no listing is cached. No
torch, no ray: keepers use it. Costs: one fsync of file and folder a write, and one for each `SYNC` bytes; on object
stores, which have no rename, `rename` copies and deletes.
"""

import contextlib
import errno
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from raycp.errors import ConfigError

Chunk = bytes | memoryview
PIECE = 1 << 24  # bytes moved at a time: what is buffered stays small, whatever the file
SYNC = 1 << 30  # bytes after which a long file is brought to disk: the last sync is short, and a dead disk is seen soon


class Storage(ABC):
    """One folder; it is made when first written to. Pickles as its address; two are equal if their addresses are.

    Attributes:
        where: absolute path or URL.
    """

    where: str

    @classmethod
    def of(cls, where: "str | Path | Storage") -> "Storage":
        """The folder at an absolute path or a URL. Connects to nothing yet.

        Raises:
            ConfigError: a relative path, an unknown or chained URL, a password in it, or the package that its scheme
                needs is missing.
        """
        if isinstance(where, Storage):
            return where
        text = str(where)
        if "://" not in text:
            path = Path(text)
            if not path.is_absolute():
                raise ConfigError(f"{text!r} is a relative path", fix="give an absolute path or a URL")
            return PathStorage(path)
        if "::" in text:
            raise ConfigError(f"{text!r} is a chain of file systems", fix="give the URL of the storage itself")
        if urlsplit(text).password is not None:
            raise ConfigError(
                f"{urlsplit(text).scheme} URL with a password in it: it would be written into logs and events",
                fix="give credentials by the environment or by fsspec's configuration files, on every node",
            )
        if text.startswith(("file://", "local://")):
            path = Path(text.partition("://")[2])
            if not path.is_absolute():
                raise ConfigError(f"{text!r} is a relative path", fix="give file:// and an absolute path")
            return PathStorage(path)
        from raycp.training.remote import UrlStorage

        return UrlStorage(text)

    @property
    def name(self) -> str:
        """Last part of the address."""
        return self.where.rpartition("/")[2]

    @property
    def parent(self) -> "Storage":
        """The folder above."""
        above = self.where.rstrip("/").rpartition("/")[0]
        return Storage.of(f"{above}/" if above.endswith(":/") else above or "/")

    def child(self, name: str) -> "Storage":
        """Sub-folder `name`."""
        return Storage.of(f"{self.where}{'' if self.where.endswith('/') else '/'}{name}")

    @abstractmethod
    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        """Makes file `name` of the chunks, replacing an older one; complete and durable when this returns.

        Raises:
            OSError: the storage refused; whatever `chunks` raises goes through.
        """

    def replace(self, name: str, data: bytes) -> None:
        """Makes file `name`: on paths and object stores a reader sees the whole old or the whole new one."""
        self.write(name, [data])

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The whole file.

        Raises:
            FileNotFoundError: there is none.
            OSError: the storage failed.
        """

    @abstractmethod
    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file that has them.

        Raises:
            OSError: the storage failed, or the file is shorter.
        """

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is no file of that name."""

    @abstractmethod
    def names(self) -> list[str]:
        """Files and folders in this one, sorted; none if it does not exist."""

    @abstractmethod
    def rename(self, name: str, to: str) -> None:
        """Renames a file or folder; on object stores every file is copied, then the old ones are deleted."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Deletes a file, or a folder with all in it. Missing is fine."""

    def local_path(self) -> Path | None:
        """The folder as a path of this machine, for memory maps; None for a URL."""
        return None

    def blocks(self, name: str) -> Iterator[bytes]:
        """The file in order, 16 MiB at a time."""
        size = self.size(name) or 0
        for at in range(0, size, PIECE):
            yield self.read_range(name, at, min(at + PIECE, size))

    def _whole(self, name: str, data: bytes, length: int) -> bytes:
        if len(data) != length:
            raise OSError(errno.EIO, f"{length} bytes were asked for, {len(data)} came", f"{self.where}/{name}")
        return data

    def __str__(self) -> str:
        return self.where

    def __repr__(self) -> str:
        return f"Storage.of({self.where!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Storage) and other.where == self.where

    def __hash__(self) -> int:
        return hash(self.where)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Storage.of, (self.where,))


class PathStorage(Storage):
    """A folder that the operating system knows."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._path = path

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        """See `Storage.write`: written aside, synced, renamed."""
        self._make()
        aside = self._path / f".{name}.{uuid.uuid4().hex[:12]}.part"  # several may write the same file at once
        try:
            write_synced(aside, chunks)
            aside.replace(self._path / name)
        except BaseException as error:
            with contextlib.suppress(OSError):
                aside.unlink()
            if isinstance(error, OSError) and error.filename is None and error.errno is not None:
                raise OSError(error.errno, error.strerror, str(self._path / name)) from error
            raise
        sync_folder(self._path)

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        with (self._path / name).open("rb") as file:
            file.seek(start)
            return self._whole(name, file.read(stop - start), stop - start)

    def size(self, name: str) -> int | None:
        path = self._path / name
        try:
            return path.stat().st_size if path.is_file() else None
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self._path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def rename(self, name: str, to: str) -> None:
        os.rename(self._path / name, self._path / to)
        sync_folder(self._path)

    def delete(self, name: str) -> None:
        path = self._path / name
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def local_path(self) -> Path | None:
        return self._path

    def _make(self) -> None:
        new = [p for p in (self._path, *self._path.parents) if not p.exists()]
        self._path.mkdir(parents=True, exist_ok=True)
        for folder in new:
            sync_folder(folder.parent)


def write_synced(path: Path, chunks: Iterable[Chunk]) -> int:
    """Makes a file of the chunks, overwriting one that is there; all of it is on disk when this returns.

    Returns:
        Its length in bytes.
    """
    written = synced = 0
    with path.open("wb") as file:
        for chunk in chunks:
            written += file.write(chunk)
            if written - synced >= SYNC:
                file.flush()
                os.fdatasync(file.fileno())
                synced = written
        file.flush()
        os.fsync(file.fileno())
    return written


def sync_folder(folder: Path) -> None:
    """Makes renames and new names inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
