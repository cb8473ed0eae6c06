"""The rule by which a slot may be written again: whatever happens, the newest committed step stays as it is."""

import os
import random
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycp.errors import ClusterError
from workers import slots
from workers.slots import Image, Slot, SlotState, SlotTable

SIZE = 4096


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def content(slot: Slot) -> bytes:
    return bytes(slot.image.view)


def written(slot: Slot) -> bytes:
    """What a rank writes: nothing of another step, generation or file looks like it."""
    text = f"{slot.generation} {slot.step} {slot.file} {slot.replica}".encode()
    return (text * (SIZE // len(text) + 1))[:SIZE]


class World:
    """Drives a table as keepers do, and checks it after every move."""

    def __init__(self, table: SlotTable) -> None:
        self.table = table
        self.generation = 1
        self.holders = {rank: object() for rank in range(2)}
        self.granted: list[Slot] = []
        self.used: list[tuple[Slot, bytes]] = []
        self.committed: dict[tuple[int, str], bytes] = {}
        self.newest = (-1, -1)
        self.next_step = 1

    def grant(self, rank: int, replica: bool) -> None:
        holder = "replicas" if replica else self.holders[rank]
        mine = [s for s in self.table.slots if (s.rank, s.replica) == (rank, replica)]
        waiting = [
            s
            for s in mine
            if s.generation == self.generation and s.state is not SlotState.FILLING and not self.is_committed(s)
        ]
        file = f"g{self.generation}-{rank}"
        step = max(self.next_step, *(s.step + 1 for s in waiting)) if waiting else self.next_step
        if (step, file) in self.committed:
            return
        slot = self.table.grant(
            replica=replica,
            rank=rank,
            step=step,
            generation=self.generation,
            file=file,
            size=SIZE,
            holder=holder,
        )
        if waiting:
            assert slot is None, "granted before the step before was committed"
            assert all(s in self.table.slots for s in waiting)
        if slot is not None:
            assert not self.is_committed(slot)
            assert all(slot.image is not other.image for other, _ in self.used), "somebody reads that image"
            slot.image.view[:] = written(slot)
            self.granted.append(slot)

    def seal(self, index: int) -> None:
        filling = [s for s in self.granted if s.state is SlotState.FILLING and s in self.table.slots]
        if filling:
            slot = filling[index % len(filling)]
            self.table.seal(slot, ())
            self.table.verify(slot, zlib.crc32(slot.image.view))

    def commit(self) -> None:
        """A step of the generation in force that is verified for all that hold it."""
        steps = {s.step for s in self.verified() if s.generation == self.generation and not self.is_committed(s)}
        if steps:
            step = max(steps)
            shards = [s for s in self.verified() if s.step == step and s.generation == self.generation]
            self.protect(step, shards)
            assert self.table.commit(self.generation, step, [s.file for s in shards])
            self.next_step = step + 1

    def commit_an_older_one(self) -> None:
        before = list(self.table.slots)
        assert not self.table.commit(self.newest[0], self.newest[1] - 1, ["g1-0", "g1-1"])
        assert self.table.slots == before

    def keep_only(self) -> None:
        steps = {(s.generation, s.step) for s in self.verified()}
        if steps:
            generation, step = max(steps)
            shards = [s for s in self.verified() if (s.generation, s.step) == (generation, step)]
            self.protect(step, shards)
            self.newest = (generation, step)
            self.table.keep_only(generation, step, [s.file for s in shards])
            assert {s.key for s in self.table.slots} == set(self.committed)
            self.next_step = step + 1

    def protect(self, step: int, shards: list[Slot]) -> None:
        self.newest = (self.generation, step)
        self.committed = {s.key: b"" for s in shards}
        for slot in shards:
            self.committed[slot.key] = written(slot)[: SIZE // 2]  # the replica and the original differ at the end

    def fence(self) -> None:
        self.generation += 1
        self.table.fence()
        assert all(s.state is not SlotState.FILLING for s in self.table.slots)
        self.holders = {rank: object() for rank in self.holders}

    def leave(self, rank: int) -> None:
        gone, self.holders[rank] = self.holders[rank], object()
        self.table.left(gone)
        assert gone not in [s.holder for s in self.table.slots]
        assert self.table.images_of(gone) == []

    def use(self, index: int) -> None:
        verified = self.verified()
        if verified:
            slot = verified[index % len(verified)]
            self.table.use(slot)
            self.used.append((slot, content(slot)))

    def done(self, index: int) -> None:
        if self.used:
            slot, _ = self.used.pop(index % len(self.used))
            self.table.done(slot)

    def verified(self) -> list[Slot]:
        return [s for s in self.table.slots if s.state is SlotState.VERIFIED]

    def is_committed(self, slot: Slot) -> bool:
        return slot.key in self.committed

    def check(self) -> None:
        table = self.table
        for step, file in self.committed:
            slot = table.find(step, file)
            assert slot is not None, "a shard of the newest committed step is gone"
            assert content(slot) == written(slot), "a shard of the newest committed step was overwritten"
        for slot, before in self.used:
            assert content(slot) == before, "an image changed under its reader"
        images = [s.image.number for s in table.slots] + [s.image.number for s, _ in self.used if s.retired]
        spare = [image.number for spares in table._spare.values() for _, image in spares]
        assert not set(spare) & set(images)
        for key in {(s.replica, s.rank) for s in table.slots}:
            held = [s for s in table.slots if (s.replica, s.rank) == key]
            assert len(held) + len(table._spare.get(key, ())) <= 2, "more memory than was counted for"


MOVES: list[Callable[[World, int], None]] = [
    lambda w, n: w.grant(n % 2, n % 4 >= 2),
    lambda w, n: w.grant(n % 2, n % 4 >= 2),
    lambda w, n: w.seal(n),
    lambda w, n: w.seal(n),
    lambda w, n: w.commit(),
    lambda w, n: w.commit_an_older_one(),
    lambda w, n: w.keep_only(),
    lambda w, n: w.fence(),
    lambda w, n: w.leave(n % 2),
    lambda w, n: w.use(n),
    lambda w, n: w.done(n),
]


def play(table: SlotTable, moves: list[tuple[int, int]]) -> None:
    world = World(table)
    try:
        for move, number in moves:
            MOVES[move](world, number)
            world.check()
    finally:
        table.close()
        for slot, _ in world.used:
            table.done(slot)
        if type(table) is SlotTable:
            assert table.bytes == 0


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(MOVES) - 1), st.integers(0, 7)), max_size=60))
def test_the_newest_committed_step_is_never_granted_lost_or_changed(moves: list[tuple[int, int]]) -> None:
    play(SlotTable(), moves)


