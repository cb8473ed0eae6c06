"""The configuration tree of `raycp.fit`: frozen, keyword-only dataclasses, and one `validate` that finds everything.

Guarantees: a tree is immutable and plain (numbers, strings, tuples), so it is hashed, stored as `config.json` and sent
to other machines as it is; `problems()` reports every problem at once, before any process starts. "auto" values are
filled in by `raycp.api`, which writes the resolved tree to the output folder. Imports neither torch nor ray.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from raycp.errors import ConfigError, Problem
from raycp.peaks import peak_table
from raycp.problems import Problems

ALGORITHMS = ("auto", "ring", "ulysses", "hybrid", "allgather")
LAYOUTS = ("auto", "contiguous", "zigzag", "balanced")
KV_CACHES = ("none", "half", "full")
DEVICES = ("auto", "cpu", "cuda", "npu")
DTYPES = ("auto", "float32", "bfloat16")
FORMATS = ("auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokens")
OVERFLOWS = ("raise", "split", "split_restart", "truncate", "truncate_left", "drop")
PACKINGS = ("best_fit", "first_fit", "sequential", "none")
BAD_ROWS = ("raise", "skip")
TOOLS = ("template", "text")
LOCAL_COPIES = ("auto", "always", "never")
TRAIN_ON = ("auto", "assistant", "last_assistant", "completion", "all")
OPTIMIZERS = ("adamw", "sgd")
SCHEDULES = ("cosine", "linear", "constant")
RESUMES = ("auto", "never", "must")
ON_LOSS = ("auto", "shrink", "wait", "stop")
CHECKPOINTING = ("auto", "full", "none")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How a pack and the packs of a step are spread over the workers: workers = dp * cp, cp = ulysses * ring."""

    cp: int | tuple[int, int] | Literal["auto"] = "auto"
    """Context-parallel ranks that share one pack. A number stays, whatever is lost (dp gives way); a pair (lowest,
    highest) starts at the highest that the workers give, and may shrink and grow back. "auto": all workers that dp
    leaves, and as a pair from 1 to that when workers are lost."""
    dp: int | Literal["auto"] = "auto"
    """Data-parallel replicas. "auto": workers / cp."""
    algorithm: str = "auto"
    """"ring", "allgather" (both: ulysses=1), "ulysses" (ulysses=cp) or "hybrid" (Ulysses inside, ring outside). "auto":
    ring x ulysses once per run, ring or all-gather for each pack, by the figures of `cost`."""
    ulysses: int | Literal["auto"] = "auto"
    """Ranks that trade tokens for heads; divides cp."""
    window: int | Literal["auto"] = 1
    """Inner ring length of a double ring; 1 is a single ring. Divides the ring, which is cp / ulysses. "auto": 1, or
    what fills a node, by the figures of `cost`."""
    layout: str = "auto"
    """Which tokens of a pack a rank holds. "auto": for each pack, by the figures of `cost`."""
    kv_cache: str = "none"
    """What of other ranks' K and V a ring keeps until backward: "none", "half" (K) or "full". Saves traffic that
    compute cannot hide, for the memory of all remote rows of every layer."""
    cost: str = "auto"
    """Figures that "auto" is decided by: a table ("auto": the device's, "cpu", "910b", "a100", "h100"), and changes to
    it: "910b, bandwidth=5.6e10". `raycp.plan.CostModel` has the names."""
    shard: str = "full"
    """"full": parameters, gradients and optimizer sharded over dp * cp. "none": replicated on every rank."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """From rows to documents to packs."""

    format: str = "auto"
    """What a row is: messages, sharegpt, alpaca, prompt_completion, text or tokens. "auto": by its columns."""
    columns: str = ""
    """Which column is which, where names differ: "prompt=question, completion=answer"."""
    eod_token_id: int | None = None
    """Id that ends a document in rows of token ids that were packed before."""
    overflow: str = "raise"
    """What happens to a document of more than `seq_length` tokens. "split": cut, positions run on over the cut;
    "split_restart": cut, positions start at 0 again; "truncate": its first tokens are kept; "truncate_left": its last
    ones; "drop"; "raise": an error that counts them."""
    packing: str = "best_fit"
    """Which documents share a pack: best_fit, first_fit (as they come, 64 packs open), sequential or none."""
    train_on: str = "auto"
    """Tokens that are trained: assistant, last_assistant, completion or all. "auto": what the format is made for."""
    chat_template: str | None = None
    """A Jinja chat template that replaces the tokenizer's own."""
    tools: str = "template"
    """How tools, their calls and answers are written: by the chat template, which must know them; or as "text"."""
    on_bad_row: str = "raise"
    """"skip": rows that cannot be used are left out, counted, and listed in `skipped.jsonl` beside the documents."""
    local_copy: str = "auto"
    """Whether each node copies the documents to its own disk before it reads them. "auto": where they are on a network
    file system and the disk has room for them."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and schedule. The learning rate is a function of the step alone."""

    name: str = "adamw"
    lr: float = 1e-5
    schedule: str = "cosine"
    warmup: float = 0.03
    """Below 1: fraction of all steps. 1 or more: number of steps."""
    clip: float | None = 1.0
    """Global norm that gradients are scaled down to; None: no clipping."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.0
    """Of SGD."""
    min_lr_ratio: float = 0.0
    """What the schedule falls to one step after the last, as a fraction of `lr`."""


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """What is saved when, and what a lost worker does to the run."""

    min_workers: int = 1
    """Fewest workers that the run goes on with."""
    max_workers: int | None = None
    """Most workers that the run grows to where capacity appears; None: as many as it was started with."""
    spares: int = 0
    """Workers that are started, warm and idle, and take the place of a lost one at once."""
    on_loss: str = "auto"
    """"auto": a spare if there is one, else a smaller world at once if its memory fits (and back when a replacement is
    warm), else wait. "shrink": never wait for capacity. "wait": keep the size, wait for a replacement. "stop": end the
    run."""
    heartbeat_timeout: float = 30.0
    """Seconds after which a rank that does not answer, or whose counters stand still inside a step, counts as lost."""
    wait_for_capacity: float = 600.0
    """Seconds that a run waits for the cluster to have the workers that it asked for, or has to have."""
    snapshot_every: int = 1
    """Steps between copies of the state in the memory of two nodes. A step is committed by its copy."""
    checkpoint_every: int = 50
    """Steps between checkpoints on storage; the last step always writes one."""
    checkpoint_dir: str | None = None
    """Where checkpoints go: an absolute path, or a URL that fsspec knows. None: `checkpoints` in output_dir."""
    keep: int = 3
    """Newest checkpoints that are kept."""
    keeper_ttl: float = 600.0
    """Seconds that copies in memory outlive their driver; then they are written to storage and given up."""
    resume: str = "auto"
    """"auto": continue if `output_dir` holds this run. "must": fail if it does not. "never": fail if it does."""


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """Everything about a run but its model, its data and its folder."""

    seq_length: int = 131_072
    """Tokens of a pack (T): documents are packed up to this length."""
    steps: int | None = None
    """Optimizer steps; None: as many as `epochs` gives."""
    epochs: float = 1.0
    global_batch: int = 8
    """Packs per optimizer step, whatever the number of workers."""
    seed: int = 0
    dtype: str = "auto"
    """"bfloat16": fp32 master weights and bf16 compute. "auto": bfloat16 on accelerators, float32 on CPU."""
    device: str = "auto"
    """What ranks compute on: npu, cuda or cpu. "auto": what the cluster has, in this order."""
    resource: str | None = None
    """Ray resource that a rank takes one of, where it is not the device's own (NPU, GPU; CPUs for device="cpu")."""
    peak_flops: str = "auto"
    """Dense FLOP/s of a device, in the compute dtype: what the mfu of the progress bar is a share of, and what the cost
    figures of an accelerator scale with. "auto": by the name that the device gives itself. A number: of all devices.
    Or changes to the table: "Ascend910B3=3.13e14, H20=1.48e14"."""
    workers: int | None = None
    """Ray actors, each with one accelerator (or CPU). Required on an existing cluster."""
    eval_data: Any = None
    """Held-out rows, in any form that `data` takes; evaluated before the first and after the last step."""
    eval_every: int | None = None
    """Also evaluate each so many steps."""
    activation_checkpointing: str = "auto"
    """Recompute each layer in backward (attention's output and LSE are kept). "auto": when memory asks for it."""
    loss_chunk: int = 2048
    """Target rows that go through the head at once."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)

    def problems(self) -> list[Problem]:
        """Every problem that can be seen without looking at the model, the data or the cluster."""
        found = Problems()
        found.integer("seq_length", self.seq_length, 1)
        found.integer("steps", self.steps, 1, none=True)
        found.number("epochs", self.epochs, above=0.0)
        found.integer("global_batch", self.global_batch, 1)
        found.integer("seed", self.seed, 0)
        found.integer("workers", self.workers, 1, none=True)
        found.integer("eval_every", self.eval_every, 1, none=True)
        found.integer("loss_chunk", self.loss_chunk, 1)
        found.choice("dtype", self.dtype, DTYPES)
        found.choice("device", self.device, DEVICES)
        if self.resource is not None and (not isinstance(self.resource, str) or self.resource in ("", "CPU")):
            found.add(f"resource={self.resource!r} is not an accelerator's Ray resource", "set resource='NPU', or None")
        try:
            peak_table(self.peak_flops)
        except ValueError as error:
            found.add(
                f"peak_flops={self.peak_flops!r}: {error}",
                "write a number such as 3.13e14, or changes by device such as 'Ascend910B3=3.13e14'",
            )
        found.choice("activation_checkpointing", self.activation_checkpointing, CHECKPOINTING)
        _check_parallel(found, self.parallel, self.workers)
        _check_data(found, self.data)
        _check_optim(found, self.optim)
        _check_elastic(found, self.elastic, self.workers)
        _check_lengths(found, self)
        return found.items

    def validate(self) -> None:
        """Raises:
        ConfigError: with all problems of `problems()`, if there is one.
        """
        items = self.problems()
        if items:
            raise ConfigError.from_problems(items)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict, as written to config.json. `eval_data` becomes its description."""
        raw = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("parallel", "data", "optim", "elastic"):
            raw[name] = dataclasses.asdict(raw[name])
        raw["eval_data"] = describe_source(self.eval_data)
        return raw


