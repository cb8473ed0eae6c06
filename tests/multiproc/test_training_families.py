"""Every supported model type, tiny and random, through the whole sharded model at cp = 2: exact, documents apart."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from raycp.attention import build_groups
from raycp.config import ParallelConfig
from raycp.plan import RankGrid
from raycp.training.check import SUPPORTED, check_model
from raycp.training.loss import IGNORE
from raycp.training.sharding import named_weights
from raycp.training.spec import ModelSpec
from tests.multiproc.launcher import run_ranks
from tests.multiproc.training_cases import (
    TestPack,
    difference,
    make_pack,
    micro_batch_loss,
    plain_loss,
    plain_model,
    total_weight,
    trainee_on,
    whole,
)

GRID = RankGrid(dp=1, ring=2)
LENGTHS = (19, 26, 2)
EXTRA: dict[str, dict[str, Any]] = {
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.4,
    },
    "mistral": {"sliding_window": None},
    "mistral, window": {"sliding_window": 12},
    "qwen2": {"use_sliding_window": False, "sliding_window": 8},
    "qwen2, window in one layer": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {"sliding_window": None},
}


FAMILIES = (*SUPPORTED, "mistral, window", "qwen2, window in one layer")


def config_of(family: str) -> Any:
    fields: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return CONFIG_MAPPING[family.split(",")[0]](**{**fields, **EXTRA.get(family, {})})


def second_document_only(change: bool) -> TestPack:
    """Targets in the second document alone; `change` puts another token into the first."""
    pack = make_pack(LENGTHS, 7, trained=(1,))
    if change:
        pack.ids[4] = (pack.ids[4] + 1) % 97
    return pack


def run_families(rank: int, world_size: int, families: tuple[str, ...]) -> dict[str, Any]:
    groups = build_groups(GRID)
    results = {}
    for family in families:
        trainee = trainee_on(GRID, ModelSpec.of(config_of(family)))
        steps = {
            "exact": (make_pack(LENGTHS, 7), ""),
            "base": (second_document_only(False), ""),
            "changed": (second_document_only(True), ""),
            "leaked": (second_document_only(False), "leaked document"),
            "leaked and changed": (second_document_only(True), "leaked document"),
        }
        for name, (pack, fault) in steps.items():
            loss = micro_batch_loss(trainee, pack, GRID, groups, 1.0 / total_weight([pack]), fault=fault)
            loss.backward()
            gradient = {n: whole(p.grad) for n, p in named_weights(trainee) if p.grad is not None}
            trainee.zero_grad()
            results[f"{family} {name}"] = (loss.item(), gradient if rank == 0 else None)
    return results


@cache
def results() -> list[dict[str, Any]]:
    return run_ranks(run_families, 2, FAMILIES, timeout=150)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_the_plain_model_document_by_document(family: str) -> None:
    config = config_of(family)
    assert check_model(config, max(LENGTHS), ParallelConfig()) == []
    lm = plain_model(config)
    loss = plain_loss(lm, [make_pack(LENGTHS, 7)])
    loss.backward()  # type: ignore[no-untyped-call]
    want = {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}
    ranks = results()
    assert sum(r[f"{family} exact"][0] for r in ranks) == pytest.approx(loss.item(), rel=1e-6)
    assert difference(ranks[0][f"{family} exact"][1], want) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_of_one_document_changes_nothing_in_another(family: str) -> None:
    assert (second_document_only(True).targets != IGNORE).sum() == LENGTHS[1] - 1
    for ours in results():
        base, changed = ours[f"{family} base"], ours[f"{family} changed"]
        assert base[0] == changed[0]
        if base[1] is not None:
            assert all(torch.equal(base[1][n], changed[1][n]) for n in base[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_leaked_document_is_seen(family: str) -> None:
    first = results()[0]
    base, changed = first[f"{family} leaked"], first[f"{family} leaked and changed"]
    assert not all(torch.equal(base[1][n], changed[1][n]) for n in base[1])
    assert difference(base[1], first[f"{family} base"][1]) > 1e-3


@pytest.mark.parametrize("family", ["mistral, window", "qwen2, window in one layer"])
def test_a_window_that_is_not_honoured_is_seen(family: str) -> None:
    """Planted fault: the plain model with full attention, against ours with its window."""
    config = config_of(family)
    config.sliding_window = None
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    loss = plain_loss(plain_model(config), [make_pack(LENGTHS, 7)])
    assert abs(sum(r[f"{family} exact"][0] for r in results()) - loss.item()) > 1e-4
