"""Packs from documents as they come: first fit over a bounded number of open packs.

Guarantees: a pack is given out as soon as it is full, or when it is the fullest and room for another is needed, so what
came out so far never changes; the state is a few numbers per open pack, JSON-able, and goes on exactly where it stood.
Integers only: the same everywhere. Cost: one look at up to `num_open` packs per document, about 3 us; 97-99.9 % full,
where the global `best_fit` reaches 99.7 % and more.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Self

from raycp.errors import CheckpointError, PlanError

OPEN_PACKS = 64

Packed = tuple[int, ...]


class OpenPacks:
    """The packs that are being filled.

    Args:
        seq_length: room of a pack.
        num_open: most packs that are open at once.

    Raises:
        PlanError: a number below 1.
    """

    def __init__(self, seq_length: int, num_open: int = OPEN_PACKS) -> None:
        if seq_length < 1 or num_open < 1:
            raise PlanError(f"seq_length={seq_length}, {num_open} open packs", fix="set both to 1 or more")
        self.seq_length, self.num_open = seq_length, num_open
        self._rooms: list[int] = []  # of the open packs, in the order in which they were opened
        self._members: list[list[int]] = []

    def add(self, document: int, length: int) -> list[Packed]:
        """Puts one document into the first pack that has room; returns the packs that this closed, at most two.

        Raises:
            PlanError: a length below 1 or above `seq_length`.
        """
        if not 1 <= length <= self.seq_length:
            raise PlanError(
                f"document {document} has {length} tokens, a pack 1 to {self.seq_length}",
                fix="set data.overflow to split, truncate or drop",
            )
        closed: list[Packed] = []
        place = next((i for i, room in enumerate(self._rooms) if room >= length), -1)
        if place < 0:
            if len(self._rooms) == self.num_open:
                closed.append(self._close(self._rooms.index(min(self._rooms))))
            place = len(self._rooms)
            self._rooms.append(self.seq_length)
            self._members.append([])
        self._rooms[place] -= length
        self._members[place].append(document)
        if not self._rooms[place]:
            closed.append(self._close(place))
        return closed

    def flush(self) -> list[Packed]:
        """Closes all open packs, in the order in which they were opened."""
        return [self._close(0) for _ in range(len(self._rooms))]

    def state(self) -> dict[str, Any]:
        """What `restored` takes: documents in the open packs and their room."""
        return {
            "seq_length": self.seq_length,
            "num_open": self.num_open,
            "rooms": list(self._rooms),
            "members": [list(members) for members in self._members],
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Self:
        """Goes on where `state` was taken.

        Raises:
            CheckpointError: the state cannot be read.
        """
        try:
            made = cls(int(state["seq_length"]), int(state["num_open"]))
            made._rooms = [int(room) for room in state["rooms"]]
            made._members = [[int(d) for d in members] for members in state["members"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"state of open packs {str(state)[:80]} cannot be read: {error!r}", fix="resume from another checkpoint"
            ) from error
        return made

    def _close(self, place: int) -> Packed:
        del self._rooms[place]
        return tuple(self._members.pop(place))


def pack_stream(lengths: Iterable[int], seq_length: int) -> Iterator[Packed]:
    """Packs of documents 0, 1, ... in the order in which they close."""
    packs = OpenPacks(seq_length)
    for document, length in enumerate(lengths):
        yield from packs.add(document, length)
    yield from packs.flush()
