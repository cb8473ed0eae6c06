"""A tiny Llama on several ranks against one: isolation bit for bit, gradients, checkpointing."""

import pytest
import torch

from raycp.attention import build_groups
from raycp.plan import RankGrid
from tests.multiproc.launcher import run_ranks
from tests.unit.attention.llama import NUM_LAYERS, hidden_and_gradient, llama_plan, tiny_llama, token_ids

ENDS = [7, 30, 31, 57]
Result = tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], int]


def _run(
    rank: int, world_size: int, ids: torch.Tensor, ends: list[int], checkpointing: bool = False, ulysses: int = 1
) -> Result:
    ring = world_size // ulysses
    groups = build_groups(RankGrid(1, ring, ulysses))
    model = tiny_llama()
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    plan = llama_plan(ends, ring, ulysses)
    hidden, grad, carrier = hidden_and_gradient(model, ids, plan, groups, keep=checkpointing)
    assert carrier.stats.max_remote_blocks <= 2
    parameters = [p.grad for p in model.base_model.parameters() if p.grad is not None]
    return hidden, grad, parameters, carrier.stats.kernel_forward_calls


def _gather(
    results: list[Result], ends: list[int], ulysses: int = 1
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    plan = llama_plan(ends, len(results) // ulysses, ulysses)
    order = torch.cat([torch.from_numpy(plan.token_index(rank)) for rank in range(len(results))])
    whole = [torch.cat([r[i] for r in results])[torch.argsort(order)] for i in (0, 1)]
    return whole[0], whole[1], [torch.stack(grads).sum(0) for grads in zip(*(r[2] for r in results), strict=True)]


def _distance(x: torch.Tensor, ref: torch.Tensor) -> float:
    return float((x - ref).norm() / ref.norm())


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_equal_one_rank(world_size: int) -> None:
    ids = token_ids(ENDS)
    one = _gather([_run(0, 1, ids, ENDS)], ENDS)
    many = _gather(run_ranks(_run, world_size, ids, ENDS), ENDS)
    assert _distance(many[0], one[0]) < 2e-6
    assert _distance(many[1], one[1]) < 5e-6
    assert max(_distance(a, b) for a, b in zip(many[2], one[2], strict=True)) < 5e-6
    leaked = _gather(run_ranks(_run, world_size, ids, [30, 31, 57]), [30, 31, 57])
    assert _distance(leaked[0], one[0]) > 1e-2, "planted fault: joined documents must show"


@pytest.mark.parametrize(("world_size", "ulysses"), [(2, 2), (4, 2)])
def test_ulysses_and_hybrid_equal_one_rank(world_size: int, ulysses: int) -> None:
    ids = token_ids(ENDS)
    one = _gather([_run(0, 1, ids, ENDS)], ENDS)
    results = run_ranks(_run, world_size, ids, ENDS, True, ulysses)
    assert all(r[3] == NUM_LAYERS * world_size // ulysses for r in results), "attention was recomputed"
    many = _gather(results, ENDS, ulysses)
    assert _distance(many[0], one[0]) < 2e-6
    assert _distance(many[1], one[1]) < 5e-6
    assert max(_distance(a, b) for a, b in zip(many[2], one[2], strict=True)) < 5e-6


def test_a_changed_token_changes_no_bit_of_other_documents() -> None:
    ids = token_ids(ENDS)
    changed = ids.clone()
    changed[3] = (ids[3] + 1) % 64
    before, after = (_gather(run_ranks(_run, 2, x, ENDS), ENDS) for x in (ids, changed))
    for x, y in zip(before[:2], after[:2], strict=True):
        assert not torch.equal(x[:7], y[:7])
        assert torch.equal(x[7:], y[7:])


def test_checkpointing_recomputes_no_attention_and_changes_no_bit() -> None:
    ids = token_ids(ENDS)
    plain = run_ranks(_run, 2, ids, ENDS)
    kept = run_ranks(_run, 2, ids, ENDS, True)
    for a, b in zip(plain, kept, strict=True):
        assert a[3] == b[3] == 2 * NUM_LAYERS
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
        assert all(torch.equal(x, y) for x, y in zip(a[2], b[2], strict=True))
