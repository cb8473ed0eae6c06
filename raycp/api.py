"""`raycp.fit`: configuration -> data -> plan -> run -> result.

Guarantees: every configuration problem is in one report before any process starts; the same call again continues an
unfinished run and returns at once for a finished one; whatever it raises is a `RaycpError` with a fix, except what a
person's Ctrl-C or a programming error raises. Costs nothing that a run does not need: a finished one starts no worker.
"""

import copy
import dataclasses
import itertools
import os
import sys
from pathlib import Path
from typing import Any

from data_pipeline import DocumentStore, PackPlan, StepSchedule, describe, plan_packs
from data_pipeline.build import remove_leftovers
from data_pipeline.prepare import ProgressBar, prepare
from raycp.config import FitConfig
from raycp.driver.cluster import connect
from raycp.driver.controller import Outcome
from raycp.driver.record import RunRecord, identity_of, single_driver, storage_errors, write_json
from raycp.errors import DataError, ModelError, one_error
from raycp.events import read_events
from raycp.launch import checkpoint_root, launch, newest_folder, processes, take_lease
from raycp.preflight import ITEMSIZE, Setup, check_kinds
from raycp.resolve import cost_model
from raycp.training.check import check_model
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
    checkpoint_path: Path | str | None
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
        data: path, paths, folder, glob or URL of jsonl / json / csv / parquet / arrow / txt, the name of a data set on
            the hub, a `datasets.Dataset`, or an iterable of rows; several with weights as {path: weight} or
            [(source, weight), ...]. docs/data.md has what rows may hold.
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
        WorkerError: a rank died, froze or raised, and the run may not (`elastic.on_loss`) or cannot go on: three times
            in a row at one step, or no world is left within the limits. Names rank, node and cause; run again to
            continue.
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
    with ProgressBar("preparing data") as progress:
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
    root = checkpoint_root(setup)
    record = RunRecord(folder, root)
    namespace = record.peek("namespace")
    lease = None if namespace is None else take_lease(setup, namespace)
    try:
        record.open(identity, resume=config.elastic.resume)
        if namespace is None:
            lease = take_lease(setup, record.namespace)
        if record.status == "finished" and (folder / "export").is_dir():
            done = newest_folder(root)
            return _result(folder, Outcome(status="finished", checkpoint=done, export=folder / "export"))
        return _result(folder, _train(setup, record, schedule, store, evaluation, plan, fingerprint))
    finally:
        if lease is not None:
            lease.give_back()


def _train(
    setup: Setup,
    record: RunRecord,
    schedule: StepSchedule,
    store: DocumentStore,
    evaluation: DocumentStore | None,
    plan: PackPlan,
    fingerprint: str,
) -> Outcome:
    config, folder = setup.config, setup.folder
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
        total_steps=schedule.total_steps,
        cost=cost,
        train=_store_spec(store, config, plan),
        evaluation=None if evaluation is None else _store_spec(evaluation, config, _first_plan(evaluation, config)),
    )
    print(describe(store, plan), file=sys.stderr)
    return launch(setup, spec, schedule, record, packs=_typical_packs(plan, store))


def _tokenizer_of_run(setup: Setup) -> Any:
    """The tokenizer to export: it carries the chat template that the model is trained with."""
    if setup.config.data.chat_template is None:
        return setup.tokenizer
    tokenizer = copy.deepcopy(setup.tokenizer)
    tokenizer.chat_template = setup.config.data.chat_template
    return tokenizer


def _prepare(setup: Setup, data: Any, folder: Path, progress: ProgressBar) -> DocumentStore:
    def cluster() -> None:
        if setup.cluster is None:
            setup.cluster = connect(workers=processes(setup.config))

    return prepare(
        data,
        setup.tokenizer,
        seq_length=setup.config.seq_length,
        config=setup.config.data,
        folder=folder,
        progress=progress,
        connect=cluster,
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
