"""Host-side planning: which rank holds which token, computes which scores and moves which rows.

Guarantees: pure functions that make frozen value objects, deterministic and hashable; numpy only (neither torch nor ray
is imported); executors in `raycp.attention` obey a plan and decide nothing.

* `grid`: `RankGrid`, the shape of the world
* `ranges`: `Range`, `MaskKind`, `Slice`, the words that plans are written in
* `layout`: which ranges of a pack each context-parallel rank holds
* `balance`: documents kept whole where work allows
* `blocks`: the parts of the score matrix between two shards
* `heads`: which heads a rank of a Ulysses group computes
* `rows`: sets of rows
* `program`: what one rank does in each step: rows to move, slices to compute
* `ring`, `gather`: the programs of the ring (single and double), and of one exchange
* `halves`: what of its own block a rank computes last in backward
* `kinds`: plans of a model whose layers differ
* `attention_plan`: `AttentionPlan`, which puts these together for one pack
* `checks`: what is refused, and why
* `cost`: `CostModel`, figures of a device and its links
* `estimate`: what a layout costs, without its programs
* `choose`: layout, algorithm and grid where they were left on "auto"
* `explain`, `draw`: a plan in words, and as a picture
"""

from raycp.plan.attention_plan import AttentionPlan
from raycp.plan.choose import GridChoice, choose_grid, ring_warning
from raycp.plan.cost import CostModel
from raycp.plan.grid import RankGrid
from raycp.plan.heads import HeadShare, head_shares
from raycp.plan.kinds import plans_by_kind
from raycp.plan.program import OwnPart, RankProgram, Step, Transfer
from raycp.plan.ranges import MaskKind, Range, Slice, query_runs

__all__ = [
    "AttentionPlan",
    "CostModel",
    "GridChoice",
    "HeadShare",
    "MaskKind",
    "OwnPart",
    "Range",
    "RankGrid",
    "RankProgram",
    "Slice",
    "Step",
    "Transfer",
    "choose_grid",
    "head_shares",
    "plans_by_kind",
    "query_runs",
    "ring_warning",
]
