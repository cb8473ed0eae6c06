"""`cp_attention`: attention of one rank's shard of a pack, over the whole pack.

Guarantees: shapes, plan and groups are checked against each other before anything is sent, so a mismatch is an error
here and not a hang. Legend: t rows of the rank, H query heads, K key/value heads, D head dim, Dv value dim.
"""

from dataclasses import replace

import torch

from raycp.attention import gather, ring
from raycp.attention.call import AttentionCall
from raycp.attention.function import PlannedAttention
from raycp.attention.groups import Groups
from raycp.attention.kernels import Kernel, for_groups, kernel_for
from raycp.attention.ulysses import HeadExchange, HeadTrade
from raycp.errors import PlanError
from raycp.plan import AttentionPlan

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def cp_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    plan: AttentionPlan,
    groups: Groups,
    scale: float | None = None,
    kernel: Kernel | None = None,
) -> torch.Tensor:
    """Attention over a pack that is split over context-parallel ranks; collective over them, differentiable once.

    Args:
        q: [t, H, D]: the rows `plan.token_index(groups.cp_rank)` of the pack.
        k: [t, K, D].
        v: [t, K, Dv].
        plan: the same on every rank.
        groups: from `build_groups(plan.grid)`.
        scale: factor of the scores; None: D ** -0.5.
        kernel: None: what `kernel_for` has for q's device.

    Returns:
        [t, H, Dv] of q's dtype.

    Raises:
        PlanError: shapes, dtypes, plan and groups do not fit each other.
        WorkerError: another rank failed.
    """
    call = make_call(q, k, v, plan=plan, groups=groups, scale=scale, kernel=kernel)
    return run_call(q, k, v, plan=plan, groups=groups, call=call)


def make_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    plan: AttentionPlan,
    groups: Groups,
    scale: float | None,
    kernel: Kernel | None,
) -> AttentionCall:
    """Checks everything that can be checked on this rank alone. Arguments and errors as `cp_attention`."""
    _check(q, k, v, plan, groups)
    kernel = kernel_for(q.device) if kernel is None else kernel
    return AttentionCall(
        program=plan.program(groups.cp_rank),
        schedule=gather if plan.algorithm == "allgather" else ring,
        communicator=groups.communicator,
        outer=groups.outer,
        head_groups=plan.head_groups(),
        cached={"none": 0, "half": 1, "full": 2}[plan.kv_cache],
        kernel=for_groups(kernel, plan.head_shares()[groups.ulysses.rank].group_sizes),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
    )


def run_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, plan: AttentionPlan, groups: Groups, call: AttentionCall
) -> torch.Tensor:
    """Attention as `cp_attention`, of a call that `make_call` made: a schedule, inside a trade of tokens for heads."""
    if call.cached and call.keep is None and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))):
        call = replace(call, cached=0)  # there will be no backward
    trade = None
    if groups.ulysses.size > 1:
        exchange = HeadExchange(groups.ulysses, plan.group_rows(groups.cp_rank), call.name, call.stats)
        shares = plan.head_shares()
        trade = HeadTrade(exchange, [share.query for share in shares], [share.kv for share in shares])
    out: torch.Tensor = PlannedAttention.apply(q, k, v, call, trade)  # type: ignore[no-untyped-call]
    return out


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, groups: Groups) -> None:
    if plan.grid != groups.grid:
        raise PlanError(
            f"the plan is for {plan.grid}, the groups are for {groups.grid}", fix="use one RankGrid for both"
        )
    if (groups.communicator.size, groups.ulysses.size) != (plan.grid.ring, plan.grid.ulysses):
        raise PlanError(
            f"groups of {groups.communicator.size} ring x {groups.ulysses.size} Ulysses ranks for {plan.grid}",
            fix="make the groups with build_groups(plan.grid)",
        )
    rank, rows = groups.cp_rank, plan.num_tokens(groups.cp_rank)
    for name, x, heads in (("q", q, plan.num_heads), ("k", k, plan.num_kv_heads), ("v", v, plan.num_kv_heads)):
        if x.dim() != 3 or x.shape[0] != rows or x.shape[1] != heads:
            raise PlanError(
                f"{name} has shape {list(x.shape)}, but the plan gives cp rank {rank} {rows} tokens and {heads} heads: "
                f"[{rows}, {heads}, dim]",
                fix="split the pack with this plan's token_index, and build the plan with the model's head counts",
            )
        if x.dtype not in DTYPES or x.dtype != q.dtype or x.device != q.device:
            raise PlanError(
                f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}",
                fix=f"pass q, k and v of one device and one dtype of {', '.join(str(d) for d in DTYPES)}",
            )
    if q.shape[-1] != k.shape[-1]:
        raise PlanError(f"q has head dim {q.shape[-1]}, k has {k.shape[-1]}", fix="pass q and k of the same head dim")
