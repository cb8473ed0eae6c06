"""The kill matrix as data: every phase of a run with every fault, what each pair must cost, or why it cannot occur.

`python -m tests.elastic.matrix [FAULT ...]` runs it (all faults, or some), adds the results to build/kill_matrix.json,
and writes all that are there as a table with seconds to build/kill_matrix.md.
"""

import argparse
import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray

from tests.elastic.campaign import Campaign, Result, Shape, unbroken_run
from tests.elastic.fake_nodes import ROOT, FakeNodes
from tests.elastic.runs import make_folder
from tests.elastic.script import Case, Strike
from tests.elastic.scripted_driver import CHECKPOINT_EVERY

IN_STEP = ("data", "forward", "ring exchange", "backward", "gradient reduce", "optimizer", "snapshot", "replication")
PHASES = ("placement", "connect", "load", *IN_STEP, "disk write", "manifest", "recovery", "shutdown")
FAULTS = (
    "SIGKILL",
    "SIGSTOP",
    "raylet SIGKILL",
    "zombie",
    "two workers",
    "second fault",
    "driver SIGKILL",
    "exception",
    "keeper dies",
    "disk full",
    "corrupt checkpoint",
    "node joins",
    "node flaps",
    "keeper frozen",
)
STANDARD = Shape()
"""Two ranks on two nodes, a spare on a third."""
GROWING = Shape(nodes=2, cp=(1, 3), elastic={"spares": 0, "max_workers": 3})
"""Two ranks on two nodes; a third node makes three."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A phase and a fault.

    Attributes:
        why_not: why the pair cannot occur; "" if it can.
        lost: committed steps that are computed again, at most.
        redone: steps that are computed again, at most.
    """

    phase: str
    fault: str
    why_not: str = ""
    lost: int = 0
    redone: int = 2

    @property
    def occurs(self) -> bool:
        return not self.why_not


_NO_RANK = "no code of a rank runs in this phase"
_NO_DISK = "nothing is written to storage in this phase"
_NOT_READ = "checkpoints are not read in this phase: the state is in memory"
_ONE = "one worker is hired"
_THIRD = "three failures without a step between them end the run, by design (tests/unit/driver)"

IMPOSSIBLE: Mapping[tuple[str, str], str] = {
    ("placement", "two workers"): _ONE,
    ("placement", "node joins"): "nobody is hired before the node joins",
    ("placement", "second fault"): "a hired worker that dies is no incident that there could be a second fault in",
    ("recovery", "second fault"): _THIRD,
    **{(p, "exception"): _NO_RANK for p in ("replication", "disk write", "manifest")},
    **{(p, "disk full"): _NO_DISK for p in PHASES if p not in ("disk write", "manifest", "recovery", "shutdown")},
    **{(p, "corrupt checkpoint"): _NOT_READ for p in PHASES if p not in ("load", "recovery", "shutdown")},
}

COSTS: Mapping[tuple[str, str], tuple[int, int]] = {
    # (phase, fault): steps lost, steps redone, at most; (0, 2) for all others
    **{("placement", f): (0, 0) for f in FAULTS if f not in ("raylet SIGKILL", "zombie", "node flaps", "node joins")},
    ("placement", "driver SIGKILL"): (0, 2),
    **{
        (p, fault): (0, 0)
        for fault in ("keeper dies", "keeper frozen")
        for p in (*IN_STEP, "disk write", "manifest", "shutdown")
    },
    **{(p, "disk full"): (0, 0) for p in ("disk write", "manifest", "shutdown")},
    **{(p, "node joins"): (0, 0) for p in PHASES if p != "recovery"},
    # the newest one is damaged, and the one that was being written when the first fault came was never committed
    **{(p, "corrupt checkpoint"): (3 * CHECKPOINT_EVERY, 3 * CHECKPOINT_EVERY + 2) for p in ("load", "recovery")},
    ("shutdown", "corrupt checkpoint"): (CHECKPOINT_EVERY, CHECKPOINT_EVERY),
    **{(p, "second fault"): (0, 4) for p in PHASES},
    **{("recovery", f): (0, 4) for f in FAULTS if f != "corrupt checkpoint"},
}


def pair(phase: str, fault: str) -> Pair:
    """What is known of a phase and a fault before anything runs."""
    lost, redone = COSTS.get((phase, fault), (0, 2))
    return Pair(phase=phase, fault=fault, why_not=IMPOSSIBLE.get((phase, fault), ""), lost=lost, redone=redone)


PAIRS = tuple(pair(phase, fault) for fault in FAULTS for phase in PHASES)