class Unprotected(SlotTable):
    """Forgets that a committed step must stay."""

    def protects(self, slot: Slot) -> bool:
        return False


class Hasty(SlotTable):
    """Grants the slot of a sealed step before that step is committed."""

    def grant(self, **what: object) -> Slot | None:  # type: ignore[override]
        for slot in [s for s in self.slots if s.rank == what["rank"] and s.replica == what["replica"]]:
            if not self.protects(slot):
                self.retire(slot)
        return super().grant(**what)  # type: ignore[arg-type]


class Careless(SlotTable):
    """Gives an image away under its readers."""

    def retire(self, slot: Slot) -> None:
        slot.users, before = 0, slot.users
        super().retire(slot)
        slot.users = before
        if before:
            self._leaving.append(slot)


@pytest.mark.parametrize("faulty", [Unprotected, Hasty, Careless])
def test_planted_fault_a_table_that_breaks_the_rule_is_found(faulty: type[SlotTable]) -> None:
    found = 0
    for seed in range(60):
        dice = random.Random(seed)
        moves = [(dice.randrange(len(MOVES)), dice.randrange(8)) for _ in range(60)]
        play(SlotTable(), moves)  # green where the faulty one is red
        try:
            play(faulty(), moves)
        except (AssertionError, AttributeError):  # an image that was given back has no view
            found += 1
    assert found > 0


def test_the_memory_of_a_run_is_two_images_a_rank_and_all_of_it_comes_back() -> None:
    before = descriptors()
    table = SlotTable()
    holder = object()
    seen = set()
    for step in range(1, 7):
        slot = table.grant(replica=False, rank=0, step=step, generation=1, file="f", size=SIZE, holder=holder)
        assert slot is not None
        seen.add(slot.image.number)
        table.seal(slot, ())
        table.verify(slot, 1)
        assert table.commit(1, step, ["f"])
    assert len(seen) == 2
    assert table.bytes == 2 * SIZE
    table.close()
    assert table.bytes == 0
    assert descriptors() == before


