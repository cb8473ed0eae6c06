"""Which heads each rank of a Ulysses group computes.

Guarantees: query heads are dealt in order and as evenly as whole numbers allow (9 on 2 ranks: 5 and 4); a rank gets
exactly the key/value heads that its query heads read, so a key/value head that ranks share is on each of them.
"""

from dataclasses import dataclass

from raycp.plan.ranges import Range


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Heads of one rank: ranges of the model's query and key/value heads.

    `group_sizes` says, for each key/value head of the share, how many query heads of the share read it.
    """

    query: Range
    kv: Range
    group_sizes: tuple[int, ...]


def head_shares(num_heads: int, num_kv_heads: int, num_ranks: int) -> tuple[HeadShare, ...]:
    """The share of each rank; `num_ranks` must not exceed `num_heads`."""
    group = num_heads // num_kv_heads
    shares = []
    for rank in range(num_ranks):
        query = Range(num_heads * rank // num_ranks, num_heads * (rank + 1) // num_ranks)
        kv = Range(query.start // group, (query.stop - 1) // group + 1)
        sizes = tuple(
            min(query.stop, (head + 1) * group) - max(query.start, head * group) for head in range(kv.start, kv.stop)
        )
        shares.append(HeadShare(query, kv, sizes))
    return tuple(shares)


MOST_GROUPS = 4
"""Groups that "allgather" cuts the key/value heads into: one is under way while another is computed. The first one is
hidden by the queries that need no other rank only; more groups would hide more of it in more, smaller messages."""


def head_groups(num_kv_heads: int) -> tuple[Range, ...]:
    """Key/value heads in as equal groups as whole numbers allow."""
    groups = min(num_kv_heads, MOST_GROUPS)
    return tuple(Range(num_kv_heads * g // groups, num_kv_heads * (g + 1) // groups) for g in range(groups))
