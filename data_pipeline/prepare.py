"""`prepare`: a document store, made by Ray tasks over the cluster where there is much to do.

Guarantees: documents and their order are those of `build_store` in one process; a part is made on a node that sees both
the data and the folder, found out by looking, so data that only this machine has are prepared on this machine; a node
that is lost costs the parts that it was making; a killed call goes on with the parts that are missing. One bar shows
rows and the share of all bytes, and moves while parts are being made. Costs nothing for small data: below `LOCAL_BYTES`
no cluster is asked for.
"""

import os
import secrets
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tqdm import tqdm

from data_pipeline.build import build_store
from data_pipeline.encode import Tokenizer
from data_pipeline.files import File
from data_pipeline.part_progress import Progress
from data_pipeline.part_worker import Job
from data_pipeline.readers import serially
from data_pipeline.store import DocumentStore
from raycp.config import DataConfig
from raycp.errors import ClusterError

LOCAL_BYTES = 128 << 20
"""Up to so much is read in this process, whose tokenizer has threads of its own."""
_ATTEMPTS = 3
_LOOK_SECONDS = 2.0
_END_SECONDS = 20.0
_ONE_THREAD = {"env_vars": {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}}


def prepare(
    data: object,
    tokenizer: Tokenizer,
    *,
    seq_length: int,
    config: DataConfig,
    folder: Path | str,
    progress: Progress | None = None,
    connect: Callable[[], object] | None = None,
    local_bytes: int = LOCAL_BYTES,
) -> DocumentStore:
    """As `build_store`, with parts made by tasks on a Ray cluster.

    Args:
        data, tokenizer, seq_length, config, folder, progress: as for `build_store`.
        connect: connects this process to Ray; called when there is enough to do. None: Ray is used if this process is
            connected already.
        local_bytes: up to so much is read in this process.

    Raises:
        DataError, ModelError: as `build_store`; the first bad row that was met, not always the first of the data.
        ClusterError: tasks fail for reasons of the cluster, on every node that could run them.
    """
    root = Path(folder).absolute()

    def run(
        function: Callable[[Any], Any], items: list[Any], meanwhile: Callable[[], None] | None = None
    ) -> Iterator[tuple[int, Any]]:
        much = len(items) > 1 and sum(map(_bytes_of, items)) > local_bytes
        if much and connect is not None:
            connect()
        if not much or not ray.is_initialized():
            return serially(function, items)
        return Tasks(root, {path for file in map(_file_of, items) if not file.remote for path in file.stored()})(
            function, items, meanwhile
        )

    return build_store(data, tokenizer, seq_length=seq_length, config=config, folder=root, progress=progress, run=run)


