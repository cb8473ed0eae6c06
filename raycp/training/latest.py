"""latest.json beside the step folders: what was committed last, and which generation may commit.

Guarantees: neither ever goes back within a run, so a process of an older generation that wakes up late advances
nothing; a run is bound by its own file only, not by one that another run left in the folder; replaced in one piece; a
torn or missing one says nothing, and the listing of the folder is enough. Two that write at once may lose the older
entry, which is harmless: `committed.newest` compares generations again. Costs one small file a commit.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from raycp.training.storage import Storage

LATEST = "latest.json"


@dataclass(frozen=True, kw_only=True)
class Latest:
    """The content of the file.

    Attributes:
        run_id: whose it is; "" if there is none.
        fence: no driver of a generation of the run before this one may commit.
        generation: of the step that was committed last.
        step: that one; None before the first.
    """

    run_id: str = ""
    fence: int = 0
    generation: int = 0
    step: int | None = None

    def fence_of(self, run_id: str) -> int:
        """The first generation of this run that may commit."""
        return self.fence if run_id == self.run_id else 0


def read_latest(root: Storage) -> Latest:
    """What the file says; nothing, if it is missing or torn."""
    try:
        raw: Any = json.loads(root.read(LATEST))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return Latest()
    match raw if isinstance(raw, Mapping) else {}:
        case {
            "run_id": str(run),
            "fence": int(fence),
            "generation": int(generation),
            "step": int(step) | (None as step),
        }:
            return Latest(run_id=run, fence=fence, generation=generation, step=step)
    return Latest()


def advance(root: Storage, run_id: str, generation: int, step: int) -> None:
    """`step` of `generation` was committed."""
    old = read_latest(root)
    new = Latest(run_id=run_id, fence=max(generation, old.fence_of(run_id)), generation=generation, step=step)
    if old.run_id == run_id and old.step is not None and (old.generation, old.step) > (generation, step):
        new = replace(old, fence=new.fence)
    _write(root, old, new)


def fence(root: Storage | Path | str, run_id: str, generation: int) -> None:
    """From now on no driver of a generation of the run before this one commits a step below `root`."""
    root = Storage.of(root)
    old = read_latest(root)
    mine = old if old.run_id == run_id else Latest(run_id=run_id)
    _write(root, old, replace(mine, fence=max(mine.fence, generation)))


def _write(root: Storage, old: Latest, new: Latest) -> None:
    if new != old:
        root.replace(LATEST, json.dumps(asdict(new)).encode())
