"""RoPE scaling of GGUF files, of which transformers reads the base frequency only."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from raycp.config import ParallelConfig
from raycp.errors import ModelError
from raycp.training.check import check_model, positions_limit
from raycp.training.spec import ModelSpec
from raycp.training.weights import empty_model, fill

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
SHAPES = {
    "token_embd": (64, 64),
    "output_norm": (64,),
    "output": (64, 64),
    "blk.0.attn_norm": (64,),
    "blk.0.ffn_norm": (64,),
    "blk.0.attn_q": (64, 64),
    "blk.0.attn_k": (32, 64),
    "blk.0.attn_v": (32, 64),
    "blk.0.attn_output": (64, 64),
    "blk.0.ffn_gate": (128, 64),
    "blk.0.ffn_up": (128, 64),
    "blk.0.ffn_down": (64, 128),
}


def write(path: Path, keys: dict[str, Any] | None = None, factors: str = "") -> Path:
    """A tiny Llama; `factors` names one tensor more."""
    w = gguf.GGUFWriter(path, "llama")
    w.add_context_length(4096)
    w.add_embedding_length(64)
    w.add_block_count(1)
    w.add_feed_forward_length(128)
    w.add_head_count(4)
    w.add_head_count_kv(2)
    w.add_rope_dimension_count(16)
    w.add_rope_freq_base(5e5)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(64)
    for key, value in (keys or {}).items():
        add = w.add_string if isinstance(value, str) else w.add_uint32 if isinstance(value, int) else w.add_float32
        add(f"llama.rope.{key}", value)
    rng = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        w.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    if factors:
        w.add_tensor(factors, np.linspace(1, 8, 8).astype(np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def model_config(**changes: Any) -> LlamaConfig:
    fields = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    return LlamaConfig(**{**fields, **heads, "max_position_embeddings": 4096, **changes})


def frequencies(config: Any) -> torch.Tensor:
    inv_freq: torch.Tensor = LlamaRotaryEmbedding(config).inv_freq
    return inv_freq


@pytest.mark.parametrize("keys", [{}, {"scaling.type": "none"}, {"scaling.type": "none", "scaling.factor": 4.0}])
def test_a_gguf_without_scaling_is_read_as_before(tmp_path: Path, keys: dict[str, Any]) -> None:
    config = ModelSpec.of(write(tmp_path / "a.gguf", keys)).load_config()
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    "keys",
    [
        {"scaling.type": "linear", "scaling.factor": 4.0},
        {"scaling.factor": 4.0},  # llama.cpp: no type means linear
        {"scale_linear": 4.0},  # of old files
    ],
)
def test_linear_scaling_of_a_gguf_is_not_lost(tmp_path: Path, keys: dict[str, Any]) -> None:
    config = ModelSpec.of(write(tmp_path / "a.gguf", keys)).load_config()
    assert config.rope_parameters == {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}
    plain = 5e5 ** (-torch.arange(0, 16, 2) / 16)
    assert torch.allclose(frequencies(config), plain / 4)
    assert positions_limit(config) == 4 * 4096


def test_yarn_scaling_of_a_gguf_is_not_lost(tmp_path: Path) -> None:
    keys = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 1024}
    spec = ModelSpec.of(write(tmp_path / "a.gguf", keys))
    config = spec.load_config()
    assert check_model(config, 4096, ParallelConfig()) == []
    found, scale = _of_llama_cpp(16, 5e5, 4.0, 1024)
    assert torch.allclose(frequencies(config), found, rtol=1e-6)
    assert math.isclose(LlamaRotaryEmbedding(config).attention_scaling, scale)
    assert torch.equal(frequencies(empty_model(config, "eager").config), frequencies(config))


def _of_llama_cpp(dim: int, base: float, factor: float, trained: int) -> tuple[torch.Tensor, float]:
    """`ggml_rope_yarn_corr_dims` and `rope_yarn` of llama.cpp: frequencies [dim / 2], and the factor of sin and cos."""

    def corrected(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(0, math.floor(corrected(32.0))), min(dim - 1, math.ceil(corrected(1.0)))
    i = torch.arange(dim // 2, dtype=torch.float64)
    mix = 1 - ((i - low) / max(0.001, high - low)).clamp(0, 1)
    extrapolated = base ** (-2 * i / dim)
    return (extrapolated / factor * (1 - mix) + extrapolated * mix).float(), 1 + 0.1 * math.log(factor)


@pytest.mark.parametrize(
    ("keys", "factors", "said"),
    [
        ({}, "rope_freqs.weight", "rope_freqs.weight"),
        ({}, "rope_factors_long.weight", "rope_factors_long.weight"),
        ({"scaling.type": "longrope", "scaling.factor": 4.0}, "", "longrope"),
        ({"scaling.type": "yarn", "scaling.factor": 4.0}, "", "yarn"),
        (
            {
                "scaling.type": "yarn",
                "scaling.factor": 4.0,
                "scaling.original_context_length": 1024,
                "scaling.yarn_log_multiplier": 0.1,
            },
            "",
            "yarn_log_multiplier",
        ),
    ],
)
def test_scaling_that_the_metadata_cannot_say_is_refused(
    tmp_path: Path, keys: dict[str, Any], factors: str, said: str
) -> None:
    """As llama.cpp writes Llama 3: factors in a tensor, which cannot be turned back into parameters."""
    file = write(tmp_path / "a.gguf", keys, factors)
    for model in (file, tmp_path):
        with pytest.raises(ModelError, match=said) as error:
            ModelSpec.of(model)
    assert "config.json" in error.value.fix
    model_config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=said):  # a configuration that knows no scaling either
        ModelSpec.of(file)


def test_a_llama_3_gguf_is_trained_with_the_configuration_beside_it(tmp_path: Path) -> None:
    """The way out that the error names: `config.json` of the model's own repository in the folder of the file."""
    file = write(tmp_path / "a.gguf", factors="rope_freqs.weight")
    model_config(rope_parameters=LLAMA3).save_pretrained(tmp_path)
    spec = ModelSpec.of(file)
    assert spec == ModelSpec.of(tmp_path)
    config = spec.load_config()
    assert config.rope_parameters == LLAMA3
    lm = torch.nn.Module()
    lm.add_module("lm", empty_model(config, "eager").to_empty(device="cpu"))
    fill(lm, spec, config, 0)
    expected = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    assert torch.equal(dict(lm.named_parameters())["lm.model.embed_tokens.weight"], torch.from_numpy(expected))
    before = spec.fingerprint()
    model_config(rope_parameters={**LLAMA3, "factor": 4.0}).save_pretrained(tmp_path)
    assert ModelSpec.of(file).fingerprint() != before
