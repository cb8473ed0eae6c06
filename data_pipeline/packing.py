"""Which documents share a pack: a pure function of lengths and settings.

Guarantees: the same (lengths, seq_length, policy, seed, epoch) give the same plan on any machine: only integers are
compared, and the shuffle is a fixed 64-bit mix, neither Python's hash nor a library's random stream. The number of
workers is no argument. Every document is in exactly one pack, no pack exceeds `seq_length`, and the number of packs is
the same in every epoch. Bump VERSION when any output changes: it is part of the hash that guards resuming.
Cost: best-fit decreasing in O(1) per document (a two-level bitmap of the room left): about 2 s per million documents,
and 2-6 s where they are packed as they come (`data_pipeline.streams`). numpy only, no torch.

Source: best-fit decreasing, Johnson et al. 1974, "Worst-case performance bounds for simple one-dimensional packing".
"""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from data_pipeline.streams import pack_stream
from raycp.config import PACKINGS
from raycp.errors import PlanError

VERSION = 2

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class PackReport:
    """What a plan comes to: documents, packs, tokens and the share of pack room that tokens fill."""

    num_documents: int
    num_packs: int
    num_tokens: int
    longest: int
    efficiency: float


@dataclass(frozen=True, eq=False, kw_only=True)
class PackPlan:
    """Packs of one epoch, in the order of consumption.

    Args:
        order: [documents] int64: document indices, pack after pack.
        offsets: [packs + 1] int64: pack i is `order[offsets[i] : offsets[i + 1]]`.
        seq_length, policy, seed, epoch: what it was planned for.
        family: hash of everything but the epoch; equal for all epochs of a run.
        report: totals.
    """

    order: Int64
    offsets: Int64
    seq_length: int
    policy: str
    seed: int
    epoch: int
    family: str
    report: PackReport

    def __len__(self) -> int:
        return int(self.offsets.size - 1)

    @property
    def hash(self) -> str:
        """Identity of this plan, as stored in a cursor."""
        return epoch_hash(self.family, self.epoch)

    def pack(self, index: int) -> tuple[int, ...]:
        """Document indices of pack `index`, 0 <= index < len(self)."""
        if not 0 <= index < len(self):
            raise PlanError(f"pack {index} of a plan of {len(self)} packs", fix=f"use 0 to {len(self) - 1}")
        return tuple(self.order[self.offsets[index] : self.offsets[index + 1]].tolist())

    @cached_property
    def packs(self) -> tuple[tuple[int, ...], ...]:
        """All packs as tuples of document indices."""
        order, ends = self.order.tolist(), self.offsets.tolist()
        return tuple(tuple(order[a:b]) for a, b in itertools.pairwise(ends))


def epoch_hash(family: str, epoch: int) -> str:
    """Hash of the plan of `epoch` in a family of plans."""
    return hashlib.sha256(f"{family}:{epoch}".encode()).hexdigest()


def plan_packs(
    lengths: Sequence[int] | npt.NDArray[np.integer],
    *,
    seq_length: int,
    policy: str = "best_fit",
    seed: int = 0,
    epoch: int = 0,
) -> PackPlan:
    """Plans one epoch.

    Args:
        lengths: [documents] tokens of each document, each 1 to `seq_length`.
        seq_length: room of a pack.
        policy: "best_fit": global best-fit decreasing, packs shuffled by (seed, epoch). "first_fit": documents as they
            come, with 64 packs open, packs in the order in which they close. "sequential": documents in their own
            order, a new pack when the next does not fit, never shuffled. "none": one document per pack, shuffled.
        seed: of the shuffle.
        epoch: of the shuffle, from 0.

    Raises:
        PlanError: no document, a length below 1 or above `seq_length`, or an unknown policy.
    """
    sizes = np.ascontiguousarray(lengths, dtype=np.int64)
    _check(sizes, seq_length, policy, seed, epoch)
    if policy == "best_fit":
        order, offsets = _best_fit_decreasing(sizes, seq_length)
    elif policy == "first_fit":
        packs = list(pack_stream(sizes.tolist(), seq_length))
        order = np.fromiter(itertools.chain.from_iterable(packs), np.int64, sizes.size)
        offsets = _offsets(np.fromiter(map(len, packs), np.int64, len(packs)))
    elif policy == "sequential":
        order, offsets = _sequential(sizes, seq_length)
    else:
        order, offsets = np.arange(sizes.size, dtype=np.int64), np.arange(sizes.size + 1, dtype=np.int64)
    if policy in ("best_fit", "none"):
        order, offsets = _shuffle_packs(order, offsets, seed, epoch)
    num_packs, num_tokens = int(offsets.size - 1), int(sizes.sum())
    facts = f"raycp-pack-plan:{VERSION}:{policy}:{seq_length}:{seed}:{sizes.size}:"
    family = hashlib.sha256(facts.encode() + sizes.astype("<i8").tobytes()).hexdigest()
    report = PackReport(
        num_documents=int(sizes.size),
        num_packs=num_packs,
        num_tokens=num_tokens,
        longest=int(sizes.max()),
        efficiency=num_tokens / (num_packs * seq_length),
    )
    return PackPlan(
        order=order,
        offsets=offsets,
        seq_length=seq_length,
        policy=policy,
        seed=seed,
        epoch=epoch,
        family=family,
        report=report,
    )


