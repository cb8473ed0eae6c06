"""Ray calls to keepers: how they are found, started, asked and ended.

Guarantees: a keeper is found by namespace and node whoever started it; an answer is a value or an exception, never a
wait longer than stated. Costs about a second to start a keeper (a process without torch).
"""

import contextlib
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycp.errors import CheckpointError, ClusterError, RaycpError, StaleGenerationError
from raycp.training.manifest import Manifest
from workers.keeper import Keeper
from workers.wire import KeeperAddress

CONTROL, COLLECT, DISK = "control", "collect", "disk"
"""Concurrency groups of a keeper: orders, long polls, writes."""
START_SECONDS = 60.0
"""How long a new keeper may take to answer."""
PIN_SECONDS = 2.0
"""How long a keeper may take to say what it holds."""
LOOK_SECONDS = 0.2
"""How long Ray may take to say that a keeper has died."""
Ask = Callable[[Mapping[str, Any], float], dict[str, Any]]
"""As `answers_of`."""
_PREFIX = "keeper-"
_GROUPS = {CONTROL: 8, COLLECT: 32, DISK: 8}


class KeeperLost(RaycpError, RuntimeError):  # noqa: N818 - as worker_lost, the event
    """A keeper died or answers no more. `details`: node_id, cause."""

    @property
    def node_id(self) -> str:
        """Ray's id of its node."""
        return str(self.details["node_id"])


class CopyRefused(ClusterError):  # noqa: N818 - as snapshot_failed, the event
    """A copy of a step cannot be brought to its second home. `details`: step, node_id of its first one."""