class Tasks:
    """Calls a function on items in Ray tasks of one CPU each, on every node that sees what they need.

    Args:
        folder: where results are written; a node that does not see a file that is put there is not used.
        files: paths that a node must see, too.
    """

    def __init__(self, folder: Path, files: Collection[str] = ()) -> None:
        self._folder, self._files = folder, sorted(files)

    def __call__(
        self, function: Callable[[Any], Any], items: Sequence[Any], meanwhile: Callable[[], None] | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Yields (index, result) as they come; calls `meanwhile` when none came for `_LOOK_SECONDS`.

        Raises:
            ClusterError: see `prepare`; what the function raises is raised as it is.
        """
        slots = self._slots()
        free = Counter(slots)
        shared = ray.put(function)
        waiting = deque((index, 1) for index in range(len(items)))
        running: dict[Any, tuple[int, int, str]] = {}
        suspects: set[str] = set()  # nodes whose last task was lost: others are asked first
        try:
            while waiting or running:
                while waiting and free.total():
                    index, attempt = waiting.popleft()
                    node = max((n for n in free if free[n] > 0), key=lambda n: (n not in suspects, free[n]))
                    free[node] -= 1
                    options: Any = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
                    task = ray.remote(_call).options(num_cpus=1, max_retries=0, runtime_env=_ONE_THREAD, **options)
                    running[task.remote(shared, items[index])] = (index, attempt, node)
                done, _ = ray.wait(list(running), num_returns=1, timeout=_LOOK_SECONDS)
                if not done:
                    if meanwhile is not None:
                        meanwhile()
                    continue
                index, attempt, node = running.pop(done[0])
                free[node] += 1
                try:
                    result = ray.get(done[0])
                except RayTaskError as error:
                    raise (error.cause if isinstance(error.cause, Exception) else error) from None
                except RayError as error:  # the process or its node is gone
                    suspects.add(node)
                    if attempt == _ATTEMPTS:
                        raise ClusterError(
                            f"preparing data failed {attempt} times on part {index}, last on node {node[:12]}: {error}",
                            fix="look for a node without memory or disk; start again to go on with what is missing",
                        ) from error
                    if not _is_alive(node):
                        del free[node]
                        slots.pop(node, None)
                    if not slots:
                        raise ClusterError(
                            "every node that sees the data is gone", fix="bring them back and start again"
                        ) from error
                    waiting.append((index, attempt + 1))
                else:
                    suspects.discard(node)
                    yield index, result
        finally:
            for reference in running:
                ray.cancel(reference, force=True)
            if running:  # until they are gone they may still put a part into the folder
                ray.wait(list(running), num_returns=len(running), timeout=_END_SECONDS)

    def _slots(self) -> dict[str, int]:
        """{node id: CPUs} of the nodes that see the folder and the files."""
        nonce = self._folder / f".sees.{secrets.token_hex(8)}"
        nonce.parent.mkdir(parents=True, exist_ok=True)
        nonce.write_text("", "utf-8")
        try:
            alive = {n["NodeID"]: int(n["Resources"].get("CPU", 0)) for n in ray.nodes() if n["Alive"]}
            looks = {
                node: ray.remote(_sees)
                .options(
                    num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
                )
                .remote([str(nonce), *self._files])
                for node, cpus in alive.items()
                if cpus
            }
            found: dict[str, int] = {}
            for node, look in looks.items():
                try:
                    if ray.get(look):
                        found[node] = alive[node]
                except RayError:
                    continue  # gone meanwhile, or without our packages: it is not used
        finally:
            nonce.unlink(missing_ok=True)
        if not found:
            raise ClusterError(
                f"no node of the cluster with a CPU sees {self._folder} and the data files",
                fix="put both on storage that the nodes share, or give one node a CPU for Ray (num_cpus)",
            )
        return found


def _call(function: Callable[[Any], Any], item: Any) -> Any:
    return function(item)


def _sees(paths: list[str]) -> bool:
    return all(os.path.exists(path) for path in paths)


def _file_of(item: Job | File) -> File:
    return item.part.file if isinstance(item, Job) else item


def _bytes_of(item: Job | File) -> int:
    return item.part.size if isinstance(item, Job) else max(0, item.size())


def _is_alive(node: str) -> bool:
    return any(n["NodeID"] == node and n["Alive"] for n in ray.nodes())


class ProgressBar:
    """Rows done and share of the data; a context manager to be called as a `Progress`.

    Nothing is drawn for work that takes less than a second.

    Args:
        text: left of the bar.
        file: where to draw; standard error by default.
    """

    def __init__(self, text: str, file: TextIO | None = None) -> None:
        file = file or sys.stderr
        self._bar = tqdm(
            total=100.0,
            desc=text,
            file=file,
            delay=1.0,
            leave=False,
            dynamic_ncols=file.isatty(),
            mininterval=0.5 if file.isatty() else 10.0,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def __call__(self, rows: int, share: float) -> None:
        """Shows where preparation is."""
        self._bar.set_postfix_str(f"{rows:,} rows", refresh=False)
        self._bar.update(100.0 * share - self._bar.n)