def column_map(columns: str) -> dict[str, str]:
    """{our name: the file's name} of `DataConfig.columns`.

    Raises:
        ValueError: a piece that is no pair, or one of our names twice.
    """
    if not isinstance(columns, str):
        raise ValueError(f"it is a {type(columns).__name__}, not a string")
    found: dict[str, str] = {}
    for piece in filter(None, (p.strip() for p in columns.split(","))):
        ours, sign, theirs = (part.strip() for part in piece.partition("="))
        if not (ours and sign and theirs):
            raise ValueError(f"{piece!r} is no pair of names")
        if ours in found:
            raise ValueError(f"{ours!r} is there twice")
        found[ours] = theirs
    return found


def describe_source(data: Any) -> Any:
    """A short JSON-able description of a `data` argument: paths as they are, anything else by its type."""
    if data is None or isinstance(data, str):
        return data
    if hasattr(data, "__fspath__"):
        return str(data)
    if isinstance(data, list | tuple) and all(isinstance(x, str) or hasattr(x, "__fspath__") for x in data):
        return [str(x) for x in data]
    if isinstance(data, Mapping):
        return {str(name): weight for name, weight in data.items()}
    if isinstance(data, list | tuple) and data and all(isinstance(x, tuple) and len(x) == 2 for x in data):
        return [[describe_source(one), weight] for one, weight in data]
    return f"<{type(data).__module__}.{type(data).__qualname__}>"


