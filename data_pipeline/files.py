"""Files of a data set, on a mounted disk or behind a URL: which there are, how they are opened, whether they changed.

Guarantees: a path, a folder, a glob and a URL of any fsspec file system ("s3://...", "hf://...", "https://...") give
the same kind of `File`, which travels to other processes; compressed files (.gz, .zst, .bz2, .xz) are read as a stream,
never whole. Credentials are the file system's own business (environment, instance role): none is kept here. Cost:
listing; fsspec is imported only for URLs.
"""

import bz2
import contextlib
import glob
import gzip
import io
import json
import lzma
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from data_pipeline.megatron_files import INDEX, find_index, stored_with, without_beside
from raycp.errors import DataError

KINDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".idx")
"""Suffixes that can be read, each also with one of `COMPRESSIONS` after it (but parquet, arrow and idx)."""
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
_COLUMNAR = (".parquet", ".arrow", ".idx")
_COUNTED_BYTES = 1 << 17  # of one read that is counted
_NOT_ROWS = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")  # of `datasets` and others
_STAMPS = ("ETag", "etag", "md5Hash", "checksum", "LastModified", "last_modified", "mtime", "updated", "blob_id", "oid")


@dataclass(frozen=True)
class File:
    """One file of rows. `name` is its path or URL as it was said, which row ids show; `path` is absolute.

    `on_read` is called with the number of bytes of each read of the file as stored, to show how far a reader is.
    """

    name: str
    path: str = ""
    on_read: Callable[[int], None] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.path:
            object.__setattr__(self, "path", self.name if self.remote else os.path.abspath(self.name))

    @property
    def remote(self) -> bool:
        """Whether it is behind a URL."""
        return "://" in self.name

    @property
    def kind(self) -> str:
        """Suffix that says how rows are read, in lower case and without that of a compression."""
        suffixes = [s.lower() for s in PurePosixPath(self.name.partition("?")[0]).suffixes]
        if self.compression:
            suffixes.pop()
        return suffixes[-1] if suffixes else ""

    @property
    def compression(self) -> str | None:
        """Name of the compression, or None."""
        return COMPRESSIONS.get(PurePosixPath(self.name.partition("?")[0]).suffix.lower())

    def check(self) -> None:
        """Raises:
        DataError: a kind that cannot be read, or an empty file.
        """
        if self.kind not in KINDS or (self.compression and self.kind in _COLUMNAR):
            raise DataError(
                f"{self.name} is of a kind that cannot be read",
                fix=f"use one of {', '.join(KINDS)}, or load it with `datasets` and pass the Dataset",
                file=self.name,
            )
        if self.remote and self.kind == INDEX:
            raise DataError(
                f"{self.name}: Megatron's data are read from a mounted disk only",
                fix="copy the .idx and .bin files to a disk that every node sees",
                file=self.name,
            )
        if self.size() == 0:
            raise self.empty()

    def size(self) -> int:
        """Bytes, as stored; -1 where the file system does not say."""
        if not self.remote:
            return sum(os.stat(path).st_size for path in self.stored())
        found = _info(self.name).get("size")
        return -1 if found is None else int(found)

    def stamp(self) -> str | None:
        """What changes when the file does, without reading it; None where there is nothing to trust."""
        if not self.remote:
            stats = [os.stat(path) for path in self.stored()]
            return " ".join(f"{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}" for stat in stats)
        info = _info(self.name)
        found = {key: str(info[key]) for key in _STAMPS if info.get(key)}
        return json.dumps([info.get("size"), found], sort_keys=True) if found else None

    def changed_at(self) -> float | None:
        """Seconds since the epoch of the last change of a local file."""
        return None if self.remote else max(os.stat(path).st_mtime for path in self.stored())

    def stored(self) -> list[str]:
        """Paths of all that belongs to it: more than one for Megatron's data."""
        return stored_with(self.path) if self.kind == INDEX else [self.path]

    @contextlib.contextmanager
    def open_raw(self) -> Iterator[BinaryIO]:
        """The bytes as stored."""
        if not self.remote:
            with open(self.path, "rb") as stream:
                yield self._counted(stream)
            return
        with _remote_errors(self.name):
            fs, path = _file_system(self.name)
            stream = fs.open(path, "rb")
        with stream:
            yield self._counted(cast(BinaryIO, stream))

    def _counted(self, stream: BinaryIO) -> BinaryIO:
        if self.on_read is None and not self.remote:
            return stream
        return io.BufferedReader(_Readable(stream, self.on_read, self.name if self.remote else ""), _COUNTED_BYTES)

    @contextlib.contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """The bytes, decompressed.

        Raises:
            DataError: the compressed data are broken.
        """
        with self.open_raw() as raw:
            if self.compression is None:
                yield raw
                return
            try:
                with _decompressed(raw, self.compression) as stream:
                    yield stream
            except (EOFError, gzip.BadGzipFile, lzma.LZMAError, OSError) as error:
                raise DataError(
                    f"{self.name}: broken {self.compression} data: {error}", fix="write the file again", file=self.name
                ) from error

    def empty(self) -> DataError:
        """The error to raise where no row was found."""
        return DataError(
            f"{self.name} is empty: it has no rows", fix="fill it, or leave it out of data", file=self.name
        )


