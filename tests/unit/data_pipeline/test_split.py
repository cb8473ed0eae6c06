import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline import Document, Pack, PackShard, pack_documents, split_pack
from data_pipeline.document import IGNORE, shift_targets
from raycp.errors import PlanError
from raycp.plan import AttentionPlan, RankGrid


def make_pack(lengths: list[int], *, weighted: bool = False) -> Pack:
    documents, first = [], 1
    for size in lengths:
        ids = np.arange(first, first + size)
        weights = ids / 4 if weighted else None
        documents.append(Document(ids=ids, targets=shift_targets(ids, np.ones(size, bool)), weights=weights))
        first += size
    return pack_documents(documents)


def split(pack: Pack, cp: int, layout: str) -> list[PackShard]:
    plan = AttentionPlan.build(
        doc_ends=pack.doc_ends,
        grid=RankGrid(dp=1, ring=cp),
        layout=layout,
        algorithm="ring",
        num_heads=4,
        num_kv_heads=2,
    )
    return [split_pack(pack, plan, rank) for rank in range(cp)]


def check_union(pack: Pack, shards: list[PackShard]) -> None:
    """Put back at their positions, the shards are the pack."""
    order = np.argsort(np.concatenate([s.token_index for s in shards]))
    for name in ("ids", "targets", "position_ids", "weights"):
        whole = getattr(pack, name)
        if whole is not None:
            assert np.concatenate([getattr(s, name) for s in shards])[order].tolist() == whole.tolist()
    assert sum(s.num_targets for s in shards) == pack.num_targets
    assert sum(s.target_weight for s in shards) == pytest.approx(pack.target_weight)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 23), min_size=1, max_size=7),
    st.integers(1, 5),
    st.sampled_from(["contiguous", "zigzag"]),
    st.booleans(),
)
def test_union_of_shards_is_the_pack(lengths, cp, layout, weighted):
    pack = make_pack(lengths, weighted=weighted)
    check_union(pack, split(pack, cp, layout))


@pytest.mark.parametrize("fault", ["shift after shard", "another index for targets"])
def test_the_check_sees_a_planted_fault(fault):
    pack = make_pack([7, 5, 4])
    shards = split(pack, 2, "zigzag")
    if fault == "shift after shard":  # what is lost when each rank shifts what it holds
        for shard in shards:
            shard.targets[:] = shift_targets(shard.ids, np.ones(len(shard), bool))
    else:
        shards[0].targets[:] = np.roll(shards[0].targets, 1)
    with pytest.raises(AssertionError):
        check_union(pack, shards)


def test_a_rank_without_tokens_gets_an_empty_shard():
    shards = split(make_pack([1]), 3, "contiguous")
    assert sorted(map(len, shards)) == [0, 0, 1]
    empty = next(s for s in shards if not len(s))
    assert (empty.num_targets, empty.target_weight) == (0, 0.0)


def test_golden_example_contiguous_over_two_ranks():
    pack = pack_documents(
        [
            Document(ids=np.array([1, 2, 3]), targets=np.array([2, 3, IGNORE])),
            Document(ids=np.array([4, 5, 6, 7]), targets=np.array([5, 6, 7, IGNORE])),
        ],
        pad_to=8,
    )
    first, second = split(pack, 2, "contiguous")
    assert (first.ids.tolist(), first.position_ids.tolist()) == ([1, 2, 3, 4], [0, 1, 2, 0])
    assert (second.targets.tolist(), second.position_ids.tolist()) == ([6, 7, -100, -100], [1, 2, 3, 0])


def test_a_plan_of_another_pack_is_refused():
    pack = make_pack([3, 5])
    other = AttentionPlan.build(
        doc_ends=(4, 8), grid=RankGrid(dp=1, ring=2), layout="zigzag", algorithm="ring", num_heads=4, num_kv_heads=2
    )
    with pytest.raises(PlanError, match="other ends"):
        split_pack(pack, other, 0)

    class Longer:
        def token_index(self, cp_rank: int) -> np.ndarray:
            return np.arange(9)

    with pytest.raises(PlanError, match="places token 8 on rank 1, the pack has 8 tokens"):
        split_pack(pack, Longer(), 1)