DIAGONAL = (
    ("placement", "SIGKILL"),
    ("connect", "exception"),
    ("load", "exception"),
    ("data", "raylet SIGKILL"),
    ("ring exchange", "SIGSTOP"),
    ("backward", "exception"),
    ("optimizer", "node flaps"),
    ("snapshot", "zombie"),
    ("recovery", "corrupt checkpoint"),
    ("replication", "keeper dies"),
    ("snapshot", "keeper frozen"),
    ("disk write", "disk full"),
    ("manifest", "driver SIGKILL"),
    ("forward", "second fault"),
    ("gradient reduce", "two workers"),
    ("shutdown", "SIGKILL"),
)
"""Every phase and every fault once or more; ("backward", "node joins") has a run of its own."""


def case_of(found: Pair) -> Case:
    """How the pair is brought about."""
    phase, fault = found.phase, found.fault
    in_memory = ("SIGKILL", "zombie", "keeper dies", "keeper frozen", "node flaps")
    place = {"manifest": "commit" if fault in in_memory else "manifest"}
    rank = 0 if phase == "shutdown" or FAULTS.index(fault) % 2 else 1
    kill = Strike(phase="forward", fault="SIGKILL", rank=0)
    what = {"second fault": "SIGKILL", "corrupt checkpoint": "keepers and checkpoint"}.get(fault, fault)
    strikes: tuple[Strike, ...] = (Strike(phase=place.get(phase, phase), fault=what, rank=rank),)
    if phase == "recovery":
        left = 0 if fault == "node joins" else 1  # no spare there: one rank recovers
        strikes = (kill, Strike(phase="recovery", fault=what, rank=left))
    elif fault == "second fault":
        strikes = (*strikes, Strike(phase="recovery", fault="SIGKILL", rank=0))
    elif (phase, fault) == ("load", "corrupt checkpoint"):
        strikes = (Strike(phase="data", fault="all but storage", rank=rank),)
    elif (phase, fault) == ("shutdown", "corrupt checkpoint"):
        strikes = (Strike(phase="shutdown", fault="corrupt", rank=0),)
    return Case(
        name=f"{phase}: {fault}",
        strikes=strikes,
        reform=phase in ("connect", "load") and fault != "corrupt checkpoint",
        hire=phase == "placement",
        checkpoint=phase in ("disk write", "manifest") or fault == "corrupt checkpoint",
        last=phase == "shutdown",
    )


def judge(found: Pair, result: Result) -> list[str]:
    """What is wrong with the result of a pair."""
    problems = list(result.problems)
    if result.lost > found.lost:
        problems.append(f"steps lost: {result.lost}, at most {found.lost} expected")
    if result.redone > found.redone:
        problems.append(f"steps redone: {result.redone}, at most {found.redone} expected")
    return problems


class Matrix:
    """Runs pairs on one live cluster.

    Args:
        folder: for everything.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inputs = folder / "inputs"
        self.inputs.mkdir(parents=True)
        make_folder(self.inputs)["model"].save_pretrained(self.inputs / "model")
        self.nodes = FakeNodes(folder)
        ray.init(address=self.nodes.address, log_to_driver=False, logging_level="ERROR")
        self.runs = 0
        self._unbroken: dict[int, dict[str, Any]] = {}

    def unbroken(self, steps: int) -> dict[int, dict[str, Any]]:
        """At least so many steps of the run that nothing happens to."""
        if len(self._unbroken) < steps:
            self.runs += 1
            out = self.folder / f"run-{self.runs}-unbroken"
            self._unbroken = unbroken_run(self.nodes, self.inputs, out, STANDARD, steps=steps)
        return self._unbroken

    def run(self, pairs: Sequence[Pair], *, seed: int = 0) -> tuple[list[Result], list[str]]:
        """Runs pairs of one shape in one run; (what each did, what is wrong with each and with the run)."""
        shape = GROWING if any(p.fault == "node joins" for p in pairs) else STANDARD
        self.runs += 1
        name = f"run-{self.runs}-{pairs[0].fault.replace(' ', '-')}"
        campaign = Campaign(self.nodes, self.inputs, self.folder / name, shape, [case_of(p) for p in pairs], seed=seed)
        problems = []
        try:
            campaign.run(90.0 + 60.0 * len(pairs))
        except AssertionError as error:
            problems.append(f"{name}: {error}")
            self.nodes.sweep()
        results = [campaign.result(i) for i in range(len(pairs))]
        problems += [
            f"{p.phase}: {p.fault}: {problem}"
            for p, result in zip(pairs, results, strict=True)
            for problem in judge(p, result)
        ]
        if campaign.finished:
            problems += [f"{name}: {problem}" for problem in campaign.check(self.unbroken(campaign.steps))]
        return results, problems

    def close(self) -> None:
        ray.shutdown()
        self.nodes.close()


def column(fault: str) -> list[Pair]:
    """The pairs of a fault that can occur; that of the end of the run comes last."""
    return [p for p in PAIRS if p.fault == fault and p.occurs]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A result in the table."""

    seconds: float
    lost: int
    redone: int
    problems: tuple[str, ...] = ()


