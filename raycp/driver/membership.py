"""The ranks of one generation as the driver sees them: handles in rank order, who is alive, and who is to blame.

Guarantees: `gather` returns every rank's answer, or raises one `WorkerError` that names the culprit and not merely the
first rank that complained: a dead, silent or stuck process outweighs an exception of a rank's own, which outweighs a
broken connection (the usual consequence of the first two); the error's details list every rank that is lost. After
the first failure every other rank is ordered to abort its groups, so that no rank keeps waiting; `freeze` then tells
which ranks came to rest. Costs a question to each rank every `POLL_SECONDS` while a call runs.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from raycp.driver.blame import cause_of, default_fix, is_lost, unwrap, weight
from raycp.driver.stuck import stuck
from raycp.errors import RaycpError, WorkerError
from workers.messages import Probe
from workers.wire import KeeperAddress

CONTROL = "control"
"""Concurrency group of the actor's methods that are answered while a step runs."""
POLL_SECONDS = 0.5
"""Time between two questions to a control thread."""
LOOK_SECONDS = 0.1
"""Time between two looks at the answers of a call, and at what is done meanwhile: a commit waits so long."""
BLAME_SECONDS = 3.0
"""How long the driver waits for the other ranks' versions after the first failure."""
ANSWER_SECONDS = 2.0
"""How long a control thread may take to answer before its process counts as unreachable (after a failure)."""


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
        unresponsive_after: seconds without an answer of a rank's control thread, or without any progress of the
            call that runs, after which it counts as lost.
        watch: called about once a second with rank 0's progress while a call runs.
        is_alive: whether the cluster counts a node (by its id) as alive.
        is_stopped: whether a rank's process is known to be stopped by a signal: then no `patience` is had with it.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        generation: int,
        unresponsive_after: float,
        watch: Callable[[dict[str, Any]], None] | None = None,
        is_alive: Callable[[str], bool] | None = None,
        is_stopped: Callable[[Member], bool] = lambda member: False,
    ) -> None:
        self.members = list(members)
        self.generation = generation
        self._unresponsive_after = unresponsive_after
        self._watch = watch
        self._is_alive = is_alive or _node_is_alive
        self._is_stopped = is_stopped
        self._began = 0.0
        self._asked: dict[int, Any] = {}
        self._heard: dict[int, float] = {}
        self._beats: dict[int, dict[str, Any]] = {}
        self._open: dict[Any, Member] = {}
        self._lost: set[int] = set()
        self._passed_over: set[KeeperAddress] = set()

    def gather(
        self,
        call: Callable[[Member], Any],
        *,
        what: str,
        only: Sequence[int] | None = None,
        patience: float = 1.0,
        meanwhile: Callable[[], None] | None = None,
        release: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Calls every member (or those in `only`) and waits for all answers.

        Args:
            call: starts the remote call on a member and returns its reference.
            what: name of the operation, for messages.
            only: ranks to call.
            patience: factor on the time without an answer after which a rank counts as frozen, or without progress
                after which it counts as stuck (`raycp.driver.stuck`).
            meanwhile: called about ten times a second while answers are missing; must not raise.
            release: called after the first failure, before the others' answers are waited for: frees them.

        Returns:
            The answers, in rank order.

        Raises:
            WorkerError: a rank died, raised or froze; all others were told to abort. `details["lost_ranks"]`: ranks
                whose process is gone, silent or stuck; `details["raised_ranks"]`: ranks that raised on their own.
        """
        chosen = [m for m in self.members if only is None or m.rank in only]
        references = {call(m): m for m in chosen}
        answers: dict[int, Any] = {}
        pending = list(references)
        self._began = now = time.monotonic()
        self._heard = {m.rank: now for m in chosen}
        self._asked, self._beats = {}, {}
        looked = now
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=LOOK_SECONDS)
            failures: dict[int, BaseException] = {}
            for reference in done:
                member = references[reference]
                try:
                    answers[member.rank] = ray.get(reference)
                except (RayError, RaycpError) as error:
                    failures[member.rank] = unwrap(error)
            if pending and meanwhile is not None:
                meanwhile()
            if pending and time.monotonic() - looked >= POLL_SECONDS:
                looked = time.monotonic()
                waiting = [references[r] for r in pending]
                failures |= self._silent(waiting, patience * self._unresponsive_after)
                failures |= self._stuck(waiting, patience) if not failures else {}
            if failures:
                if release is not None:
                    release()
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

    def let_go(self, keeper: KeeperAddress) -> None:
        """Orders the ranks of a keeper's node to wait for it no more; does not wait for them. Between this and `freeze`
        nothing is different for them: they report that their copy was not made.
        """
        for member in self.members:
            if member.probe.node_id == keeper.node_id:
                member.actor.let_go.options(concurrency_group=CONTROL).remote(self.generation, keeper)

    def pass_over(self, keepers: Iterable[KeeperAddress]) -> None:
        """Orders all ranks, once for each of these, to read from other keepers; does not wait for them."""
        for keeper in [k for k in keepers if k not in self._passed_over]:
            self._passed_over.add(keeper)
            for member in self.members:
                member.actor.let_go.options(concurrency_group=CONTROL).remote(self.generation, keeper)

    def freeze(self, seconds: float) -> list[int]:
        """Waits until every rank has come to rest after a failure; tells which did not, and which are lost.

        Args:
            seconds: how long a rank that still computes (and answers its control thread) may take.
        """
        deadline = time.monotonic() + seconds
        left = {r: m for r, m in self._open.items() if m.rank not in self._lost}
        now = time.monotonic()  # the call may have failed before anybody was asked anything
        self._asked, self._heard = {}, {m.rank: now for m in left.values()}
        while left and time.monotonic() < deadline:
            done, _ = ray.wait(list(left), num_returns=len(left), timeout=POLL_SECONDS)
            for reference in done:
                member = left.pop(reference)
                if self._failure_of(reference, dead_only=True) is not None:
                    self._lost.add(member.rank)
            for rank in self._silent(list(left.values()), ANSWER_SECONDS):
                self._lost.add(rank)
            left = {r: m for r, m in left.items() if m.rank not in self._lost}
        self._lost |= {m.rank for m in left.values()}
        resting = [m for m in self.members if m.rank not in self._lost]
        asked = {m.actor.progress.options(concurrency_group=CONTROL).remote(): m for m in resting}
        if asked:
            ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS)
        for reference, member in asked.items():
            done, _ = ray.wait([reference], timeout=0)
            if not done or self._failure_of(reference, dead_only=False) is not None:
                self._lost.add(member.rank)
        self._open = {}
        return sorted(self._lost)

    # -- who does not answer, who does not move ---------------------------------------------------------------------

    def _silent(self, waiting: Sequence[Member], limit: float) -> dict[int, BaseException]:
        """Members whose control thread has been silent too long; also feeds `watch` with rank 0's progress."""
        now = time.monotonic()
        found: dict[int, BaseException] = {}
        for member in waiting:
            reference = self._asked.get(member.rank)
            if reference is not None:
                ready, _ = ray.wait([reference], timeout=0)
                if not ready:
                    silent = now - self._heard[member.rank]
                    if silent > limit or (silent > self._unresponsive_after and self._is_stopped(member)):
                        found[member.rank] = TimeoutError(f"no answer from its control thread for {silent:.0f} s")
                    continue
                del self._asked[member.rank]
                try:
                    beat = ray.get(reference)
                except RayError:  # the call itself fails as well, and carries the reason
                    continue
                self._heard[member.rank] = now
                self._beats[member.rank] = beat
                if self._watch is not None and member.rank == 0:
                    self._watch(beat)
            self._asked[member.rank] = member.actor.progress.options(concurrency_group=CONTROL).remote()
        return found

    def _stuck(self, waiting: Sequence[Member], patience: float) -> dict[int, BaseException]:
        """Members whose counters stand still for too long, once all that are waited for have told theirs."""
        beats = {m.rank: self._beats[m.rank] for m in waiting if m.rank in self._beats}
        if len(beats) < len(waiting):
            return {}
        running = time.monotonic() - self._began
        return stuck(beats, patience=patience, heartbeat=self._unresponsive_after, running=running)

    # -- after a failure --------------------------------------------------------------------------------------------

    def _failure_of(self, reference: Any, *, dead_only: bool) -> BaseException | None:
        try:
            ray.get(reference)
        except (RayError, RaycpError) as error:
            inner = unwrap(error)
            return inner if not dead_only or isinstance(inner, RayActorError) else None
        return None

    def _fail(self, failures: dict[int, BaseException], pending: dict[Any, Member], what: str) -> None:
        lost = {r for r, e in failures.items() if isinstance(e, TimeoutError)}
        self.abort([m.rank for m in pending.values() if m.rank not in lost])
        deadline = time.monotonic() + BLAME_SECONDS
        left = [r for r, m in pending.items() if m.rank not in lost]
        while left and time.monotonic() < deadline:
            done, left = ray.wait(left, num_returns=len(left), timeout=max(0.0, deadline - time.monotonic()))
            for reference in done:
                error = self._failure_of(reference, dead_only=False)
                if error is not None:
                    failures[pending[reference].rank] = error
        self._open = {r: pending[r] for r in left}
        self._lost = {r for r, e in failures.items() if is_lost(e)}
        raise self._blame(failures, what)

    def _blame(self, failures: dict[int, BaseException], what: str) -> WorkerError:
        rank = min(failures, key=lambda r: (*weight(failures[r]), r))
        error = failures[rank]
        member = next(m for m in self.members if m.rank == rank)
        details = dict(error.details) if isinstance(error, WorkerError) else {}
        cause = str(details.get("cause") or cause_of(error))
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
            others={r: cause_of(e) for r, e in failures.items() if r != rank},
            lost=is_lost(error),
            silent_seconds=self._silent_for(rank) if isinstance(error, TimeoutError) else 0.0,
            lost_ranks=sorted(r for r, e in failures.items() if is_lost(e)),
            raised_ranks=sorted(r for r, e in failures.items() if weight(e)[0] == 1 and not is_lost(e)),
        )
        fix = error.fix if isinstance(error, RaycpError) and error.fix else default_fix(error)
        return WorkerError(f"{what} failed: {member.where}: {cause}", fix=fix, **details)

    def _silent_for(self, rank: int) -> float:
        """Seconds since a frozen or stuck rank last answered, or last moved inside this call."""
        now, beat = time.monotonic(), self._beats.get(rank)
        still = 0.0 if beat is None else min(float(beat["idle_seconds"]), now - self._began)
        return max(now - self._heard.get(rank, now), still)


def _node_is_alive(node_id: str) -> bool:
    return any(n["NodeID"] == node_id and n["Alive"] for n in ray.nodes())
