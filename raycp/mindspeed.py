"""MindSpeed's names for context parallelism, and what each means in raycp.

Guarantees: every flag of `FLAGS` is understood, with and without dashes, as a mapping or as the words of a launch
script; all problems come back at once, each with its fix; whatever changes meaning, or is not needed here, is said in a
note. `FLAGS` is the table of docs/migration_mindspeed.md. Flags outside it are listed as not read. Starts nothing and
imports neither torch nor ray.
"""

import dataclasses
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from raycp.config import FitConfig
from raycp.errors import ConfigError, PlanError, Problem
from raycp.plan import CostModel, RankGrid, ring_warning

ALGORITHMS: Mapping[str, tuple[str, str, str]] = {
    "megatron_cp_algo": ("ring", "auto", "direct pull of the K/V rows that are needed; odd rings work"),
    "ulysses_cp_algo": ("ulysses", "auto", "heads need not divide; q, k and v in one exchange"),
    "hybrid_cp_algo": ("hybrid", "auto", "Ulysses inside, ring outside"),
    "kvallgather_cp_algo": ("allgather", "auto", "only the K/V rows that a rank's queries see, not the whole sequence"),
    "adaptive_cp_algo": ("ring", "balanced", "the layout is searched for each pack; masks are the documents', not 2-D"),
    "hybrid_adaptive_cp_algo": ("hybrid", "balanced", "as adaptive_cp_algo, inside Ulysses groups"),
}
"""MindSpeed's `context_parallel_algo`: algorithm and layout of raycp, and what is different."""


@dataclass(frozen=True)
class Flag:
    """A row of the migration table."""

    name: str
    raycp: str
    meaning: str


FLAGS = (
    Flag(
        "context_parallel_size", "parallel.cp", "The same. No length and no number of heads has to be divisible by it."
    ),
    *(
        Flag(
            f"context_parallel_algo {name}",
            f"parallel.algorithm={algorithm!r}" + (f", parallel.layout={layout!r}" if layout != "auto" else ""),
            meaning[0].upper() + meaning[1:] + ".",
        )
        for name, (algorithm, layout, meaning) in ALGORITHMS.items()
    ),
    Flag("ulysses_degree_in_cp", "parallel.ulysses", 'The same; "auto" chooses it.'),
    Flag("cp_window_size", "parallel.window", "The same: inner ring length of a double ring; may be the whole ring."),
    Flag(
        "use_cp_send_recv_overlap",
        "nothing to set",
        "Always on: a step's rows are posted before the step before it is computed. Correct for odd rings too.",
    ),
    Flag(
        "kv_head_repeat_before_uly_alltoall",
        "nothing to set",
        "Not needed: each rank gets exactly the key/value heads that its query heads read, none is repeated.",
    ),
    Flag(
        "context_parallel_kv_cache_policy",
        "parallel.kv_cache",
        '"full" and "half" (K) as there, for a ring or hybrid. Ulysses repeats no K/V heads: nothing to drop.',
    ),
    Flag(
        "context_parallel_cache_interval",
        "nothing to set",
        "0 only: `parallel.kv_cache` is for every layer.",
    ),
    Flag(
        "attention_mask_type",
        "nothing to set",
        '"causal" inside each document. "general" with packed documents is the same mask here, at the cost of '
        '"causal". Mask tensors are not taken.',
    ),
    Flag("seq_length", "seq_length", "Tokens of a pack. All of it is used, no slot is reserved for padding."),
    Flag("reset_position_ids", "nothing to set", "Always on: positions restart in each document."),
    Flag(
        "reset_attention_mask",
        "nothing to set",
        "Always on: documents of a pack never see each other. Lengths come from the packer, not from an EOD token.",
    ),
    Flag(
        "tensor_model_parallel_size", "1 only", "Refused for now. Parameters are sharded over all ranks (FSDP) instead."
    ),
    Flag("pipeline_model_parallel_size", "1 only", "Refused, as tensor parallelism."),
    Flag("expert_model_parallel_size", "1 only", "Refused, as tensor parallelism."),
    Flag("position_embedding_type", "the model's own", "`alibi` is refused: kernels take no bias."),
    Flag("use_alibi_mask", "off only", "Refused, as `position_embedding_type alibi`."),
    Flag("use_kv_cache", "off only", "Refused: it is for generation. Models run with `use_cache=False`."),
    Flag("attention_dropout", "0 only", "Refused above 0: ranks would have to agree on what is dropped."),
    Flag("hidden_dropout", "0 only", "Refused above 0."),
    Flag("multi_latent_attention", "off only", "Refused for now (MLA, DeepSeek), by name."),
    Flag("use_flash_attn", "nothing to set", "Always: each device has one kernel."),
    Flag("use_fused_ring_attention_update", "nothing to set", "Partial results are merged in fp32, always."),
    Flag("megatron_cp_in_bnsd", "nothing to set", "Tensors are packed rows [t, heads, dim]."),
    Flag("use_ulysses_allgather_kv", "nothing to set", 'Not needed; `parallel.algorithm="allgather"` without Ulysses.'),
    Flag("attention_mask_on_cpu", "nothing to set", "No mask tensor exists."),
    Flag("variable_seq_lengths", "nothing to set", "Packs have the length of their documents, without padding."),
)
"""The migration table."""

