"""Fills in what a configuration left on "auto", and finds what cannot be.

Guarantees: pure functions of their arguments; each returns the value or the problems, so that the caller reports all of
them at once. Imports neither torch nor ray.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from raycp.config import FitConfig, highest_degree
from raycp.errors import PlanError, Problem
from raycp.peaks import peak_table
from raycp.plan import CostModel, GridChoice, RankGrid, choose_grid, ring_warning
from raycp.plan.resize import WorldLimits
from raycp.training.device import local_accelerators
from raycp.training.layers import AttentionLayers

_SAVED_PER_LAYER_HIDDEN = 10
_SAVED_PER_LAYER_INNER = 4
_SHARE_OF_MEMORY = 0.25
_STATE_COPIES = 4  # parameters, gradients and two moments, fp32


def capacity_problems(
    workers: int | None, *, existing_cluster: bool, resources: Mapping[str, float], resource: str | None
) -> list[Problem]:
    """Whether the cluster can hold the workers.

    Args:
        workers: as the user said; what is not a count is reported elsewhere.
        existing_cluster: the cluster is not ours: its size says nothing about what this run may take.
        resources: total of the cluster (or of this machine).
        resource: the accelerator's Ray resource; None: CPUs, of which a local Ray offers as many as there are ranks.
    """
    name = resource or "CPU"
    have = int(resources.get(name, 0))
    if workers is None and existing_cluster:
        return [
            Problem(
                f"workers is not set, and the run goes to an existing cluster (which has {have} {name})",
                "set workers to the number of accelerators (or CPU ranks) that this run may take",
            )
        ]
    bounded = existing_cluster or resource is not None
    if bounded and isinstance(workers, int) and workers > have:
        where = "the cluster" if existing_cluster else "this machine"
        return [
            Problem(
                f"workers={workers}, and {where} has {have} {name} in all",
                f"set workers to {have} or less, or add nodes" if have else f"add nodes that have {name}",
            )
        ]
    return []


def resolve_workers(config: FitConfig, *, resources: Mapping[str, float], resource: str | None) -> FitConfig:
    """Workers, cp and dp as numbers.

    Args:
        config: `problems()` of it is empty.
        resources: total of the cluster (or of this machine).
        resource: the accelerator's Ray resource; None: CPUs.
    """
    p, e = config.parallel, config.elastic
    have = int(resources.get(resource or "CPU", 0))
    have = max(1, min(have - e.spares, e.max_workers or have))
    cp = p.cp if isinstance(p.cp, int) else None
    dp = p.dp if isinstance(p.dp, int) else None
    workers = config.workers
    if isinstance(p.cp, tuple | list):
        workers = workers or _most_workers(have if resource else p.cp[1] * (dp or 1), p.cp, dp)
        cp = highest_degree(workers, p.cp, dp) or p.cp[0]
    if workers is None:
        workers = cp * dp if cp and dp else cp or dp or (have if resource else 1) or 1
    if cp is None:
        cp = max(1, workers // (dp or 1))
    parallel = dataclasses.replace(p, cp=cp, dp=dp or max(1, workers // cp))
    return dataclasses.replace(config, workers=workers, parallel=parallel)


def _most_workers(have: int, cp: Sequence[int], dp: int | None) -> int:
    """The most of the workers there are that a degree of the pair uses whole; all, where none does."""
    return next((n for n in range(have, 0, -1) if highest_degree(n, cp, dp)), have)


def world_limits(asked: FitConfig, resolved: FitConfig) -> WorldLimits:
    """What the run may shrink and grow to.

    Args:
        asked: as the user gave it.
        resolved: of `resolve_workers`: with workers, cp and dp as numbers.
    """
    p, q, e = asked.parallel, resolved.parallel, asked.elastic
    assert isinstance(q.cp, int)
    assert isinstance(q.dp, int)
    workers = resolved.workers or q.cp * q.dp
    most = e.max_workers or workers
    cp = (q.cp, q.cp) if isinstance(p.cp, int) else (1, max(q.cp, most // q.dp))
    if isinstance(p.cp, tuple | list):
        cp = (p.cp[0], p.cp[1])
    dp = q.dp
    if p.dp == "auto" and isinstance(p.cp, int):  # more replicas than packs of a step would idle
        dp = max(q.dp, min(most // q.cp, asked.global_batch))
    return WorldLimits(cp=cp, dp=(1, dp), workers=(min(e.min_workers, workers), most), wanted=(q.dp, q.cp))


def rank_bytes(config: FitConfig, model: Any, grid: RankGrid, *, itemsize: int, recompute: bool) -> int:
    """Bytes of memory that a rank of a world takes: state, and the activations of one pack's share. An estimate.

    Args:
        config: resolved.
        model: transformers configuration.
        grid: the world.
        itemsize: bytes of the compute dtype.
        recompute: layers are recomputed in backward.
    """
    hidden, layers = int(model.hidden_size), int(model.num_hidden_layers)
    sharded, tokens = config.parallel.shard == "full", -(-config.seq_length // grid.cp)
    weights = 4 * _all_weights(model) * _STATE_COPIES // (grid.world_size if sharded else 1)
    embedding, head = int(model.vocab_size) * hidden, _embeddings(model)
    head_bytes = 4 * embedding + 8 * min(config.loss_chunk, tokens) * int(model.vocab_size)  # the loss, fp32
    if sharded:  # gathered for compute; the whole gradient of embedding and head before it is cut
        weights += itemsize * (_layer_weights(model) + head * embedding) + 4 * head * embedding
    elif itemsize != 4:
        weights += itemsize * _all_weights(model)
    width = _saved_width(model)
    kept = (2 * hidden * layers + width) if recompute else width * layers
    if recompute and grid.ulysses > 1:  # q, k, v and output of attention, as they were exchanged, are kept too
        kept += 2 * _head_dim(model) * (_heads(model)[0] + max(_heads(model)[1], grid.ulysses)) * layers
    return weights + head_bytes + tokens * kept * itemsize


def cost_model(config: FitConfig, model: Any, *, device: str, itemsize: int) -> CostModel:
    """The figures that "auto" is decided by, for one layer of this model.

    Args:
        config: as the user gave it.
        model: transformers configuration.
        device: "cpu", "cuda" or "npu".
        itemsize: bytes of the compute dtype.

    Raises:
        PlanError: `config.parallel.cost` names no table, or no figure.
    """
    cost = config.parallel.cost
    head_dim = _head_dim(model)
    of_model = {
        "head_dim": head_dim,
        "value_dim": head_dim,
        "itemsize": itemsize,
        "linear_flops": 2.0 * _layer_weights(model),
    }
    table = CostModel.named(cost, device=device, peaks=peak_table(config.peak_flops))
    given = {part.partition("=")[0].strip() for part in cost.split(",")}
    return dataclasses.replace(table, **{k: v for k, v in of_model.items() if k not in given})  # type: ignore[arg-type]


def placed_cost(config: FitConfig, cost: CostModel, node_ranks: Sequence[int]) -> CostModel:
    """The figures with the size of the nodes that ranks are placed on, unless `config.parallel.cost` gives one.

    Args:
        config: as the user gave it.
        cost: of `cost_model`.
        node_ranks: ranks of each node, in the order of the ranks; empty: not known.
    """
    return cost if "ranks_per_node" in config.parallel.cost else cost.on_nodes(node_ranks)


def resolve_grid(
    config: FitConfig,
    model: Any,
    cost: CostModel,
    *,
    packs: Sequence[Sequence[int]] = (),
    node_ranks: Sequence[int] = (),
) -> GridChoice:
    """The shape of the world: ring x Ulysses as asked for, or what the figures say.

    Args:
        config: with cp and dp as numbers.
        model: transformers configuration.
        cost: of `cost_model`.
        packs: ends of the documents of typical packs; none: one document of `seq_length` tokens.
        node_ranks: as in `placed_cost`.

    Raises:
        PlanError: nothing fits what was asked for, such as more Ulysses ranks than query heads.
    """
    p = config.parallel
    assert isinstance(p.cp, int)
    assert isinstance(p.dp, int)
    heads, kv_heads = _heads(model)
    return choose_grid(
        p.cp,
        heads,
        kv_heads,
        config.seq_length,
        placed_cost(config, cost, node_ranks),
        packs=packs,
        layers=AttentionLayers.of(model).counted,
        algorithm=p.algorithm,
        ulysses=p.ulysses if isinstance(p.ulysses, int) else None,
        window=p.window if isinstance(p.window, int) else None,
        layout=p.layout,
        dp=p.dp,
        kv_cache=p.kv_cache,
    )


def grid_warning(grid: RankGrid, config: FitConfig, model: Any, cost: CostModel) -> str | None:
    """What to say about a ring that was asked for and whose chunks are short; None: nothing, or it was chosen."""
    if config.parallel.algorithm == "auto" and config.parallel.ulysses == "auto":
        return None
    heads, kv_heads = _heads(model)
    return ring_warning(grid, config.seq_length, num_heads=heads, num_kv_heads=kv_heads, cost=cost)


def grid_problems(config: FitConfig, model: Any, *, device: str, itemsize: int) -> list[Problem]:
    """Why no world of the wanted shape can run this model; arguments as those of `cost_model` and `resolve_grid`."""
    try:
        resolve_grid(config, model, cost_model(config, model, device=device, itemsize=itemsize))
    except PlanError as error:
        return [Problem(error.message, error.fix, error)]
    return []


def _head_dim(model: Any) -> int:
    return int(getattr(model, "head_dim", None) or int(model.hidden_size) // _heads(model)[0])


def _layer_weights(model: Any) -> int:
    """Weights of one layer's projections and MLP."""
    hidden, (heads, kv_heads) = int(model.hidden_size), _heads(model)
    inner = int(getattr(model, "intermediate_size", 4 * hidden))
    return hidden * _head_dim(model) * (2 * heads + 2 * kv_heads) + 3 * hidden * inner


