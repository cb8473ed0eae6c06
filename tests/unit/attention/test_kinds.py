"""Models that mix layer kinds, one plan per kind, against Hugging Face's own attention on each document alone."""

from collections.abc import Mapping

import pytest
import torch
from transformers import Gemma2Config, Gemma3TextConfig, PreTrainedModel, Qwen2Config
from transformers.models.auto import AutoModelForCausalLM

from raycp.attention import ATTENTION_NAME, Carrier, Groups, InMemoryWorld, attention_forward, register_attention
from raycp.attention.communicator import Communicator, LocalCommunicator
from raycp.errors import ModelError, PlanError
from raycp.plan import AttentionPlan, RankGrid, plans_by_kind
from tests.unit.attention.llama import positions

ENDS = [7, 60, 61, 97]
WINDOW = 12
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "attention_dropout": 0.0}
CONFIGS = {
    "qwen2": lambda: Qwen2Config(use_sliding_window=True, max_window_layers=1, **SIZES),
    "gemma2": lambda: Gemma2Config(attn_logit_softcapping=None, **GEMMA, **SIZES),
    "gemma3": lambda: Gemma3TextConfig(
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], **GEMMA, **SIZES
    ),
}


def _model(name: str, attention: str = ATTENTION_NAME) -> PreTrainedModel:
    register_attention()
    torch.manual_seed(0)
    config = CONFIGS[name]()
    assert set(config.layer_types) == {"full_attention", "sliding_attention"}
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def _plans(name: str, ring: int, windows: Mapping[str, int | None] | None = None) -> dict[str, AttentionPlan]:
    windows = {"full_attention": None, "sliding_attention": WINDOW} if windows is None else windows
    kinds = CONFIGS[name]().layer_types
    return plans_by_kind(windows, kinds, ENDS, RankGrid(1, ring), num_heads=4, num_kv_heads=2)


