"""A run that is hit case after case, and what became of it.

The driver runs in a process of its own (`tests.elastic.scripted_driver`); this one owns the nodes, does to processes
what the cases say, tidies up (nodes come back), starts the driver again when it was killed, and looks at the end: every
pack once in the order of an unbroken run, losses equal, nothing left.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from raycp.events import read_events
from tests.elastic import leftovers
from tests.elastic.fake_nodes import ROOT, FakeNodes, send_signal, wait_for
from tests.elastic.script import PRIVATE, Case, Script, Strike

SETTLE_SECONDS = 90.0
"""A case, from its first strike until two more steps are committed."""
THAW_SECONDS = 20.0
INCIDENTS = (
    "recovered",
    "resized",
    "keeper_lost",
    "checkpoint_failed",
    "snapshot_failed",
    "worker_lost",
    "run_failed",
    "run_started",
)


@dataclass(kw_only=True)
class Result:
    """What a case did.

    Attributes:
        case: of it.
        seconds: from the (last) strike to the next committed step.
        lost, redone: steps, summed over its `recovered` events.
        events: names of the incidents' events, in order.
        grids: ranks before and after.
        problems: what is wrong; empty if nothing is.
    """

    case: Case
    seconds: float = float("nan")
    lost: int = 0
    redone: int = 0
    events: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    grids: tuple[int, int] = (0, 0)
    problems: list[str] = field(default_factory=list)
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A run that can be hit.

    Attributes:
        nodes: of one CPU each.
        workers: ranks.
        cp: lowest and highest.
        elastic: settings beside those of all runs.
    """

    nodes: int = 3
    workers: int = 2
    cp: tuple[int, int] = (1, 2)
    elastic: dict[str, Any] = field(default_factory=lambda: {"spares": 1})

    def settings(self) -> dict[str, Any]:
        return {"workers": self.workers, "cp": self.cp, "elastic": self.elastic}