def table(results: Mapping[tuple[str, str], Cell], where: str) -> str:
    """The results as Markdown."""
    lines = [
        "Seconds from the (last) fault to the next committed step / steps redone; *lost* where committed steps were.",
        where,
        "",
        "| phase | " + " | ".join(FAULTS) + " |",
        "|---" * (len(FAULTS) + 1) + "|",
    ]
    for phase in PHASES:
        cells = [_cell(pair(phase, fault), results.get((phase, fault))) for fault in FAULTS]
        lines.append(f"| {phase} | " + " | ".join(cells) + " |")
    reasons: dict[str, list[str]] = {}
    for found in PAIRS:
        if not found.occurs:
            reasons.setdefault(f"{found.fault}: {found.why_not}", []).append(found.phase)
    lines += ["", "n/a:", ""]
    lines += [f"* {reason} ({', '.join(phases)})" for reason, phases in reasons.items()]
    return "\n".join(lines) + "\n"


def _cell(found: Pair, result: Cell | None) -> str:
    if not found.occurs:
        return "n/a"
    if result is None:
        return "-"
    if result.problems:
        return "FAILED"
    text = f"{result.seconds:.1f} / {result.redone}"
    return text + (f" (*lost* {result.lost})" if result.lost else "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", help=f"of {', '.join(FAULTS)}; all by default")
    parser.add_argument("--phases", nargs="*", default=PHASES)
    parser.add_argument("--keep", action="store_true", help="leave the folders of the runs")
    options = parser.parse_args(arguments)
    unknown = set(options.faults) - set(FAULTS)
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    folder = Path(tempfile.mkdtemp(prefix="raycp-matrix-"))
    began, problems, count = time.monotonic(), [], 0
    matrix = Matrix(folder)
    try:
        for fault in options.faults or FAULTS:
            pairs = [p for p in column(fault) if p.phase in options.phases]
            if not pairs:
                continue
            found, wrong = matrix.run(pairs)
            problems += wrong
            count += len(pairs)
            _show(zip(pairs, found, strict=True), wrong)
            keep(pairs, found)
    finally:
        matrix.close()
    print(f"{count} pairs in {time.monotonic() - began:.0f} s, {len(problems)} problems")
    if not (options.keep or problems):
        shutil.rmtree(folder)
    return 1 if problems else 0


def run_column(fault: str, matrix: Matrix) -> None:
    """Asserts that all pairs of a fault do what is expected of them, and adds them to the table of results."""
    pairs = column(fault)
    results, problems = matrix.run(pairs)
    keep(pairs, results)
    assert problems == []
    assert len(results) == len(pairs)


def keep(pairs: Sequence[Pair], found: Sequence[Result]) -> None:
    """Adds results to build/kill_matrix.json, and makes the table beside it of all that are there."""
    stored = ROOT / "build" / "kill_matrix.json"
    stored.parent.mkdir(exist_ok=True)
    with stored.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = _load(stored)
        for one, r in zip(pairs, found, strict=True):
            results[one.phase, one.fault] = Cell(
                seconds=r.seconds, lost=r.lost, redone=r.redone, problems=tuple(judge(one, r))
            )
        _store(stored, results)
        where = f"On {os.cpu_count()} cores ({_processor()}), {len(results)} pairs."
        stored.with_suffix(".md").write_text(table(results, where))


def _load(path: Path) -> dict[tuple[str, str], Cell]:
    rows = json.loads(path.read_text()) if path.exists() else []
    return {(r.pop("phase"), r.pop("fault")): Cell(**r) for r in rows}


def _store(path: Path, results: Mapping[tuple[str, str], Cell]) -> None:
    rows = [{"phase": phase, "fault": fault, **asdict(cell)} for (phase, fault), cell in results.items()]
    path.write_text(json.dumps(rows, indent=1))


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _show(found: Iterable[tuple[Pair, Result]], wrong: Sequence[str]) -> None:
    for one, r in found:
        cost = f"{r.seconds:6.2f} s, lost {r.lost}, redone {r.redone}, ranks {r.grids[0]} -> {r.grids[1]}"
        print(f"{one.phase:>16} {one.fault:<18} {cost}; {' '.join(r.events)}", flush=True)
    for problem in wrong:
        print(f"PROBLEM {problem}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
