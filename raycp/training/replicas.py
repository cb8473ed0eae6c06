"""Whole parameters on every rank and gradients summed over ranks: `ParallelConfig(shard="none")`.

Guarantees: at rest, parameters and gradients are DTensors on a mesh of replicas of one shard, so optimizer, clipping
and state treat them as FSDP2's; from a forward to the end of its backward, modules hold plain tensors on the same
memory (in bfloat16: copies). Gradients are summed once a step, those of a layer while the layer before it is computed;
on CPUs in rank order, so they are the same bits on every rank and in every run. Costs no copy of parameters or
gradients in fp32, and the receive buffers of two layers while their sums are under way.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from raycp.training.collectives import RankSum, start_sum
from raycp.training.mesh import REPLICATE
from raycp.training.sharding import held_rows

_PLACEMENTS = (Replicate(), Shard(0))


class Replicas:
    """The parameters of a model, whole on every rank.

    Args:
        module: its parameters are replaced by replicas on `device`, with nothing in them yet. Collective, as are its
            backward passes.
        mesh: of `replicated`.
        device: of this rank.
        dtype: that the model computes in.
        parts: of `module`, in the order of their backward passes: gradients of a part are summed when they are complete
            and all parts before it are. Parameters that are in no part come last.

    Attributes:
        last: whether the coming backward pass is the last of its step: gradients are summed then.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        *,
        device: torch.device,
        dtype: torch.dtype,
        parts: Sequence[Iterable[nn.Parameter]],
    ) -> None:
        self.last = True
        self._mesh = mesh
        self._dtype = dtype
        owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    owners.setdefault(parameter, []).append((owner, name))
        order = dict.fromkeys(p for part in parts for p in part)
        order.update(dict.fromkeys(owners))
        index = {p: n for n, p in enumerate(order)}
        trained = [[index[p] for p in part if p.requires_grad] for part in parts]
        listed = {n for part in trained for n in part}
        rest = [n for p, n in index.items() if p.requires_grad and n not in listed]
        self._parts = [part for part in (*trained, rest) if part]
        self._owners = [owners[p] for p in order]
        self._resting = [self._replica(p, device) for p in order]
        self._plain: list[nn.Parameter] = []
        self.forget()
        self._hold(self._resting)
        module.register_forward_pre_hook(self._before_forward)
        module.register_forward_hook(self._after_forward)

    def rest(self) -> None:
        """Modules hold what the optimizer holds, until the next forward."""
        self._hold(self._resting)

    def forget(self) -> None:
        """Drops the gradients of a step that was given up between its micro-batches."""
        self._totals: list[torch.Tensor | None] = [None] * len(self._resting)
        self._new_pass()

    def _new_pass(self) -> None:
        self._running = False  # inside a backward pass
        self._ready: set[int] = set()
        self._begun = 0  # parts
        self._sums: list[list[RankSum]] = []

    def _replica(self, like: nn.Parameter, device: torch.device) -> nn.Parameter:
        local = torch.empty(like.shape, dtype=torch.float32, device=device)
        return nn.Parameter(DTensor.from_local(local, self._mesh, _PLACEMENTS, run_check=False), like.requires_grad)

    def _hold(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter, owners in zip(parameters, self._owners, strict=True):
            for module, name in owners:
                module._parameters[name] = parameter

    @torch.no_grad()
    def _before_forward(self, *_: Any) -> None:
        self._new_pass()  # a backward pass that raised has not ended
        locals_ = [held_rows(p)[0] for p in self._resting]
        if not self._plain:
            self._plain = [
                nn.Parameter(x if x.dtype == self._dtype else x.to(self._dtype), p.requires_grad)
                for x, p in zip(locals_, self._resting, strict=True)
            ]
            for n in (n for part in self._parts for n in part):
                self._plain[n].register_post_accumulate_grad_hook(self._hook(n))  # type: ignore[no-untyped-call]
        if self._dtype != torch.float32:
            torch._foreach_copy_([p.detach() for p in self._plain], locals_)
        self._hold(self._plain)

    def _after_forward(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            self.rest()

    def _hook(self, n: int) -> Callable[[torch.Tensor], None]:
        me = weakref.ref(
            self
        )  # autograd holds hooks where the garbage collector does not see them: no cycle through it

        def add(parameter: torch.Tensor) -> None:
            replicas = me()
            if replicas is not None:
                replicas._add(n, parameter)

        return add

    @torch.no_grad()
    def _add(self, n: int, parameter: torch.Tensor) -> None:
        """Takes over a gradient that is complete for this backward pass."""
        if not self._running:
            self._running = True
            Variable._execution_engine.queue_callback(self._finish)
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        total = self._totals[n]
        if total is None:
            self._totals[n] = gradient.float().contiguous()
        else:
            total += gradient
        self._ready.add(n)
        while self.last and self._begun < len(self._parts) and self._ready.issuperset(self._parts[self._begun]):
            self._begin()

    def _begin(self) -> None:
        """Starts to sum the next part; that before it has arrived meanwhile, or is waited for."""
        group, sums = self._mesh.get_group(REPLICATE), []
        for n in self._parts[self._begun]:
            total = self._totals[n]
            if total is None:  # the loss of this rank does not depend on it
                total = self._totals[n] = torch.zeros_like(held_rows(self._resting[n])[0])
            sums.append(start_sum(total, group, n))
        self._begun += 1
        for one in self._sums[-1] if self._sums else ():
            one.spread()
        self._sums.append(sums)

    @torch.no_grad()
    def _finish(self) -> None:
        """At the end of a backward pass."""
        if self.last:
            while self._begun < len(self._parts):
                self._begin()
            for one in self._sums[-1] if self._sums else ():
                one.spread()
            for one in (one for sums in self._sums for one in sums):
                one.wait()
            for parameter, total in zip(self._resting, self._totals, strict=True):
                if total is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = DTensor.from_local(total, self._mesh, _PLACEMENTS, run_check=False)
                else:
                    held_rows(parameter.grad)[0].add_(total)
            self._totals = [None] * len(self._resting)
        self._new_pass()
        self.rest()
