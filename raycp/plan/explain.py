"""A plan in words: a table of its ranks, why it was chosen, and what it holds in memory.

Guarantees: tokens, work, calls and bytes are the plan's own; seconds are the cost model's.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from raycp.plan.choose import Choice
from raycp.plan.program import RankProgram

if TYPE_CHECKING:
    from raycp.plan.attention_plan import AttentionPlan

_MIB = 2**20


def rows_held(program: RankProgram) -> int:
    """Most rows of K and V of other ranks that a rank holds at once: blocks in use, and blocks that are arriving."""
    steps = program.steps[1:]
    return max((sum(s.num_rows for s in steps if s.posted <= now.index <= s.index) for now in program.steps), default=0)


def explain(plan: "AttentionPlan", choice: Choice, *, head_dim: int, itemsize: int) -> str:
    """See `AttentionPlan.explain`."""
    grid = plan.grid
    cost = replace(plan.cost, head_dim=head_dim, value_dim=head_dim, itemsize=itemsize)
    window = "" if plan.sliding_window is None else f" window {plan.sliding_window}"
    inner = "" if grid.window == 1 else f", inner ring {grid.window}"
    lines = [
        f"{plan.pack_length} tokens in {len(plan.doc_ends)} documents; {plan.algorithm}, {plan.layout}, "
        f"{plan.mask}{window}; cp={grid.cp} (ring {grid.ring} x ulysses {grid.ulysses}{inner})",
        f"{'rank':>4} {'tokens':>8} {'entries':>16} {'calls':>6} {'sent MiB':>9} {'held MiB':>9} {'cache MiB':>9} "
        f"{'compute s':>10} {'link s':>10}",
    ]
    for rank in range(grid.cp):
        program = plan.program(rank)
        sent = plan.bytes_moved(rank, head_dim=head_dim, itemsize=itemsize)
        messages = sum(len(step.sends) for step in program.steps) + 4 * (grid.ulysses - 1)
        parts = len(plan.head_groups()) if plan.algorithm == "allgather" else 1
        held = rows_held(program) * min(2, parts) / parts  # two groups of heads at a time
        row_bytes = len(plan.head_shares()[rank % grid.ulysses].kv) * 2 * head_dim * itemsize
        compute = cost.compute_seconds(float(plan.work(rank)), float(program.num_slices))
        link = cost.link_seconds(sent, messages)
        lines.append(
            f"{rank:>4} {plan.num_tokens(rank):>8} {plan.work(rank):>16} {program.num_slices:>6} "
            f"{sent / _MIB:>9.1f} {held * row_bytes / _MIB:>9.1f} "
            f"{program.rows_received * row_bytes / _MIB:>9.1f} {compute:>10.4f} {link:>10.4f}"
        )
    return "\n".join([*lines, *([choice.reason] if choice.reason else [])])
