"""TrainWorker: the thin shell around one rank that Ray calls.

Guarantees: calls that change state run one at a time; control calls (`abort`, `progress`, `ping`) are answered while a
step runs; a message of another generation is refused; any exception first cuts this rank's own groups, so that no
peer waits for it, and then reaches the driver as a `WorkerError` that names rank, node and cause and tells whether the
cause is a broken connection (a consequence) or something of this rank's own. A process whose node's raylet has died
ends itself, so that no trainer outlives its node's place in the cluster. Costs one thread pool of three threads, and
one thread that looks at its parent twice a second.
"""

import workers.plain  # noqa: F401  # first: it says with which modules torch is imported

# isort: split
import dataclasses
import gc
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
import ray
import torch

from data_pipeline import PackLoader
from data_pipeline.local_copy import open_near
from raycp.attention import register_attention
from raycp.errors import CheckpointError, ClusterError, DeviceError, RaycpError, StaleGenerationError
from raycp.plan import RankGrid
from raycp.training.accelerator import Accelerator
from raycp.training.checkpoint import CheckpointReader, ShardRecord, verify, write_shard
from raycp.training.device import host_memory, local_index
from raycp.training.export import export_hf
from raycp.training.layers import AttentionLayers
from raycp.training.model import build_trainee
from raycp.training.optim import build_optimizer
from raycp.training.state import export_state, import_state
from raycp.training.vendor import largest_messages
from workers import progress as phases
from workers.batch import Batcher
from workers.failure import failure_of
from workers.memory_reader import MemoryPoint, MemoryReader
from workers.messages import EvalReport, Probe, Rendezvous, RunSpec, StepReport, StepRequest, StoreSpec
from workers.process_groups import ProcessGroups
from workers.progress import Progress
from workers.snapshot import SnapshotWriter
from workers.step import TrainState, run_evaluation, run_step
from workers.storage import shared_folder_problems
from workers.wire import KeeperAddress

_R = TypeVar("_R")
_ORPHAN_POLL_SECONDS = 0.5
_LAST_COPY_SECONDS = 0.5
"""How long a rank that joins other groups lets the copy of its last step run on: if it ends, no step is redone."""
_STUCK_COPY_SECONDS = 2.0
"""How long after an abort a step may go on waiting for its copy to be granted a slot."""