_KNOWN = {flag.name.split()[0] for flag in FLAGS}
_ONE = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_OFF = {
    "use_alibi_mask": ("ALiBi adds a bias to scores", "use a model with rotary positions"),
    "use_kv_cache": ("a K/V cache is for generation, training has none", "leave the flag out"),
    "multi_latent_attention": ("MLA is not supported in this version", "use a model with plain or grouped heads"),
}


@dataclass(frozen=True, kw_only=True)
class Migration:
    """What the flags come to: `config` as far as they could be read, notes for the user, and all problems."""

    config: FitConfig
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]

    def checked(self) -> FitConfig:
        """The configuration.

        Raises:
            ConfigError: with every problem.
        """
        if self.problems:
            raise ConfigError.from_problems(self.problems)
        return self.config


def from_mindspeed(
    flags: Mapping[str, Any] | Iterable[str] | str,
    *,
    config: FitConfig | None = None,
    num_heads: int = 1,
    num_kv_heads: int = 1,
    device: str = "npu",
) -> Migration:
    """Reads MindSpeed's flags into a configuration.

    Args:
        flags: {name: value}, or the words of a launch script, as a list or as one string. Names with or without leading
            dashes, with dashes or underscores.
        config: what is changed; None: the defaults.
        num_heads: query heads of the model, for the warning about short ring chunks.
        num_kv_heads: key/value heads of the model, likewise.
        device: whose figures the warning uses.
    """
    reader = _Reader(_named(flags))
    base = config or FitConfig()
    cp = reader.number("context_parallel_size", base.parallel.cp if isinstance(base.parallel.cp, int) else 1)
    changed = _parallel(reader, base, cp)
    seq_length = reader.number("seq_length", base.seq_length)
    _notes_on_masks(reader)
    _refusals(reader)
    result = dataclasses.replace(
        base, seq_length=seq_length, parallel=dataclasses.replace(base.parallel, cp=cp, **changed)
    )
    reader.problems += result.problems()
    if not reader.problems:
        reader.notes += _chunk_warning(result, cp, num_heads, num_kv_heads, device)
    unread = sorted(name for name in reader.flags if name not in _KNOWN)
    if unread:
        reader.notes.append(f"not read, since they say nothing about context parallelism: {', '.join(unread)}")
    return Migration(config=result, notes=tuple(reader.notes), problems=tuple(reader.problems))


def table() -> str:
    """The migration table as Markdown."""
    rows = [f"| `{flag.name}` | {_code(flag.raycp)} | {flag.meaning} |" for flag in FLAGS]
    return "\n".join(["| MindSpeed | raycp | what is different |", "|---|---|---|", *rows, ""])


class _Reader:
    """Typed access to the flags; collects problems and notes."""

    def __init__(self, flags: dict[str, Any]) -> None:
        self.flags = flags
        self.notes: list[str] = []
        self.problems: list[Problem] = []

    def number(self, name: str, default: int) -> int:
        value = self.flags.get(name)
        if value is None:
            return default
        try:
            number = int(str(value))
        except ValueError:
            number = 0
        if number < 1:
            self.problems.append(
                Problem(f"{name}={value!r} is not a whole number of at least 1", f"set {name} to 1 or more")
            )
            return default
        return number

    def word(self, name: str, allowed: Iterable[str]) -> str | None:
        value = self.flags.get(name)
        if value is None or str(value).lower() == "none":
            return None
        if str(value) not in allowed:
            self.problems.append(
                Problem(f"{name}={value!r} is none of MindSpeed's choices", f"use one of {', '.join(allowed)}")
            )
            return None
        return str(value)

    def switch(self, name: str) -> bool | None:
        """On, off, or None where it was not said."""
        value = self.flags.get(name)
        if value is None or isinstance(value, bool):
            return value
        return str(value).lower() not in ("false", "0", "off", "none", "")


