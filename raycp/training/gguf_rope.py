"""RoPE scaling of a GGUF file: transformers reads the base frequency and drops the rest without a word.

Guarantees: a configuration that comes back scales positions as llama.cpp does with the same file; what cannot be said
exactly is refused. Linear and YaRN scaling are told from the metadata. Factors in a tensor (`rope_freqs.weight`, which
is how llama.cpp writes Llama 3) cannot be turned back into parameters: they need the model's own `config.json` beside
the file. Costs a second pass over the file's metadata (seconds where the vocabulary is in it). Imports no torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycp.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def with_rope_scaling(config: "PretrainedConfig", file: Path) -> "PretrainedConfig":
    """The configuration of a GGUF file with its RoPE scaling.

    Args:
        config: what transformers made of the file; changed in place where the metadata suffices.
        file: the GGUF file.

    Raises:
        ModelError: the file has a scaling that its metadata does not say, and no `config.json` beside it does.
    """
    import gguf

    reader = gguf.GGUFReader(file)
    prefix = f"{reader.fields['general.architecture'].contents()}.rope."
    fields: dict[str, Any] = {
        key.removeprefix(prefix): field.contents() for key, field in reader.fields.items() if key.startswith(prefix)
    }
    factors = sorted(t.name for t in reader.tensors if t.name.startswith("rope_"))
    scaling = {k: v for k, v in fields.items() if k.startswith(("scaling.", "scale_linear"))}
    if not factors:
        told = _told(scaling)
        if told is not None:
            config.rope_parameters = {**_rope(config), **told}
            return config
    what = ", ".join([*factors, *(f"{prefix}{k}={v}" for k, v in sorted(scaling.items()))])
    return _beside(file, what)


def _told(scaling: dict[str, Any]) -> dict[str, Any] | None:
    """The parameters that the metadata says in full, in transformers' words: {} for no scaling, None if it does not."""
    left = {k: v for k, v in scaling.items() if k != "scaling.finetuned"}
    factor = left.pop("scaling.factor", left.pop("scale_linear", None))
    kind = left.pop("scaling.type", "linear")  # as llama.cpp takes it
    if kind == "none" or (kind == "linear" and not factor and not left):
        return {}
    if kind == "linear" and factor and not left:
        return {"rope_type": "linear", "factor": float(factor)}
    trained = left.pop("scaling.original_context_length", None)
    if kind == "yarn" and factor and trained and not left:
        return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": int(trained)}
    return None


def _beside(file: Path, what: str) -> "PretrainedConfig":
    """The configuration in the folder of the file, if it scales."""
    from transformers import AutoConfig

    fix = (
        "use the safetensors of the model, or put the config.json of its own repository, with its rope_parameters (or "
        "rope_scaling), beside the GGUF file"
    )
    problem = f"{file} scales its rotary positions ({what}) in a way that transformers does not read from GGUF"
    if not (file.parent / "config.json").is_file():
        raise ModelError(problem, fix=fix)
    try:
        config = AutoConfig.from_pretrained(file.parent, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{problem}, and its config.json cannot be read: {error}", fix=fix) from error
    if _rope(config).get("rope_type", "default") == "default":
        raise ModelError(f"{problem}, and the config.json beside it has no scaling", fix=fix)
    return config


def _rope(config: "PretrainedConfig") -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})
