"""How a tester hits a run at an exact place: a folder that driver, workers, keepers and the tester talk through.

The driver arms a case; whoever comes to the place that the case names says so and stands still there until the tester
has done what the case wants (or is killed meanwhile). Each strike happens once, whatever is computed again.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PATIENCE = 30.0
"""Seconds that a process stands still for the tester at most."""


class PlantedError(ValueError):
    """The exception of a case."""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One fault at one place.

    Attributes:
        phase: the place.
        fault: what happens there.
        rank: whom it happens to, where a rank comes there.
    """

    phase: str
    fault: str
    rank: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """What happens in one incident.

    Attributes:
        name: for people.
        strikes: one after another.
        reform: the world is formed again without a loss first, to come to the place.
        hire: an idle spare dies first, so that another worker is hired and comes to the place.
        checkpoint: it happens in a step that is saved.
        last: it happens in the last step.
        ends: it ends the run with an error, and the same command goes on.
        eager: it does not wait until the run is complete again, and is left out where its place does not exist.
    """

    name: str
    strikes: tuple[Strike, ...]
    reform: bool = False
    hire: bool = False
    checkpoint: bool = False
    last: bool = False
    ends: bool = False
    eager: bool = False


class Script:
    """The cases of one run and how far they are.

    Args:
        folder: where the files are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, cases: list[Case]) -> None:
        self.folder.mkdir(parents=True)
        self._put("cases.json", [asdict(c) for c in cases])

    def cases(self) -> list[Case]:
        return [
            Case(**{**c, "strikes": tuple(Strike(**s) for s in c["strikes"])})
            for c in json.loads((self.folder / "cases.json").read_text())
        ]

    def say(self, what: str, **fields: Any) -> None:
        """Leaves a mark."""
        self._put(what, {"time": time.time(), **fields})

    def said(self, what: str) -> dict[str, Any] | None:
        """The mark, if it was left."""
        path = self.folder / what
        return dict(json.loads(path.read_text())) if path.exists() else None

    def wait(self, what: str, seconds: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + seconds
        while (found := self.said(what)) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        return found

    def hit(self, phase: str, *, step: int | None = None, rank: int | None = None, **who: Any) -> None:
        """The calling process has come to `phase`: if the armed case says so, it waits here for its fault.

        Args:
            phase: the place.
            step: of the run, where the place is inside a step: only that of the case counts.
            rank: of the process; None: it has none, and any comes as good as another.
            who: more about the process, for the tester.

        Raises:
            PlantedError: the case wants an exception here.
            OSError: the case wants a full disk here.
        """
        armed = self.said("armed")
        if armed is None:
            return
        number, case = int(armed["number"]), self.case(armed)
        for index, strike in enumerate(case.strikes):
            mark = f"{number}-{index}"
            if (self.folder / f"reached-{mark}").exists():
                continue
            if strike.phase != phase or rank not in (None, strike.rank) or step not in (None, armed["step"]):
                return
            if not self._claim(mark, phase=phase, step=step, rank=rank, **who):
                return
            self._suffer(strike, mark)
            return

    def _suffer(self, strike: Strike, mark: str) -> None:
        if strike.fault == "exception":
            self.say(f"done-{mark}")
            raise PlantedError(f"planted in {strike.phase}: this rank alone cannot go on")
        if strike.fault == "disk full":
            self.say(f"done-{mark}")
            with open("/dev/full", "wb", buffering=0) as full:
                full.write(b"no space is left here")
        self.wait(f"done-{mark}", PATIENCE)

    def case(self, armed: Mapping[str, Any]) -> Case:
        """The case that was armed; its ranks are those of the world at that time."""
        c = armed["case"]
        return Case(**{**c, "strikes": tuple(Strike(**s) for s in c["strikes"])})

    def _claim(self, mark: str, **fields: Any) -> bool:
        try:
            os.close(os.open(self.folder / f"claimed-{mark}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        self.say(f"reached-{mark}", pid=os.getpid(), **fields)
        return True

    def _put(self, name: str, value: Any) -> None:
        aside = self.folder / f".{name}.{os.getpid()}.{time.monotonic_ns()}"
        aside.write_text(json.dumps(value))
        os.replace(aside, self.folder / name)


PRIVATE = "RAYCP_FAKE_NODE"
"""Environment variable of a fake node's processes: the node's private folder, beside those of the others."""


def stay_at_home() -> None:
    """From now on this process cannot open what is private to another fake node."""
    home = Path(os.environ[PRIVATE])

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str | bytes):
            return
        path = Path(os.fsdecode(arguments[0]))
        if home.parent in path.parents and home != path and home not in path.parents:
            (home.parent / "trespassed").write_text(f"{home.name} opened {path}")
            raise PermissionError(f"{path} is on another machine")

    sys.addaudithook(look)


def put(where: Any, name: str, what: Any) -> None:
    """Replaces something of ours by a version with a stop in it."""
    setattr(where, name, what)


def node_of_this() -> str:
    """Ray's id of the node."""
    import ray

    return str(ray.get_runtime_context().get_node_id())
