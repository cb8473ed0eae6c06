"""What an incident is: which error can be recovered from, how often, and what each phase of recovery took.

Guarantees: pure bookkeeping without Ray and without a clock of its own, so that every decision is tested by the
thousand; a run that fails three times in a row without a newly committed step stops with the cause; an error that
would come again (a loss that is not finite, bad data, a damaged model) is never retried.

Phases, in order: detect, freeze (every rank that is left comes to rest), fence (what is lost is killed), plan (the
world for what is left), rebuild (a new generation of groups), restore (state from memory or storage), run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from raycp.config import ElasticConfig
from raycp.errors import RaycpError, WorkerError
from raycp.plan.resize import WorldLimits

MAX_STRIKES = 3
"""Failures in a row without a committed step between them, after which the run stops."""


class Phase(Enum):
    """A part of a recovery; its name is the key in the event's `seconds`."""

    DETECT = "detect"
    FREEZE = "freeze"
    FENCE = "fence"
    PLAN = "plan"
    REBUILD = "rebuild"
    RESTORE = "restore"


@dataclass(kw_only=True)
class Incident:
    """One interruption, from the first failure until the ranks run again; faults meanwhile belong to it.

    Attributes:
        began: clock at the first failure, or when a resize was decided.
        attempted: highest step that was begun before it.
        error: the first failure; None: the world is resized because capacity came.
        causes: (rank, node, cause) of each failure, oldest first.
        seconds: by phase, summed over attempts.
    """

    began: float
    attempted: int
    error: WorkerError | None = None
    causes: list[tuple[int | None, str, str]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, phase: Phase, clock: Callable[[], float]) -> Iterator[None]:
        """Adds the time of the body to that phase, also when it raises."""
        began = clock()
        try:
            yield
        finally:
            self.seconds[phase.value] = self.seconds.get(phase.value, 0.0) + clock() - began

    def note(self, error: WorkerError) -> None:
        """One more failure."""
        details = error.details
        self.causes.append(
            (details.get("rank"), str(details.get("node", "?")), str(details.get("cause", error.message)))
        )
        silent = float(details.get("silent_seconds", 0.0))
        self.seconds[Phase.DETECT.value] = self.seconds.get(Phase.DETECT.value, 0.0) + silent


class Repeaters:
    """Processes that raised on their own since a step was committed: one that does it again is of no use.

    An accelerator's context that is broken stays so until its process ends, and raises in whatever is done there.
    """

    def __init__(self) -> None:
        self._committed = -1
        self._raised: list[Any] = []

    def again(self, raised: Sequence[Any], *, of: int, committed: int) -> list[Any]:
        """Which of the processes that raised have done so before, without a commit since.

        Args:
            raised: those that raised now.
            of: how many run. Where all of several raise, it is nothing about one of them.
            committed: the newest committed step.
        """
        if committed != self._committed:
            self._raised, self._committed = [], committed
        found = [one for one in raised if one in self._raised] if len(raised) < max(of, 2) else []
        self._raised += raised
        return found


class Strikes:
    """Counts failures without progress."""

    def __init__(self) -> None:
        self._count = 0
        self._committed = -1

    def failed(self, error: WorkerError, *, committed: int, on_loss: str) -> None:
        """A rank failed while `committed` was the newest committed step.

        Raises:
            WorkerError: `error`, if the run cannot or must not go on.
        """
        self._count = self._count + 1 if committed == self._committed else 1
        self._committed = committed
        if on_loss == "stop" or error.details.get("fatal"):
            raise error
        if self._count >= MAX_STRIKES:
            raise WorkerError(
                f"{self._count} failures in a row after step {committed}, without a step between them; the last one: "
                f"{error.message} ({error.details.get('cause', 'no cause known')})",
                fix=error.fix,
                **error.details,
            ) from error


def no_world(
    workers: int, incident: Incident, limits: WorldLimits, elastic: ElasticConfig, *, keeps: int
) -> WorkerError:
    """The error for a run that cannot go on with the workers that are left.

    Args:
        workers: how many are healthy.
        incident: what happened.
        limits: of the worlds that the run may have.
        elastic: how long it waited, and for what.
        keeps: ranks that the run must not have fewer of, where only that forbids a smaller world; else 0.
    """
    waited = "" if elastic.on_loss == "shrink" else f" after waiting {elastic.wait_for_capacity:.0f} s"
    details: dict[str, Any] = {"rank": None, "node": "?", "cause": "no world fits these workers"}
    details |= incident.error.details if incident.error is not None else {}
    why = f"no world of them fits cp {limits.cp}, dp {limits.dp}, workers {limits.workers} and their memory"
    fix = "add nodes, lower elastic.min_workers, give parallel.cp as a pair, or raise elastic.wait_for_capacity"
    if keeps:
        why = f"the run keeps its {keeps} ranks (elastic.on_loss='wait')"
        fix = "add nodes and give the same command again, with a longer elastic.wait_for_capacity where they come "
        fix += "late, or with elastic.on_loss='auto' to go on with fewer ranks"
    return WorkerError(
        f"{workers} healthy workers are left{waited}, and {why}; what happened: {details['cause']}",
        fix=fix,
        **details | {"hopeless": True},
    )


def without_keeper(lost: RaycpError, when: str) -> WorkerError:
    """The failure of a world whose keepers are lost.

    Args:
        lost: `KeeperLost`.
        when: what was going on.
    """
    node_id = str(lost.details["node_id"])
    return WorkerError(
        f"{when}: {lost.message}", fix=lost.fix, rank=None, node=node_id, node_id=node_id, cause=lost.message
    )


def waiting(workers: int, elastic: ElasticConfig, *, keeps: int) -> str:
    """One line for the person while a run waits for workers; arguments as for `no_world`."""
    why = f"it keeps its {keeps} ranks (elastic.on_loss='wait')" if keeps else "its limits ask for more"
    if elastic.on_loss == "shrink":
        return f"{workers} healthy workers are left for the run, and {why}: starting others where there is room now"
    return (
        f"{workers} healthy workers are left for the run, and {why}: waiting up to {elastic.wait_for_capacity:.0f} s "
        "for others"
    )


def human(incident: Incident, *, now: float, lost: int, redone: int, grid: str) -> str:
    """One line for the person: what failed, where, how long it took, what it cost, how the run goes on."""
    took = now - incident.began + incident.seconds.get(Phase.DETECT.value, 0.0)
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in incident.seconds.items())
    what = "; then ".join(f"rank {rank} on {node}: {_short(cause)}" for rank, node, cause in incident.causes)
    if incident.error is None:
        return f"resized to {grid} in {took:.1f} s ({parts}): no step lost"
    cost = f"steps lost {lost}, computed again {redone}"
    return f"recovered from: {what}. {took:.1f} s ({parts}); {cost}; going on as {grid}"


def _short(cause: str) -> str:
    line = cause.strip().splitlines()[0] if cause.strip() else "unknown"
    return line if len(line) <= 120 else line[:117] + "..."
