"""Checks of what a plan is asked for; each error names the value and what to change."""

from collections.abc import Sequence

import numpy as np

from raycp.errors import PlanError
from raycp.plan.grid import RankGrid


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raises:
    PlanError: `value` is not one of `allowed`.
    """
    if value not in allowed:
        raise PlanError(f"{name}={value!r} is not a choice", fix=f"set {name} to one of {', '.join(allowed)}")


def resolve_algorithm(algorithm: str, grid: RankGrid, num_heads: int) -> str:
    """The algorithm that a grid means ("auto"), or the one asked for, if it fits the grid.

    Raises:
        PlanError: it does not, or there are more Ulysses ranks than query heads.
    """
    if grid.ulysses > num_heads:
        raise PlanError(
            f"RankGrid(ulysses={grid.ulysses}) and {num_heads} query heads: a rank would have none",
            fix=f"set ulysses to {num_heads} at most",
        )
    natural = "ring" if grid.ulysses == 1 else "ulysses" if grid.ring == 1 else "hybrid"
    if algorithm == "auto":
        return natural
    if algorithm == "ring" and grid.ulysses != 1:
        raise PlanError(f"RankGrid(ulysses={grid.ulysses}): a ring has one Ulysses rank", fix="set ulysses=1")
    if algorithm == "ulysses" and grid.ring != 1:
        raise PlanError(f"RankGrid(ring={grid.ring}): Ulysses alone has ring=1", fix="set ring=1, or use 'hybrid'")
    if algorithm == "allgather" and (grid.ulysses != 1 or grid.window != 1):
        raise PlanError(
            f"RankGrid(ulysses={grid.ulysses}, window={grid.window}): algorithm='allgather' has neither",
            fix="set ulysses=1 and window=1, or use 'hybrid' or 'ring'",
        )
    return algorithm


def check_cache(kv_cache: str, algorithm: str, allowed: Sequence[str]) -> bool:
    """Whether anything is cached.

    Raises:
        PlanError: no such policy, or an algorithm without blocks that come and go.
    """
    check_choice("kv_cache", kv_cache, allowed)
    if kv_cache != "none" and algorithm in ("ulysses", "allgather"):
        raise PlanError(
            f"kv_cache={kv_cache!r} with algorithm={algorithm!r}: only a ring brings K/V blocks that can be kept",
            fix="set kv_cache='none', or algorithm to 'ring' or 'hybrid'",
        )
    return kv_cache != "none"


def check_window(window: int, mask: str) -> None:
    """Raises:
    PlanError: not a whole number of at least 1, or a mask that has no windows.
    """
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise PlanError(f"sliding_window={window!r} is not a whole number of at least 1", fix="pass None for no window")
    if mask != "causal":
        raise PlanError(f"sliding_window={window} with mask={mask!r}", fix="use mask='causal', or sliding_window=None")


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Raises:
    PlanError: query heads are not a multiple of key/value heads.
    """
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise PlanError(
            f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}",
            fix="pass the model's num_attention_heads and num_key_value_heads",
        )


def check_doc_ends(doc_ends: Sequence[int]) -> tuple[int, ...]:
    """`doc_ends` as plain ints.

    Raises:
        PlanError: not a flat, strictly ascending list of positive integers.
    """
    ends = np.asarray(doc_ends)
    if ends.ndim != 1 or (ends.size and not np.issubdtype(ends.dtype, np.integer)):
        raise PlanError(
            f"doc_ends has dtype {ends.dtype} and {ends.ndim} dimensions", fix="pass a flat list of integers"
        )
    lengths = np.diff(ends, prepend=0) if ends.size else ends
    if ends.size and int(lengths.min()) < 1:
        bad = int(np.flatnonzero(lengths < 1)[0])
        raise PlanError(
            f"doc_ends[{bad}]={int(ends[bad])} is not above the end before it ({int(ends[bad] - lengths[bad])})",
            fix="pass strictly ascending ends; leave documents without tokens out",
        )
    return tuple(int(e) for e in ends)
