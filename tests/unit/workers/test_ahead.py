"""Plans are made ahead, in order, and compared between ranks before their first use."""

import threading
import time

import pytest
import torch.distributed as dist

from data_pipeline import Pack, pack_documents
from data_pipeline.document import Document
from raycp.errors import PlanError
from raycp.plan import AttentionPlan, RankGrid
from workers.ahead import DEPTH, PlanAgreement, PlanAhead, Planned


def pack_of(size: int) -> Pack:
    ids = list(range(size))
    return pack_documents([Document(ids=ids, targets=[*ids[1:], -100], weights=None, start_position=0, row_id="")])


def planned(size: int, layout: str = "zigzag") -> Planned:
    plan = AttentionPlan.build(
        doc_ends=[size], grid=RankGrid(dp=1, ring=2), layout=layout, algorithm="ring", num_heads=2, num_kv_heads=1
    )
    return Planned(pack_of(size), plan)


def ahead(rank: int, store: dist.Store, layout: str = "zigzag", made: list[int] | None = None) -> PlanAhead:
    def make(pack_id: int | None) -> Planned:
        assert pack_id is not None
        if made is not None:
            made.append(pack_id)
        return planned(8 + pack_id, layout)

    return PlanAhead(make, PlanAgreement(store, name="train/0", cp_rank=rank, cp=2))


def test_ranks_that_agree_get_their_packs_in_order() -> None:
    store = dist.HashStore()
    ranks = [ahead(r, store) for r in range(2)]
    for i in range(12):
        sizes = [len(rank.take(i, range(i + 1, 12)).pack) for rank in ranks]
        assert sizes == [8 + i, 8 + i]


def test_keys_of_packs_long_past_are_deleted() -> None:
    store = dist.HashStore()
    ranks = [ahead(r, store) for r in range(2)]
    for i in range(40):
        for rank in ranks:
            rank.take(i, range(i + 1, 40))
    assert store.num_keys() <= 4 * DEPTH + 4


def test_a_rank_that_plans_differently_stops_with_both_hashes() -> None:
    store = dist.HashStore()
    first, other = ahead(0, store), ahead(1, store, layout="contiguous")
    first.take(0, [])
    with pytest.raises(PlanError) as caught:
        other.take(0, [])
    assert planned(8).plan.hash[:16] in str(caught.value)
    assert planned(8, "contiguous").plan.hash[:16] in str(caught.value)


def test_the_next_plans_are_made_while_the_current_one_is_used_also_over_the_end_of_a_step() -> None:
    made: list[int] = []
    queue = ahead(0, dist.HashStore(), made=made)
    queue.take(0, [1, 2, 3, 4])
    deadline = time.monotonic() + 5
    while len(made) < 1 + DEPTH and time.monotonic() < deadline:
        time.sleep(0.01)
    assert made == list(range(1 + DEPTH)), "no more than DEPTH ahead"
    queue.take(1, [2])
    assert made.count(1) == 1


def test_a_change_of_mind_plans_anew() -> None:
    queue = ahead(0, dist.HashStore())
    queue.take(0, [1, 2])
    assert len(queue.take(5, []).pack) == 13


def test_a_rank_waits_for_a_slow_first_rank() -> None:
    store = dist.HashStore()
    first, other = ahead(0, store), ahead(1, store)
    threading.Timer(0.3, lambda: first.take(0, [])).start()
    began = time.monotonic()
    other.take(0, [])
    assert time.monotonic() - began > 0.2
