"""The workers of a run as the driver sees them: handles in rank order, who is alive, and who is to blame.

Guarantees: `gather` returns every rank's answer, or raises one `WorkerError` that names the culprit and not merely the
first rank that complained: a dead actor outweighs an exception of a rank's own, which outweighs a broken connection
(the usual consequence of the first two). After the first failure every other rank is ordered to abort its groups, so
that no rank keeps waiting. Costs a poll each `POLL_SECONDS` while a call runs.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError

from raycp.errors import RaycpError, WorkerError
from workers.messages import Probe

CONTROL = "control"
"""Concurrency group of the actor's methods that are answered while a step runs."""
POLL_SECONDS = 1.0
BLAME_SECONDS = 3.0
"""How long the driver waits for the other ranks' versions after the first failure."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One rank: its actor and where it runs."""

    rank: int
    actor: Any
    probe: Probe

    @property
    def where(self) -> str:
        return f"rank {self.rank} on node {self.probe.address} ({self.probe.node_id[:8]}, pid {self.probe.pid})"


class Membership:
    """The actors of one generation, in rank order.

    Args:
        members: ranks 0 .. world - 1.
        generation: travels with every call.
        unresponsive_after: seconds without any answer of a rank's control thread after which it counts as frozen.
        watch: called about once a second with rank 0's progress while a call runs.
        is_alive: whether the cluster counts a node (by its id) as alive.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        generation: int,
        unresponsive_after: float,
        watch: Callable[[dict[str, Any]], None] | None = None,
        is_alive: Callable[[str], bool] | None = None,
    ) -> None:
        self.members = list(members)
        self.generation = generation
        self._unresponsive_after = unresponsive_after
        self._watch = watch
        self._is_alive = is_alive or _node_is_alive
        self._beats: dict[int, Any] = {}
        self._heard: dict[int, float] = {}

    def gather(
        self, call: Callable[[Member], Any], *, what: str, only: Sequence[int] | None = None, patience: float = 1.0
    ) -> list[Any]:
        """Calls every member (or those in `only`) and waits for all answers.

        Args:
            call: starts the remote call on a member and returns its reference.
            what: name of the operation, for messages.
            only: ranks to call.
            patience: factor on the time without an answer after which a rank counts as frozen.

        Returns:
            The answers, in rank order.

        Raises:
            WorkerError: a rank died, raised or froze; all others were told to abort.
        """
        chosen = [m for m in self.members if only is None or m.rank in only]
        references = {call(m): m for m in chosen}
        answers: dict[int, Any] = {}
        pending = list(references)
        now = time.monotonic()
        self._heard = {m.rank: now for m in chosen}
        self._beats = {}
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_SECONDS / 2)
            failures: dict[int, BaseException] = {}
            for reference in done:
                member = references[reference]
                try:
                    answers[member.rank] = ray.get(reference)
                except RayError as error:
                    failures[member.rank] = _unwrap(error)
                except RaycpError as error:
                    failures[member.rank] = error
            frozen = self._frozen(chosen, patience * self._unresponsive_after) if pending else None
            if frozen is not None:
                failures[frozen.rank] = TimeoutError(
                    f"no answer from its control thread for {patience * self._unresponsive_after:.0f} s"
                )
            if failures:
                self._fail(failures, {r: references[r] for r in pending}, what)
        return [answers[m.rank] for m in chosen]

    def abort(self, ranks: Sequence[int] | None = None) -> None:
        """Orders members to cut their groups; does not wait longer than a second for those that do not answer."""
        calls = [
            m.actor.abort.options(concurrency_group=CONTROL).remote(self.generation)
            for m in self.members
            if ranks is None or m.rank in ranks
        ]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=1.0)

    def kill(self) -> None:
        """Ends every actor."""
        for member in self.members:
            ray.kill(member.actor, no_restart=True)

    def _frozen(self, chosen: Sequence[Member], limit: float) -> Member | None:
        """A member whose control thread has been silent too long; also feeds `watch` with rank 0's progress."""
        now = time.monotonic()
        for member in chosen:
            reference = self._beats.get(member.rank)
            if reference is not None:
                ready, _ = ray.wait([reference], timeout=0)
                if not ready:
                    if now - self._heard[member.rank] > limit:
                        return member
                    continue
                del self._beats[member.rank]
                try:
                    beat = ray.get(reference)
                except RayError:  # the call itself fails as well, and carries the reason
                    continue
                self._heard[member.rank] = now
                if self._watch is not None and member.rank == chosen[0].rank:
                    self._watch(beat)
            self._beats[member.rank] = member.actor.progress.options(concurrency_group=CONTROL).remote()
        return None

    def _fail(self, failures: dict[int, BaseException], pending: dict[Any, Member], what: str) -> None:
        self.abort([m.rank for m in pending.values()])
        deadline = time.monotonic() + BLAME_SECONDS
        left = list(pending)
        while left and time.monotonic() < deadline:
            done, left = ray.wait(left, num_returns=len(left), timeout=max(0.0, deadline - time.monotonic()))
            for reference in done:
                try:
                    ray.get(reference)
                except RayError as error:
                    failures[pending[reference].rank] = _unwrap(error)
                except RaycpError as error:
                    failures[pending[reference].rank] = error
        raise self._blame(failures, what)

    def _blame(self, failures: dict[int, BaseException], what: str) -> WorkerError:
        rank = min(failures, key=lambda r: (*_weight(failures[r]), r))
        error = failures[rank]
        member = next(m for m in self.members if m.rank == rank)
        details = dict(error.details) if isinstance(error, WorkerError) else {}
        cause = str(details.get("cause") or _cause(error))
        if isinstance(error, ActorUnavailableError):
            alive = self._is_alive(member.probe.node_id)  # Ray notices a dead node seconds after its connections break
            gone = "it cannot be reached (its process, its node or the network)" if alive else "its node has died"
            cause = f"{gone}: {cause}"
        details.update(
            rank=rank,
            node=member.probe.address,
            node_id=member.probe.node_id,
            cause=cause,
            generation=self.generation,
            others={r: _cause(e) for r, e in failures.items() if r != rank},
            lost=isinstance(error, RayActorError | TimeoutError),
        )
        fix = error.fix if isinstance(error, RaycpError) and error.fix else _default_fix(error)
        return WorkerError(f"{what} failed: {member.where}: {cause}", fix=fix, **details)


