"""What a committed step is: its shards, their lengths, checksums and rows. The same on disk and in memory.

Guarantees: no torch, no ray (keepers hold manifests and need neither); a manifest that was read has the types and the
plain file names that it should have, whoever wrote it, so that it can neither run code nor point outside its folder;
`coverage_problem` says whether shards give every row of every tensor exactly once. Costs nothing worth measuring: a
few hundred bytes of JSON for each tensor and rank.
"""

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from raycp.errors import CheckpointError

VERSION = 1
Data = bytes  # `Manifest.bytes` hides the type
_CHECKSUM = "checksum"
_FIX = "delete or move the folder aside: the checkpoint before it is used"


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """Rows [start, stop) of tensor `name` (whole shape `shape`) in one shard file, under the key `name`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ShardEntry":
        """Raises:
        CheckpointError: not the dict of an entry.
        """
        _exactly(raw, cls)
        shape = raw["shape"]
        entry = cls(**{**raw, "shape": tuple(shape) if isinstance(shape, list | tuple) else ()})
        good = isinstance(entry.name, str) and isinstance(entry.dtype, str) and bool(entry.shape)
        if not (good and all(map(_count, (*entry.shape, entry.start, entry.stop))) and entry.start <= entry.stop):
            raise CheckpointError(f"not an entry of a shard: {dict(raw)!r}", fix=_FIX)
        return entry


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """One file of a checkpoint, or one image in a keeper: what whoever wrote it hands to whoever commits."""

    file: str
    bytes: int
    crc32: int
    entries: tuple[ShardEntry, ...]

    def brief(self, known: int | None) -> "ShardRecord | ShardSum":
        """What to tell somebody who has a record of this file already whose entries have the sum `known`."""
        if known is None or known != layout_sum(self.entries):
            return self
        return ShardSum(file=self.file, bytes=self.bytes, crc32=self.crc32)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `from_dict` is its inverse."""
        return asdict(self)

    def to_text(self) -> str:
        """`to_dict` as canonical JSON."""
        return _canonical({**vars(self), "entries": [vars(entry) for entry in self.entries]})

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ShardRecord":
        """Raises:
        CheckpointError: not the dict of a record, or a file name that is not a plain one.
        """
        _exactly(raw, cls)
        entries = raw["entries"]
        if not (isinstance(entries, list | tuple) and _count(raw["bytes"]) and _count(raw["crc32"])):
            raise CheckpointError(f"not a record of a shard: {raw['file']!r}", fix=_FIX)
        if not is_plain(raw["file"]):
            raise CheckpointError(f"{raw['file']!r} is no file name of a shard", fix=_FIX)
        return cls(**{**raw, "entries": tuple(ShardEntry.from_dict(e) for e in entries)})


@dataclass(frozen=True, kw_only=True)
class ShardSum:
    """What is new of a shard at the next step of the same generation: never its entries."""

    file: str
    bytes: int
    crc32: int

    def of(self, before: ShardRecord) -> ShardRecord:
        """The whole record, with the very entries of the one before."""
        return replace(before, bytes=self.bytes, crc32=self.crc32)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a committed step is.

    Attributes:
        step: optimizer steps done.
        cursor: position in the data after this step.
        plan_hash: of the pack plan that the cursor belongs to.
        generation: of the process groups that wrote it.
        run_id: of the run.
        grid: how the ranks were arranged; information only, a state loads into any grid.
        fingerprint: of model, data and configuration, compared on resume.
        shards: every file.
        extra: anything else, JSON-able.
    """

    step: int
    cursor: dict[str, Any]
    plan_hash: str
    generation: int
    run_id: str
    grid: dict[str, int]
    shards: tuple[ShardRecord, ...]
    fingerprint: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION

    @property
    def bytes(self) -> int:
        return sum(s.bytes for s in self.shards)

    @property
    def age(self) -> tuple[int, int]:
        """(generation, step): of two manifests of one run the greater one is the newer one, for a later generation
        may have gone back to an older step.
        """
        return self.generation, self.step

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `from_dict` is its inverse."""
        return asdict(self)

    def since(self, base: "Manifest | None") -> "ManifestChange | None":
        """The same in a few bytes a shard, for whoever has `base`; None where entries or generation are others."""
        if base is None or base.generation != self.generation or len(base.shards) != len(self.shards):
            return None
        pairs = list(zip(self.shards, base.shards, strict=True))
        if not all(new.file == old.file and new.entries == old.entries for new, old in pairs):
            return None
        sums = tuple((new.bytes, new.crc32) for new, _ in pairs)
        return ManifestChange(base=base.age, head=self._bare(), sums=sums)

    def _bare(self) -> "Manifest":
        return replace(self, shards=())

    def to_bytes(self) -> Data:
        """The file: a JSON object, with a checksum of itself among its keys."""
        parts = {name: _canonical(json.loads(json.dumps(value))) for name, value in asdict(self._bare()).items()}
        parts["shards"] = f"[{','.join(s.to_text() for s in self.shards)}]"  # one at a time: other threads go on
        text = f"{{{','.join(f'{json.dumps(name)}:{parts[name]}' for name in sorted(parts))}}}"
        return f'{text[:-1]},"{_CHECKSUM}":"{zlib.crc32(text.encode()):08x}"}}'.encode()

    @classmethod
    def from_bytes(cls, data: Data) -> "Manifest":
        """Raises:
        CheckpointError: not a manifest, a changed one, or one of another version (`details["version"]`).
        """
        try:
            raw = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"not a manifest: {error}", fix=_FIX) from error
        if isinstance(raw, dict) and _CHECKSUM in raw:
            said = raw.pop(_CHECKSUM)
            found = f"{zlib.crc32(_canonical(raw).encode()):08x}"
            if said != found:
                raise CheckpointError(f"a changed manifest: checksum {found}, it says {said!r:.20}", fix=_FIX)
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "Manifest":
        """Raises:
        CheckpointError: another version, or not a manifest.
        """
        if not isinstance(raw, Mapping):
            raise CheckpointError(f"not a manifest: {type(raw).__name__} instead of an object", fix=_FIX)
        if raw.get("version") != VERSION:
            raise CheckpointError(
                f"manifest version {raw.get('version')!r}, this raycp reads version {VERSION}",
                fix="use the raycp that wrote the checkpoint",
                version=raw.get("version"),
            )
        try:
            manifest = cls(**{**raw, "shards": tuple(ShardRecord.from_dict(s) for s in raw["shards"])})
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"not a manifest: {error!r}", fix=_FIX) from error
        wrong = [name for name in ("step", "generation") if not _count(getattr(manifest, name))]
        wrong += [name for name in ("plan_hash", "run_id") if not isinstance(getattr(manifest, name), str)]
        wrong += [n for n in ("cursor", "grid", "fingerprint", "extra") if not isinstance(getattr(manifest, n), dict)]
        if len({s.file for s in manifest.shards}) < len(manifest.shards):
            wrong.append("shards (a file twice)")
        if wrong:
            raise CheckpointError(f"not a manifest: {', '.join(wrong)} cannot be right", fix=_FIX)
        return manifest


