"""Which files belong to a data set of Megatron's: NAME.idx, NAME.bin, and the same of its labels and attention mask.

Guarantees: names only; `megatron_rows` reads them. Local disks only. Cost: a look at a few names.
"""

import os
from pathlib import Path

INDEX = ".idx"
_NAMES = ("", "_packed_input_ids_document", "_input_ids_document", "_text_document")
"""Behind the prefix that MindSpeed-LLM and Megatron-LM take as `--data-path`."""
_BESIDE = ("labels", "attention_mask")
"""Columns beside `input_ids`, in files of their own."""


def megatron_columns(path: str) -> dict[str, str]:
    """{column: .idx file} of the data set whose token ids are in this one."""
    folder, name = os.path.split(path)
    found = {"input_ids": path}
    before, ids, after = name.rpartition("input_ids")
    for column in _BESIDE:
        beside = os.path.join(folder, f"{before}{column}{after}")
        if ids and os.path.isfile(beside):
            found[column] = beside
    return found


def stored_with(path: str) -> list[str]:
    """Paths of all files of the data set whose token ids this index is of; what is missing is left out."""
    pairs = ((index, index.removesuffix(INDEX) + ".bin") for index in megatron_columns(path).values())
    return [one for pair in pairs for one in pair if os.path.isfile(one)]


def without_beside(paths: list[Path]) -> list[Path]:
    """Without files that another one brings along: labels and masks of Megatron's data, and .bin beside .idx."""
    indexes = {str(p) for p in paths if p.suffix == INDEX}
    brought = {beside for path in indexes for beside in list(megatron_columns(path).values())[1:]}
    return [p for p in paths if str(p) not in brought and not (p.suffix == ".bin" and p.with_suffix(INDEX).is_file())]


def find_index(path: Path) -> Path | None:
    """The index that a .bin file, or a prefix as `--data-path` takes it, stands for."""
    if path.suffix == ".bin" and path.with_suffix(INDEX).is_file():
        return path.with_suffix(INDEX)
    if path.exists():
        return None
    names = (f"{path.name}{behind}{INDEX}" for behind in _NAMES)
    return next((path.with_name(name) for name in names if path.with_name(name).is_file()), None)
