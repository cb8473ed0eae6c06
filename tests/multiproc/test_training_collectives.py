"""FSDP2's collectives by P2P: sums in rank order, bit for bit, and refusal of what is not a sum."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from raycp.attention import build_groups
from raycp.plan import RankGrid
from raycp.training.collectives import P2PAllGather, PairwiseReduceScatter, start_sum
from raycp.training.optim import sum_over_ranks
from raycp.training.sharding import held_rows, named_weights
from raycp.training.spec import ModelSpec
from tests.multiproc.launcher import RankError, run_ranks
from tests.multiproc.training_cases import difference, make_step, micro_batch_loss, tiny_llama, trainee_on, whole

NUMEL = 1001
SIZES = (0, 1, 2, 500)
"""Numbers of tensors that are summed; 0: all."""


def piece(rank: int, world_size: int) -> torch.Tensor:
    return torch.randn(world_size * NUMEL, generator=torch.Generator().manual_seed(rank))


def collect(rank: int, world_size: int) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    gathered = torch.empty(world_size * NUMEL)
    own = gathered[rank * NUMEL : (rank + 1) * NUMEL]  # FSDP2 gathers in place
    own.copy_(piece(rank, world_size)[:NUMEL])
    gathering = P2PAllGather()(gathered, own, group)
    apart = torch.empty_like(gathered)
    again = P2PAllGather()(apart, own.clone(), group)  # two under way at a time
    for work in (gathering, again):
        assert work is not None
        work.wait()
    reduced = torch.empty(NUMEL)
    PairwiseReduceScatter()(reduced, piece(rank, world_size), group, dist.ReduceOp.SUM)
    summed = [piece(rank, world_size).view(world_size, -1)[0, : n or None].clone() for n in SIZES]
    sums = [start_sum(x, group, i) for i, x in enumerate(summed)]  # several under way at a time
    for one in sums:
        one.spread()
    for one in reversed(sums):
        one.wait()
    return {
        "summed": summed,
        "gathered": gathered,
        "apart": apart,
        "reduced": reduced,
        "total": sum_over_ranks(1.0 / (rank + 3), None, torch.device("cpu")),
    }


def average(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    PairwiseReduceScatter()(torch.empty(NUMEL), piece(rank, world_size), group, dist.ReduceOp.AVG)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_pieces_and_sums_are_bit_equal_to_one_process(world_size: int) -> None:
    results = run_ranks(collect, world_size)
    pieces = [piece(r, world_size) for r in range(world_size)]
    want = torch.cat([p[:NUMEL] for p in pieces])
    for rank, result in enumerate(results):
        assert torch.equal(result["gathered"], want)
        assert torch.equal(result["apart"], want)
        total = torch.zeros(NUMEL)
        for p in pieces:
            total += p[rank * NUMEL : (rank + 1) * NUMEL]
        assert torch.equal(result["reduced"], total)
        first = torch.zeros(NUMEL)
        for p in pieces:
            first += p[:NUMEL]
        for n, x in zip(SIZES, result["summed"], strict=True):
            assert torch.equal(x, first[: n or None]), n
        assert result["total"] == results[0]["total"]
        assert result["total"] == pytest.approx(sum(1.0 / (r + 3) for r in range(world_size)), rel=1e-13)


def test_an_average_is_refused() -> None:
    with pytest.raises(RankError, match="set_force_sum_reduction_for_comms"):
        run_ranks(average, 2)


class CountingAllGather(P2PAllGather):
    """Counts the calls of all FSDP groups of a model."""

    def __init__(self, calls: list[int]) -> None:
        self.calls = calls

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        self.calls.append(1)
        return super().__call__(*args, **kwargs)


def count(rank: int, world_size: int, checkpointing: bool) -> int:
    grid = RankGrid(dp=1, ring=world_size)
    groups = build_groups(grid)
    spec = ModelSpec.of(tiny_llama(tie_word_embeddings=True))
    trainee = trainee_on(grid, spec, activation_checkpointing=checkpointing)
    calls: list[int] = []
    for module in trainee.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(CountingAllGather(calls))
    micro_batch_loss(trainee, make_step(1)[0], grid, groups, 1.0).backward()  # loss_chunk is 7: several chunks
    return len(calls)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_head_is_gathered_once_and_each_layer_twice(checkpointing: bool) -> None:
    assert run_ranks(count, 2, checkpointing) == [2 * 2 + 1] * 2


def _fail(*_: Any) -> None:
    raise ArithmeticError


def replicate(rank: int, world_size: int) -> dict[str, Any]:
    """Two micro-batches and an evaluation of replicas."""
    grid = RankGrid(dp=1, ring=world_size)
    groups = build_groups(grid)
    trainee = trainee_on(grid, ModelSpec.of(tiny_llama(tie_word_embeddings=True)), shard="none")
    resting = dict(trainee.named_parameters())
    storage = {n: held_rows(p)[0].data_ptr() for n, p in resting.items()}
    packs = make_step(2)
    micro_batch_loss(trainee, packs[0], grid, groups, 1.0, last=False).backward()
    between = [p.grad for p in resting.values()]
    loss = micro_batch_loss(trainee, packs[1], grid, groups, 1.0)
    during = {n: p.data_ptr() for n, p in trainee.named_parameters()}
    loss.backward()
    after = dict(trainee.named_parameters())
    gradients = {n: held_rows(p.grad)[0] for n, p in after.items() if p.grad is not None}
    with torch.no_grad():
        micro_batch_loss(trainee, packs[0], grid, groups, 1.0)
    hook = next(iter(trainee.lm.base_model.layers)).register_full_backward_hook(_fail)
    loss = micro_batch_loss(trainee, packs[0], grid, groups, 1.0, last=False)
    with pytest.raises(ArithmeticError):
        loss.backward()
    hook.remove()
    assert trainee.replicas is not None
    trainee.replicas.forget()
    trainee.zero_grad(set_to_none=True)
    for p in resting.values():
        p.grad = None
    for n, pack in enumerate(packs):
        micro_batch_loss(trainee, pack, grid, groups, 1.0, last=n == 1).backward()
    again = [held_rows(p.grad)[0] for p in resting.values() if p.grad is not None]
    micro_batch_loss(trainee, packs[0], grid, groups, 1.0)  # and no backward
    return {
        "after an error": all(torch.equal(a, b) for a, b in zip(again, gradients.values(), strict=True)),
        "none between": all(g is None for g in between),
        "no copies": during == storage,
        "at rest": after == resting and dict(named_weights(trainee)) == {n[3:]: p for n, p in resting.items()},
        "gradients": gradients,
    }


def test_replicas_copy_nothing_and_have_the_same_gradients_to_the_bit() -> None:
    first, *others = run_ranks(replicate, 3)
    assert len(first["gradients"]) == 2 * 9 + 2
    for result in (first, *others):
        assert result["none between"]
        assert result["no copies"]
        assert result["at rest"]
        assert result["after an error"]
        assert all(torch.equal(g, first["gradients"][n]) for n, g in result["gradients"].items())


def in_bfloat16(rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    """Gradients of two micro-batches, sharded, replicated, and replicated in fp32."""
    grid = RankGrid(dp=1, ring=world_size)
    groups = build_groups(grid)
    found = []
    for shard, dtype in (("full", "bfloat16"), ("none", "bfloat16"), ("none", "float32")):
        trainee = trainee_on(grid, ModelSpec.of(tiny_llama(tie_word_embeddings=True)), shard=shard, dtype=dtype)
        for n, pack in enumerate(make_step(2)):
            micro_batch_loss(trainee, pack, grid, groups, 1.0, last=n == 1).backward()
        for _, p in named_weights(trainee):
            assert p.dtype == torch.float32
            assert p.grad is not None
            assert p.grad.dtype == torch.float32
        found.append({n: whole(p.grad) for n, p in named_weights(trainee) if p.grad is not None})
    return found


def test_replicas_in_bfloat16_have_fp32_masters_and_the_gradients_of_shards() -> None:
    sharded, replicated, exact = run_ranks(in_bfloat16, 2)[0]
    assert difference(replicated, sharded) < 2e-3
    assert 2e-3 < difference(replicated, exact) < 0.1