def _embeddings(model: Any) -> int:
    """Matrices of vocabulary x hidden size: 1 where input and output share theirs."""
    return 1 if getattr(model, "tie_word_embeddings", False) else 2


def _all_weights(model: Any) -> int:
    embedding = int(model.vocab_size) * int(model.hidden_size)
    return int(model.num_hidden_layers) * _layer_weights(model) + embedding * _embeddings(model)


def _saved_width(model: Any) -> int:
    """Numbers that a layer keeps of a token for backward, without recomputation."""
    inner = int(getattr(model, "intermediate_size", 4 * model.hidden_size))
    return _SAVED_PER_LAYER_HIDDEN * int(model.hidden_size) + _SAVED_PER_LAYER_INNER * inner


def token_flops(model: Any, packs: Sequence[Sequence[int]]) -> float:
    """FLOP that the model needs for a token, forward and backward, without what is computed again; for mfu.

    Args:
        model: transformers configuration.
        packs: ends of the documents of typical packs: attention is causal inside each; a sliding window is left out.
    """
    heads, _ = _heads(model)
    layers, dim = int(model.num_hidden_layers), _head_dim(model)
    ends = [(a, b) for pack in packs for a, b in zip((0, *pack), pack, strict=False)]
    pairs = sum((b - a) * (b - a + 1) / 2 for a, b in ends) / max(1, sum(b - a for a, b in ends))
    linear = layers * _layer_weights(model) + int(model.hidden_size) * int(model.vocab_size)
    return 3.0 * (2 * linear + layers * heads * 4 * dim * pairs)


