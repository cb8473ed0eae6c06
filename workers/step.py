"""One optimizer step, and one evaluation, as a function of (training state, pack ids).

Guarantees: the result depends on the state, the step number and the pack ids only: not on time, on earlier failures or
on the world (beyond float rounding); the loss is normalised once, by the step's global sum of target weights; the
update is refused, on every rank alike, when loss or gradient is not finite. A step either ends with all parameters
updated or raises; what a raise leaves behind is thrown away by recovery, never repaired.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from data_pipeline import PackLoader
from raycp.config import FitConfig
from raycp.errors import RaycpError
from raycp.training.model import Trainee
from raycp.training.optim import clip_by_global_norm, learning_rate, set_learning_rate
from workers.batch import Batcher
from workers.messages import EvalReport, StepReport, StepRequest
from workers.progress import COPY, Progress


class NonFiniteError(RaycpError, ArithmeticError):
    """Loss or gradient of a step is NaN or infinite; the parameters were not touched."""


@dataclass(kw_only=True)
class TrainState:
    """What a step changes: the sharded parameters and the optimizer over them."""

    trainee: Trainee
    optimizer: torch.optim.Optimizer
    rank: int


def run_step(
    state: TrainState,
    request: StepRequest,
    *,
    batcher: Batcher,
    loader: PackLoader,
    config: FitConfig,
    total_steps: int,
    progress: Progress,
    before_update: Callable[[], float],
) -> StepReport:
    """Runs one optimizer step over `request.pack_ids`. Collective.

    Args:
        before_update: waits until the state may change (a copy of it may still be made); returns the seconds waited.

    Raises:
        NonFiniteError: the loss or the gradient is not finite (on all ranks at once).
    """
    began, waited = time.perf_counter(), batcher.waited
    assigned = batcher.assigned(request.pack_ids)
    weight = loader.step_weight(request.pack_ids)
    scale = 1.0 / weight if weight > 0 else 0.0
    progress.begin(request.step, len(assigned))
    state.trainee.train()
    state.optimizer.zero_grad(set_to_none=True)
    loss_sum, held = 0.0, 0
    following = batcher.assigned(request.next_pack_ids)
    for number, batch in enumerate(batcher.micro_batches(assigned, following), 1):
        progress.next_micro_batch(_work(loader, assigned[number - 1]))
        loss = state.trainee(
            batch.ids,
            batch.position_ids,
            batch.targets,
            batch.weights,
            batch.carrier,
            scale,
            last=number == len(assigned),
        )
        loss.backward()
        loss_sum += float(loss.detach()) * weight
        held = max(held, batch.carrier.stats.max_remote_blocks)
    progress.enter("update")
    lr = learning_rate(request.step, total_steps, config.optim)
    norm = clip_by_global_norm(state.trainee, config.optim.clip)
    if not math.isfinite(norm):
        state.optimizer.zero_grad(set_to_none=True)
        raise NonFiniteError(
            f"step {request.step}: gradient norm is {norm} (packs {list(request.pack_ids)}, learning rate {lr:g})",
            fix="lower optim.lr, raise optim.warmup, or look at these packs; the last checkpoint is intact",
            step=request.step,
        )
    set_learning_rate(state.optimizer, lr)
    progress.enter(COPY)
    stalled = before_update()
    progress.enter("update")
    state.optimizer.step()
    progress.move()
    return StepReport(
        generation=request.generation,
        step=request.step,
        rank=state.rank,
        loss_sum=loss_sum,
        weight=weight,
        grad_norm=norm,
        lr=lr,
        tokens=sum(loader.num_tokens(p) for p in request.pack_ids),
        targets=sum(loader.num_targets(p) for p in request.pack_ids),
        seconds=time.perf_counter() - began,
        remote_blocks_held=held,
        stall_seconds=stalled,
        data_seconds=batcher.waited - waited,
    )


@torch.no_grad()
def run_evaluation(
    state: TrainState,
    pack_ids: tuple[int, ...],
    *,
    generation: int,
    batcher: Batcher,
    loader: PackLoader,
    progress: Progress,
) -> EvalReport:
    """The loss sum of this rank over `pack_ids`, parameters untouched. Collective."""
    assigned = batcher.assigned(pack_ids)
    weight = loader.step_weight(pack_ids)
    progress.begin(0, len(assigned))
    state.trainee.eval()
    loss_sum = 0.0
    for pack_id, batch in zip(assigned, batcher.micro_batches(assigned), strict=True):
        progress.next_micro_batch(_work(loader, pack_id))
        loss_sum += float(
            state.trainee(batch.ids, batch.position_ids, batch.targets, batch.weights, batch.carrier, 1.0)
        )
    return EvalReport(
        generation=generation,
        rank=state.rank,
        loss_sum=loss_sum,
        weight=weight,
        targets=sum(loader.num_targets(p) for p in pack_ids),
    )


def _work(loader: PackLoader, pack_id: int | None) -> float:
    return 0.0 if pack_id is None else loader.cost(pack_id)
