"""`make soak`: a tiny job of many steps under random faults on several nodes; it has to finish as if nothing had been.

Faults come without waiting until the run is complete again: while spares start, while it grows, while it recovers.
Each is a random phase and fault of the kill matrix, seeded. At the end every pack was trained once, in order, and no
process, actor, placement group, port or memory file is left.
"""

import argparse
import collections
import dataclasses
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from raycp.events import read_events
from tests.elastic.campaign import Campaign
from tests.elastic.matrix import IN_STEP, PAIRS, STANDARD, Matrix, Pair, case_of

PHASES = (*IN_STEP, "connect", "load", "recovery", "disk write", "manifest")
FAULTS = {
    "SIGKILL": 6,
    "exception": 4,
    "keeper dies": 3,
    "keeper frozen": 1,
    "SIGSTOP": 2,
    "raylet SIGKILL": 2,
    "second fault": 2,
    "two workers": 2,
    "node flaps": 1,
    "zombie": 1,
    "driver SIGKILL": 1,
    "disk full": 1,
}
"""Weights."""


def draw(count: int, seed: int) -> list[Pair]:
    """Random pairs that can occur."""
    chance = random.Random(seed)
    known = {(p.phase, p.fault): p for p in PAIRS if p.occurs and p.phase in PHASES}
    drawn: list[Pair] = []
    while len(drawn) < count:
        (fault,) = chance.choices(list(FAULTS), list(FAULTS.values()))
        found = known.get((chance.choice(PHASES), fault))
        if found is not None:
            drawn.append(found)
    return drawn


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100, help="at least so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="leave the folder of the run")
    options = parser.parse_args(arguments)
    pairs = draw(options.faults + options.faults // 10, options.seed)  # some find no place: in a world of one rank
    cases = [dataclasses.replace(case_of(p), eager=p.fault not in ("driver SIGKILL",)) for p in pairs]
    folder = Path(tempfile.mkdtemp(prefix="raycp-soak-"))
    matrix = Matrix(folder)
    problems: list[str] = []
    began = time.monotonic()
    try:
        campaign = Campaign(matrix.nodes, matrix.inputs, folder / "soak", STANDARD, cases, seed=options.seed)
        campaign.run(120.0 + 30.0 * len(cases))
        took = time.monotonic() - began
        results = [campaign.result(i) for i in range(len(cases))]
        problems += [f"{r.case.name}: {p}" for r in results for p in r.problems if not r.skipped]
        problems += campaign.check(matrix.unbroken(campaign.steps))
        log = list(read_events(campaign.out / "events.jsonl"))
        count = collections.Counter(e["event"] for e in log)
        happened = collections.Counter(p.fault for p, r in zip(pairs, results, strict=True) if not r.skipped)
        if happened.total() < options.faults:
            problems.append(f"{happened.total()} faults, not {options.faults}")
        lost = sum(int(e["steps_lost"]) for e in log if e["event"] == "recovered")
        redone = sum(int(e["steps_redone"]) for e in log if e["event"] == "recovered")
        print(f"{happened.total()} faults in {took:.0f} s, seed {options.seed}: {dict(happened)}")
        print(f"{count['step']} steps committed, {count['recovered']} recoveries, {count['resized']} resizes,")
        print(f"{count['keeper_lost']} keepers replaced, {campaign.starts} drivers; steps lost {lost}, redone {redone}")
        print(f"events: {dict(count)}")
    except AssertionError as error:
        problems.append(str(error))
    finally:
        matrix.close()
    for problem in problems:
        print(f"PROBLEM {problem}")
    print("soak: " + ("FAILED" if problems else "every pack once, losses equal, nothing left"))
    if not (options.keep or problems):
        shutil.rmtree(folder)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
