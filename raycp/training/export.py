"""A committed checkpoint as a plain Hugging Face folder.

Guarantees: the folder appears complete, by one rename, which in a run the driver makes (`publish`): a rank that was
given up and wakes later has a name of its own generation to write to, and never touches the export. It holds
safetensors of at most 5 GB (with an index when there are several), config.json, generation_config.json, and tokenizer
with chat template; names and shapes are those of the model class, and a tied head is not written twice. Streams: memory
is one tensor, whatever the size of the model.
"""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from raycp.errors import CheckpointError, ModelError
from raycp.training.checkpoint import CheckpointReader
from raycp.training.device import compute_dtype
from raycp.training.sharding import named_weights
from raycp.training.spec import ModelSpec
from raycp.training.state import PARAMETER
from raycp.training.storage import sync_folder
from raycp.training.tensorfile import write_tensors
from raycp.training.weights import empty_model

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

MAX_FILE_BYTES = 5_000_000_000


def export_hf(
    reader: CheckpointReader,
    spec: ModelSpec,
    tokenizer: "PreTrainedTokenizerBase | str | None",
    out: Path,
    dtype: str,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Writes `out`, replacing an older export.

    Args:
        reader: of a committed step.
        spec: the model that was trained.
        tokenizer: a tokenizer, its folder or hub id, or None: the model's own (none for a bare configuration).
        out: folder to make.
        dtype: of the weights on disk: "float32" or "bfloat16".
        max_file_bytes: limit of one weight file (a single larger tensor gets a file of its own).

    Returns:
        `out`.

    Raises:
        CheckpointError: the checkpoint is not of this model.
    """
    config = spec.load_config()
    lm = empty_model(config, "eager")
    shapes = {name: tuple(p.shape) for name, p in named_weights(lm)}
    _check_names(reader, shapes)
    aside = out.with_name(f".{out.name.lstrip('.')}.writing")
    _remove(aside)
    aside.mkdir(parents=True)
    _write_weights(aside, reader, shapes, compute_dtype(dtype), max_file_bytes)
    config.architectures = [type(lm).__name__]
    config.dtype = compute_dtype(dtype)
    config.save_pretrained(aside)
    _generation_config(spec, config).save_pretrained(aside)
    if isinstance(tokenizer, str) or (tokenizer is None and not spec.is_random):
        spec.load_tokenizer(tokenizer).save_pretrained(aside)
    elif tokenizer is not None:
        tokenizer.save_pretrained(aside)
    _check_folder(aside, shapes)
    sync_folder(aside)
    _replace(out, aside)
    return out


def written_aside(out: Path, generation: int) -> Path:
    """Where a rank of this generation writes what will be `out`."""
    return out.with_name(f".{out.name}.g{generation:04d}")


def publish(written: Path, out: Path) -> Path:
    """Makes `written`, of `written_aside`, to `out`, and deletes what ranks of other generations have left beside it.

    Returns:
        `out`.

    Raises:
        OSError: the storage refused.
    """
    _replace(out, written)
    for left in out.parent.glob(f".{out.name}.g*"):  # one that wakes later cannot go on there
        shutil.rmtree(left, ignore_errors=True)
    return out


def _replace(out: Path, written: Path) -> None:
    old = out.with_name(f".{out.name.lstrip('.')}.old")
    _remove(old)
    if out.exists():
        out.rename(old)
    written.rename(out)
    sync_folder(out.parent)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _check_names(reader: CheckpointReader, shapes: dict[str, tuple[int, ...]]) -> None:
    prefix = f"{PARAMETER}/"
    have = {n.removeprefix(prefix): s for n, s in reader.names.items() if n.startswith(prefix)}
    if have != shapes:
        wrong = sorted(n for n in have.keys() | shapes.keys() if have.get(n) != shapes.get(n))
        raise CheckpointError(
            f"{reader.folder} is not a checkpoint of this model: {len(wrong)} weights differ, the first is {wrong[0]} "
            f"(checkpoint {have.get(wrong[0])}, model {shapes.get(wrong[0])})",
            fix="export with the model that was trained",
        )


def _write_weights(
    folder: Path, reader: CheckpointReader, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, limit: int
) -> None:
    files: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        need = torch.Size(shape).numel() * dtype.itemsize
        if files[-1] and size + need > limit:
            files.append([])
            size = 0
        files[-1].append(name)
        size += need
    several = len(files) > 1
    weight_map = {}
    for i, names in enumerate(files, 1):
        file = f"model-{i:05d}-of-{len(files):05d}.safetensors" if several else "model.safetensors"
        announced = {name: (shapes[name], dtype) for name in names}
        write_tensors(folder / file, announced, lambda n: reader.read(f"{PARAMETER}/{n}").to(dtype), {"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    if several:
        total = sum(torch.Size(s).numel() for s in shapes.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _generation_config(spec: ModelSpec, config: "PretrainedConfig") -> "GenerationConfig":
    from transformers import GenerationConfig

    if spec.kind == "folder" and (Path(spec.source) / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(spec.source)
    if spec.kind == "hub":  # this file alone: a node that came later has no weights, and needs none
        try:
            return GenerationConfig.from_pretrained(spec.source, revision=spec.revision)
        except OSError:  # it has none
            pass
    return GenerationConfig.from_model_config(config)


def _check_folder(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    from safetensors import safe_open

    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                found[name] = tuple(file.get_slice(name).get_shape())
    if found != shapes:
        raise ModelError(f"the export in {folder} does not hold the model's weights", fix="export again")
