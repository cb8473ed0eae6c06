"""`raycp.fit`: configuration -> data -> plan -> run -> result.

Guarantees: every configuration problem is in one report before any process starts; the same call again continues an
unfinished run and returns at once for a finished one; whatever it raises is a `RaycpError` with a fix, except what a
person's Ctrl-C or a programming error raises. Costs nothing that a run does not need: a finished one starts no worker.
"""

import copy
import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

from data_pipeline import DocumentStore, PackPlan, StepSchedule, plan_packs, prepare
from data_pipeline.build import remove_leftovers
from raycp.config import FitConfig
from raycp.driver.cluster import (
    connect,
)
from raycp.driver.controller import Controller, Outcome
from raycp.driver.display import Display, counting_bar
from raycp.driver.record import RunRecord, identity_of, single_driver, storage_errors, write_json
from raycp.driver.signals import StopSignal
from raycp.errors import DataError, ModelError, one_error
from raycp.events import EventLog, read_events
from raycp.preflight import ITEMSIZE, Setup, check_kinds
from raycp.resolve import (
    cost_model,
    grid_warning,
    needs_checkpointing,
    resolve_grid,
)
from raycp.training.check import check_model
from raycp.training.checkpoint import newest
from raycp.training.device import host_memory
from workers.messages import RunSpec, StoreSpec

