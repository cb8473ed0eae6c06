"""The workers that a tester hits: ours, with a stop at every place that a case may name.

Each fake node has a private folder and says so in `RAYCP_FAKE_NODE`; opening anything of another node raises.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from raycp.training import collectives
from raycp.training.layers import AttentionLayers
from raycp.training.state import State
from tests.elastic.script import Script, node_of_this, put, stay_at_home
from workers import actor
from workers.actor import TrainWorker
from workers.memory_reader import MemoryPoint
from workers.messages import Probe, Rendezvous, RunSpec, StepReport, StepRequest
from workers.process_groups import ProcessGroups
from workers.progress import EXPORT, JOIN, RECALL, Progress
from workers.snapshot import SnapshotWriter


class VictimWorker(TrainWorker):
    """A rank, or a spare."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        stay_at_home()
        self.script = Script(Path(spec.output_dir) / "script")
        self.at_step: int | None = None
        self._progress = _Progress()
        self._progress.victim = self
        put(actor, "SnapshotWriter", _writer_of(self))  # in this process only
        _stop_in_reduce(self)

    def here(self, phase: str, *, step: int | None = None) -> None:
        """This process has come to `phase`."""
        groups = self._groups
        rank = None if groups is None else groups.rendezvous.rank
        self.script.hit(phase, step=step, rank=rank, node=node_of_this())

    def probe(self, nonce_path: str, nonce: str) -> Probe:
        self.script.hit("placement", node=node_of_this())
        return super().probe(nonce_path, nonce)

    def join(self, rendezvous: Rendezvous) -> None:
        def connect() -> None:
            self.script.hit("connect", rank=rendezvous.rank, node=node_of_this())

        self._guard(JOIN, rendezvous.generation, connect, rank=rendezvous.rank)
        super().join(dataclasses.replace(rendezvous, threads=1))

    def _open(self, store_spec: Any, groups: ProcessGroups, layers: AttentionLayers, *, keep: bool) -> Any:
        self.here("load")
        return super()._open(store_spec, groups, layers, keep=keep)

    def restore_memory(self, generation: int, point: MemoryPoint, secret: bytes) -> None:
        self._guard(RECALL, generation, lambda: self.here("recovery"))
        super().restore_memory(generation, point, secret)

    def step(self, request: StepRequest) -> StepReport:
        self.at_step = request.step
        if self._state is None or self._train is None:
            return super().step(request)
        handles = self._stops(request.step)
        try:
            return super().step(request)
        finally:
            for handle in handles:
                handle.remove()
            self.at_step = None

    def export(self, generation: int, checkpoint: str, out: str) -> str:
        self._guard(EXPORT, generation, lambda: self.here("shutdown"))
        return super().export(generation, checkpoint, out)

    def _stops(self, step: int) -> list[Any]:
        """Stops inside the next step, without changing what it computes."""
        state, (_, batcher) = self._require(self._state), self._require(self._train)
        plain = type(batcher).micro_batches

        def micro_batches(*args: Any) -> Iterator[Any]:
            self.here("data", step=step)
            return plain(batcher, *args)

        put(batcher, "micro_batches", micro_batches)
        layer = next(m for name, m in state.trainee.named_modules() if name.endswith("layers.1"))

        def forward(module: Any, args: Any) -> None:
            if torch.is_grad_enabled():
                self.here("forward", step=step)

        def backward(module: Any, args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self.here("backward", step=step))

        def update(*_: Any) -> None:
            self.here("optimizer", step=step)

        return [
            layer.register_forward_pre_hook(forward),
            layer.register_forward_hook(backward),
            state.optimizer.register_step_pre_hook(update),
        ]


class _Progress(Progress):
    """Comes by after each step of a ring, while the next transfers are under way."""

    victim: VictimWorker | None = None

    def ring_step(self, *args: object) -> None:
        super().ring_step(*args)
        if self.victim is not None and self.victim.at_step is not None:
            self.victim.here("ring exchange", step=self.victim.at_step)


def _writer_of(victim: VictimWorker) -> type[SnapshotWriter]:
    class Writer(SnapshotWriter):
        def _copy(self, step: int, state: State, event: Any) -> None:
            self.copied = step
            super()._copy(step, state, event)

        def _fill(self, image: Any, layout: Any, state: State) -> None:
            super()._fill(image, layout, state)
            victim.here("snapshot", step=self.copied)

    return Writer


def _stop_in_reduce(victim: VictimWorker) -> None:
    plain = collectives.PairwiseReduceScatter.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if victim.at_step is not None:
            victim.here("gradient reduce", step=victim.at_step)
        return plain(self, *args, **kwargs)

    put(collectives.PairwiseReduceScatter, "__call__", call)


def ranks_of(members: Sequence[Any]) -> list[dict[str, Any]]:
    """What a tester has to know of the ranks."""
    return [{"rank": m.rank, "pid": m.probe.pid, "node": m.probe.node_id} for m in members]