class Campaign:
    """One run.

    Args:
        nodes: the cluster.
        inputs: folder with model, tokenizer and rows.
        out: output folder of the run.
        shape: of the run.
        cases: in order.
        seed: of what is left to chance.
        armed: the first case is armed before the driver starts.
    """

    def __init__(
        self,
        nodes: FakeNodes,
        inputs: Path,
        out: Path,
        shape: Shape,
        cases: list[Case],
        *,
        seed: int = 0,
        steps: int | None = None,
        armed: bool = False,
    ) -> None:
        self.nodes, self.out, self.shape, self.cases = nodes, out, shape, cases
        self.random = random.Random(seed)
        self.steps = steps or sum(9 if c.checkpoint else 5 for c in cases) + 10
        out.mkdir(parents=True)
        self.script = Script(out / "script")
        self.script.write(cases)
        self.shared = leftovers.shared_names()
        self.settings = out / "settings.json"
        self.settings.write_text(
            json.dumps(
                {
                    "address": nodes.address,
                    "inputs": str(inputs),
                    "output_dir": str(out),
                    "steps": self.steps,
                    **shape.settings(),
                }
            )
        )
        if armed:
            from dataclasses import asdict

            self.script.say("armed", number=0, case=asdict(cases[0]), step=1, ranks=[], spares=[])
        self.driver: subprocess.Popen[str] | None = None
        self.starts = 0
        self.finished = False
        self.done: set[str] = set()
        self.corrupted: list[str] = []
        self.stopped: list[int] = []

    # -- the run ----------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> list[Result]:
        """Runs to the end; returns what each case did."""
        self.nodes.keep(self.shape.nodes)
        self._start()
        deadline = time.monotonic() + seconds
        restored = -1
        try:
            while True:
                if time.monotonic() > deadline:
                    raise AssertionError(f"not done after {seconds:.0f} s: {self.state()}\n{self._kill()}")
                number, case = self._armed()
                if case is not None:
                    self._act(number, case)
                    if number > restored and self.script.said(f"settled-{number}") is not None:
                        self._tidy_up(number)
                        restored = number
                if self.driver is not None and self.driver.poll() is not None and self._ended(number, case):
                    break
                time.sleep(0.005)
            if self.nodes.frozen or self.stopped:
                self._tidy_up(len(self.cases) - 1)
            self.finished = True
        finally:
            self._kill()
        return [self.result(i) for i in range(len(self.cases))]

    def state(self) -> str:
        marks = sorted(p.name for p in self.script.folder.iterdir() if not p.name.startswith("."))
        events = [e["event"] for e in read_events(self.out / "events.jsonl")]
        return f"{marks[-12:]}; {len(events)} events, the last ones {events[-6:]}"

    def _start(self) -> None:
        self.starts += 1
        self.log = (self.out / f"driver-{self.starts}.log").open("w")
        self.driver = subprocess.Popen(
            [sys.executable, "-m", "tests.elastic.scripted_driver", str(self.settings)],
            cwd=ROOT,
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1", PRIVATE: str(self.nodes.folder / "driver")},
            stdout=self.log,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _ended(self, number: int, case: Case | None) -> bool:
        """Whether the run is over; starts the driver again where a case ended it."""
        assert self.driver is not None
        code = self.driver.returncode
        if code == 0:
            return True
        killed = case is not None and any(s.fault in ("driver SIGKILL", "all but storage") for s in case.strikes)
        ended = case is not None and case.ends and self.script.said(f"done-{number}-0") is not None
        if not (killed or ended) or self.starts > 2 * len(self.cases) + 2:
            raise AssertionError(f"the driver ended with {code} in case {number} ({case}):\n{self._tail()}")
        self._start()
        return False

    def _armed(self) -> tuple[int, Case | None]:
        armed = self.script.said("armed")
        if armed is None:
            return -1, None
        return int(armed["number"]), self.script.case(armed)

    def _kill(self) -> str:
        if self.driver is not None and self.driver.poll() is None:
            self.driver.kill()
            self.driver.wait()
        return self._tail()

    def _tail(self) -> str:
        return "\n".join((self.out / f"driver-{self.starts}.log").read_text().splitlines()[-40:])

    # -- faults -----------------------------------------------------------------------------------------------------

    def _act(self, number: int, case: Case) -> None:
        """Does what the case wants of whoever has come to its place."""
        if case.hire and f"hire-{number}" not in self.done:
            self.done.add(f"hire-{number}")
            for pid in (self.script.said("armed") or {})["spares"]:
                send_signal(pid, signal.SIGKILL)
        for index, strike in enumerate(case.strikes):
            mark = f"{number}-{index}"
            reached = self.script.said(f"reached-{mark}")
            if reached is None or mark in self.done:
                continue
            self.done.add(mark)
            if strike.fault not in ("exception", "disk full"):
                struck = time.time()
                if strike.fault == "node joins":  # a rank that stood still for as long as a node starts would be lost
                    self.script.say(f"done-{mark}", struck=struck)
                self._strike(strike, reached)
                self.script.say(f"done-{mark}", struck=struck)

    def _strike(self, strike: Strike, reached: dict[str, Any]) -> None:
        armed = self.script.said("armed") or {}
        near = [r for r in armed["ranks"] if r["node"] == reached.get("node") or r["rank"] == strike.rank]
        victim = reached if strike.phase not in NOT_RANKED or not near else near[0]
        pid = int(victim["pid"])
        match strike.fault:
            case "SIGKILL":
                send_signal(pid, signal.SIGKILL)
            case "SIGSTOP":
                send_signal(pid, signal.SIGSTOP)
                self.stopped.append(pid)
            case "two workers":
                for one in {pid, *(r["pid"] for r in armed["ranks"])}:
                    send_signal(one, signal.SIGKILL)
            case "raylet SIGKILL":
                self.nodes.kill(self.nodes.of(victim["node"]))
            case "zombie":
                self.nodes.freeze(self.nodes.of(victim["node"]))
            case "node flaps":
                self.nodes.kill(self.nodes.of(victim["node"]), all_of_it=True)
                self.nodes.kill(self.nodes.add())
            case "node joins":
                self.nodes.add()
            case "keeper dies":
                self._hit_keeper(victim["node"], signal.SIGKILL)
            case "keeper frozen":
                self._hit_keeper(victim["node"], signal.SIGSTOP)
            case "keepers and checkpoint":
                self._corrupt()
                for node in self.nodes.nodes:
                    self._hit_keeper(node.node_id, signal.SIGKILL)
            case "corrupt":
                self._corrupt()
            case "all but storage":
                self._corrupt()
                for node in self.nodes.nodes:
                    self._hit_keeper(node.node_id, signal.SIGKILL)
                self._kill()
            case "driver SIGKILL":
                self._kill()
            case _:
                raise AssertionError(f"no such fault: {strike.fault}")

    def _hit_keeper(self, node_id: str, number: signal.Signals) -> None:
        keeper = self.script.said(f"keeper-{node_id}")
        if keeper is not None:
            send_signal(int(keeper["pid"]), number)
            if number == signal.SIGSTOP:
                self.stopped.append(int(keeper["pid"]))

    def _corrupt(self) -> None:
        """Flips a bit in the newest checkpoint."""
        folder = max((self.out / "checkpoints").glob("step-*"))
        shard = self.random.choice(sorted(folder.glob("*.safetensors")))
        content = bytearray(shard.read_bytes())
        content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
        shard.write_bytes(content)
        self.corrupted.append(folder.name)

    def _tidy_up(self, number: int) -> None:
        left = self.nodes.thaw(THAW_SECONDS) if self.nodes.frozen else []
        for pid in self.stopped:
            send_signal(pid, signal.SIGKILL)
        self.stopped = []
        self.nodes.keep(self.shape.nodes)
        self.script.say(f"restored-{number}", left=left)

    # -- what became of it ------------------------------------------------------------------------------------------

    def result(self, number: int) -> Result:
        """What a case did, by the event log."""
        case = self.cases[number]
        result = Result(case=case)
        log = list(read_events(self.out / "events.jsonl"))
        marks = [self.script.said(f"done-{number}-{i}") for i in range(len(case.strikes))]
        if not all(marks):
            result.problems.append(f"strike {[i for i, m in enumerate(marks) if not m]} never happened")
            return result
        result.skipped = any(m.get("skipped") for m in marks if m)
        began, struck = (f(float(m.get("struck", m["time"])) for m in marks if m) for f in (min, max))
        restored = self.script.said(f"restored-{number}")
        end = float(restored["time"]) if restored is not None else float("inf")
        during = [e for e in log if began - 0.001 <= e["time"] <= end]
        steps = [e for e in during if e["event"] == "step" and e["time"] > struck]
        before = [e for e in log if e["event"] == "step" and e["time"] < began]
        named = _own(e for e in during if e["event"] in INCIDENTS)
        recovered = [e for e in named if e["event"] == "recovered"]
        last = max((e["time"] for e in recovered), default=struck)
        following = [e["time"] for e in log if e["event"] in ("step", "run_finished") and e["time"] >= last]
        if following:
            result.seconds = following[0] - struck
        result.lost = sum(int(e["steps_lost"]) for e in recovered)
        result.redone = sum(int(e["steps_redone"]) for e in recovered)
        result.events = tuple(e["event"] for e in named)
        result.causes = tuple(str(e.get("cause")) for e in named if e["event"] == "worker_lost")
        result.grids = (_size(before[-1:]), _size(steps[:1]))
        if restored is not None and restored["left"]:
            result.problems.append(f"woke up and stayed: {restored['left']}")
        return result

    def check(self, unbroken: dict[int, dict[str, Any]]) -> list[str]:
        """What is wrong with the run as a whole: losses, packs, what is left."""
        problems = []
        steps = [e for e in read_events(self.out / "events.jsonl") if e["event"] == "step"]
        if [e["step"] for e in steps] != list(range(1, self.steps + 1)):
            problems.append(f"steps of the log are not 1 .. {self.steps}: {[e['step'] for e in steps]}")
        changed = False
        for event in steps:
            truth = unbroken[event["step"]]
            if event["pack_ids"] != truth["pack_ids"]:
                problems.append(f"step {event['step']} has packs {event['pack_ids']}, not {truth['pack_ids']}")
            changed = changed or event["grid"] != truth["grid"]
            error = abs(event["loss"] - truth["loss"]) / abs(truth["loss"])
            if error > (1e-5 if changed else 0.0):
                problems.append(f"step {event['step']} has loss {event['loss']}, not {truth['loss']} ({error:.1e})")
        trespassed = self.nodes.folder / "trespassed"
        if trespassed.exists():
            problems.append(trespassed.read_text())
            trespassed.unlink()
        return problems + self.left()

    def left(self) -> list[str]:
        """Processes, actors, placement groups, ports, memory and files that outlived the run."""
        root, found = self.nodes.folder, list[str]()
        looks: dict[str, Callable[[], list[str]]] = {
            "processes": lambda: leftovers.processes(root),
            "actors": self._actors,
            "placement groups": self._groups,
            "ports": lambda: leftovers.ports(root),
            "memory": lambda: leftovers.memory(root, before=self.shared, homes=[n.home for n in self.nodes.nodes]),
        }
        for what, look in looks.items():
            if not wait_for(lambda look=look: not look(), 15.0 if what == "processes" else 10.0):
                found.append(f"{what}: {look()}")
        driver = self.script.said("driver-left")
        if driver is None or driver["left"]:
            found.append(f"in the driver after its run: {driver}")
        nonces = list((self.out / ".raycp").glob("nonce-*"))
        if len(nonces) > self.starts - 1:
            found.append(f"files: {nonces}")
        return found

    def _actors(self) -> list[str]:
        table = ray._private.state.state.actor_table(None)
        return [f"{a['ActorClassName']} {a['State']}" for a in table.values() if a["State"] != "DEAD"]

    def _groups(self) -> list[str]:
        return [g for g, t in ray.util.placement_group_table().items() if t["state"] != "REMOVED"]


NOT_RANKED = ("replication", "disk write", "manifest", "commit")
"""Places that keepers and the driver come to; to all others the victim comes itself."""


def _own(incidents: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the recovery from what was done before the case: the node that the case before it had added goes away."""
    found: list[dict[str, Any]] = []
    for event in incidents:
        if event["event"] != "recovered" or any(e["event"] in ("worker_lost", "run_started") for e in found):
            found.append(event)
    return found


def _size(events: list[dict[str, Any]]) -> int:
    return int(events[0]["grid"]["dp"] * events[0]["grid"]["cp"]) if events else 0


def unbroken_run(nodes: FakeNodes, inputs: Path, out: Path, shape: Shape, *, steps: int) -> dict[int, dict[str, Any]]:
    """The `step` events of a run that nothing happens to."""
    campaign = Campaign(nodes, inputs, out, shape, [], steps=steps)
    campaign.run(240.0 + steps)
    return {e["step"]: e for e in read_events(out / "events.jsonl") if e["event"] == "step"}
