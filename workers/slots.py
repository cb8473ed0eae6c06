"""The memory of a keeper: images of shards in slots, and the rule by which a slot may be written again.

Guarantees: the slots of the newest committed step are never granted, never freed and never changed, whatever is asked
for; an image that somebody else might still write (its rank died, was fenced off or hung up inside a copy) is given
back and never used again; a slot that is being read or written to storage is freed when that ends. Costs, for each
rank whose image is held: the committed one and the one being filled, and one more while storage is written. All of it
is anonymous memory (memfd): no limit of /dev/shm, nothing left on a file system, gone with the processes.
Not thread-safe: whoever owns the table holds a lock.
"""

import errno
import fcntl
import itertools
import mmap
import os
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from raycp.errors import ClusterError
from raycp.training.device import host_memory
from raycp.training.manifest import ShardEntry, ShardRecord
from workers.wire import KeeperAddress

_NUMBERS = itertools.count(1)


class Image:
    """Anonymous memory of a fixed size that processes of a node share by its descriptor.

    Raises:
        OSError: no process can map that much (ENOMEM).
    """

    def __init__(self, size: int) -> None:
        self.number = next(_NUMBERS)
        self.size = size
        self.descriptor = os.memfd_create("raycp-image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._reserved = False
        try:
            os.ftruncate(self.descriptor, size)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._map = mmap.mmap(self.descriptor, size)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.view = memoryview(self._map)

    def reserve(self) -> None:
        """Takes the pages, about 3 GB/s, so that no writer waits for them, and none is killed for want of one.

        Raises:
            OSError: this machine or container has less memory left (ENOMEM).
        """
        if not self._reserved:
            _, available = host_memory()
            if self.size > available:
                raise OSError(errno.ENOMEM, f"{self.size} bytes of memory are needed, {available} are left")
            os.posix_fallocate(self.descriptor, 0, self.size)
            self._reserved = True

    def release(self) -> None:
        """Gives the pages back at once, also while another process maps them; the image cannot be used afterwards."""
        if self.descriptor < 0:
            return
        self._map.madvise(mmap.MADV_REMOVE)
        os.close(self.descriptor)
        self.descriptor = -1
        del self.view  # the map itself goes when the last reader's view does
        del self._map


class SlotState(Enum):
    """How far an image is."""

    FILLING = "filling"
    SEALED = "sealed"
    VERIFIED = "verified"


@dataclass(eq=False, kw_only=True)
class Slot:
    """One image and what it holds.

    Attributes:
        replica: it came from another node's keeper; else from a rank of this node.
        generation: of the process groups whose state it is.
        file: name of the shard, the same in a checkpoint.
        holder: whoever fills it (a connection); None once that one is gone.
        source: the keeper that holds the original of a replica.
        copies: keepers that acknowledged a replica of it.
        users: readers and writers that the image must outlive.
        sending: the keeper that a replica is being sent to.
        checked: the checksum was compared in this generation.
        problem: why its replica cannot be made.
    """

    replica: bool
    rank: int
    step: int
    generation: int
    file: str
    image: Image
    holder: Any
    source: KeeperAddress | None = None
    state: SlotState = SlotState.FILLING
    crc32: int = 0
    entries: tuple[ShardEntry, ...] = ()
    copies: set[KeeperAddress] = field(default_factory=set)
    users: int = 0
    retired: bool = False
    checked: bool = False
    sending: KeeperAddress | None = None
    problem: str = ""

    @property
    def record(self) -> ShardRecord:
        """What a manifest says of it."""
        return ShardRecord(file=self.file, bytes=self.image.size, crc32=self.crc32, entries=self.entries)

    @property
    def key(self) -> tuple[int, str]:
        """(step, file): two slots with the same one hold the same bytes."""
        return self.step, self.file


class SlotTable:
    """The slots of one keeper."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.newest: tuple[int, int] = (-1, -1)
        """(generation, step) of the newest committed step."""
        self._protected: frozenset[tuple[int, str]] = frozenset()
        self._abandoned: tuple[int, int] = (-1, -1)
        self._leaving: list[Slot] = []
        self._closed = False
        self._spare: dict[tuple[bool, int], list[tuple[Any, Image]]] = {}

    @property
    def bytes(self) -> int:
        """Memory of all images."""
        spare = sum(image.size for spares in self._spare.values() for _, image in spares)
        return spare + sum(s.image.size for s in (*self.slots, *self._leaving))

    def protects(self, slot: Slot) -> bool:
        """Whether the slot belongs to the newest committed step."""
        return slot.state is SlotState.VERIFIED and self._is_newest(slot)

    def _is_newest(self, slot: Slot) -> bool:
        """As `protects`, or it will be: its bytes are on their way here."""
        return slot.key in self._protected

    def find(self, step: int, file: str) -> Slot | None:
        """A verified slot with that shard, the own one before a replica."""
        found = [s for s in self.slots if s.key == (step, file) and s.state is SlotState.VERIFIED]
        return min(found, key=lambda s: s.replica, default=None)

    def grant(
        self,
        *,
        replica: bool,
        rank: int,
        step: int,
        generation: int,
        file: str,
        size: int,
        holder: Any,
        source: KeeperAddress | None = None,
    ) -> Slot | None:
        """A slot to fill, or None while an earlier step of the same rank waits for its commit.

        Raises:
            ClusterError: the step is committed, or older than one that was sealed.
        """
        for slot in [s for s in self.slots if s.rank == rank and s.replica == replica]:
            if self.protects(slot):
                if slot.key == (step, file):
                    raise ClusterError(f"step {step} of rank {rank} is committed and held", fix="copy later steps only")
            elif (
                slot.state is SlotState.FILLING
                or slot.generation < generation
                or slot.step == step
                or (slot.generation, slot.step) <= self._abandoned
            ):
                self.retire(slot)  # left, of a world that ended, filled again, or of a step that is never committed
            elif slot.step > step:
                raise ClusterError(f"step {step} of rank {rank} after step {slot.step}", fix="copy later steps only")
            else:
                return None
        image = self._take_spare(replica, rank, size, holder) or Image(size)
        granted = Slot(
            replica=replica,
            rank=rank,
            step=step,
            generation=generation,
            file=file,
            image=image,
            holder=holder,
            source=source,
        )
        self.slots.append(granted)
        return granted

    def seal(self, slot: Slot, entries: Sequence[ShardEntry]) -> None:
        """The image is complete.

        Raises:
            ClusterError: the slot was taken back meanwhile.
        """
        if slot not in self.slots or slot.state is not SlotState.FILLING:
            raise ClusterError(f"the slot of step {slot.step} was taken back", fix="begin the copy again")
        slot.entries, slot.state = tuple(entries), SlotState.SEALED

    def verify(self, slot: Slot, crc32: int) -> bool:
        """The checksum is known. False: the slot was taken back meanwhile."""
        if slot not in self.slots or slot.state is not SlotState.SEALED:
            return False
        slot.crc32, slot.state, slot.checked = crc32, SlotState.VERIFIED, True
        return True

    def commit(self, generation: int, step: int, files: Collection[str]) -> bool:
        """These shards are the newest committed step from now on; what is older is given back.

        Returns:
            False, and nothing changes, if a newer step was committed before.
        """
        if (generation, step) < self.newest:
            return False
        self.newest = (generation, step)
        self._protected = frozenset((step, file) for file in files)
        for slot in list(self.slots):
            if not self._is_newest(slot) and (slot.generation, slot.step) <= self.newest:
                self.retire(slot)
        return True

    def abandon(self, generation: int, step: int) -> None:
        """Steps of this generation up to this one that are not committed will not be: their slots may be granted."""
        self._abandoned = max(self._abandoned, (generation, step))

    def keep_only(self, generation: int, step: int, files: Collection[str]) -> None:
        """Protects these shards as if they had just been committed, and gives all other slots back."""
        self.newest = (generation, step)
        self._protected = frozenset((step, file) for file in files)
        for slot in list(self.slots):
            if not self._is_newest(slot):
                self.retire(slot)
        self._drop_spares()

    def fence(self) -> None:
        """A new generation: what is being filled is of an older one, and its writer may not know yet."""
        for slot in list(self.slots):
            slot.checked = False
            if slot.state is SlotState.FILLING:
                self.retire(slot)
        self._drop_spares()

    def left(self, holder: Any) -> None:
        """Whoever filled these slots is gone: what it had not sealed is lost, and no image is used again for it."""
        for slot in [s for s in (*self.slots, *self._leaving) if s.holder is holder]:
            slot.holder = None
            if slot.state is SlotState.FILLING and not slot.retired:
                self.retire(slot)
        for key, spares in self._spare.items():
            for _, image in [s for s in spares if s[0] is holder]:
                image.release()
            self._spare[key] = [s for s in spares if s[0] is not holder]

    def retire(self, slot: Slot) -> None:
        """Takes a slot back: at once, or when its last user is done."""
        self.slots.remove(slot)
        slot.retired = True
        if slot.users:
            self._leaving.append(slot)
        else:
            self._recycle(slot)

    def use(self, slot: Slot) -> None:
        """The image must stay as it is until `done`."""
        slot.users += 1

    def done(self, slot: Slot) -> None:
        """Ends one `use`."""
        slot.users -= 1
        if slot.retired and not slot.users:
            self._leaving.remove(slot)
            self._recycle(slot)

    def images_of(self, holder: Any) -> list[int]:
        """Numbers of the images that this holder fills or may get again."""
        spare = [image.number for spares in self._spare.values() for h, image in spares if h is holder]
        return spare + [s.image.number for s in (*self.slots, *self._leaving) if s.holder is holder]

    def close(self) -> None:
        """Gives everything back, now or when its last user is done."""
        self._closed = True
        for slot in list(self.slots):
            self.retire(slot)
        self._drop_spares()

    def _recycle(self, slot: Slot) -> None:
        key = (slot.replica, slot.rank)
        held = sum((s.replica, s.rank) == key for s in self.slots) + len(self._spare.get(key, ()))
        if slot.state is SlotState.VERIFIED and slot.holder is not None and held < 2 and not self._closed:
            self._spare.setdefault(key, []).append((slot.holder, slot.image))
        else:
            slot.image.release()

    def _take_spare(self, replica: bool, rank: int, size: int, holder: Any) -> Image | None:
        found = None
        for owner, image in self._spare.pop((replica, rank), []):
            if found is None and owner is holder and image.size == size:
                found = image
            else:
                image.release()
        return found

    def _drop_spares(self) -> None:
        for spares in self._spare.values():
            for _, image in spares:
                image.release()
        self._spare = {}
        for slot in self._leaving:  # nor does it become one when its last user is done
            slot.holder = None


class Pins:
    """Slots that orders to write to storage hold, each order its own: the same step may be written twice at a time.

    Args:
        table: of the keeper, whose lock whoever calls this holds.
    """

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._slots: dict[tuple[str, int, str], Slot] = {}
        self._ended: deque[str] = deque(maxlen=16)

    def hold(self, order: str, step: int, files: Sequence[str]) -> list[str]:
        """Holds these shards until `end`; returns those that are not there: all, if the order has ended already."""
        if order in self._ended:
            return list(files)
        missing = []
        for file in files:
            slot, held = self._table.find(step, file), (order, step, file) in self._slots
            if slot is None and not held:
                missing.append(file)
            elif slot is not None and not held:
                self._table.use(slot)
                self._slots[order, step, file] = slot
        return missing

    def get(self, order: str, step: int, file: str) -> Slot | None:
        """The slot that is held."""
        return self._slots.get((order, step, file))

    def end(self, order: str) -> None:
        """Ends an order, also one that is still on its way."""
        self._ended.append(order)
        self._drop([key for key in self._slots if key[0] == order])

    def clear(self) -> None:
        """Holds nothing any more."""
        self._drop(list(self._slots))

    def _drop(self, keys: Sequence[tuple[str, int, str]]) -> None:
        for key in keys:
            self._table.done(self._slots.pop(key))
