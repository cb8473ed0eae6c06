"""Fills the own rows of every parameter: from safetensors, from GGUF, or at random.

Guarantees: a rank reads only its rows of a safetensors file (memory: one slice at a time); missing, unexpected and
misshapen names are an error, never a silent random weight; random values depend on the seed and the parameter's name
alone, so they are bit-equal for every (dp, cp) and every way of sharding. GGUF is de-quantised whole on each rank
(transformers has no partial read): one fp32 copy of the model in host memory while it loads.
"""

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from raycp.errors import ModelError
from raycp.training.sharding import held_rows, named_weights
from raycp.training.spec import ModelSpec

Read = Callable[[str, int, int], torch.Tensor]
"""(name, start, stop) -> rows [start, stop) of a tensor of the source, on CPU."""


def empty_model(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    """The language model with parameters on the meta device, buffers (rotary tables) real, tied weights tied."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        # A copy: `from_config` writes the attention's name into the configuration, also into one that a model uses.
        lm = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention, dtype=torch.float32)
    lm.tie_weights()
    return lm


@torch.no_grad()
def fill(
    module: nn.Module,
    spec: ModelSpec,
    config: PretrainedConfig,
    seed: int,
    *,
    on_piece: Callable[[], None] = lambda: None,
) -> None:
    """Writes the initial value into the held rows of every parameter of `module` (a `Trainee`).

    Args:
        module: to fill.
        spec: where the values come from.
        config: of the model.
        seed: of random values.
        on_piece: called for each tensor that was read or made, and for what a download has brought.

    Raises:
        ModelError: the source lacks a name, has one too many, or a shape differs.
    """
    if spec.is_random:
        _fill_random(module, config, seed, on_piece)
        return
    if spec.kind == "gguf":
        source = _gguf_state(spec, config)
        shapes = {name: tuple(t.shape) for name, t in source.items()}
        _fill_by_name(module, shapes, lambda name, start, stop: source[name][start:stop], spec.describe(), (), on_piece)
        return
    folder = spec.weights_folder(on_piece=on_piece)
    ignore = ("rotary_emb.inv_freq",)
    with _SafetensorsFolder(folder) as files:
        _fill_by_name(module, files.shapes, files.read, str(folder), ignore, on_piece)


def _fill_by_name(
    module: nn.Module,
    shapes: dict[str, tuple[int, ...]],
    read: Read,
    where: str,
    ignore: tuple[str, ...],
    on_piece: Callable[[], None],
) -> None:
    wanted = dict(named_weights(module))
    aliases = {n.removeprefix("lm.") for n, _ in module.named_parameters(remove_duplicate=False)}
    missing = sorted(set(wanted) - set(shapes))
    unexpected = sorted(n for n in set(shapes) - aliases if not n.endswith(ignore or ("\0",)))
    wrong = [n for n in wanted if n in shapes and shapes[n] != tuple(wanted[n].shape)]
    if missing or unexpected or wrong:
        lines = [f"{where} does not fit the model:"]
        lines += [f"  missing {n}" for n in missing[:5]] + [f"  unexpected {n}" for n in unexpected[:5]]
        lines += [f"  {n} has shape {shapes[n]}, the model wants {tuple(wanted[n].shape)}" for n in wrong[:5]]
        raise ModelError(
            "\n".join(lines) + f"\n  ({len(missing)} missing, {len(unexpected)} unexpected, {len(wrong)} misshapen)",
            fix="check that config.json and the weight files belong together",
        )
    for name, parameter in wanted.items():
        local, start, stop = held_rows(parameter)
        if stop > start:
            local.copy_(read(name, start, stop))
            on_piece()


class _SafetensorsFolder:
    """Row-wise reader over model.safetensors, or the files that an index names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Any] = {}

    def __enter__(self) -> "_SafetensorsFolder":
        from safetensors import SafetensorError, safe_open

        index = self._folder / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            names = sorted(p.name for p in self._folder.glob("*.safetensors"))
        for name in names:
            try:
                file: Any = safe_open(self._folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{self._folder / name}: {error}", fix="copy or download the file again") from error
            for key in file.keys():  # noqa: SIM118  (not a mapping)
                self._file_of[key] = file
                self.shapes[key] = tuple(file.get_slice(key).get_shape())
        return self

    def __exit__(self, *exc: object) -> None:
        self._file_of.clear()

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        rows: torch.Tensor = self._file_of[name].get_slice(name)[start:stop]
        return rows


def _gguf_state(spec: ModelSpec, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    try:
        lm = AutoModelForCausalLM.from_pretrained(
            spec.source, config=copy.deepcopy(config), gguf_file=spec.gguf_file, dtype=torch.float32
        )
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(
            f"{spec.describe()} cannot be loaded: {error}", fix="install the package gguf, or use safetensors"
        ) from error
    return dict(lm.state_dict())


def _fill_random(module: nn.Module, config: PretrainedConfig, seed: int, on_piece: Callable[[], None]) -> None:
    """One module at a time on the CPU, through the model's own `_init_weights`."""
    wanted = dict(named_weights(module))
    lm = empty_model(config, "eager")
    for module_name, part in lm.named_modules():
        own = list(part.named_parameters(recurse=False))
        names = [f"{module_name}.{n}" if module_name else n for n, _ in own]
        if not any(n in wanted for n in names):
            continue
        part.to_empty(device="cpu", recurse=False)
        digest = hashlib.sha256(f"{seed}:{module_name}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            for _, parameter in part.named_parameters(recurse=False):
                parameter.fill_(float("nan"))
            lm._init_weights(part)
        for name, (_, value) in zip(names, part.named_parameters(recurse=False), strict=True):
            if name not in wanted:
                continue
            if not bool(torch.isfinite(value).all()):
                raise ModelError(
                    f"{config.model_type}: {name} is not initialised by the model's own _init_weights",
                    fix="start from pretrained weights",
                )
            local, start, stop = held_rows(wanted.pop(name))
            local.copy_(value[start:stop])
        part.to_empty(device="meta", recurse=False)
        on_piece()
    assert not wanted, f"no initial value for {sorted(wanted)}"