def _check_parallel(found: Problems, p: ParallelConfig, workers: int | None) -> None:
    for name, value in (("cp", p.cp), ("dp", p.dp), ("ulysses", p.ulysses), ("window", p.window)):
        if name == "cp" and isinstance(value, tuple | list):
            _check_range(found, value)
        elif value != "auto":
            found.integer(f"parallel.{name}", value, 1)
    found.choice("parallel.algorithm", p.algorithm, ALGORITHMS)
    found.choice("parallel.layout", p.layout, LAYOUTS)
    found.choice("parallel.shard", p.shard, ("full", "none"))
    found.choice("parallel.kv_cache", p.kv_cache, KV_CACHES)
    workers = workers if isinstance(workers, int) and workers >= 1 else None
    cp = p.cp if isinstance(p.cp, int) and p.cp >= 1 else None
    dp = p.dp if isinstance(p.dp, int) and p.dp >= 1 else None
    if workers is not None and isinstance(p.cp, tuple | list):
        cp = _degree_of_range(found, workers, p.cp, dp)
    elif workers is not None:
        _check_world(found, workers, cp, dp)
        cp = cp or (workers // dp if dp and workers % dp == 0 else None if dp else workers)
    _check_algorithm(found, p, cp)


def _check_range(found: Problems, cp: Sequence[object]) -> None:
    good = len(cp) == 2 and all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in cp)
    if not good or not cp[0] <= cp[1]:  # type: ignore[operator]
        found.add(
            f"parallel.cp={tuple(cp)!r} is not a pair (lowest, highest) of whole numbers of at least 1",
            "set parallel.cp to a number, to a pair such as (2, 8), or to 'auto'",
        )