def state_bytes(model: Any, optimizer: str) -> int:
    """Bytes of the fp32 training state that has to be saved: parameters and moments. An estimate."""
    return 4 * _all_weights(model) * (3 if optimizer == "adamw" else 2)


def _heads(model: Any) -> tuple[int, int]:
    """Query and key/value heads of a transformers configuration."""
    layers = AttentionLayers.of(model)
    return layers.num_heads, layers.num_kv_heads


def needs_checkpointing(config: FitConfig, model: Any, *, itemsize: int, accelerator: bool, host_bytes: int) -> bool:
    """Whether layers are recomputed in backward.

    "auto": always on accelerators (long sequences are what they are for); on CPU when the activations that a step
    would keep on all ranks of one host exceed a quarter of its memory.

    Args:
        config: resolved.
        model: transformers configuration.
        itemsize: bytes of the compute dtype.
        accelerator: the device is not a CPU.
        host_bytes: memory of one host.
    """
    if config.activation_checkpointing != "auto":
        return config.activation_checkpointing == "full"
    if accelerator:
        return True
    replicas = config.parallel.dp if isinstance(config.parallel.dp, int) else 1
    kept = config.seq_length * replicas * int(model.num_hidden_layers) * _saved_width(model) * itemsize
    return kept > _SHARE_OF_MEMORY * host_bytes


def local_resources() -> dict[str, float]:
    """What a Ray that is started on this machine will offer: CPUs, and accelerators by their device files."""
    return {"CPU": float(os.cpu_count() or 1), **{k: float(n) for k, n in local_accelerators().items()}}