@dataclass(frozen=True, kw_only=True)
class ManifestChange:
    """A manifest, told by what differs from an earlier one of its generation.

    Attributes:
        base: `Manifest.age` of the earlier one.
        head: the manifest without its shards.
        sums: (bytes, crc32) of each shard, in the order of the earlier one.
    """

    base: tuple[int, int]
    head: Manifest
    sums: tuple[tuple[int, int], ...]

    @property
    def generation(self) -> int:
        """Of both manifests."""
        return self.head.generation

    def applied(self, base: Manifest) -> Manifest:
        """The whole manifest, with the very entries of `base`."""
        pairs = zip(base.shards, self.sums, strict=True)
        return replace(self.head, shards=tuple(replace(s, bytes=size, crc32=crc) for s, (size, crc) in pairs))


def whole(told: Manifest | ManifestChange, held: Iterable[Manifest]) -> Manifest | None:
    """The manifest that was told; None for a change of one that is not among those held."""
    if isinstance(told, Manifest):
        return told
    return next((told.applied(m) for m in held if m.age == told.base), None)


def layout_sum(entries: Iterable[ShardEntry]) -> int:
    """A checksum of what a shard's entries say, the same in every process."""
    return zlib.crc32("\n".join(f"{e.name} {e.shape} {e.dtype} {e.start} {e.stop}" for e in entries).encode())


def shard_file(generation: int, rank: int) -> str:
    """Name of a rank's file: the generation is part of it, so that a rank of an older one overwrites nothing."""
    return f"shard-g{generation:04d}-{rank:05d}.safetensors"


def is_plain(name: object) -> bool:
    """True for a name that stays inside its folder: no separator, no `..`, nothing hidden."""
    return isinstance(name, str) and name != "" and not name.startswith(".") and not set("/\\\0") & set(name)


def coverage_problem(shards: Iterable[ShardRecord]) -> str:
    """What is wrong with the rows of these shards together; "" when each tensor is covered once."""
    spans: dict[str, list[ShardEntry]] = {}
    for shard in shards:
        for entry in shard.entries:
            spans.setdefault(entry.name, []).append(entry)
    if not spans:
        return "no shard holds any tensor"
    for name, entries in sorted(spans.items()):
        if len({(e.shape, e.dtype) for e in entries}) > 1:
            return f"{name} has several shapes or dtypes"
        at = 0
        for entry in sorted(entries, key=lambda e: e.start):
            if entry.start != at:
                return f"{name}: rows [{min(at, entry.start)}, {max(at, entry.start)}) are missing or given twice"
            at = entry.stop
        if at != entries[0].shape[0]:
            return f"{name}: rows [{at}, {entries[0].shape[0]}) are missing"
    return ""


def _canonical(raw: object) -> str:
    return json.dumps(raw, sort_keys=True, separators=(",", ":"))


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _exactly(raw: object, cls: type) -> None:
    fields = set(cls.__dataclass_fields__)  # type: ignore[attr-defined]
    if not isinstance(raw, Mapping) or set(raw) != fields:
        raise CheckpointError(f"not the dict of a {cls.__name__}: {raw!r:.200}", fix=_FIX)
