"""Which keepers answer: what their answers say about their health, and since when one is silent.

Guarantees: a keeper that died is told at the next look; one that answers no more (its process was stopped, its node or
the network hangs) once it has been silent for the stated time, and not before. Costs a message to each keeper whenever
`beat` is called. Not thread-safe: whoever owns it holds a lock.
"""

import time
from collections.abc import Mapping
from typing import Any

from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

from raycp.driver.keeper_calls import CONTROL, answers_of, first_line, lost, on
from raycp.errors import RaycpError

UNAVAILABLE_SECONDS = 3.0
"""How long a keeper may be out of reach before it counts as lost."""


class Pulse:
    """The health of keepers, by node id.

    Args:
        unresponsive_after: seconds without an answer to a beat after which a keeper is lost.
    """

    def __init__(self, unresponsive_after: float) -> None:
        self._unresponsive_after = unresponsive_after
        self._beats: dict[str, tuple[Any, float]] = {}
        self._silent: dict[str, tuple[float, str]] = {}

    def beat(self, handles: Mapping[str, Any], generation: int) -> None:
        """Sends each keeper a word of the driver of `generation`, unless it has not answered the one before."""
        now = time.monotonic()
        for node_id, handle in handles.items():
            before = self._beats.get(node_id)
            if before is not None:
                answer = answers_of({node_id: before[0]}, 0.0)[node_id]
                if isinstance(answer, GetTimeoutError):
                    self.waits(node_id, before[1], self._unresponsive_after)
                    continue
                self.note(node_id, answer)
            self._beats[node_id] = (on(handle, "beat", CONTROL).remote(generation), now)

    def note(self, node_id: str, answer: Any) -> None:
        """What an answer says."""
        if isinstance(answer, ActorUnavailableError):
            self._silent.setdefault(node_id, (time.monotonic(), first_line(answer)))
        elif isinstance(answer, RayActorError):
            self._silent[node_id] = (float("-inf"), first_line(answer))
        elif isinstance(answer, BaseException) and not isinstance(answer, RaycpError | GetTimeoutError):
            self._silent[node_id] = (float("-inf"), f"{type(answer).__name__}: {first_line(answer)}")
        else:
            self._silent.pop(node_id, None)

    def waits(self, node_id: str, asked: float, limit: float) -> None:
        """A question of the time `asked` has no answer yet; more than `limit` seconds are too many."""
        silent = time.monotonic() - asked
        if silent > limit:
            self._silent[node_id] = (float("-inf"), f"no answer for {silent:.0f} s")

    def silent(self) -> dict[str, str]:
        """Those that have died, or were out of reach or silent for too long, and how that was seen."""
        now = time.monotonic()
        return {n: cause for n, (since, cause) in self._silent.items() if now - since > UNAVAILABLE_SECONDS}

    def check(self) -> None:
        """Raises:
        KeeperLost: one has died, or was out of reach or silent for too long.
        """
        for node_id, cause in self.silent().items():
            raise lost(node_id, cause)

    def forget(self, node_id: str) -> None:
        """The keeper of that node is nobody's any more."""
        self._beats.pop(node_id, None)
        self._silent.pop(node_id, None)
