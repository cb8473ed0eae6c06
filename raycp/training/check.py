"""Which models raycp trains, and how long their documents may be.

Guarantees: a model is refused by name and reason before any process starts, never trained inexactly. The list holds
model types whose packed isolation was tested through the whole model (tests/multiproc/test_training_families.py):
some types change attention without telling the attention function, so an unknown type is refused, not tried, with the
reason where it is known (ALiBi, layers without softmax, latent or compressed attention, dropout). A K/V cache cannot be
asked for: `raycp.training.model` always passes `use_cache=False`, whatever the configuration says; a mask tensor is
refused in `raycp.attention.register`. Imports neither torch nor transformers.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raycp.config import ParallelConfig
from raycp.errors import Problem
from raycp.training.layers import FULL, SLIDING, AttentionLayers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SUPPORTED = ("arcee", "granite", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3", "starcoder2")
"""Model types that are trained: plain softmax attention in every layer, through the attention interface."""

_SOFTMAX_LAYERS = (FULL, SLIDING)
_WINDOW_IN_ALL = ("mistral", "starcoder2")
_WINDOW_BY_LAYER = ("qwen2", "qwen3", "smollm3")
"""Types whose code (transformers 5.24) applies `sliding_window` in all layers, or by `layer_types`; others never do."""
_NO_SOFTMAX = (
    "mamba",
    "rwkv",
    "xlstm",
    "jamba",
    "zamba",
    "recurrent_gemma",
    "lfm",
    "nemotron_h",
    "falcon_h1",
    "retnet",
)
_ALIBI = ("bloom", "mpt")
_COMPRESSED = ("deepseek_v4", "deepseek_v32")
_REASONS: Mapping[str, tuple[str, str]] = {
    "alibi": (
        "ALiBi adds a bias to every score, which attention kernels here do not take",
        "use a model with rotary positions (model type {supported})",
    ),
    "no_softmax": (
        "layers without softmax attention carry a state from token to token, which a shard does not have",
        "use a model whose layers are all softmax attention (model type {supported})",
    ),
    "compressed": (
        "compressed or indexed attention (DeepSeek-V3.2, V4) picks keys by content, which no plan knows",
        "use a model with plain or grouped heads (model type {supported})",
    ),
    "latent": (
        "multi-head latent attention (MLA) is not available in this version",
        "use a model with plain or grouped heads (model type {supported})",
    ),
}
"""Why a model is refused, and what to use instead."""

_SCALED_ROPE = ("linear", "llama3", "yarn")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def check_model(config: "PretrainedConfig", longest_document: int, parallel: ParallelConfig) -> list[Problem]:
    """Every reason why this model cannot be trained exactly on this data.

    Args:
        config: configuration of the model.
        longest_document: tokens of the longest document (packs may be longer: positions restart).
        parallel: how the run is spread.
    """
    kind = str(config.model_type)
    why = _structure(config)
    if why is not None:
        reason, fix = _REASONS[why[0]]
        return [Problem(f"model type {kind!r} ({why[1]}): {reason}", fix.format(supported=", ".join(SUPPORTED)))]
    if kind not in SUPPORTED:
        return [
            Problem(
                f"model type {kind!r} is not supported: its attention was not shown to keep packed documents apart",
                f"use a model of type {', '.join(SUPPORTED)}",
            )
        ]
    found = [
        Problem(f"{kind}: {name}={value} in the model's configuration, and dropout is not applied", f"set {name}=0.0")
        for name, value in sorted(config.to_dict().items())
        if name.endswith(("dropout", "pdrop")) and isinstance(value, int | float) and value > 0
    ]
    rope = _rope_type(config)
    if rope in _LENGTH_DEPENDENT_ROPE:
        found.append(
            Problem(
                f"{kind}: rope type {rope!r} depends on the length of the input, which a shard does not see",
                f"use one of the rope types default, {', '.join(_SCALED_ROPE)}",
            )
        )
    limit = positions_limit(config)
    if longest_document > limit:
        found.append(
            Problem(
                f"the longest document has {longest_document} tokens, and the model has {limit} positions "
                "(fragments of a split document keep their positions)",
                f"set data.overflow='truncate' or 'drop' with seq_length={limit} or less, or use RoPE scaling",
            )
        )
    if getattr(config, "final_logit_softcapping", None) or getattr(config, "attn_logit_softcapping", None):
        found.append(Problem(f"{kind}: logit soft-capping is not supported", "use a model without it"))
    found += _quantisation(config)
    found += _windows(config)
    heads = int(config.num_attention_heads)
    kv_heads = getattr(config, "num_key_value_heads", None)
    if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
        found.append(
            Problem(
                f"{kind}: {heads} query heads do not share {kv_heads} key/value heads evenly",
                "let num_attention_heads be a multiple of num_key_value_heads, as in the model's own config.json",
            )
        )
    if isinstance(parallel.ulysses, int) and parallel.ulysses > heads:
        found.append(
            Problem(f"parallel.ulysses={parallel.ulysses} and the model has {heads} query heads", f"at most {heads}")
        )
    return found


def _quantisation(config: "PretrainedConfig") -> list[Problem]:
    quantised = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if not quantised:
        return []
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else type(quantised).__name__
    return [
        Problem(
            f"{config.model_type}: the weights are quantised ({str(method)!r}), and quantised weights are not trained",
            "use the unquantised repository of the model",
        )
    ]


def _windows(config: "PretrainedConfig") -> list[Problem]:
    """Sliding windows that no plan can have, or that the model's code does not apply as its configuration says."""
    kind, window = str(config.model_type), getattr(config, "sliding_window", None)
    layers = AttentionLayers.of(config)
    if SLIDING in layers.kinds and window is not None and (not isinstance(window, int) or window < 1):
        return [
            Problem(
                f"{kind}: sliding_window={window} in the model's configuration: a token sees itself at least",
                "set sliding_window to null for no window, or to 1 or more",
            )
        ]
    for name, planned in layers.windows.items():
        applied = None
        if kind in _WINDOW_IN_ALL or (kind in _WINDOW_BY_LAYER and name == SLIDING):
            applied = window
        if kind == "smollm3" and not config.use_sliding_window:
            applied = None
        if planned != applied:
            return [
                Problem(
                    f"{kind}: the configuration gives {name!r} layers sliding_window={planned}, and its code gives "
                    f"them sliding_window={applied}",
                    "set sliding_window to null, or leave layer_types out"
                    if kind in _WINDOW_IN_ALL
                    else "set sliding_window to null, and layer_types (if there are any) to 'full_attention'",
                )
            ]
    return []


