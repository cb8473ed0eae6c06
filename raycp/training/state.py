"""Training state by logical offsets: out of any world size, into any other.

Guarantees: a state is a set of named tensors, each row given by exactly one rank (replicas share the rows out), so
that it can be written, sent and read again without knowing how many ranks there were. Names: `param/<weight>`,
`<moment>/<weight>` (AdamW: exp_avg, exp_avg_sq; SGD with momentum: momentum_buffer) and `optimizer/step`. Exporting
copies nothing: the tensors are views, valid until the next step.
"""

from collections.abc import Callable

import torch
from torch import nn

from raycp.errors import CheckpointError
from raycp.training.sharding import ShardSpan, held_rows, named_weights, written_rows

PARAMETER = "param"
STEP = "optimizer/step"
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")

State = dict[str, tuple[ShardSpan, torch.Tensor]]
Read = Callable[[str, int, int], torch.Tensor]
"""(name, start, stop) -> rows [start, stop) of that tensor, on any device."""


def export_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The rows that this rank contributes; a rank that holds no row of a tensor leaves it out.

    Returns:
        {name: (span, rows)}; fp32, sharing memory with the model and the optimizer. Not collective.
    """
    state: State = {}
    for name, tensor in _named_tensors(module, optimizer):
        rows, start, stop = written_rows(tensor)
        if stop > start:
            state[name] = (ShardSpan(name, tuple(tensor.shape), tensor.dtype, start, stop), rows)
    step = _step(optimizer)
    if step is not None and _is_first(module):
        value = torch.tensor([step], dtype=torch.float32)
        state[STEP] = (ShardSpan(STEP, (1,), value.dtype, 0, 1), value)
    return state


@torch.no_grad()
def import_state(module: nn.Module, optimizer: torch.optim.Optimizer, read: Read) -> None:
    """Fills parameters and optimizer from `read`, asking only for rows that this rank holds. Not collective.

    Args:
        module: a `Trainee` of the model that the state is of, at any world size.
        optimizer: of `build_optimizer` with the configuration that the state is of.
        read: gives rows of a named tensor.

    Raises:
        CheckpointError: `read` gave rows of another shape.
    """
    for name, tensor in _named_tensors(module, optimizer):
        local, start, stop = held_rows(tensor)
        if stop == start:
            continue
        rows = read(name, start, stop)
        if tuple(rows.shape) != tuple(local.shape):
            raise CheckpointError(
                f"{name}: rows [{start}, {stop}) have shape {tuple(rows.shape)}, the model wants {tuple(local.shape)}",
                fix="resume with the model and the optimizer that wrote the checkpoint",
            )
        local.copy_(rows)
    if _step(optimizer) is not None:
        value = float(read(STEP, 0, 1).item())
        for entry in optimizer.state.values():
            entry["step"].fill_(value)


def state_names(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[int, ...]]:
    """{name: whole shape} of every tensor of the state, the same on all ranks."""
    names = {name: tuple(t.shape) for name, t in _named_tensors(module, optimizer)}
    if _step(optimizer) is not None:
        names[STEP] = (1,)
    return names


def _named_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, torch.Tensor]] = []
    for name, parameter in named_weights(module):
        found.append((f"{PARAMETER}/{name}", parameter))
        entry = optimizer.state.get(parameter, {})
        found += [(f"{moment}/{name}", entry[moment]) for moment in _MOMENTS if moment in entry]
    return found


def _step(optimizer: torch.optim.Optimizer) -> float | None:
    for entry in optimizer.state.values():
        if "step" in entry:
            return float(entry["step"])
    return None


def _is_first(module: nn.Module) -> bool:
    _, parameter = next(named_weights(module))
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is None or not any(mesh.get_local_rank(axis) for axis in range(mesh.ndim))
