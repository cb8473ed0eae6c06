"""A process that stays a rank builds its model anew after a loss: nothing of the one before may stay in memory."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from raycp.attention import build_groups
from raycp.plan import RankGrid
from raycp.training.optim import build_optimizer
from raycp.training.replicas import Replicas
from raycp.training.spec import ModelSpec
from tests.multiproc.launcher import run_ranks
from tests.multiproc.test_training_state import OPTIMIZERS
from tests.multiproc.training_cases import make_step, micro_batch_loss, tiny_llama, trainee_on

SPEC = ModelSpec.of(tiny_llama(tie_word_embeddings=True))


def _train(grid: RankGrid, shard: str, dtype: str) -> list["weakref.ref[object]"]:
    """Two steps; references to what is large."""
    gc.freeze()  # as a worker does, before it has a model
    groups = build_groups(grid)
    trainee = trainee_on(grid, SPEC, shard=shard, dtype=dtype, activation_checkpointing=True)
    optimizer = build_optimizer(trainee, OPTIMIZERS["adamw"])
    large: list[object] = [trainee, *trainee.parameters()]
    for pack in make_step(2):
        optimizer.zero_grad()
        micro_batch_loss(trainee, pack, grid, groups, 1.0).backward()
        optimizer.step()
        large += [p.grad for p in trainee.parameters()]
    large += [m for state in optimizer.state.values() for m in state.values() if isinstance(m, torch.Tensor) and m.ndim]
    return [weakref.ref(x) for x in large]


def _left(rank: int, world_size: int, shard: str, dtype: str, cycle: bool) -> list[int]:
    """How many of them are alive after each of two rebuilds."""
    if cycle:
        Replicas._hook = _hook_with_a_cycle  # type: ignore[method-assign]
    found = []
    for _ in range(2):
        large = _train(RankGrid(1, world_size), shard, dtype)
        gc.collect()
        found.append(sum(x() is not None for x in large))
    return found


def _hook_with_a_cycle(self: Replicas, n: int) -> Callable[[torch.Tensor], None]:
    """Planted fault: autograd holds the hook, and the hook the parameters."""
    return lambda parameter: self._add(n, parameter)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard", ["full", "none"])
def test_the_model_before_a_rebuild_is_gone(shard: str, dtype: str) -> None:
    assert run_ranks(_left, 2, shard, dtype, False) == [[0, 0]] * 2


def test_a_cycle_through_autograd_shows() -> None:
    for left in run_ranks(_left, 2, "none", "float32", True):
        assert min(left) > 0
