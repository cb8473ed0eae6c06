"""Packs are read and planned ahead, in order."""

import time

from data_pipeline import Pack, pack_documents
from data_pipeline.document import Document
from workers.ahead import DEPTH, Ahead


def pack_of(size: int) -> Pack:
    ids = list(range(size))
    return pack_documents([Document(ids=ids, targets=[*ids[1:], -100], weights=None, start_position=0, row_id="")])


def ahead(made: list[int] | None = None) -> Ahead[Pack]:
    def make(pack_id: int | None) -> Pack:
        assert pack_id is not None
        if made is not None:
            made.append(pack_id)
        return pack_of(8 + pack_id)

    return Ahead(make)


def test_packs_come_in_the_order_that_is_asked_for() -> None:
    queue = ahead()
    assert [len(queue.take(i, range(i + 1, 12))) for i in range(12)] == [8 + i for i in range(12)]


def test_the_next_plans_are_made_while_the_current_one_is_used_also_over_the_end_of_a_step() -> None:
    made: list[int] = []
    queue = ahead(made)
    queue.take(0, [1, 2, 3, 4])
    deadline = time.monotonic() + 5
    while len(made) < 1 + DEPTH and time.monotonic() < deadline:
        time.sleep(0.01)
    assert made == list(range(1 + DEPTH)), "no more than DEPTH ahead"
    queue.take(1, [2])
    assert made.count(1) == 1


def test_a_change_of_mind_plans_anew() -> None:
    queue = ahead()
    queue.take(0, [1, 2])
    assert len(queue.take(5, [])) == 13
