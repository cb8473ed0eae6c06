"""A Hugging Face Llama beside the real torch_npu, attention on the NPU path: packed and split, forward and backward.

The oracle is the same model, document by document, with PyTorch's own attention.
"""

import torch

from raycp.attention import InMemoryWorld
from raycp.attention.communicator import Communicator
from raycp.attention.kernels.varlen import VarlenKernel
from raycp.plan import AttentionPlan, RankGrid
from tests.device.inside.world import npu_kernel
from tests.unit.attention.cases import groups_in_memory
from tests.unit.attention.llama import hidden_and_gradient, positions, tiny_llama, token_ids

ENDS = [7, 30, 31, 45, 118]


def _whole(ids: torch.Tensor, direction: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Last hidden state and gradient of the embeddings, [T, h] each, of the documents one by one."""
    model = tiny_llama(attention="sdpa")
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    parts = [
        model.base_model(
            inputs_embeds=embeddings[a:b][None], position_ids=positions([b - a])[None], use_cache=False
        ).last_hidden_state[0]
        for a, b in zip([0, *ENDS[:-1]], ENDS, strict=True)
    ]
    hidden = torch.cat(parts)
    hidden.backward(direction)
    assert embeddings.grad is not None
    return hidden.detach(), embeddings.grad


def _split(ids: torch.Tensor, grid: RankGrid, kernel: VarlenKernel) -> tuple[torch.Tensor, torch.Tensor]:
    plan = AttentionPlan.build(ENDS, grid, num_heads=4, num_kv_heads=2, layout="zigzag")
    world = InMemoryWorld(grid.cp)
    models = [tiny_llama() for _ in range(grid.cp)]  # here, since ranks are threads and share one generator

    def rank(whole: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        groups = groups_in_memory(world, grid, whole.rank)
        return hidden_and_gradient(models[whole.rank], ids, plan, groups, kernel=kernel)[:2]

    shards = world.run(rank)
    order = torch.cat([torch.from_numpy(plan.token_index(r)) for r in range(grid.cp)])
    hidden, gradient = (torch.cat(x) for x in zip(*shards, strict=True))
    return torch.empty_like(hidden).index_copy_(0, order, hidden), torch.empty_like(gradient).index_copy_(
        0, order, gradient
    )


def test_llama_on_three_and_four_ranks() -> None:
    ids = token_ids(ENDS)
    direction = torch.randn(ENDS[-1], 32, generator=torch.Generator().manual_seed(6))
    expected = _whole(ids, direction)
    for grid in (RankGrid(1, 1), RankGrid(1, 3), RankGrid(1, 2, 2)):
        for found, wanted in zip(_split(ids, grid, npu_kernel()), expected, strict=True):
            assert float((found - wanted).norm() / wanted.norm()) < 2e-6, grid


def test_a_kernel_without_masks_shows() -> None:
    ids = token_ids(ENDS)
    direction = torch.randn(ENDS[-1], 32, generator=torch.Generator().manual_seed(6))
    kernel = npu_kernel()
    masking = kernel.op._masking  # type: ignore[attr-defined]
    kernel.op._masking = lambda call: dict(masking(call)) | {"atten_mask": None}  # type: ignore[attr-defined]
    found, wanted = _split(ids, RankGrid(1, 3), kernel)[0], _whole(ids, direction)[0]
    assert float((found - wanted).norm() / wanted.norm()) > 1e-3
