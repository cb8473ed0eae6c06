"""From a resolved setup to a running controller: which worlds there may be, where state goes, who may drive.

Guarantees: nothing is started before the run's record is opened under a raised generation; a second live driver is
refused; the checkpoint folder is fenced against drivers of older generations. Costs nothing beside that.
"""

import dataclasses
import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from data_pipeline import StepSchedule
from raycp.config import FitConfig
from raycp.driver.checkpoints import Checkpoints
from raycp.driver.cluster import connect
from raycp.driver.controller import Controller, Outcome
from raycp.driver.display import Display
from raycp.driver.lease import Lease
from raycp.driver.record import RunRecord
from raycp.driver.runtime import RayRuntime, secret_of
from raycp.driver.signals import StopSignal
from raycp.driver.worlds import World, Worlds
from raycp.errors import PlanError
from raycp.events import EventLog
from raycp.plan import CostModel, GridChoice, RankGrid
from raycp.preflight import ITEMSIZE, Setup
from raycp.resolve import (
    grid_warning,
    needs_checkpointing,
    placed_cost,
    rank_bytes,
    resolve_grid,
    state_bytes,
    token_flops,
    world_limits,
)
from raycp.training.device import host_memory
from raycp.training.latest import fence
from raycp.training.storage import Storage
from workers.messages import RunSpec


def processes(config: FitConfig) -> int:
    """Worker processes that a run wants: its ranks, or as many as it may grow to, and its spares."""
    return max(config.workers or 1, config.elastic.max_workers or 1) + config.elastic.spares


def checkpoint_root(setup: Setup) -> Storage:
    """Where the run's checkpoints are."""
    return Storage.of(setup.config.elastic.checkpoint_dir or setup.folder / "checkpoints")


def take_lease(setup: Setup, namespace: str) -> Lease | None:
    """The right to drive the run; None on a Ray of our own, which nobody else can reach.

    Raises:
        ConfigError: another live driver has it.
    """
    if setup.cluster is None or setup.cluster.started_here:
        return None
    return Lease.take(namespace, f"host {socket.gethostname()}, pid {os.getpid()}")


def launch(
    setup: Setup, spec: RunSpec, schedule: StepSchedule, record: RunRecord, *, packs: Sequence[Sequence[int]]
) -> Outcome:
    """Runs the training to its end.

    Args:
        setup: what was found out before.
        spec: what the workers run.
        schedule: which packs each step takes.
        record: run.json, opened for this driver.
        packs: ends of the documents of typical packs.
    """
    config, folder = setup.config, setup.folder
    worlds = _worlds(setup, spec, packs)
    if setup.cluster is None:
        setup.cluster = connect(workers=processes(config))
    root = checkpoint_root(setup)
    fence(root, record.run_id, record.generation)
    events = EventLog(folder / "events.jsonl", generation=record.generation)
    secret = secret_of(folder, lambda: secrets.token_bytes(32))
    with Display(total_steps=schedule.total_steps) as display, StopSignal(display.say) as stop:

        def started(world: World) -> None:
            events.write(
                "run_started",
                run_id=record.run_id,
                config=config.to_dict(),
                grid=dataclasses.asdict(world.grid),
                grid_reason=world.reason,
            )
            warning = grid_warning(world.grid, config, setup.model_config, world.cost)
            if warning is not None:
                display.say(warning)

        runtime = RayRuntime(
            spec,
            setup.cluster,
            namespace=record.namespace,
            secret=secret,
            checkpoints=root.where,
            say=display.say,
            watch=display.inside,
        )
        display.count_flops(token_flops(setup.model_config, packs), runtime.peak)
        outcome = Controller(
            spec=spec,
            worlds=worlds,
            schedule=schedule,
            runtime=runtime,
            record=record,
            events=events,
            checkpoints=Checkpoints(root, keep=config.elastic.keep, events=events, say=display.say),
            secret=secret,
            state_bytes=state_bytes(setup.model_config, config.optim.name),
            display=display,
            stop=stop,
            started=started,
        ).run()
    events.close()
    return outcome


def newest_folder(root: Storage) -> Path | str | None:
    """The newest committed checkpoint, as a path where it is one, else as a URL."""
    from raycp.training.checkpoint import newest

    found = newest(root)
    if found.storage is None:
        return None
    return found.storage.local_path() or found.storage.where


def _worlds(setup: Setup, spec: RunSpec, packs: Sequence[Sequence[int]]) -> Worlds:
    config, model = setup.config, setup.model_config
    itemsize = ITEMSIZE[config.dtype]

    def grid_of(dp: int, cp: int, cost: CostModel) -> GridChoice | None:
        parallel = dataclasses.replace(config.parallel, dp=dp, cp=cp)
        try:
            return resolve_grid(dataclasses.replace(config, parallel=parallel), model, cost, packs=packs)
        except PlanError:  # more Ulysses ranks than heads, a window that does not divide the ring
            return None

    def bytes_of(grid: RankGrid, recompute: bool) -> int:
        return rank_bytes(config, model, grid, itemsize=itemsize, recompute=recompute)

    recompute = needs_checkpointing(
        config,
        model,
        itemsize=itemsize,
        accelerator=setup.device.is_accelerator,
        host_bytes=host_memory()[0],
    )
    limits = world_limits(setup.asked, config)

    def cost_of(node_ranks: tuple[int, ...]) -> CostModel:
        return placed_cost(setup.asked, spec.cost, node_ranks)

    return Worlds(limits, grid_of=grid_of, cost_of=cost_of, bytes_of=bytes_of, recompute=recompute)