def _check(sizes: Int64, seq_length: int, policy: str, seed: int, epoch: int) -> None:
    if policy not in PACKINGS:
        raise PlanError(f"policy={policy!r} is not a packing", fix=f"set packing to one of {', '.join(PACKINGS)}")
    if seed < 0 or epoch < 0:
        raise PlanError(f"seed={seed} and epoch={epoch} must not be negative", fix="count both from 0")
    if sizes.ndim != 1 or sizes.size == 0:
        raise PlanError(f"lengths of shape {sizes.shape}: nothing to pack", fix="give at least one document")
    if sizes.min() < 1:
        index = int(sizes.argmin())
        raise PlanError(f"document {index} has {sizes[index]} tokens", fix="leave empty documents out")
    if sizes.max() > seq_length:
        index, count = int(sizes.argmax()), int((sizes > seq_length).sum())
        raise PlanError(
            f"{count} documents exceed seq_length={seq_length}; the longest, number {index}, has {sizes[index]} tokens",
            fix="set data.overflow to split, truncate or drop, or raise seq_length",
        )


class _RoomIndex:
    """Set of integers 0..limit with "smallest member >= x" in two steps: words of about sqrt(limit) bits."""

    def __init__(self, limit: int) -> None:
        self.shift = (limit.bit_length() + 1) // 2
        self.mask = (1 << self.shift) - 1
        self.words = [0] * ((limit >> self.shift) + 1)
        self.top = 0

    def add(self, value: int) -> None:
        word = value >> self.shift
        self.words[word] |= 1 << (value & self.mask)
        self.top |= 1 << word

    def remove(self, value: int) -> None:
        word = value >> self.shift
        self.words[word] &= ~(1 << (value & self.mask))
        if not self.words[word]:
            self.top &= ~(1 << word)

    def at_least(self, value: int) -> int:
        """Smallest member >= value, or -1."""
        word = value >> self.shift
        low = self.words[word] >> (value & self.mask)
        if low:
            return value + (low & -low).bit_length() - 1
        high = self.top >> (word + 1)
        if not high:
            return -1
        word += (high & -high).bit_length()
        bits = self.words[word]
        return (word << self.shift) + (bits & -bits).bit_length() - 1


def _best_fit_decreasing(sizes: Int64, seq_length: int) -> tuple[Int64, Int64]:
    by_size = np.argsort(-sizes, kind="stable")
    pack_of = np.empty(sizes.size, dtype=np.int64)
    open_packs: list[list[int]] = [[] for _ in range(seq_length)]  # by room left; a full pack is closed
    rooms = _RoomIndex(seq_length)
    num_packs = 0
    for place, size in enumerate(sizes[by_size].tolist()):
        room = rooms.at_least(size)
        if room < 0:
            room, pack = seq_length, num_packs
            num_packs += 1
        else:
            members = open_packs[room]
            pack = members.pop()
            if not members:
                rooms.remove(room)
        pack_of[place] = pack
        left = room - size
        if left:
            if not open_packs[left]:
                rooms.add(left)
            open_packs[left].append(pack)
    order = by_size[np.argsort(pack_of, kind="stable")]
    counts = np.bincount(pack_of, minlength=num_packs)
    return order.astype(np.int64), _offsets(counts)


def _sequential(sizes: Int64, seq_length: int) -> tuple[Int64, Int64]:
    ends = np.cumsum(sizes)
    offsets = [0]
    while offsets[-1] < sizes.size:
        used = int(ends[offsets[-1] - 1]) if offsets[-1] else 0
        offsets.append(int(np.searchsorted(ends, used + seq_length, side="right")))
    return np.arange(sizes.size, dtype=np.int64), np.asarray(offsets, dtype=np.int64)


def _offsets(counts: npt.NDArray[np.integer]) -> Int64:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def _shuffle_packs(order: Int64, offsets: Int64, seed: int, epoch: int) -> tuple[Int64, Int64]:
    counts = np.diff(offsets)
    new = permutation(counts.size, seed=seed, epoch=epoch)
    new_counts = counts[new]
    new_offsets = _offsets(new_counts)
    source = np.repeat(offsets[:-1][new] - new_offsets[:-1], new_counts) + np.arange(order.size)
    return order[source], new_offsets


def permutation(size: int, *, seed: int, epoch: int) -> Int64:
    """[size] int64: a permutation of 0..size-1 that depends on (size, seed, epoch) only, on every machine.

    Indices are sorted by a splitmix64 of (seed, epoch, index); equal keys keep their order.
    """
    digest = hashlib.sha256(f"{seed}:{epoch}".encode()).digest()
    start = np.uint64(int.from_bytes(digest[:8], "little"))
    x: UInt64 = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = x + start  # wraps around, as it should
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return np.argsort(x, kind="stable").astype(np.int64)
