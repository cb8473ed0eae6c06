"""Which ranks are stuck, by what their counters say: the deadlines of every call of a rank.

Guarantees: a rank that still answers and gets no further is found within a stated time, whatever call it is in, and so
is one whose call does not begin; ranks that merely wait for it are not blamed; slow work is told from none by the
longest pause that the work has shown before. Pure functions, tested without a cluster; cost nothing.
"""

from collections.abc import Mapping
from typing import Any

from workers.memory_reader import READ_SECONDS
from workers.messages import COLLECTIVE_TIMEOUT
from workers.progress import ALONE, COPY, EVAL, IDLE, KEEPER, MEET, RESTORE, SAVE, STEP, WHOLE

SLOWER = 4.0
"""A rank is stuck when it stands still for so many times the longest pause that any rank has shown in this call."""
FIRST = 10.0
"""Least factor on `heartbeat_timeout` while a rank is in its first call of a kind: nobody knows yet how long its pauses
are. The same as for loading and writing, since the first time is when libraries are loaded and kernels made; and in all
steps of an accelerator, where the host has long ordered what the device computes: a heavy pack after light ones is a
silence.
"""
BEGIN = 3.0
"""Least factor until a call begins: it is a message, and an actor that does nothing else."""
COPY_PATIENCE = 13.0
"""Factor while a rank waits for the copy of its state. The driver gives a copy up after ten `heartbeat_timeout`, which
frees whoever waits for a keeper: a rank that waits for three more hangs in its own part of the copy.
"""
WHOLE_SECONDS = COLLECTIVE_TIMEOUT
"""Least time for a part of a call that shows no progress by nature: the other ranks wait for it no longer than that."""
KEEPER_SECONDS = READ_SECONDS + 10.0
"""Least time that a rank may wait for one keeper: it passes over one that is silent by itself."""
FILES = frozenset({RESTORE, SAVE})
"""Calls in which the storage is to blame where every one of several ranks stands still: they hold the state, and wait
as long as for a part without a sign of progress."""
_LATE = 1.0

Beat = Mapping[str, Any]
"""`Progress.snapshot` of one rank."""


def stuck(beats: Mapping[int, Beat], *, patience: float, heartbeat: float, running: float) -> dict[int, BaseException]:
    """Ranks that stand still for longer than they may.

    Where ranks wait for each other all of them stop when one does: only when every one stands still for too long the
    one that stopped first is to blame, and of those that do not say that they wait for the others. A rank in a call of
    `ALONE`, or whose call never begins, is judged by itself.

    Args:
        beats: by rank, of every one whose answer is awaited.
        patience: factor of this call on `heartbeat`.
        heartbeat: `heartbeat_timeout` (seconds).
        running: seconds since the call was made; what was before it is not held against a rank.

    Returns:
        The reason by rank.
    """
    still = {r: min(float(b["idle_seconds"]), running) for r, b in beats.items()}
    over = [r for r in beats if still[r] > _limit(r, beats, patience, heartbeat, running)]
    guilty = [r for r in over if beats[r]["call"] in ALONE or beats[r]["call"] == IDLE]
    if len(guilty) == len(beats) > 1 and all(b["call"] in FILES for b in beats.values()):
        return {r: TimeoutError(_cause(beats[r], still[r])) for r in guilty if still[r] > WHOLE_SECONDS}
    if not guilty and over and len(over) == len(beats):
        working = [r for r in over if beats[r]["phase"] != MEET] or over
        guilty = [max(working, key=lambda r: float(beats[r]["idle_seconds"]))]
    return {r: TimeoutError(_cause(beats[r], still[r])) for r in guilty}


def _limit(rank: int, beats: Mapping[int, Beat], patience: float, heartbeat: float, running: float) -> float:
    """Seconds that this rank may stand still."""
    beat = beats[rank]
    if beat["call"] == IDLE:
        return max(patience, BEGIN) * heartbeat
    if beat["phase"] == COPY:
        return COPY_PATIENCE * heartbeat
    alike = [b for b in beats.values() if b["call"] == beat["call"]]
    before = float(beat["call_seconds"]) > running + _LATE  # the call before this one has not ended yet
    first = before or any(b["calls_done"] == 0 for b in alike)
    first = first or (beat.get("ahead", False) and beat["call"] in (STEP, EVAL))
    limit = max(patience, FIRST if first else 0.0) * heartbeat
    limit = max(limit, SLOWER * max(float(b["longest"]) for b in alike))
    return max(limit, {KEEPER: KEEPER_SECONDS, WHOLE: WHOLE_SECONDS}.get(beat["phase"], 0.0))


def _cause(beat: Beat, still: float) -> str:
    if beat["call"] == IDLE:
        return f"no progress for {still:.0f} s: its call does not begin, though its control thread answers"
    part = "" if beat["phase"] == beat["call"] else f" ({beat['phase']})"
    return f"no progress for {still:.0f} s in {beat['call']}{part}"
