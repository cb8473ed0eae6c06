"""An object store in memory, as an fsspec file system, that fails as it is told: refuses the n-th write, forgets the
end of it, lists late, caches listings, raises errors of its own. As in S3, a file appears when its upload completes."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class VendorError(Exception):
    """What a cloud's own library raises: no OSError."""


class Killed(BaseException):
    """The process ends here."""


@dataclass
class Faults:
    """What goes wrong next."""

    fail_at: int = 0
    """The n-th upload operation (a part, or the completion) fails; 0: none."""
    error: BaseException = field(default_factory=lambda: OSError(errno.ENOSPC, "no space left"))
    truncate: int = 0
    """Bytes that are forgotten from each upload that completes."""
    unlisted: tuple[str, ...] = ()
    """Names that listings do not show yet."""
    operations: int = 0
    uploads_open: int = 0


class FlakyFileSystem(AbstractFileSystem):
    """flaky://anything/below: one store for the process."""

    protocol = "flaky"
    store: ClassVar[dict[str, bytes]] = {}
    faults = Faults()

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            here = {p[len(path) + 1 :].partition("/") for p in self.store if p.startswith(f"{path}/")}
            seen = {(name, bool(slash)) for name, slash, _ in here if name not in self.faults.unlisted}
            self.dircache[path] = [
                {"name": f"{path}/{name}", "type": "directory" if folder else "file", "size": self._size(path, name)}
                for name, folder in sorted(seen)
            ]
        if not self.dircache[path]:
            raise FileNotFoundError(path)
        return list(self.dircache[path]) if detail else [entry["name"] for entry in self.dircache[path]]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if path in self.store:
            return {"name": path, "type": "file", "size": len(self.store[path])}
        if any(p.startswith(f"{path}/") for p in self.store):
            return {"name": path, "type": "directory", "size": 0}
        raise FileNotFoundError(path)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        self.info(path)
        return self.store[self._strip_protocol(path)][start:end]

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        self.operate()
        self.store[self._strip_protocol(path2)] = self.store[self._strip_protocol(path1)]

    def _rm(self, path: str) -> None:
        self.store.pop(self._strip_protocol(path), None)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> "Upload":
        assert mode == "wb"
        kwargs.pop("autocommit", None)
        self.faults.uploads_open += 1
        return Upload(self, path, mode, **{**kwargs, "block_size": 1024})

    def operate(self) -> None:
        faults = type(self).faults
        faults.operations += 1
        if faults.operations == faults.fail_at:
            raise faults.error

    def _size(self, path: str, name: str) -> int:
        return len(self.store.get(f"{path}/{name}", b""))


class Upload(AbstractBufferedFile):
    """Parts are held back until the last one."""

    DEFAULT_BLOCK_SIZE = 1024

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.fs.operate()
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.operate()
            data = b"".join(self.parts)
            FlakyFileSystem.faults.uploads_open -= 1
            self.fs.store[self.path] = data[: len(data) - FlakyFileSystem.faults.truncate]
        return True

    def discard(self) -> None:
        FlakyFileSystem.faults.uploads_open -= 1


@contextmanager
def flaky(**faults: Any) -> Iterator[Faults]:
    """These faults, while the block runs; counts operations from 0."""
    before = FlakyFileSystem.faults
    FlakyFileSystem.faults = Faults(**faults)
    try:
        yield FlakyFileSystem.faults
    finally:
        FlakyFileSystem.faults = before


fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
