"""Optimizer, learning-rate schedule and gradient clipping over sharded parameters.

Guarantees: state exists from the start (so that a checkpoint of step 0 has the shape of every other), the learning
rate is a pure function of the step, and the global norm is the same number on every rank and, to rounding, for every
grid: squares are summed in fp64 and rank by rank in one order. Costs one all-gather of two floats per step.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from raycp.config import OptimConfig
from raycp.errors import ConfigError
from raycp.training.mesh import SHARD
from raycp.training.sharding import held_rows


def build_optimizer(module: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW or SGD over the (sharded) parameters of a `Trainee`.

    Weight decay reaches only weights of two or more dimensions: not norms, not biases. The learning rate is set
    before each step by `set_learning_rate`.

    Raises:
        ConfigError: `config.name` is unknown.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if config.name == "adamw":
        fused = parameters[0].device.type in ("cpu", "cuda")
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused
        )
        for p in parameters:
            step = torch.zeros((), dtype=torch.float32, device=p.device if fused else "cpu")
            optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        return optimizer
    if config.name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
        if config.momentum:
            for p in parameters:
                optimizer.state[p] = {"momentum_buffer": torch.zeros_like(p)}
        return optimizer
    raise ConfigError(f"optim.name={config.name!r} is not an optimizer", fix="set optim.name to adamw or sgd")


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Sets the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = value


def learning_rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """Learning rate of `step`, which counts from 1 to `total_steps`.

    Linear warm-up over w steps (step s has s / (w + 1) of the peak), the peak at step w + 1, then down towards
    `min_lr_ratio` of the peak, which would be reached one step after the last: no step is spent at 0.

    Raises:
        ValueError: the step is not in [1, total_steps].
    """
    if not 1 <= step <= total_steps:
        raise ValueError(f"step {step} is not in [1, {total_steps}]")
    warmup = round(config.warmup * total_steps) if config.warmup < 1 else int(config.warmup)
    if step <= warmup:
        return config.lr * step / (warmup + 1)
    progress = (step - 1 - warmup) / max(1, total_steps - warmup)
    shape = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }
    if config.schedule not in shape:
        raise ConfigError(
            f"optim.schedule={config.schedule!r} is not a schedule",
            fix=f"set optim.schedule to one of {', '.join(shape)}",
        )
    floor = 1.0 if config.schedule == "constant" else config.min_lr_ratio
    return config.lr * (floor + (1.0 - floor) * shape[config.schedule])


@torch.no_grad()
def clip_by_global_norm(module: nn.Module, max_norm: float | None) -> float:
    """Scales all gradients down to a global L2 norm of at most `max_norm`. Collective over the ranks of the shards.

    Args:
        module: with sharded or plain parameters; those without a gradient are skipped.
        max_norm: None: only measure.

    Returns:
        The norm before clipping, the same number on every rank. When it is not finite no gradient was touched: the
        caller must not step.
    """
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    locals_ = [held_rows(g)[0] for g in grads]
    squares = sum(_sum_of_squares(g) for g in locals_)
    group = None
    for g in grads:
        if isinstance(g, DTensor):
            group = g.device_mesh.get_group(SHARD)
            break
    if group is not None and dist.get_world_size(group) > 1:
        squares = sum_over_ranks(squares, group, locals_[0].device)
    norm = math.sqrt(squares)
    if max_norm is not None and math.isfinite(norm) and norm > max_norm:
        torch._foreach_mul_([g for g in locals_ if g.numel()], max_norm / norm)
    return norm


def sum_over_ranks(value: float, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Sum of one fp64 number per rank, added in rank order: bit-equal on all ranks. Collective over `group`.

    The number travels as two fp32 halves, since not every back end (hccl) takes fp64; about 48 bits arrive.
    """
    high = torch.tensor(value, dtype=torch.float32).item()
    low = value - high if math.isfinite(high) else 0.0
    mine = torch.tensor([high, low], dtype=torch.float32, device=device)
    world_size = dist.get_world_size(group)
    parts = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(parts, mine, group=group)
    return math.fsum(x for part in torch.stack(parts).tolist() for x in part)


def _sum_of_squares(x: torch.Tensor) -> float:
    if not x.numel():
        return 0.0
    dtype = torch.float64 if x.device.type in ("cpu", "cuda") else torch.float32
    return float(torch.linalg.vector_norm(x, dtype=dtype).item()) ** 2