def _node_is_alive(node_id: str) -> bool:
    return any(n["NodeID"] == node_id and n["Alive"] for n in ray.nodes())


def _unwrap(error: BaseException) -> BaseException:
    """The worker's own exception out of Ray's wrapper; Ray's error itself for a lost actor."""
    if not isinstance(error, RayTaskError):
        return error
    inner = getattr(error, "cause", None)
    return inner if isinstance(inner, BaseException) else error


def _weight(error: BaseException) -> tuple[int, float]:
    """Sort key of blame: lost processes first, then a rank's own errors by time, then broken connections."""
    if isinstance(error, RayActorError | GetTimeoutError | TimeoutError) and not isinstance(
        error, ActorUnavailableError
    ):
        return (0, 0.0)
    if isinstance(error, WorkerError):
        return (2 if error.details.get("communication") else 1, float(error.details.get("time", 0.0)))
    return (1, 0.0)


def _cause(error: BaseException) -> str:
    if isinstance(error, WorkerError):
        return str(error.details.get("cause", error.message))
    if isinstance(error, ActorDiedError):
        text = str(error)
        kind = "its node has died" if "node" in text and "died" in text.split("node")[-1][:40] else "its process died"
        reasons = [w for w in ("OutOfMemory", "SIGKILL", "SIGSEGV", "SIGTERM", "SIGABRT") if w in text]
        return f"{kind}{' (' + ', '.join(reasons) + ')' if reasons else ''}: {_first_lines(text)}"
    return f"{type(error).__name__}: {_first_lines(str(error))}"


def _first_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:2] + [line for line in lines[2:] if "exit" in line.lower() or "oom" in line.lower()])[:600]


def _default_fix(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "look at that machine (is it swapping or stopped?); run the same command again to continue"
    if isinstance(error, RayActorError):
        return "look for the reason in the node's log (out of memory?); run the same command again to continue"
    return "run the same command again to continue from the last checkpoint"
