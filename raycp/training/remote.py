"""Storage behind a URL, through fsspec.

Guarantees: a write that fails half way is not completed (an upload is aborted); one that the storage cut short is seen
by its length; what other nodes changed is seen, for no listing is cached; every failure is an `OSError` with a number,
whatever library raised it. Costs: one request for the length beside each write; a `rename` copies and deletes, since
object stores have no other; 64 MiB of memory for an upload's part.
"""

import contextlib
import errno
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile

from raycp.errors import ConfigError
from raycp.training.storage import PIECE, Chunk, Storage

_PART = 1 << 26  # upload part of object stores; their limit of 10 000 parts makes 640 GiB a file
_SEEN_DELAYS = (0.0, 0.05, 0.1, 0.2, 0.4)  # a file may take a moment to be seen


class UrlStorage(Storage):
    """A folder behind an fsspec file system, which makes what retries it makes by itself."""

    def __init__(self, url: str) -> None:
        scheme, _, path = url.partition("://")
        self.where = f"{scheme}://{path.rstrip('/')}"
        try:
            self._root = str(fsspec.core.url_to_fs(self.where)[1]).rstrip("/")
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{url!r} cannot be opened: {error}",
                fix="check the scheme of the URL, and install the package that fsspec needs for it on every node",
            ) from error

    @property
    def _fs(self) -> Any:
        """The connection of this thread and process: fsspec keeps them apart, and not every client may be shared."""
        return fsspec.core.url_to_fs(self.where)[0]

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        """See `Storage.write`: what fails half way is not completed (an upload is aborted)."""
        written = 0
        with self._errors(name):
            file = self._into(self._at(name), lambda path: self._fs.open(path, "wb", block_size=_PART))
        try:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                for at in range(0, len(view), PIECE):
                    with self._errors(name):
                        file.write(view[at : at + PIECE])
                written += len(view)
            with self._errors(name):
                file.close()
        except BaseException as error:
            _abandon(file, error)
            raise
        self._expect(name, written)

    def read(self, name: str) -> bytes:
        with self._errors(name):
            return bytes(self._fs.cat_file(self._at(name)))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        with self._errors(name):
            return self._whole(name, bytes(self._fs.cat_file(self._at(name), start=start, end=stop)), stop - start)

    def size(self, name: str) -> int | None:
        with self._errors(name):
            self._fs.invalidate_cache()
            try:
                info = self._fs.info(self._at(name))
            except FileNotFoundError:
                return None
        return int(info["size"]) if info.get("type") == "file" else None

    def names(self) -> list[str]:
        with self._errors(""):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._root, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        plain = {str(path).rstrip("/") for path in found} - {self._root, self._root.lstrip("/")}
        return sorted(path.rpartition("/")[2] for path in plain)

    def rename(self, name: str, to: str) -> None:
        with self._errors(name):
            self._fs.invalidate_cache()
            source, goal = self._at(name), self._at(to)
            for path in map(str, self._fs.find(source)):
                self._into(goal + path.partition(source)[2], functools.partial(self._fs.copy, path))
        self.delete(name)

    def delete(self, name: str) -> None:
        with self._errors(name):
            self._fs.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(self._at(name), recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _into(self, path: str, make: Callable[[str], Any]) -> Any:
        """Object stores have no folders to make, and may forbid asking for them; others say that one is missing."""
        try:
            return make(path)
        except FileNotFoundError:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            return make(path)

    def _expect(self, name: str, written: int) -> None:
        """The storage has what was written."""
        for delay in _SEEN_DELAYS:
            time.sleep(delay)
            found = self.size(name)
            if found == written:
                return
        raise OSError(errno.EIO, f"{written} bytes were written, the storage holds {found}", f"{self.where}/{name}")

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """File systems raise errors of their own libraries, or ones without a number: callers know `OSError`."""
        try:
            yield
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            kinds = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES}
            number = next((n for kind, n in kinds.items() if isinstance(error, kind)), errno.EIO)
            raise OSError(number, f"{type(error).__name__}: {error}", f"{self.where}/{name}") from error


def _abandon(file: Any, error: BaseException) -> None:
    """Closing a buffered remote file completes it, and so does its finalizer: neither may happen to a torn one."""
    if isinstance(file, AbstractBufferedFile):  # a failed `close` says closed, with the upload still open
        try:
            file.discard()
        except Exception as second:  # what is raised is the first error; an upload that stays open makes no file
            error.add_note(f"and the upload could not be aborted: {second!r}")
        finally:
            file.closed = True
