"""Rows from whatever a user has, each with an id that says where it came from.

Takes paths, globs, folders and URLs of files; the name of a data set on the hub; a `datasets.Dataset`, map-style or
streaming; any iterable of dict rows; and several of these with weights. Guarantees: the order is the files' sorted (or
given) order and the order inside each; row ids are stable ("file:line", "rows:3"); every problem is a DataError with
file and line; what is no file is written to a spool file before it is cut into parts, so every source can be read
again, part by part, in any process that sees the spool. Fingerprints are of content: a file that was touched but not
changed is the same. Cost: see `readers`; a spool takes the disk space of its rows while they are prepared.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from data_pipeline.files import KINDS, File, find_files
from data_pipeline.readers import Look, Run, look_at_all, read_part, serially
from data_pipeline.rows import BadRow, Part, Row
from data_pipeline.spools import DatasetSource, SpooledSource
from raycp.errors import DataError

_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.+-]+))?(?:\[([\w.+:%-]+)\])?")


class Source(Protocol):
    """Rows that can be read again and again, in the same order."""

    @property
    def fingerprint(self) -> str:
        """sha256 of the content."""

    def parts(self) -> list[Part]:
        """Stretches that together are the source, for `read_part`; writes the spool where there is one."""

    def rows(self, bad: BadRow) -> Iterator[Row]:
        """All rows in order; `bad` gets those that cannot be read."""

    def close(self) -> None:
        """Removes what was written aside for reading."""


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """A source and how often its rows are seen in an epoch: 2 twice, 0.5 a fixed half of them."""

    source: Source
    weight: float
    name: str


def open_sources(data: object, spool: Path, *, memory: Path | None = None, run: Run = serially) -> list[Weighted]:
    """Sources for the `data` argument of `fit`, with their weights.

    Args:
        data: path, glob, folder, URL, hub name, list of those; a `datasets.Dataset`; an iterable of dict rows; a
        mapping
            of any of the first to weights; a list of (source, weight).
        spool: folder where rows that come from no file are written; made when needed.
        memory: file that remembers looks at files.
        run: where files are looked at.

    Raises:
        DataError: nothing is there, `data` is none of these, or a weight is not above 0.
    """
    pairs: list[tuple[Any, Any]]
    if _is_mapping_of_names(data):
        assert isinstance(data, Mapping)
        pairs = list(data.items())
    elif _is_list_of_pairs(data):
        assert isinstance(data, Sequence)
        pairs = list(data)
    else:
        return [Weighted(source=open_source(data, spool, memory=memory, run=run), weight=1.0, name=_name_of(data, ""))]
    for name, weight in pairs:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise DataError(f"the weight of {name!r} is {weight!r}", fix="give each source a number above 0")
    opened: list[Weighted] = []
    try:
        for number, (one, weight) in enumerate(pairs, 1):
            source = open_source(one, spool, memory=memory, run=run, label=f"rows{number}")
            opened.append(Weighted(source=source, weight=float(weight), name=_name_of(one, str(number))))
    except BaseException:
        for one in opened:
            one.source.close()
        raise
    return opened


def open_source(
    data: object, spool: Path, *, memory: Path | None = None, run: Run = serially, label: str = "rows"
) -> Source:
    """One source: what `open_sources` takes, without weights; `label` begins the ids of rows of no file.

    Raises:
        DataError: nothing is there, or `data` is none of these.
    """
    if isinstance(data, str | os.PathLike):
        name = os.fspath(data)
        hub = None if os.path.exists(os.path.expanduser(name)) else _hub_parts(name)
        if hub is not None:
            return DatasetSource(_load_from_hub(name, *hub), spool, label=name)
        return FileSource(find_files(name), memory=memory, run=run)
    if type(data).__module__.partition(".")[0] == "datasets":
        if isinstance(data, Mapping):
            raise DataError(
                f"data is a DatasetDict of {', '.join(map(str, data))}", fix='pass one split: data["train"]'
            )
        custom = (getattr(data, "format", None) or {}).get("type") == "custom"  # a transform of the user's: row by row
        if hasattr(data, "with_format") and hasattr(data, "__len__") and not custom:
            return DatasetSource(data, spool, label=label)
    if isinstance(data, Sequence) and data and all(isinstance(item, str | os.PathLike) for item in data):
        files = [file for item in data for file in find_files(os.fspath(item))]
        return FileSource(list(dict.fromkeys(files)), memory=memory, run=run)
    if isinstance(data, Iterable) and not isinstance(data, Mapping | bytes):
        return SpooledSource(data, spool, label=label)
    raise DataError(
        f"data is a {type(data).__name__}, from which no rows can be read",
        fix="pass a path, a glob, a list of paths, a hub name, a datasets.Dataset, or an iterable of dict rows; "
        "several with weights as {path: weight} or [(source, weight), ...]",
    )


def paths_of(data: object) -> list[str]:
    """Paths and URLs that `data` names, for checks before anything is read; rows and hub names are left out."""
    items: Iterable[Any] = [data]
    if _is_mapping_of_names(data) or (isinstance(data, list | tuple) and data and not _is_list_of_pairs(data)):
        items = data  # type: ignore[assignment]
    elif _is_list_of_pairs(data):
        items = [one for one, _ in data]  # type: ignore[attr-defined]
    flat = [os.fspath(x) for item in items for x in _names_in(item)]
    return [name for name in flat if os.path.exists(os.path.expanduser(name)) or _hub_parts(name) is None]


def _names_in(item: object) -> list[Any]:
    if isinstance(item, list | tuple):
        return [x for x in item if isinstance(x, str | os.PathLike)]
    return [item] if isinstance(item, str | os.PathLike) else []


def _is_mapping_of_names(data: object) -> bool:
    return (
        isinstance(data, Mapping)
        and bool(data)
        and all(isinstance(k, str | os.PathLike) for k in data)
        and all(isinstance(v, int | float) for v in data.values())
    )


def _is_list_of_pairs(data: object) -> bool:
    return (
        isinstance(data, list | tuple)
        and bool(data)
        and all(isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], int | float) for x in data)
    )


def _name_of(data: object, number: str) -> str:
    return os.fspath(data) if isinstance(data, str | os.PathLike) else f"rows{number}"


class FileSource:
    """Rows of files, one after the other."""

    def __init__(self, files: Sequence[File], *, memory: Path | None = None, run: Run = serially) -> None:
        self.files = tuple(files)
        self._memory, self._run = memory, run
        for file in self.files:
            file.check()

    @cached_property
    def _looks(self) -> list[Look]:
        return look_at_all(list(self.files), memory=self._memory, run=self._run)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the kind and the bytes of every file, in order."""
        digest = hashlib.sha256()
        for file, look in zip(self.files, self._looks, strict=True):
            digest.update(f"{file.kind}{file.compression or ''}".encode() + bytes.fromhex(look.digest))
        return digest.hexdigest()

    def parts(self) -> list[Part]:
        """Parts of all files."""
        return [p for file, look in zip(self.files, self._looks, strict=True) for p in look.parts(file)]

    def rows(self, bad: BadRow) -> Iterator[Row]:
        """All rows."""
        for file in self.files:
            yield from read_part(Part(file=file, whole=True), bad)

    def close(self) -> None:
        """Nothing was written aside."""


def _hub_parts(name: str) -> tuple[str, str | None, str] | None:
    """(repository, configuration, split) of "owner/name:config[split]"; None if `name` looks like a path."""
    match = _HUB_NAME.fullmatch(name)
    if match is None or name.startswith(".") or File(name).kind in KINDS or os.path.isdir(name.partition("/")[0]):
        return None
    return match.group(1), match.group(2), match.group(3) or "train"


def _load_from_hub(name: str, repository: str, config: str | None, split: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(repository, config, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"there is no file or folder {name!r} (looked from {Path.cwd()}), and no such data set of the hub could be "
            f"loaded: {type(error).__name__}: {error}",
            fix="check the path; or name configuration and split as 'owner/name:config[split]', and check the network "
            "(HF_TOKEN for a private one)",
        ) from error