def _degree_of_range(found: Problems, workers: int, cp: Sequence[Any], dp: int | None) -> int | None:
    """The highest degree of the pair that uses all workers; a problem if there is none."""
    try:
        low, high = (int(n) for n in cp)
    except (TypeError, ValueError):  # `_check_range` lists it
        return None
    degree = highest_degree(workers, (low, high), dp)
    if degree is None:
        found.add(
            f"parallel.cp=({low}, {high}) with workers={workers} and parallel.dp={dp or 'auto'}: no degree of the pair "
            "uses all workers",
            "set workers to a multiple of a degree in the pair, or widen parallel.cp",
        )
    return degree


def highest_degree(workers: int, cp: Sequence[int], dp: int | None) -> int | None:
    """The highest degree of a pair (lowest, highest) that uses all workers, with so many replicas; None: any number."""
    return next((c for c in range(cp[1], cp[0] - 1, -1) if workers % c == 0 and dp in (None, workers // c)), None)


def _check_world(found: Problems, workers: int, cp: int | None, dp: int | None) -> None:
    if cp is not None and dp is not None and cp * dp != workers:
        found.add(
            f"parallel.cp={cp} x parallel.dp={dp} = {cp * dp} ranks, but workers={workers}",
            f"set workers={cp * dp}, or leave one of cp and dp on 'auto'",
        )
    for name, degree, other in (("cp", cp, dp), ("dp", dp, cp)):
        if degree is not None and other is None and workers % degree:
            found.add(
                f"parallel.{name}={degree} does not divide workers={workers}",
                f"set workers to a multiple of {degree}, or parallel.{name} to a divisor of {workers}",
            )


def _check_algorithm(found: Problems, p: ParallelConfig, cp: int | None) -> None:
    """Whether algorithm, ulysses and window fit each other, and the ranks of a pack as far as they are known."""
    ulysses = p.ulysses if isinstance(p.ulysses, int) and p.ulysses >= 1 else None
    window = p.window if isinstance(p.window, int) and p.window >= 1 else 1
    if p.algorithm in ("ring", "allgather") and ulysses not in (None, 1):
        found.add(
            f"parallel.algorithm={p.algorithm!r} with parallel.ulysses={ulysses}: it has one Ulysses rank",
            "set parallel.ulysses=1, or parallel.algorithm='hybrid'",
        )
        ulysses = 1
    elif p.algorithm == "hybrid" and ulysses == 1:
        found.add(
            "parallel.algorithm='hybrid' with parallel.ulysses=1: nothing is left of Ulysses",
            "set parallel.ulysses to 2 or more, or parallel.algorithm='ring'",
        )
    elif cp is not None and ulysses is not None and cp % ulysses:
        found.add(
            f"parallel.ulysses={ulysses} does not divide the {cp} ranks of a pack (parallel.cp)",
            f"set parallel.ulysses to a divisor of {cp}, or to 'auto'",
        )
        ulysses = None
    elif cp is not None and ulysses is not None and p.algorithm == "ulysses" and ulysses != cp:
        found.add(
            f"parallel.algorithm='ulysses' with parallel.ulysses={ulysses} and {cp} ranks a pack: a ring is left over",
            f"set parallel.ulysses={cp} or 'auto', or parallel.algorithm='hybrid'",
        )
    elif cp is not None and p.algorithm == "hybrid" and _hybrids(cp, ulysses) == 0:
        found.add(
            f"parallel.algorithm='hybrid' with {cp} ranks a pack and parallel.ulysses={p.ulysses}: it takes a ring and "
            "a Ulysses group of at least 2 ranks each",
            "set parallel.cp to 4 or more, and parallel.ulysses to a divisor of it that is smaller",
        )
    if window > 1 and p.algorithm in ("ulysses", "allgather"):
        found.add(
            f"parallel.window={window} with parallel.algorithm={p.algorithm!r}: only a ring can be a double ring",
            "set parallel.window=1, or parallel.algorithm to 'ring' or 'hybrid'",
        )
    elif window > 1 and cp is not None:
        if p.algorithm == "ring":
            ulysses = 1
        ring = cp // ulysses if ulysses else cp
        if ring % window:
            found.add(
                f"parallel.window={window} does not divide the ring of {ring} ranks",
                f"set parallel.window to a divisor of {ring}, or to 1 for a single ring",
            )
    if p.kv_cache in ("half", "full") and p.algorithm in ("ulysses", "allgather"):
        found.add(
            f"parallel.kv_cache={p.kv_cache!r} with parallel.algorithm={p.algorithm!r}: only a ring brings K/V blocks "
            "that can be kept",
            "set parallel.kv_cache='none', or parallel.algorithm to 'ring' or 'hybrid'",
        )


def _hybrids(cp: int, ulysses: int | None) -> int:
    """Ways to cut cp ranks into a ring and Ulysses groups of at least 2 each."""
    return sum(cp % u == 0 and (ulysses is None or u == ulysses) for u in range(2, cp // 2 + 1))


def _check_data(found: Problems, d: DataConfig) -> None:
    found.choice("data.format", d.format, FORMATS)
    found.choice("data.overflow", d.overflow, OVERFLOWS)
    found.choice("data.packing", d.packing, PACKINGS)
    found.choice("data.train_on", d.train_on, TRAIN_ON)
    found.choice("data.tools", d.tools, TOOLS)
    found.choice("data.on_bad_row", d.on_bad_row, BAD_ROWS)
    found.choice("data.local_copy", d.local_copy, LOCAL_COPIES)
    found.integer("data.eod_token_id", d.eod_token_id, 0, none=True)
    try:
        column_map(d.columns)
    except ValueError as error:
        found.add(f"data.columns={d.columns!r}: {error}", "write it as 'prompt=question, completion=answer'")


def _check_optim(found: Problems, o: OptimConfig) -> None:
    found.choice("optim.name", o.name, OPTIMIZERS)
    found.choice("optim.schedule", o.schedule, SCHEDULES)
    found.number("optim.lr", o.lr, above=0.0)
    found.number("optim.warmup", o.warmup, low=0.0)
    found.number("optim.clip", o.clip, above=0.0, none=True)
    found.number("optim.weight_decay", o.weight_decay, low=0.0)
    found.number("optim.eps", o.eps, above=0.0)
    found.number("optim.momentum", o.momentum, low=0.0, below=1.0)
    found.number("optim.min_lr_ratio", o.min_lr_ratio, low=0.0)
    if isinstance(o.min_lr_ratio, int | float) and o.min_lr_ratio > 1:
        found.add(f"optim.min_lr_ratio={o.min_lr_ratio!r}: the rate would rise", "set optim.min_lr_ratio to 1 at most")
    if o.name == "adamw" and isinstance(o.momentum, int | float) and 0 < o.momentum < 1:
        found.add(
            f"optim.momentum={o.momentum!r} with optim.name='adamw': it is not used",
            "set optim.betas instead, or optim.name='sgd'",
        )
    if not isinstance(o.betas, tuple | list) or len(o.betas) != 2:
        found.add(f"optim.betas={o.betas!r} are not two numbers", "set optim.betas to two numbers in [0, 1)")
    else:
        for i, beta in enumerate(o.betas):
            found.number(f"optim.betas[{i}]", beta, low=0.0, below=1.0)


def _check_lengths(found: Problems, config: FitConfig) -> None:
    """What is longer or more than the run has steps, packs or rows for."""
    warmup, steps = config.optim.warmup, config.steps
    if isinstance(steps, int) and isinstance(warmup, int | float) and warmup >= 1 and warmup > steps:
        found.add(
            f"optim.warmup={warmup} steps with steps={steps}: the rate never gets to optim.lr",
            f"set optim.warmup to {steps} at most, or to a fraction below 1",
        )
    if config.eval_every is not None and config.eval_data is None:
        found.add(f"eval_every={config.eval_every!r} without eval_data", "give eval_data, or leave eval_every out")
    dp, packs = config.parallel.dp, config.global_batch
    if isinstance(dp, int) and isinstance(packs, int) and dp > packs >= 1:
        found.add(
            f"parallel.dp={dp} replicas for global_batch={packs} packs a step: {dp - packs} would never have one",
            f"set global_batch to {dp} or more, or give the workers to parallel.cp",
        )


def _check_elastic(found: Problems, e: ElasticConfig, workers: int | None) -> None:
    found.choice("elastic.resume", e.resume, RESUMES)
    found.choice("elastic.on_loss", e.on_loss, ON_LOSS)
    found.integer("elastic.min_workers", e.min_workers, 1)
    found.integer("elastic.max_workers", e.max_workers, 1, none=True)
    found.integer("elastic.spares", e.spares, 0)
    found.integer("elastic.snapshot_every", e.snapshot_every, 1)
    found.integer("elastic.checkpoint_every", e.checkpoint_every, 1)
    found.integer("elastic.keep", e.keep, 1)
    found.number("elastic.heartbeat_timeout", e.heartbeat_timeout, above=0.0)
    found.number("elastic.wait_for_capacity", e.wait_for_capacity, low=0.0)
    found.number("elastic.keeper_ttl", e.keeper_ttl, above=0.0)
    place = e.checkpoint_dir
    if place is not None and not (isinstance(place, str) and (place.startswith("/") or "://" in place)):
        found.add(
            f"elastic.checkpoint_dir={place!r} is neither an absolute path nor a URL",
            "give a path from the root, a URL such as s3://bucket/folder, or None for output_dir/checkpoints",
        )
    low, high = e.min_workers, e.max_workers
    if workers is None and isinstance(low, int) and isinstance(high, int) and low > high >= 1:
        found.add(
            f"elastic.min_workers={low} with elastic.max_workers={high}: no number is in between",
            f"set elastic.max_workers to {low} or more",
        )
    bounds = (("min_workers", low, workers), ("max_workers", workers, high))
    for name, less, more in bounds:
        if isinstance(less, int) and isinstance(more, int) and less > more >= 1:
            found.add(
                f"elastic.{name}={getattr(e, name)} with workers={workers}: the run starts outside its own limits",
                f"set elastic.{name} to {workers}, or change workers",
            )