class Flush:
    """A step on its way from the keepers to storage."""

    def __init__(self, calls: Mapping[Any, str]) -> None:
        self._calls = dict(calls)
        self.writers = len(self._calls)
        """How many keepers write."""

    def poll(self) -> bool:
        """Whether all is written.

        Raises:
            OSError: the storage refused.
            CheckpointError: an image was damaged, or is gone.
            KeeperLost: a keeper was lost before it had written its part.
        """
        return self.wait(0.0)

    def wait(self, timeout: float) -> bool:
        """As `poll`, after at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        for reference, node_id in list(self._calls.items()):
            answer = answers_of({node_id: reference}, max(0.0, deadline - time.monotonic()))[node_id]
            if isinstance(answer, GetTimeoutError):
                continue
            if isinstance(answer, RayError):
                raise lost(node_id, first_line(answer))
            if isinstance(answer, BaseException):
                raise answer
            del self._calls[reference]
        return not self._calls


def order_flush(
    handles: Mapping[str, Any],
    manifest: Manifest,
    homes: Mapping[str, Sequence[str]],
    folder: str,
    *,
    commit: bool,
    by: int,
) -> Flush:
    """Has every shard pinned by a keeper that holds it, and then written.

    Args:
        handles: of the keepers that may be asked, by node id.
        manifest: of the step.
        homes: by shard file: nodes that should hold it, the best first.
        folder: of the step on storage.
        commit: the keepers also commit the step.
        by: generation of the driver.

    Raises:
        CheckpointError: a shard is held by no keeper that answers.
        StaleGenerationError: a newer driver has the keepers.
    """
    order = uuid.uuid4().hex  # the same step may be on its way already, ordered before a recovery
    left = {file: [n for n in nodes if n in handles] for file, nodes in homes.items()}
    chosen: dict[str, list[str]] = {}
    wanted = list(left)
    while wanted:
        asked: dict[str, list[str]] = {}
        for file in wanted:
            if not left[file]:
                for node_id in chosen:
                    on(handles[node_id], "unpin", CONTROL).remote(order, by=by)
                raise CheckpointError(
                    f"{file} of step {manifest.step} is held by no keeper that answers",
                    fix="write a newer step, or continue from the newest checkpoint",
                )
            asked.setdefault(left[file].pop(0), []).append(file)
        calls = {
            n: on(handles[n], "pin", CONTROL).remote(manifest.step, files, order=order, by=by)
            for n, files in asked.items()
        }
        wanted = []
        for node_id, answer in answers_of(calls, PIN_SECONDS).items():
            if isinstance(answer, StaleGenerationError):
                raise answer
            if isinstance(answer, BaseException) and not chosen.get(node_id):  # it may come to the order later
                on(handles[node_id], "unpin", CONTROL).remote(order, by=by)
            missing = asked[node_id] if isinstance(answer, BaseException) else answer
            wanted += missing
            chosen.setdefault(node_id, []).extend(f for f in asked[node_id] if f not in missing)
    shared = ray.put(manifest)
    return Flush(
        {
            on(handles[n], "persist", DISK).remote(shared, folder, files, commit=commit, order=order, by=by): n
            for n, files in chosen.items()
            if files
        }
    )


def find_keepers(namespace: str) -> dict[str, Any]:
    """Handles of the keepers of a namespace, by node id."""
    found: dict[str, Any] = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == namespace and entry["name"].startswith(_PREFIX):
            with contextlib.suppress(ValueError):  # it ended meanwhile
                found[entry["name"].removeprefix(_PREFIX)] = ray.get_actor(entry["name"], namespace=namespace)
    return found


def start_keepers(
    node_ids: Sequence[str], namespace: str, arguments: Mapping[str, Any]
) -> dict[str, tuple[Any, KeeperAddress]]:
    """Starts a keeper on each node; (handle, address) by node id.

    Args:
        node_ids: nodes without one.
        namespace: of the run.
        arguments: of `Keeper`.

    Raises:
        ClusterError: one does not start; none is left behind then.
    """
    handles: dict[str, Any] = {}
    deadline = time.monotonic() + START_SECONDS
    for node_id in node_ids:
        while node_id not in handles:
            try:
                handles[node_id] = _begin(node_id, namespace, arguments)
            except ValueError as error:  # the name is taken: the one before has not quite ended
                if time.monotonic() > deadline:
                    raise ClusterError(f"no keeper on node {node_id[:8]}: {error}", fix="see the reason") from error
                time.sleep(0.1)
    answers = answers_of({n: on(h, "address", CONTROL).remote() for n, h in handles.items()}, START_SECONDS)
    started: dict[str, tuple[Any, KeeperAddress]] = {}
    for node_id, answer in answers.items():
        if not isinstance(answer, KeeperAddress):
            for handle in handles.values():
                end_actor(handle)
            raise ClusterError(
                f"the keeper on node {node_id[:8]} does not start: {first_line(answer)}",
                fix="look at the node's log (memory, Python environment); then run the same command again",
                node_id=node_id,
            )
        started[node_id] = (handles[node_id], answer)
    return started


class Arrivals:
    """Keepers on nodes that come while the run goes on: they start beside it, and nobody waits for them."""

    def __init__(self) -> None:
        self._calls: dict[str, tuple[Any, Any, float]] = {}

    def __contains__(self, node_id: object) -> bool:
        return node_id in self._calls

    def look(
        self, node_id: str, namespace: str, arguments: Mapping[str, Any], *, timeout: float = 0.0
    ) -> tuple[Any, KeeperAddress] | None:
        """Starts a keeper on a node, or takes the one that was started there before.

        Args:
            node_id: where there is none.
            namespace: of the run.
            arguments: of `Keeper`.
            timeout: seconds to wait for it.

        Returns:
            (handle, address) once it answers, else None: call it again. One that does not start is ended, and the next
            call starts another.
        """
        if node_id not in self._calls:
            try:
                handle = _begin(node_id, namespace, arguments)
            except ValueError:  # the name is taken: the one before has not quite ended
                return None
            self._calls[node_id] = handle, on(handle, "address", CONTROL).remote(), time.monotonic()
        handle, call, since = self._calls[node_id]
        answer = answers_of({node_id: call}, timeout)[node_id]
        if isinstance(answer, GetTimeoutError) and time.monotonic() - since < START_SECONDS:
            return None
        del self._calls[node_id]
        if isinstance(answer, KeeperAddress):
            return handle, answer
        end_actor(handle)
        return None


def _begin(node_id: str, namespace: str, arguments: Mapping[str, Any]) -> Any:
    """A new keeper; raises ValueError where there is one of that name."""
    remote = ray.remote(concurrency_groups=_GROUPS, max_restarts=0, max_task_retries=0)(Keeper)
    return remote.options(
        name=f"{_PREFIX}{node_id}",
        namespace=namespace,
        lifetime="detached",
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        runtime_env={"env_vars": {"MALLOC_ARENA_MAX": "2"}},
    ).remote(**arguments)


def on(handle: Any, method: str, group: str) -> Any:
    """A method of the actor, to be called in that concurrency group."""
    return getattr(handle, method).options(concurrency_group=group)


def answers_of(calls: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """What each call gave within `timeout` seconds of now, exceptions included: `GetTimeoutError` for no answer."""
    if not calls:
        return {}
    ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout)
    answers: dict[str, Any] = {}
    for node_id, reference in calls.items():
        try:
            answers[node_id] = ray.get(reference, timeout=0)
        except RayTaskError as error:
            answers[node_id] = error.cause if isinstance(error.cause, BaseException) else error
        except (RayError, RaycpError) as error:
            answers[node_id] = error
    return answers


def answers_but(calls: Mapping[str, Any], timeout: float, *, silent: Callable[[], Collection[str]]) -> dict[str, Any]:
    """As `answers_of`, but those that are `silent` by now are not waited for."""
    deadline, answers, left = time.monotonic() + timeout, dict[str, Any](), dict(calls)
    while left:
        answers |= answers_of(left, max(0.0, min(deadline - time.monotonic(), LOOK_SECONDS)))
        left = {n: c for n, c in left.items() if isinstance(answers[n], GetTimeoutError) and n not in silent()}
        if time.monotonic() >= deadline:
            break
    return answers


def answered(references: Sequence[Any], timeout: float) -> list[Any]:
    """Those that are answered, once one of them is; none after `timeout` seconds."""
    if not references:
        time.sleep(min(timeout, 0.05))
        return []
    ready: list[Any] = ray.wait(list(references), num_returns=1, timeout=timeout)[0]
    return ray.wait(list(references), num_returns=len(references), timeout=0)[0] if ready else []


def has_died(answer: Any) -> bool:
    """Whether an answer says that the keeper has ended, and not merely that it is out of reach."""
    return isinstance(answer, RayActorError) and not isinstance(answer, ActorUnavailableError)


def end_actor(handle: Any) -> None:
    """Ends it at once; does not wait."""
    with contextlib.suppress(RayError):  # it was dead already
        ray.kill(handle, no_restart=True)


def lost(node_id: str, cause: str) -> KeeperLost:
    """The error for a keeper that is lost."""
    return KeeperLost(
        f"the keeper of node {node_id[:8]} is lost: {cause}",
        fix="the run starts another one; look at the node's log for the reason (out of memory?)",
        node_id=node_id,
        cause=cause,
    )


def raise_first(answers: Mapping[str, Any]) -> None:
    """Raises the first error among the answers; `KeeperLost` for one that is not raycp's own."""
    for node_id, answer in answers.items():
        if isinstance(answer, RaycpError):
            raise answer
        if isinstance(answer, BaseException):
            raise lost(node_id, f"{type(answer).__name__}: {first_line(answer)}") from answer


def first_line(error: BaseException) -> str:
    """What matters of a long message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