def test_a_third_image_lives_as_long_as_its_writer_to_storage() -> None:
    table, holder = SlotTable(), object()

    def step(number: int) -> Slot:
        slot = table.grant(replica=False, rank=0, step=number, generation=1, file="f", size=SIZE, holder=holder)
        assert slot is not None
        table.seal(slot, ())
        table.verify(slot, 1)
        table.commit(1, number, ["f"])
        return slot

    first = step(1)
    table.use(first)
    step(2)
    step(3)
    assert table.bytes == 3 * SIZE
    table.done(first)
    assert table.bytes == 2 * SIZE
    table.close()


@pytest.mark.parametrize("ending", [lambda t: t.keep_only(-1, -1, []), SlotTable.close])
def test_an_image_that_was_read_as_everything_was_given_up_is_not_kept_for_later(
    ending: Callable[[SlotTable], None],
) -> None:
    """Its reader ended after the order, and it became a spare that nobody ever gave back."""
    table, holder = SlotTable(), object()
    slot = table.grant(replica=False, rank=0, step=1, generation=1, file="f", size=SIZE, holder=holder)
    assert slot is not None
    table.seal(slot, ())
    assert table.verify(slot, 0)
    table.use(slot)
    ending(table)
    assert table.bytes == SIZE
    table.done(slot)
    assert table.bytes == 0


def test_the_pages_of_an_image_come_back_although_another_process_maps_it() -> None:
    import mmap

    size = 1 << 24
    image = Image(size)
    image.reserve()
    other = mmap.mmap(image.descriptor, size)  # the rank's map
    kept = os.dup(image.descriptor)
    assert os.fstat(kept).st_blocks * 512 >= size
    image.release()
    assert os.fstat(kept).st_blocks == 0
    image.release()
    other.close()
    os.close(kept)


def test_an_image_can_neither_shrink_under_its_keeper_nor_grow() -> None:
    image = Image(SIZE)
    for size in (0, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(image.descriptor, size)
    image.release()


def test_an_image_of_another_size_is_not_used_again() -> None:
    table, holder = SlotTable(), object()
    for step, size in ((1, SIZE), (2, SIZE), (3, 2 * SIZE)):
        slot = table.grant(replica=False, rank=0, step=step, generation=1, file="f", size=size, holder=holder)
        assert slot is not None
        assert slot.image.size == size
        table.seal(slot, ())
        table.verify(slot, 1)
        table.commit(1, step, ["f"])
    table.close()


def test_going_back_or_sealing_what_was_taken_back_is_refused() -> None:
    table = SlotTable()

    def ask(step: int, holder: object) -> Slot | None:
        return table.grant(replica=False, rank=0, step=step, generation=1, file="f", size=SIZE, holder=holder)

    slot = ask(5, "a")
    assert slot is not None
    again = ask(5, "b")
    assert again is not None
    with pytest.raises(ClusterError, match="taken back"):
        table.seal(slot, ())
    table.seal(again, ())
    assert not table.verify(slot, 1)
    table.verify(again, 1)
    with pytest.raises(ClusterError, match="step 4 of rank 0 after step 5"):
        ask(4, "b")
    assert ask(6, "b") is None
    table.commit(1, 5, ["f"])
    with pytest.raises(ClusterError, match="committed and held"):
        ask(5, "b")
    assert ask(6, "b") is not None
    table.close()


def test_a_machine_without_memory_is_an_error_and_not_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "host_memory", lambda: (1 << 30, SIZE))
    Image(SIZE).reserve()
    with pytest.raises(OSError, match="8192 bytes of memory are needed, 4096 are left"):
        Image(2 * SIZE).reserve()
    with pytest.raises(OSError, match="allocate memory"):
        Image(1 << 60)


def test_a_step_that_another_keeper_lost_does_not_hold_up_the_next_one() -> None:
    """Its slot waited for a commit that never came, and the rank stood still until it was taken for frozen."""
    table, holder = SlotTable(), object()

    def grant(step: int) -> Slot | None:
        return table.grant(replica=False, rank=0, step=step, generation=1, file="g1-0", size=SIZE, holder=holder)

    for step in (1, 2):
        slot = grant(step)
        assert slot is not None
        table.seal(slot, ())
        table.verify(slot, zlib.crc32(slot.image.view))
        if step == 1:
            table.commit(1, 1, ["g1-0"])
    assert grant(3) is None
    table.abandon(1, 2)
    assert grant(3) is not None
    kept = table.find(1, "g1-0")
    assert kept is not None
    assert table.protects(kept)
    table.close()
