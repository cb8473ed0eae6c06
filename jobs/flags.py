"""Command-line flags for every field of `raycp.FitConfig`, made from the dataclasses themselves.

Guarantees: each number of a run is a flag with the field's own name (`optim.lr` is --lr, `parallel.cp` is --cp), so a
new field needs no change here; two fields of one name are an error at start-up rather than a lost flag. Parsing fixes
types only: whether values fit together is said by `FitConfig.problems()`, all at once.
"""

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any

from raycp import config as choices
from raycp.config import FitConfig

_RENAMED = {("optim", "name"): "optimizer"}
_CHOICES = {
    "algorithm": choices.ALGORITHMS,
    "layout": choices.LAYOUTS,
    "kv_cache": choices.KV_CACHES,
    "device": choices.DEVICES,
    "dtype": choices.DTYPES,
    "format": choices.FORMATS,
    "overflow": choices.OVERFLOWS,
    "packing": choices.PACKINGS,
    "train_on": choices.TRAIN_ON,
    "optimizer": choices.OPTIMIZERS,
    "schedule": choices.SCHEDULES,
    "resume": choices.RESUMES,
    "on_loss": choices.ON_LOSS,
    "on_bad_row": choices.BAD_ROWS,
    "tools": choices.TOOLS,
    "local_copy": choices.LOCAL_COPIES,
    "activation_checkpointing": choices.CHECKPOINTING,
}


def add_config_flags(parser: argparse.ArgumentParser, defaults: FitConfig) -> None:
    """Adds a flag for every field of the tree; `defaults` gives what a flag that is not said means."""
    for part, owner in _parts(defaults).items():
        group = parser.add_argument_group(part or "run")
        for name, hint, value in _fields(owner):
            flag = _RENAMED.get((part, name), name)
            group.add_argument(
                f"--{flag.replace('_', '-')}",
                dest=flag,
                default=value,
                nargs=len(value) if isinstance(value, tuple) else None,
                type=_reader(hint),
                metavar="|".join(_CHOICES[flag]) if flag in _CHOICES else flag.upper(),
                help=f"default: {value}",
            )


def config_from_flags(flags: argparse.Namespace, defaults: FitConfig) -> FitConfig:
    """The tree that the parsed flags describe."""
    parts = _parts(defaults)
    values: dict[str, dict[str, Any]] = {}
    for part, owner in parts.items():
        read = {name: getattr(flags, _RENAMED.get((part, name), name)) for name, _, _ in _fields(owner)}
        values[part] = {name: tuple(value) if isinstance(value, list) else value for name, value in read.items()}
    inner = {part: dataclasses.replace(owner, **values[part]) for part, owner in parts.items() if part}
    return dataclasses.replace(defaults, **values[""], **inner)


def _parts(config: FitConfig) -> dict[str, Any]:
    """{name of the part: part}, with the tree itself under ""."""
    inner = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {"": config} | {name: part for name, part in inner.items() if dataclasses.is_dataclass(part)}


def _fields(owner: Any) -> list[tuple[str, Any, Any]]:
    """(name, type hint, value) of the fields of one part that are not parts themselves."""
    hints = typing.get_type_hints(type(owner))
    named = [(f.name, hints[f.name], getattr(owner, f.name)) for f in dataclasses.fields(owner)]
    return [(name, hint, value) for name, hint, value in named if not dataclasses.is_dataclass(value)]


def _reader(hint: Any) -> Callable[[str], Any]:
    """Reads a word as the first of the hint's types that takes it: `int | Literal["auto"]`, `float | None`, `str`.

    A pair among others, `int | tuple[int, int]`, is written with a colon: 2:8.
    """
    kinds = (
        typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else ()
    )
    kinds = kinds or ((typing.get_args(hint)[0],) if typing.get_origin(hint) is tuple else (hint,))

    def read(word: str) -> Any:
        if type(None) in kinds and word.lower() == "none":
            return None
        if ":" in word and any(typing.get_origin(kind) is tuple for kind in kinds):
            return tuple(int(part) for part in word.split(":"))
        if any(word in typing.get_args(kind) for kind in kinds if typing.get_origin(kind) is typing.Literal):
            return word
        for kind in (int, float):
            if kind in kinds:
                return kind(word)
        return word

    return read
