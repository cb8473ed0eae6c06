"""What `raycp clean` does: ends the keepers of the run in a folder and gives their memory back.

Guarantees: a run that has a live driver is left alone; the newest step that is only in memory goes to storage first,
unless it is to be discarded; nothing of another run is touched; doing it again is harmless. Costs the time to write
that step, and a few seconds to connect.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from raycp.driver.cluster import live_nodes, resolve_output_dir, running_cluster
from raycp.driver.keeper_calls import find_keepers
from raycp.driver.keepers import Keepers
from raycp.driver.lease import Lease
from raycp.driver.record import RunRecord, single_driver, storage_errors
from raycp.errors import CheckpointError, ClusterError, ConfigError, one_error
from raycp.training.committed import commit_if_whole, newest_committed, step_folder
from raycp.training.storage import Storage
from workers.storage import storage_fix

WRITE_SECONDS = 3600.0
"""How long the keepers may take to write their step."""
_END_SECONDS = 15.0


@dataclass(frozen=True, kw_only=True)
class Cleaned:
    """What was ended.

    Attributes:
        run_id: of the run.
        freed: {node: bytes} of the keepers that were ended.
        written: step that was written to storage first; None if storage had it, or it was to be discarded.
        discarded: step that was in memory only and is gone; None if there was none.
    """

    run_id: str
    freed: dict[str, int]
    written: int | None = None
    discarded: int | None = None


def clean_run(output_dir: Path, *, discard: bool, say: Callable[[str], None]) -> Cleaned:
    """Ends the keepers of the run in a folder, on the Ray cluster of RAY_ADDRESS or the one on this machine.

    Args:
        output_dir: folder of the run, where its run.json lies.
        discard: give up a step that is only in memory, instead of writing it to storage first.
        say: shows a message to the person.

    Raises:
        ConfigError: the folder holds no run, or a live driver has it.
        ClusterError: no cluster answers, the storage refuses the step in memory, or a keeper does not end.
        CheckpointError: the step in memory cannot be written whole.
    """
    folder, problems = resolve_output_dir(output_dir)
    if folder is None:
        raise one_error(problems)
    record = RunRecord(folder)
    run_id, namespace = record.peek("run_id"), record.peek("namespace")
    if run_id is None or namespace is None:
        raise ConfigError(f"{folder} holds no run: there is no run.json", fix="give the output_dir of a run")
    with storage_errors(folder), single_driver(folder), running_cluster():
        lease = Lease.take(namespace, f"raycp clean, host {socket.gethostname()}, pid {os.getpid()}", wait=2.0)
        try:
            return _end_keepers(run_id, namespace, checkpoint_folder(folder), discard=discard, say=say)
        finally:
            lease.give_back()


def describe(cleaned: Cleaned) -> str:
    """What a person wants to know."""
    if not cleaned.freed:
        return f"run {cleaned.run_id} has no keepers on this cluster: nothing to end"
    lines = [f"  node {node}: {size / 2**20:,.0f} MiB" for node, size in sorted(cleaned.freed.items())]
    total = sum(cleaned.freed.values()) / 2**20
    lines.insert(0, f"ended {len(cleaned.freed)} keeper(s) of run {cleaned.run_id}, {total:,.0f} MiB freed")
    if cleaned.discarded is not None:
        lines.append(f"step {cleaned.discarded} was in memory only and is gone")
    return "\n".join(lines)


def checkpoint_folder(folder: Path) -> Storage:
    """Where the run in `folder` writes its checkpoints, by its config.json."""
    try:
        elastic = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("elastic", {})
    except FileNotFoundError:
        elastic = {}
    except ValueError as error:
        raise CheckpointError(
            f"{folder / 'config.json'} is damaged: {error}", fix="restore it, or give up the step in memory: --discard"
        ) from error
    return Storage.of(elastic.get("checkpoint_dir") or folder / "checkpoints")


def _end_keepers(
    run_id: str, namespace: str, checkpoints: Storage, *, discard: bool, say: Callable[[str], None]
) -> Cleaned:
    found = find_keepers(namespace)
    if not found:
        return Cleaned(run_id=run_id, freed={})
    addresses = {n.node_id: n.address for n in live_nodes()}
    keepers = Keepers.attach(namespace)
    held = keepers.held_bytes()
    point = keepers.newest(known=())  # what was never committed has no place in the data, and cannot be continued
    stored = newest_committed(checkpoints)
    only_here = None
    if point is not None and (stored is None or stored.age < point.manifest.age):
        only_here = point.manifest
    if only_here is not None and not discard:
        say(f"step {only_here.step} is in memory only: writing it to {checkpoints}")
        target = step_folder(checkpoints, only_here.step)
        try:
            written = keepers.persist(only_here, target.where, commit=True).wait(WRITE_SECONDS)
            problem = "" if written else f"not in {WRITE_SECONDS:.0f} s"
            if written and not commit_if_whole(target, only_here):
                problem = "files are missing there"
        except OSError as error:
            raise ClusterError(
                f"step {only_here.step} cannot be written to {target}: {error}; the keepers were left alone",
                fix=f"{storage_fix(error) or 'look at the storage'}; or give that step up with --discard",
            ) from error
        if problem:
            raise CheckpointError(
                f"step {only_here.step} was not written to {target}: {problem}; the keepers were left alone",
                fix="look at the storage and run this again; or give that step up with --discard",
            )
    keepers.close()
    _wait_for_the_end(namespace)
    step = None if only_here is None else only_here.step
    return Cleaned(
        run_id=run_id,
        freed={f"{addresses.get(n, 'gone')} ({n[:8]})": held.get(n, 0) for n in found},
        written=None if discard else step,
        discarded=step if discard else None,
    )


def _wait_for_the_end(namespace: str) -> None:
    deadline = time.monotonic() + _END_SECONDS
    while left := find_keepers(namespace):
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{len(left)} keeper(s) did not end: on node(s) {', '.join(n[:8] for n in left)}",
                fix="run this again; a node that is cut off gives them up when it is back, or after elastic.keeper_ttl",
            )
        time.sleep(0.1)