_TYPICAL_PACKS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a run gave.

    Attributes:
        status: "finished", or "stopped" by a person before the last step (the same call continues it).
        steps: optimizer steps that are done.
        losses: {step: training loss}, those of earlier starts of the run included.
        evals: {step: held-out loss}.
        recoveries: the `recovered` events.
        goodput: share of this driver's time that went into committed steps; 1.0 if no step was left to do.
        output_dir, events_path, checkpoint_path, export_path: where things are; the last two None if not written.
    """

    status: str
    steps: int
    losses: dict[int, float]
    evals: dict[int, float]
    recoveries: list[dict[str, Any]]
    goodput: float
    output_dir: Path
    events_path: Path
    checkpoint_path: Path | None
    export_path: Path | None


def fit(
    model: Any,
    data: Any,
    *,
    output_dir: str | os.PathLike[str],
    tokenizer: Any = None,
    config: FitConfig | None = None,
) -> FitResult:
    """Fine-tunes a model on packed sequences, context-parallel over Ray workers.

    Args:
        model: a folder, a hub id, a folder with a GGUF file, or a transformers configuration (random initialisation,
            the same for every number of workers).
        data: path, paths or glob of jsonl / json / parquet / txt, a `datasets.Dataset`, or an iterable of rows with
            `messages`, `prompt` and `completion`, or `text`.
        output_dir: folder on storage that all nodes share. The same folder again continues the run in it.
        tokenizer: a tokenizer, a folder or a hub id; the model's own by default.
        config: everything else.

    Returns:
        What the run gave; also when a person stopped it cleanly.

    Raises:
        ConfigError: with every problem of configuration, model, cluster and folder at once.
        DataError: a row or file that cannot be used, by file and line.
        ModelError: a chat template that trains no token, weights that do not fit.
        CheckpointError: the folder holds a run that computes something else.
        WorkerError: a rank died or raised; names rank, node and cause. Run again to continue.
        ClusterError: nodes that cannot hold, see or reach what they must; an output folder that cannot be written.
    """
    config = FitConfig() if config is None else config
    check_kinds(config)
    setup = Setup.check(model, data, output_dir, tokenizer, config)
    try:
        with storage_errors(setup.folder):
            setup.folder.mkdir(parents=True, exist_ok=True)
            with single_driver(setup.folder):
                return _run(setup, data)
    finally:
        if setup.cluster is not None:
            setup.cluster.close()


def _run(setup: Setup, data: Any) -> FitResult:
    config, folder = setup.config, setup.folder
    for name in ("data", "eval_data"):
        remove_leftovers(folder / name)
    with counting_bar("preparing data") as progress:
        store = _prepare(setup, data, folder / "data", progress)
        evaluation = None
        if config.eval_data is not None:
            try:
                evaluation = _prepare(setup, config.eval_data, folder / "eval_data", progress)
            except (DataError, ModelError) as error:
                raise type(error)(f"eval_data: {error.message}", fix=error.fix, **error.details) from error
    longest = max(s.max_positions for s in (store, evaluation) if s is not None)
    problems = check_model(setup.model_config, longest, config.parallel)
    if problems:
        raise one_error(problems)
    plan = _first_plan(store, config)
    schedule = StepSchedule(
        num_packs=len(plan.packs),
        global_batch=config.global_batch,
        epochs=config.epochs,
        steps=config.steps,
        family=plan.family,
    )
    fingerprint = setup.model.fingerprint()
    identity = identity_of(
        config,
        model=fingerprint,
        data=store.fingerprint,
        evaluation=None if evaluation is None else evaluation.fingerprint,
        plan=plan.hash,
        total_steps=schedule.total_steps,
        dtype=config.dtype,
    )
    record = RunRecord(folder)
    record.open(identity, resume=config.elastic.resume)
    events_path = folder / "events.jsonl"
    if record.status == "finished" and (folder / "export").is_dir():
        return _result(folder, Outcome(status="finished", checkpoint=_newest(folder), export=folder / "export"))
    write_json(folder / "config.json", config.to_dict())
    _tokenizer_of_run(setup).save_pretrained(folder / "tokenizer")
    cost = cost_model(config, setup.model_config, device=setup.device.name, itemsize=ITEMSIZE[config.dtype])
    spec = RunSpec(
        run_id=record.run_id,
        output_dir=str(folder),
        model=setup.model,
        model_fingerprint=fingerprint,
        tokenizer_folder=str(folder / "tokenizer"),
        device=setup.device,
        dtype=config.dtype,
        config=dataclasses.replace(config, eval_data=None),
        activation_checkpointing=needs_checkpointing(
            config,
            setup.model_config,
            itemsize=ITEMSIZE[config.dtype],
            accelerator=setup.device.ray_resource is not None,
            host_bytes=host_memory()[0],
        ),
        total_steps=schedule.total_steps,
        cost=cost,
        train=_store_spec(store, config, plan),
        evaluation=None if evaluation is None else _store_spec(evaluation, config, _first_plan(evaluation, config)),
    )
    choice = resolve_grid(config, setup.model_config, cost, packs=_typical_packs(plan, store))
    grid = choice.grid
    if setup.cluster is None:
        setup.cluster = connect(workers=config.workers)
    events = EventLog(events_path, generation=record.generation)
    events.write(
        "run_started",
        run_id=record.run_id,
        config=config.to_dict(),
        grid=dataclasses.asdict(grid),
        grid_reason=choice.reason,
    )
    warning = grid_warning(grid, config, setup.model_config, cost)
    with Display(total_steps=schedule.total_steps) as display, StopSignal(display.say) as stop:
        if warning is not None:
            display.say(warning)
        outcome = Controller(
            spec=spec,
            grid=grid,
            schedule=schedule,
            cluster=setup.cluster,
            record=record,
            events=events,
            display=display,
            stop=stop,
        ).run()
    events.close()
    return _result(folder, outcome)


def _tokenizer_of_run(setup: Setup) -> Any:
    """The tokenizer to export: it carries the chat template that the model is trained with."""
    if setup.config.data.chat_template is None:
        return setup.tokenizer
    tokenizer = copy.deepcopy(setup.tokenizer)
    tokenizer.chat_template = setup.config.data.chat_template
    return tokenizer


def _prepare(setup: Setup, data: Any, folder: Path, progress: Any) -> DocumentStore:
    return prepare(
        data,
        setup.tokenizer,
        seq_length=setup.config.seq_length,
        config=setup.config.data,
        folder=folder,
        progress=progress,
    )


def _first_plan(store: DocumentStore, config: FitConfig) -> PackPlan:
    """The packs of epoch 0."""
    return plan_packs(
        store.lengths, seq_length=config.seq_length, policy=config.data.packing, seed=config.seed, epoch=0
    )


def _store_spec(store: DocumentStore, config: FitConfig, plan: PackPlan) -> StoreSpec:
    return StoreSpec(
        folder=str(store.folder),
        fingerprint=store.fingerprint,
        packing=config.data.packing,
        plan_hash=plan.hash,
    )


def _typical_packs(plan: PackPlan, store: DocumentStore) -> list[list[int]]:
    """Ends of the documents of a few packs, evenly spread over an epoch."""
    count = min(len(plan), _TYPICAL_PACKS)
    picked = [len(plan) * i // count for i in range(count)]
    return [list(itertools.accumulate(int(store.lengths[d]) for d in plan.pack(i))) for i in picked]


def _newest(folder: Path) -> Path | None:
    return newest(folder / "checkpoints").path


def _result(folder: Path, outcome: Outcome) -> FitResult:
    events = list(read_events(folder / "events.jsonl"))
    losses = {int(e["step"]): float(e["loss"]) for e in events if e["event"] == "step"}
    return FitResult(
        status=outcome.status,
        steps=max(losses, default=0),
        losses=losses,
        evals={int(e["step"]): float(e["loss"]) for e in events if e["event"] == "eval"},
        recoveries=[e for e in events if e["event"] == "recovered"],
        goodput=outcome.goodput,
        output_dir=folder,
        events_path=folder / "events.jsonl",
        checkpoint_path=outcome.checkpoint,
        export_path=outcome.export,
    )