def _structure(config: "PretrainedConfig") -> tuple[str, str] | None:
    """A reason of `_REASONS` and what showed it, or None."""
    kind = str(config.model_type)
    kinds = {str(k) for k in getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()}
    odd = sorted(kinds - {*_SOFTMAX_LAYERS, "attention"})
    if kind.startswith(_COMPRESSED):
        return "compressed", f"layers: {', '.join(odd)}" if odd else "by its type"
    if getattr(config, "kv_lora_rank", None):
        return "latent", f"kv_lora_rank={config.kv_lora_rank}"
    if odd:
        return "no_softmax", f"layers: {', '.join(odd)}"
    if any(name in kind for name in _NO_SOFTMAX):
        return "no_softmax", "by its type"
    if str(getattr(config, "position_embedding_type", "")).lower() == "alibi":
        return "alibi", "position_embedding_type='alibi'"
    if getattr(config, "alibi", False) or kind in _ALIBI:
        return "alibi", "alibi=True" if getattr(config, "alibi", False) else "by its type"
    return None


def positions_limit(config: "PretrainedConfig") -> int:
    """Tokens that one document may have: the model's positions, times the factor of RoPE scaling where it has one."""
    positions = int(config.max_position_embeddings)
    rope = _rope(config)
    if _rope_type(config) in _SCALED_ROPE:
        original = int(rope.get("original_max_position_embeddings") or positions)
        return max(positions, int(original * float(rope.get("factor") or 1.0)))
    return positions


def _rope(config: "PretrainedConfig") -> dict[str, Any]:
    raw = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return dict(raw)


def _rope_type(config: "PretrainedConfig") -> str:
    rope = _rope(config)
    return str(rope.get("rope_type") or rope.get("type") or "default")
