"""A tiny random Llama on a shard of a pack: shared by tests in one process and in several.

Legend: T tokens of the pack, t of a rank, h hidden size, V vocabulary.
"""

from collections.abc import Callable

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from raycp.attention import ATTENTION_NAME, Carrier, Groups, register_attention
from raycp.attention.kernels import Kernel
from raycp.plan import AttentionPlan, RankGrid

NUM_LAYERS = 2
VOCABULARY = 64


def tiny_llama(seed: int = 0, attention: str = ATTENTION_NAME, **changes: object) -> LlamaForCausalLM:
    register_attention()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        attn_implementation=attention,
        **changes,
    )
    return LlamaForCausalLM(config)


def llama_plan(doc_ends: list[int], ring: int, ulysses: int = 1) -> AttentionPlan:
    return AttentionPlan.build(doc_ends, RankGrid(1, ring, ulysses), num_heads=4, num_kv_heads=2, layout="zigzag")


def token_ids(doc_ends: list[int]) -> torch.Tensor:
    return torch.randint(VOCABULARY, (doc_ends[-1],), generator=torch.Generator().manual_seed(5))


def positions(doc_ends: list[int]) -> torch.Tensor:
    parts = [np.arange(b - a) for a, b in zip([0, *doc_ends], doc_ends, strict=False)]
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts]))


def hidden_and_gradient(
    model: LlamaForCausalLM,
    ids: torch.Tensor,
    plan: AttentionPlan,
    groups: Groups,
    *,
    keep: bool = False,
    kernel: Kernel | None = None,
    on_layer: Callable[[int, int], None] | None = None,
    direction: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Carrier]:
    """Last hidden state [t, h] of this rank, and the gradient [t, h] of its embeddings; parameters get theirs.

    `direction` [T, h] is the gradient that comes in, for the whole pack; a fixed random one by default.
    """
    index = torch.from_numpy(plan.token_index(groups.cp_rank))
    embeddings = model.get_input_embeddings()(ids[index][None]).detach().requires_grad_()
    carrier = Carrier(plan, groups, keep=keep, kernel=kernel, on_layer=on_layer)
    hidden = model.base_model(
        inputs_embeds=embeddings,
        position_ids=positions(list(plan.doc_ends))[index][None],
        use_cache=False,
        cp_plan=carrier,
    ).last_hidden_state
    if direction is None:
        direction = torch.randn(plan.pack_length, hidden.shape[-1], generator=torch.Generator().manual_seed(6))
    hidden.backward(direction[index][None])
    assert embeddings.grad is not None
    return hidden.detach()[0], embeddings.grad[0], carrier
