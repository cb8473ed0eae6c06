"""Plans of a model whose layers differ: one plan for each kind of layer, all on the same split of the pack.

Guarantees: every rank holds the same tokens under each of the plans, so the model's hidden states need not move between
layers; the balanced layout weighs the work of all layers together.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from raycp.errors import PlanError
from raycp.plan.attention_plan import AttentionPlan
from raycp.plan.grid import RankGrid


def plans_by_kind(
    windows: Mapping[str, int | None], layers: Sequence[str], doc_ends: Sequence[int], grid: RankGrid, **options: Any
) -> dict[str, AttentionPlan]:
    """One plan per kind of layer.

    Args:
        windows: sliding window of each kind, None for none: `{"full_attention": None, "sliding_attention": 512}`.
        layers: the kind of each layer, as in `config.layer_types` of a Hugging Face model.
        doc_ends: where each document ends.
        grid: the world.
        options: further arguments of `AttentionPlan.build`, but for `sliding_window` and `balance`; layout "auto" means
            balanced.

    Raises:
        PlanError: a kind has no window entry, there are no layers, or a plan cannot be built.
    """
    unknown = sorted(set(layers) - set(windows))
    if unknown or not layers:
        raise PlanError(
            f"layers of kinds {unknown} have no entry in windows, which has {sorted(windows)}"
            if unknown
            else "there is no layer to plan for",
            fix="pass config.layer_types, and the sliding window (or None) of each kind in it",
        )
    balance = [(windows[kind], layers.count(kind)) for kind in dict.fromkeys(layers)]
    return {
        kind: AttentionPlan.build(doc_ends, grid, sliding_window=windows[kind], balance=balance, **options)
        for kind in dict.fromkeys(layers)
    }
