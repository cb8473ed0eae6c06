"""Runs one function on several gloo ranks, each in its own process, and brings back what they return.

Guarantees: no port is chosen (ranks meet in a file store, gloo takes free ports); the first rank to fail ends the
others, and its traceback is the error; no process outlives the call; a hang ends after `timeout` seconds. Processes are
forked from a server that has imported torch and transformers once, so a rank starts in about 0.1 s after the first.
"""

import datetime
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PRELOADED = ["torch", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama"]
"""Imported once, by the server: importing transformers takes seconds in every rank otherwise."""


class RankError(RuntimeError):
    """One rank raised, died or hung. `rank` says which; the message holds its traceback."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Calls `fn(rank, world_size, *args)` on every rank, with the default process group (gloo) initialised.

    Args:
        fn: a module-level function; it and `args` are pickled.
        timeout: seconds for the whole call, and of every collective.

    Returns:
        What each rank returned (pickled; tensors are copied), by rank.

    Raises:
        RankError: of the first rank that failed, or of the ranks that had not finished in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    results: dict[int, Any] = {}
    payload = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="raycp-ranks-") as folder:
        processes, pipes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(rank, world_size, str(Path(folder) / "store"), payload, timeout, theirs)
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        deadline = time.monotonic() + timeout
        try:
            while len(results) < world_size:
                waiting = {pipes[r]: r for r in range(world_size) if r not in results}
                ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = sorted(waiting.values())
                    raise RankError(late[0], f"ranks {late} of {world_size} had not finished after {timeout} s")
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    results[waiting[pipe]] = _read(pipe, waiting[pipe], processes)
        finally:
            for process in processes:
                if len(results) == world_size:
                    process.join(5)
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()
    return [results[rank] for rank in range(world_size)]


def _read(pipe: Connection, rank: int, processes: list[Any]) -> Any:
    try:
        good, payload = pickle.loads(pipe.recv_bytes())
    except EOFError:
        processes[rank].join(5)
        raise RankError(rank, f"rank {rank} died without a word, exit code {processes[rank].exitcode}") from None
    if not good:
        raise RankError(rank, f"rank {rank} raised:\n{payload}")
    return payload


def _rank_main(rank: int, world_size: int, store: str, payload: bytes, timeout: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        fn, args = pickle.loads(payload)
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=limit
        )
        message = pickle.dumps((True, fn(rank, world_size, *args)))
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(message)
    pipe.close()