def _embeddings(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.randint(64, (ENDS[-1],), generator=torch.Generator().manual_seed(5))
    return model.get_input_embeddings()(ids).detach()


def _direction() -> torch.Tensor:
    return torch.randn(ENDS[-1], 32, generator=torch.Generator().manual_seed(6))


def _one_by_one(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Last hidden state and gradient of the embeddings, [T, h] each."""
    model = _model(name, "eager" if name == "gemma2" else "sdpa")
    x = _embeddings(model).requires_grad_()
    bounds = zip([0, *ENDS[:-1]], ENDS, strict=True)
    out = torch.cat([model.base_model(inputs_embeds=x[None, a:b], use_cache=False)[0][0] for a, b in bounds])
    out.backward(_direction())
    assert x.grad is not None
    return out.detach(), x.grad


def _through_raycp(name: str, ring: int, plans: Mapping[str, AttentionPlan]) -> tuple[torch.Tensor, torch.Tensor]:
    models = [_model(name) for _ in range(ring)]

    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mine = communicator.rank
        plan = next(iter(plans.values()))
        index = torch.from_numpy(plan.token_index(mine))
        x = _embeddings(models[mine])[index].requires_grad_()
        out = models[mine].base_model(
            inputs_embeds=x[None],
            position_ids=positions(ENDS)[index][None],
            use_cache=False,
            cp_plan=Carrier(plans, Groups(plan.grid, mine, communicator)),
        )[0][0]
        out.backward(_direction()[index])
        assert x.grad is not None
        return index, out.detach(), x.grad

    parts = InMemoryWorld(ring).run(rank)
    order = torch.argsort(torch.cat([p[0] for p in parts]))
    return torch.cat([p[1] for p in parts])[order], torch.cat([p[2] for p in parts])[order]


def _distance(x: torch.Tensor, ref: torch.Tensor) -> float:
    return float((x - ref).norm() / ref.norm())


@pytest.mark.parametrize("name", list(CONFIGS))
def test_mixed_layers_equal_the_documents_one_by_one(name: str) -> None:
    expected = _one_by_one(name)
    for ring in (1, 3):
        found = _through_raycp(name, ring, _plans(name, ring))
        assert _distance(found[0], expected[0]) < 2e-6
        assert _distance(found[1], expected[1]) < 5e-6


def test_wrong_window_and_missing_kind_are_refused() -> None:
    wrong = _plans("qwen2", 1, {"full_attention": None, "sliding_attention": WINDOW + 1})
    with pytest.raises(ModelError, match=f"layer 1 passes sliding_window={WINDOW}, the plan has sliding_window=13"):
        _through_raycp("qwen2", 1, wrong)
    full_only = {"full_attention": _plans("qwen2", 1)["full_attention"]}
    with pytest.raises(ModelError, match="layer 1 is of kind 'sliding_attention'") as error:
        _through_raycp("qwen2", 1, full_only)
    assert "plans_by_kind" in error.value.fix


def test_swapped_plans_are_refused() -> None:
    """Planted fault: each kind with the plan of the other."""
    plans = _plans("gemma3", 1)
    with pytest.raises(ModelError, match="sliding_window=12, the plan has sliding_window=None"):
        _through_raycp("gemma3", 1, dict(zip(plans, reversed(plans.values()), strict=True)))


def test_a_plan_of_another_kind_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: all layers run with the full plan."""
    expected = _one_by_one("gemma3")
    full = _plans("gemma3", 1)["full_attention"]
    monkeypatch.setattr("raycp.attention.register._check_options", lambda *args: None)
    found = _through_raycp("gemma3", 1, {"full_attention": full, "sliding_attention": full})
    assert _distance(found[0], expected[0]) > 1e-2


def test_softcap_is_refused_by_name() -> None:
    config = Gemma2Config(attn_logit_softcapping=50.0, **GEMMA, **SIZES)
    register_attention()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    carrier = Carrier(_plans("gemma2", 1), Groups(RankGrid(1, 1), 0, LocalCommunicator()))
    with pytest.raises(ModelError, match="softcap=50"):
        model.base_model(torch.zeros(1, 97, dtype=torch.int64), use_cache=False, cp_plan=carrier)


def test_kind_of_a_layer_that_names_none_is_that_of_its_window() -> None:
    class Layer(torch.nn.Module):
        layer_idx = 0
        is_causal = True

    groups = Groups(RankGrid(1, 1), 0, LocalCommunicator())
    q, k, v = (torch.randn(1, heads, 97, 8) for heads in (4, 2, 2))
    plans = _plans("qwen2", 1)
    for window, kind in ((None, "full_attention"), (WINDOW, "sliding_attention")):
        found = attention_forward(Layer(), q, k, v, None, cp_plan=Carrier(plans, groups), sliding_window=window)[0]
        alone = Carrier(plans[kind], groups)
        assert torch.equal(found, attention_forward(Layer(), q, k, v, None, cp_plan=alone, sliding_window=window)[0])


def test_plans_share_one_split() -> None:
    plans = _plans("gemma3", 4)
    full, sliding = plans.values()
    assert all((full.token_index(r) == sliding.token_index(r)).all() for r in range(4))
    assert {p.sliding_window for p in plans.values()} == {None, WINDOW}
    alone = [
        AttentionPlan.build(ENDS, RankGrid(1, 4), num_heads=4, num_kv_heads=2, sliding_window=w, layout="balanced")
        for w in (None, 3)
    ]
    groups = Groups(RankGrid(1, 4), 0, LocalCommunicator())
    assert not alone[0].holds_same_tokens(alone[1])
    for refused in ({}, {"full_attention": alone[0], "sliding_attention": alone[1]}):
        with pytest.raises(PlanError, match="do not split the pack in the same way"):
            Carrier(refused, groups)
    with pytest.raises(PlanError, match=r"kinds \['chunked_attention'\]"):
        plans_by_kind({"full_attention": None}, ["chunked_attention"], ENDS, RankGrid(1, 1))
    with pytest.raises(PlanError, match="no layer"):
        plans_by_kind({}, [], ENDS, RankGrid(1, 1))