def _parallel(reader: _Reader, base: FitConfig, cp: int) -> dict[str, Any]:
    """Changed fields of `ParallelConfig`."""
    name = reader.word("context_parallel_algo", ALGORITHMS)
    ulysses = reader.number("ulysses_degree_in_cp", 0) or None
    window = reader.number("cp_window_size", 1)
    policy = reader.word("context_parallel_kv_cache_policy", ("full", "half"))
    if name is None and "context_parallel_algo" not in reader.flags:
        name = "megatron_cp_algo"
        reader.notes.append(
            "context_parallel_algo was not given: megatron_cp_algo, MindSpeed's default; raycp's is 'auto'"
        )
    if name is None:
        return {}
    algorithm, layout, meaning = ALGORITHMS[name]
    reader.notes.append(f"{name} is parallel.algorithm={algorithm!r}: {meaning}")
    if cp == 1 and algorithm in ("ulysses", "hybrid"):
        algorithm, ulysses = "auto", None
        reader.notes.append(f"context_parallel_size=1: {name} has nothing to split")
    if ulysses is not None and algorithm != "hybrid":
        reader.notes.append(f"ulysses_degree_in_cp={ulysses} is not used by {name}, here as there")
        ulysses = None
    if algorithm == "hybrid" and ulysses is None:
        reader.notes.append("ulysses_degree_in_cp was not given: raycp chooses it (parallel.ulysses='auto')")
    if window > 1 and algorithm not in ("ring", "hybrid"):
        reader.notes.append(f"cp_window_size={window} is not used by {name}, here as there")
        window = 1
    if policy is not None and algorithm in ("ulysses", "allgather", "auto"):
        reader.notes.append(
            f"context_parallel_kv_cache_policy={policy}: nothing is repeated or kept by {name} in raycp"
        )
        policy = None
    if str(reader.flags.get("context_parallel_cache_interval") or 0) != "0":
        reader.problems.append(
            Problem(
                f"context_parallel_cache_interval={reader.flags['context_parallel_cache_interval']}: "
                "parallel.kv_cache is for every layer",
                "leave it at 0",
            )
        )
    if reader.switch("use_cp_send_recv_overlap") is not None:
        reader.notes.append("use_cp_send_recv_overlap: overlap is always on, and correct for odd rings")
    if reader.switch("kv_head_repeat_before_uly_alltoall") is not None:
        reader.notes.append("kv_head_repeat_before_uly_alltoall: not needed, no key/value head is repeated")
    return {
        "algorithm": algorithm,
        "layout": layout if layout != "auto" else base.parallel.layout,
        "ulysses": ulysses or "auto",
        "window": window,
        "kv_cache": policy or "none",
    }


def _notes_on_masks(reader: _Reader) -> None:
    kind = reader.word("attention_mask_type", ("causal", "general"))
    if kind == "general":
        reader.notes.append(
            "attention_mask_type=general: the mask is causal inside each document, computed as ranges; no S x S tensor"
        )
    if not reader.switch("reset_attention_mask"):
        reader.notes.append(
            "reset_attention_mask was off: in raycp documents of a pack never see each other, so losses differ "
            "from those of that run"
        )
    if not reader.switch("reset_position_ids"):
        reader.notes.append("reset_position_ids was off: in raycp positions restart in each document")


def _refusals(reader: _Reader) -> None:
    for name in _ONE:
        size = reader.number(name, 1)
        if size > 1:
            reader.problems.append(
                Problem(
                    f"{name}={size}: raycp has data and context parallelism only",
                    f"set {name}=1, and give those ranks to context_parallel_size: parameters are sharded over all",
                )
            )
    for name, (why, fix) in _OFF.items():
        if reader.switch(name):
            reader.problems.append(Problem(f"{name}: {why}", fix))
    if str(reader.flags.get("position_embedding_type", "")).lower() == "alibi":
        reader.problems.append(
            Problem("position_embedding_type=alibi: " + _OFF["use_alibi_mask"][0], _OFF["use_alibi_mask"][1])
        )
    for name in ("attention_dropout", "hidden_dropout"):
        value = reader.flags.get(name)
        if value is not None and str(value) not in ("0", "0.0"):
            reader.problems.append(Problem(f"{name}={value}: dropout is not applied", f"set {name}=0.0"))


def _chunk_warning(config: FitConfig, cp: int, num_heads: int, num_kv_heads: int, device: str) -> list[str]:
    """MindSpeed's advice against ring chunks below 8K tokens, with the figures of the device."""
    p = config.parallel
    if p.algorithm not in ("ring", "hybrid") or cp == 1:
        return []
    ulysses, window = (x if isinstance(x, int) else 1 for x in (p.ulysses, p.window))
    try:
        cost = CostModel.named(p.cost, device=device)
    except PlanError:  # the configuration says so itself, when it is resolved
        return []
    grid = RankGrid(1, cp // ulysses, ulysses, window)
    said = ring_warning(grid, config.seq_length, num_heads=num_heads, num_kv_heads=num_kv_heads, cost=cost)
    return [said] if said else []


def _named(flags: Mapping[str, Any] | Iterable[str] | str) -> dict[str, Any]:
    """{name with underscores: value}; a flag without a value is True."""
    if isinstance(flags, Mapping):
        return {_plain(name): value for name, value in flags.items()}
    words = shlex.split(flags.replace("\\\n", " ")) if isinstance(flags, str) else list(flags)
    found: dict[str, Any] = {}
    name: str | None = None
    for word in words:
        if word.startswith("--"):
            head, equals, value = word.partition("=")
            name = _plain(head)
            found[name] = value if equals else True
        elif name is not None and found[name] is True:
            found[name] = word
    return found


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _code(text: str) -> str:
    return text if " " in text and "=" not in text else f"`{text}`"