class TrainWorker:
    """One rank. The driver makes it with `ray.remote` and calls its methods in the order probe, join, build, restore,
    then step / evaluate / save / export as the run goes; after a fault join, build and restore again, in the same
    process. A spare is probed and warmed, and waits.

    Args:
        spec: the run.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._progress = Progress(ahead=spec.device.is_accelerator)
        self._groups: ProcessGroups | None = None
        self._state: TrainState | None = None
        self._train: tuple[PackLoader, Batcher] | None = None
        self._eval: tuple[PackLoader, Batcher] | None = None
        self._snapshots: SnapshotWriter | None = None
        self._reader: MemoryReader | None = None
        # What was imported stays: each collection of a recovery would look at its 400,000 objects, for half a second.
        # The model is not frozen: it is full of cycles, and has to go when another one takes its place.
        gc.freeze()
        _end_with_parent()

    # -- before the groups exist ------------------------------------------------------------------------------------

    def probe(self, nonce_path: str, nonce: str) -> Probe:
        """What this process is, and what is wrong on its node. Never raises for what it can report."""
        context = ray.get_runtime_context()
        ids = context.get_accelerator_ids()
        resource = self._spec.device.ray_resource
        problems = [*shared_folder_problems(nonce_path, nonce), *self._model_problems()]
        memory, sku, unfit = 0, "", False
        try:
            used = self._accelerator()
            self._readmit(used)
            memory, sku = used.memory()[0], used.sku
        except ClusterError as error:
            problems.append((error.message, error.fix))
            unfit = isinstance(error, DeviceError)
        accelerators = tuple(ids.get(resource, ())) if resource else ()
        if resource and not accelerators and not self._spec.device.is_accelerator:
            problems.append(
                (f"the worker got no {resource} from Ray", f"check what the node offers with `ray status`: {resource}")
            )
        return Probe(
            node_id=context.get_node_id(),
            address=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            accelerators=accelerators,
            cpu_count=os.cpu_count() or 1,
            started=psutil.Process().create_time(),
            memory=memory,
            host_memory=host_memory()[1],
            problems=tuple(problems),
            unfit=unfit,
            sku=sku,
        )

    def _model_problems(self) -> list[tuple[str, str]]:
        try:
            found = self._spec.model.fingerprint()
        except (OSError, RaycpError) as error:
            return [(f"the model cannot be read there: {error}", "put the model on storage that all nodes share")]
        expected = self._spec.model_fingerprint
        if found != expected:
            return [
                (
                    f"the model there differs from the driver's: {found[:16]} against {expected[:16]}",
                    "put the model on storage that all nodes share, or update the node's copy",
                )
            ]
        return []

    # -- life cycle -------------------------------------------------------------------------------------------------

    def join(self, rendezvous: Rendezvous) -> int:
        """Joins the groups of a generation and warms them. Collective.

        A process that was a rank before first gives the memory of its old state back, and its device is tried out.

        Returns:
            Free bytes of its device before anything of the new state is there.
        """

        def body() -> int:
            torch.set_num_threads(rendezvous.threads)
            device = self._spec.device
            address = ray.util.get_node_ip_address()
            messages = self._largest_messages(rendezvous.grid) if device.is_accelerator else {}
            self._progress.piece()
            self._detach()
            self._progress.piece()
            meet = partial(self._progress.enter, phases.MEET)
            before, make = self._groups, ProcessGroups.create
            if before is None:
                free = self._accelerator().memory()[1]
            else:
                self._state = self._train = self._eval = None
                free, make = self._readmit(self._accelerator()), before.rebuild
            self._progress.piece()
            self._groups = make(rendezvous, device=device, address=address, messages=messages, on_step=meet)
            meet()
            self._groups.warm()
            self._progress.enter(phases.JOIN)
            if rendezvous.keeper is not None:
                self._attach(rendezvous.keeper, rendezvous.secret)
            return free

        return self._guard(phases.JOIN, rendezvous.generation, body, rank=rendezvous.rank)

    def attach(self, generation: int, keeper: KeeperAddress, secret: bytes) -> None:
        """Sends snapshots to another keeper from now on (the one before was lost). Not while a step runs."""

        def body() -> None:
            self._require_groups(generation)
            self._detach()
            self._attach(keeper, secret)

        self._guard(phases.ATTACH, generation, body)

    def _attach(self, keeper: KeeperAddress, secret: bytes) -> None:
        at = self._require(self._groups).rendezvous
        self._snapshots = SnapshotWriter(keeper, secret=secret, generation=at.generation, rank=at.rank)

    def _detach(self) -> None:
        if self._snapshots is not None:
            self._snapshots.wait(_LAST_COPY_SECONDS)
            self._snapshots.close()
            self._snapshots = None

    def build(self, generation: int, *, initialise: bool, recompute: bool) -> None:
        """Makes model, optimizer and data readers for the current groups. Collective.

        Args:
            generation: of the groups.
            initialise: read or make the weights; False where `restore` follows.
            recompute: layers are recomputed in backward (attention's output is kept).
        """

        def body() -> None:
            groups, spec, progress = self._require_groups(generation), self._spec, self._progress
            register_attention()
            if initialise and spec.model.kind == "gguf":
                progress.enter(phases.WHOLE)
            trainee = build_trainee(
                spec.model,
                mesh=groups.mesh,
                shard=spec.config.parallel.shard,
                dtype=spec.dtype,
                device=self._accelerator().device,
                activation_checkpointing=recompute,
                loss_chunk=spec.config.loss_chunk,
                seed=spec.config.seed,
                initialise=initialise,
                on_piece=progress.piece,
            )
            progress.enter(phases.BUILD)
            self._state = TrainState(
                trainee=trainee,
                optimizer=build_optimizer(trainee, spec.config.optim),
                rank=groups.rendezvous.rank,
            )
            progress.piece()
            self._train = self._open(spec.train, groups, trainee.layers, keep=recompute)
            self._eval = None
            if spec.evaluation is not None:
                self._eval = self._open(spec.evaluation, groups, trainee.layers, keep=False)
            progress.enter(phases.MEET)
            groups.warm()  # a model whose state is replicated has groups of its own

        self._guard(phases.BUILD, generation, body)

    def restore(self, generation: int, checkpoint: str) -> None:
        """Fills parameters and optimizer from a committed checkpoint of any world size."""

        def body() -> None:
            state = self._require_state(generation)
            reader = CheckpointReader(checkpoint, on_piece=self._progress.piece)
            import_state(state.trainee, state.optimizer, reader.read)

        self._guard(phases.RESTORE, generation, body)

    def restore_memory(self, generation: int, point: MemoryPoint, secret: bytes) -> None:
        """Fills parameters and optimizer from the keepers' memory, whatever world the state is of."""

        def body() -> None:
            state = self._require_state(generation)
            near = ray.get_runtime_context().get_node_id()
            self._reader = reader = MemoryReader(
                point.manifest,
                point.holders,
                secret=secret,
                near=near,
                on_wait=partial(self._progress.enter, phases.KEEPER),
                on_piece=self._recalled,
            )
            try:
                import_state(state.trainee, state.optimizer, reader.read)
            except CheckpointError as error:  # a keeper was lost meanwhile: another attempt may find what is missing
                raise ClusterError(error.message, fix=error.fix) from error
            finally:
                self._reader = None
                reader.close()

        self._guard(phases.RECALL, generation, body)

    def _recalled(self) -> None:
        self._progress.enter(phases.RECALL)
        self._progress.piece()

    def _open(
        self, store_spec: StoreSpec, groups: ProcessGroups, layers: AttentionLayers, *, keep: bool
    ) -> tuple[PackLoader, Batcher]:
        config = self._spec.config
        store = open_near(Path(store_spec.folder), mode=config.data.local_copy, on_piece=self._progress.piece)
        self._progress.piece()
        if store.fingerprint != store_spec.fingerprint:
            raise CheckpointError(
                f"the data in {store_spec.folder} is {store.fingerprint[:16]} here and "
                f"{store_spec.fingerprint[:16]} for the driver",
                fix="keep output_dir on storage that all nodes share",
            )
        loader = PackLoader(store, seq_length=config.seq_length, policy=store_spec.packing, seed=config.seed)
        if loader.plan(0).hash != store_spec.plan_hash:
            raise CheckpointError(
                f"this node plans packs {loader.plan(0).hash[:16]}, the driver {store_spec.plan_hash[:16]}",
                fix="install the same versions of raycp and numpy on every node",
            )
        rendezvous = groups.rendezvous
        batcher = Batcher(
            loader=loader,
            grid=rendezvous.grid,
            rank=rendezvous.rank,
            groups=groups.attention,
            layers=layers,
            layout=config.parallel.layout,
            algorithm=config.parallel.algorithm,
            kv_cache=config.parallel.kv_cache,
            cost=rendezvous.cost,
            keep_attention=keep,
            device=self._accelerator().device,
            on_layer=self._progress.ring_step,
        )
        return loader, batcher

    @staticmethod
    def _readmit(used: Accelerator) -> int:
        """Free bytes of the device, if it is healthy and what was on it before is gone.

        Raises:
            DeviceError: it is not: this process must not be a rank.
        """
        used.check()
        return used.reclaim()

    def _largest_messages(self, grid: RankGrid) -> dict[str, int]:
        model, cost = self._spec.model.load_config(), self._spec.cost
        layers = AttentionLayers.of(model)
        return largest_messages(
            tokens=self._spec.config.seq_length,
            ring=grid.ring,
            ulysses=grid.ulysses,
            heads=layers.num_heads,
            kv_heads=layers.num_kv_heads,
            head_dim=cost.head_dim,
            value_dim=cost.value_dim,
            itemsize=cost.itemsize,
        )

    def _accelerator(self) -> Accelerator:
        """What Ray gave this process to compute on, made current."""
        spec = self._spec.device
        ids = ray.get_runtime_context().get_accelerator_ids()
        return Accelerator(spec, local_index(spec, ids.get(spec.ray_resource or "", ())))

    # -- work -------------------------------------------------------------------------------------------------------

    def step(self, request: StepRequest) -> StepReport:
        """Runs one optimizer step. Collective."""

        def body() -> StepReport:
            state, (loader, batcher) = self._require_state(request.generation), self._require(self._train)
            snapshots = self._snapshots
            report = run_step(
                state,
                request,
                batcher=batcher,
                loader=loader,
                config=self._spec.config,
                total_steps=self._spec.total_steps,
                progress=self._progress,
                before_update=_nothing_to_wait_for if snapshots is None else snapshots.wait,
            )
            if request.snapshot and snapshots is not None:
                snapshots.begin(request.step, export_state(state.trainee, state.optimizer))
                return dataclasses.replace(report, copy_problem=snapshots.problem or "")
            return report

        return self._guard(phases.STEP, request.generation, body, step=request.step)

    def evaluate(self, generation: int, step: int) -> EvalReport:
        """Evaluates all packs of the held-out data. Collective."""

        def body() -> EvalReport:
            state, (loader, batcher) = self._require_state(generation), self._require(self._eval)
            pack_ids = tuple(range(len(loader.plan(0).packs)))
            return run_evaluation(
                state, pack_ids, generation=generation, batcher=batcher, loader=loader, progress=self._progress
            )

        return self._guard(phases.EVAL, generation, body, step=step)

    def snapshot(self, generation: int, step: int) -> None:
        """Copies the state to the keeper between two steps, and waits for the copy."""

        def body() -> None:
            state, snapshots = self._require_state(generation), self._require(self._snapshots)
            self._progress.enter(phases.COPY)
            snapshots.begin(step, export_state(state.trainee, state.optimizer))
            snapshots.wait()

        self._guard(phases.SNAPSHOT, generation, body, step=step)

    def save(self, generation: int, step: int, folder: str) -> ShardRecord:
        """Writes this rank's share of a checkpoint; the driver commits it with the manifest."""

        def body() -> ShardRecord:
            state = self._require_state(generation)
            spans = export_state(state.trainee, state.optimizer)
            return write_shard(folder, state.rank, spans, generation=generation, on_piece=self._progress.piece)

        return self._guard(phases.SAVE, generation, body, step=step)

    def export(self, generation: int, checkpoint: str, out: str) -> str:
        """Writes a Hugging Face folder from a committed checkpoint. Only one rank is asked to."""

        def body() -> str:
            self._require_state(generation)
            spec = self._spec
            verify(checkpoint, on_piece=self._progress.piece)  # what is exported is what was committed
            reader = CheckpointReader(checkpoint, on_piece=self._progress.piece)
            export_hf(reader, spec.model, spec.tokenizer_folder, Path(out), spec.dtype)
            return out

        return self._guard(phases.EXPORT, generation, body)

    # -- control: answered while a step runs ------------------------------------------------------------------------

    def abort(self, generation: int) -> int:
        """Cuts this rank's groups if they are of `generation` or older, and ends what it reads or writes for them.
        Returns the connections cut.
        """
        self._progress.cancel(generation)
        return self._cut(generation)

    def _cut(self, generation: int) -> int:
        """As `abort`, after an error of this rank's own: it may be asked to write its state again."""
        groups = self._groups
        if groups is None or groups.rendezvous.generation > generation:
            return 0
        if self._snapshots is not None:  # a step that waits for a slot that nobody will free any more
            threading.Timer(_STUCK_COPY_SECONDS, self._snapshots.close).start()
        return groups.abort()

    def let_go(self, generation: int, keeper: KeeperAddress) -> bool:
        """Waits no more for a keeper that is lost or stands still: what is read from it is asked of another one; a copy
        is not made, and the report of the step names it as `copy_problem`.

        Returns:
            False: the order is of another generation, or copies go to another keeper by now: nothing was done.
        """
        groups, snapshots, reader = self._groups, self._snapshots, self._reader
        if groups is None or groups.rendezvous.generation != generation:
            return False
        if reader is not None:
            return reader.pass_over(keeper)
        if snapshots is None or snapshots.address != keeper:
            return False
        snapshots.close()
        return True

    def progress(self) -> dict[str, float | int | str]:
        """Counters of the running call."""
        return self._progress.snapshot()

    # -- guards -----------------------------------------------------------------------------------------------------

    def _require_groups(self, generation: int) -> ProcessGroups:
        groups = self._groups
        have = None if groups is None else groups.rendezvous.generation
        if groups is None or have != generation:
            raise StaleGenerationError(
                f"message of generation {generation}, but this worker is in {have}",
                fix="send messages of the current generation only",
            )
        return groups

    def _require_state(self, generation: int) -> TrainState:
        self._require_groups(generation)
        return self._require(self._state)

    @staticmethod
    def _require(value: _R | None) -> _R:
        if value is None:
            raise ClusterError("the worker was not built yet", fix="call build() after join()")
        return value

    def _guard(
        self, call: str, generation: int, body: Callable[[], _R], *, rank: int | None = None, step: int | None = None
    ) -> _R:
        """Runs the body of a call: `call` is its name in `Progress`."""
        try:
            with self._progress.during(call, generation):
                return body()
        except StaleGenerationError:
            raise
        except Exception as error:
            happened = time.time()
            self._cut(generation)
            groups = self._groups
            known = rank if groups is None else groups.rendezvous.rank
            raise failure_of(error, rank=known, step=step, generation=generation, happened=happened) from None


def _nothing_to_wait_for() -> float:
    return 0.0


def _end_with_parent() -> None:
    """Ends this process once its raylet is gone: Ray declared the node dead, or will."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_ORPHAN_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="raycp-parent", daemon=True).start()