def find_files(name: str) -> list[File]:
    """Files of a path, folder, glob or URL, in a fixed order.

    Raises:
        DataError: nothing is there, or it cannot be reached.
    """
    return _find_remote(name) if "://" in name else _find_local(name)


def _find_local(name: str) -> list[File]:
    path = Path(name).expanduser()
    index = find_index(path)
    if index is not None:
        return [File(str(index))]
    if path.is_dir():
        if (path / "dataset_dict.json").is_file():
            return _split_of_dict(path)
        found = without_beside(sorted(p for p in path.rglob("*") if _holds_rows(p, path)))
        if not found:
            raise DataError(f"folder {path} holds no {', '.join(KINDS)} file", fix="point data at another folder")
        return [File(str(p)) for p in found]
    if path.exists():
        return [File(str(path))]
    if glob.has_magic(name):
        names = sorted(p for p in glob.glob(os.path.expanduser(name), recursive=True) if os.path.isfile(p))
        if not names:
            raise DataError(f"the pattern {name!r} matches no file", fix="check the pattern, and quote it in a shell")
        return [File(str(p)) for p in without_beside([Path(p) for p in names])]
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, siblings, n=3)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise DataError(
        f"there is no file or folder {path} (looked from {Path.cwd()})",
        fix=f"{hint}check the path; a data set of the hub is named 'owner/name', or 'owner/name:config[split]'",
        file=str(path),
    )


def _split_of_dict(path: Path) -> list[File]:
    """What `DatasetDict.save_to_disk` wrote, where it has one split."""
    splits = json.loads((path / "dataset_dict.json").read_text("utf-8"))["splits"]
    if len(splits) != 1:
        raise DataError(f"folder {path} holds the splits {', '.join(splits)}", fix=f"point data at {path / splits[0]}")
    return _find_local(str(path / splits[0]))


def _holds_rows(path: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return path.is_file() and not hidden and _is_row_file(path.name)


def _is_row_file(name: str) -> bool:
    return not name.startswith(".") and name not in _NOT_ROWS and File(name).kind in KINDS


def _find_remote(name: str) -> list[File]:
    with _remote_errors(name):
        fs, path = _file_system(name)
        before_query = path.partition("?")[0] if path.startswith(("http://", "https://")) else path
        if glob.has_magic(before_query):
            found = sorted(p for p in fs.glob(path) if fs.isfile(p))
        elif fs.isfile(path):
            found = [path]
        else:
            found = sorted(fs.find(path)) if fs.isdir(path) else []
            found = [p for p in found if _is_row_file(PurePosixPath(p).name)]
    if not found:
        raise DataError(f"there is no file of rows at {name}", fix="check the URL, and quote a pattern in a shell")
    return [File(p if "://" in p else str(fs.unstrip_protocol(p))) for p in found]


def _file_system(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    fs, path = url_to_fs(url)
    return fs, str(path)


def _info(url: str) -> Mapping[str, Any]:
    with _remote_errors(url):
        fs, path = _file_system(url)
        return dict(fs.info(path))


@contextlib.contextmanager
def _remote_errors(url: str) -> Iterator[None]:
    """Turns what a file system raises, which may be of any type of its own, into a DataError with the URL."""
    try:
        yield
    except ImportError as error:
        raise DataError(
            f"{url} cannot be opened: {error}", fix="install the package that it names on every node", file=url
        ) from error
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise DataError(
            f"{url} cannot be read: {why}",
            fix="check the URL, the credentials (they come from the environment) and the network of every node",
            file=url,
        ) from error


@contextlib.contextmanager
def _decompressed(raw: BinaryIO, compression: str) -> Iterator[BinaryIO]:
    if compression == "zstd":
        import pyarrow as pa

        with pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd") as stream:
            yield io.BufferedReader(_Readable(stream), 1 << 20)
        return
    openers: Any = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}
    with openers[compression](raw, "rb") as stream:
        yield stream


class _Readable(io.RawIOBase):
    """Any stream as a raw Python one, from which lines can be read; counts bytes, and names the URL in errors."""

    def __init__(self, stream: Any, on_read: Callable[[int], None] | None = None, url: str = "") -> None:
        self._stream, self._on_read, self._url = stream, on_read, url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._stream.seekable())

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return int(self._stream.seek(offset, whence))

    def tell(self) -> int:
        return int(self._stream.tell())

    def readinto(self, buffer: Any) -> int:
        with _remote_errors(self._url) if self._url else contextlib.nullcontext():
            piece = self._stream.read(len(buffer))
        buffer[: len(piece)] = piece
        if self._on_read is not None:
            self._on_read(len(piece))
        return len(piece)
