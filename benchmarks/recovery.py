"""Seconds from a fault to the next committed step, and the committed steps that it costs; Ray Train beside it.

A tiny Llama on 4 ranks of two nodes of a Ray cluster on this machine (fp32, gloo), one cluster and one run per row. The
fault is a real signal, sent in the middle of a step. *Next step* is the first step that was begun after the recovery,
when it is committed; *seen* is when the driver wrote `worker_lost`. "One step" in a bar is the median step before it.
Losses of every run are compared with those of a run that nothing happened to: equal bit for bit where the world stayed
the same, else to 1e-5; and every pack has to be counted once, in order.

Ray Train's `TorchTrainer` trains the same model on the same number of tokens a step, data parallel, with a checkpoint
every `EVERY` steps. Its next step is the first one after the restart, though that is an old step computed again; *back*
is when it has reached the step that it was in.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.faults import Nodes, driver, read_lines, wait_for
from benchmarks.report import Report, parser, table
from workers.actor import TrainWorker
from workers.messages import Rendezvous

TOKENS = 4096
STEPS = 1000
"""Of the learning-rate schedule; runs are stopped long before."""
BEFORE = 6
"""Committed steps before the fault."""
AFTER = 4
"""Committed steps after the recovery, or after the run has grown back."""
FROZEN = 4.0
"""`elastic.heartbeat_timeout` where something is frozen."""
EVERY = 20
"""Steps between the peer's checkpoints."""
MODEL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TOKENS,
    "bos_token_id": None,
    "eos_token_id": 0,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: a run, and what happens to it.

    Attributes:
        fault: what is signalled: (ranks, whole node, signal); None: nothing.
        spares: warm workers.
        beyond: seconds above one step that the next committed step may take.
        after: what `beyond` is counted from: "fault", "detection", or the heartbeat's time-out.
        regrow: waits until the run has its first size again; a lost node is replaced.
    """

    name: str
    fault: tuple[int, bool, signal.Signals] | None = None
    spares: int = 0
    beyond: float = 2.0
    after: str = "fault"
    regrow: bool = False


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
CASES = (
    Case(name="rank 0 killed, warm spare", fault=(0, False, KILL), spares=1),
    Case(name="rank 2 killed, warm spare", fault=(2, False, KILL), spares=1),
    Case(name="rank 1 killed, 4 -> 3", fault=(1, False, KILL), regrow=True),
    Case(name="node of 2 ranks killed, 4 -> 2", fault=(3, True, KILL), after="detection", regrow=True),
    Case(name="rank 1 frozen, warm spare", fault=(1, False, STOP), spares=1, after="timeout"),
    Case(name="node of 2 ranks cut off, 4 -> 2", fault=(3, True, STOP), after="timeout", beyond=3.0),
)
UNBROKEN = Case(name="unbroken")


@dataclass(kw_only=True)
class Found:
    """What a run showed."""

    events: list[dict[str, Any]]
    fault: float = 0.0
    step: float = 0.0
    seen: float = 0.0
    next_step: float = 0.0
    grown: float | None = None
    recovered: dict[str, Any] = field(default_factory=dict)
    lost: int = 0

    @property
    def steps(self) -> dict[int, dict[str, Any]]:
        return {e["step"]: e for e in self.events if e["event"] == "step"}


# -- ours: the driver's process ---------------------------------------------------------------------------------------


class TellingWorker(TrainWorker):
    """Writes down which process became which rank."""

    def join(self, rendezvous: Rendezvous) -> None:
        folder = Path(self._spec.output_dir) / "ranks"
        folder.mkdir(exist_ok=True)
        super().join(rendezvous)
        (folder / f"{rendezvous.generation:04}-{rendezvous.rank}").write_text(str(os.getpid()))


def drive(settings: dict[str, Any]) -> int:
    """`raycp.fit` on the cluster of RAY_ADDRESS; ends by SIGINT."""
    from transformers import LlamaConfig

    import raycp
    from raycp.driver import fleet

    vars(fleet)["TrainWorker"] = TellingWorker
    result = raycp.fit(
        model=LlamaConfig(**MODEL),
        data=settings["rows"],
        tokenizer=settings["tokenizer"],
        output_dir=settings["folder"],
        config=raycp.FitConfig(
            seq_length=TOKENS,
            steps=STEPS,
            global_batch=1,
            workers=4,
            device="cpu",
            parallel=raycp.ParallelConfig(cp=(1, 4)),
            optim=raycp.OptimConfig(lr=1e-3),
            data=raycp.DataConfig(overflow="split_restart"),
            elastic=raycp.ElasticConfig(**settings["elastic"]),
        ),
    )
    print(result.status)
    return 0


# -- ours: what happens to it -----------------------------------------------------------------------------------------


def run_case(case: Case, folder: Path, inputs: dict[str, str], *, until: int = 0) -> Found:
    """Runs one case on a cluster of its own.

    Args:
        until: an unbroken run stops after so many steps.
    """
    elastic: dict[str, Any] = {"spares": case.spares, "checkpoint_every": 100_000}
    if case.after == "timeout":
        elastic["heartbeat_timeout"] = FROZEN
    folder.mkdir(parents=True)
    settings = folder / "settings.json"
    settings.write_text(json.dumps({**inputs, "folder": str(folder / "out"), "elastic": elastic}))
    events, log = folder / "out" / "events.jsonl", folder / "driver.log"
    with (
        Nodes([2 + case.spares, 2]) as nodes,
        driver("benchmarks.recovery", ["--driver", str(settings)], address=nodes.address, log=log) as process,
    ):

        def wait(what: str, condition: Callable[[list[dict[str, Any]]], bool], seconds: float = 150.0) -> None:
            wait_for(lambda: condition(read_lines(events)), process, seconds=seconds, what=what, log=log)

        if case.fault is None:
            wait(f"step {until}", lambda found: last_step(found) >= until, 300.0)
            end(process)
            return Found(events=read_lines(events))
        wait(f"step {BEFORE}", lambda found: last_step(found) >= BEFORE)
        step = median(e["seconds"] for e in read_lines(events) if e["event"] == "step" and e["step"] > 1)
        time.sleep(random.Random(case.name).random() * step)
        rank, whole, number = case.fault
        pid = ranks(folder / "out")[rank]
        node = nodes.node_of(pid)
        fault = nodes.signal(nodes.processes(node) if whole else [psutil.Process(pid)], number)
        wait(f"{AFTER} steps after recovered", lambda found: steps_after(found, "recovered") >= AFTER)
        if case.regrow:
            if whole:
                nodes.add(2)
            wait(f"{AFTER} steps after resized", lambda found: steps_after(found, "resized") >= AFTER)
        end(process)
        return measure(read_lines(events), fault=fault, step=step)


def last_step(events: Sequence[dict[str, Any]]) -> int:
    """The newest step that was committed; 0 if there is none."""
    return max((e["step"] for e in events if e["event"] == "step"), default=0)


def steps_after(events: Sequence[dict[str, Any]], name: str) -> int:
    """Steps that were committed since the first event of that name; -1 if there is none."""
    names = [e["event"] for e in events]
    return names[names.index(name) :].count("step") if name in names else -1


def ranks(out: Path) -> dict[int, int]:
    """{rank: pid} of the newest generation."""
    files = sorted((out / "ranks").iterdir())
    newest = files[-1].name.split("-")[0]
    return {int(f.name.split("-")[1]): int(f.read_text()) for f in files if f.name.startswith(newest)}


def end(process: subprocess.Popen[bytes]) -> None:
    """Asks a driver to stop after its step, as Ctrl-C does."""
    process.send_signal(signal.SIGINT)
    process.wait(60)


def measure(events: list[dict[str, Any]], *, fault: float, step: float) -> Found:
    """The figures of one run, out of its log."""
    names = [e["event"] for e in events]
    at = names.index("recovered")
    recovered = events[at]
    following = next(e for e in events[at:] if e["event"] == "step")
    found = Found(
        events=events,
        fault=fault,
        step=step,
        seen=next(e for e in events if e["event"] == "worker_lost")["time"] - fault,
        next_step=following["time"] - fault,
        recovered=recovered,
        lost=max(last_step([e for e in events if e["time"] <= fault]) - recovered["step"], 0),
    )
    if "resized" in names:
        at = names.index("resized")
        before = [e for e in events[:at] if e["event"] == "step"][-1]
        after = next(e for e in events[at:] if e["event"] == "step")
        found.grown = after["time"] - before["time"] - after["seconds"]
    return found


# -- the peer ---------------------------------------------------------------------------------------------------------


def run_peer(folder: Path, *, workers: Any, whole: bool) -> dict[str, Any]:
    """Ray Train through one SIGKILL of rank 2, or of the node of rank 3."""
    folder.mkdir(parents=True)
    settings = folder / "settings.json"
    plain = {"folder": str(folder), "model": MODEL, "tokens": TOKENS, "steps": STEPS, "every": EVERY}
    settings.write_text(json.dumps({**plain, "workers": workers}))
    log = folder / "driver.log"

    def lines() -> list[dict[str, Any]]:
        found = [line for path in folder.glob("steps-0-*.jsonl") for line in read_lines(path)]
        return sorted(found, key=lambda line: line["time"])

    with Nodes([2, 2]) as nodes, driver("benchmarks.ray_train", [str(settings)], address=nodes.address, log=log) as p:
        target = EVERY * 3 // 2
        wait_for(lambda: len(lines()) >= target, p, seconds=150, what=f"step {target}", log=log)
        before = lines()
        pid = int((folder / f"pid-{3 if whole else 2}").read_text())
        hit = nodes.processes(nodes.node_of(pid)) if whole else [psutil.Process(pid)]
        fault = nodes.signal(hit, KILL)
        at = max(line["step"] for line in lines())
        wait_for(
            lambda: any(line["time"] > fault + 1 and line["step"] > at for line in lines()),
            p,
            seconds=200,
            what="back where it was",
            log=log,
        )
        (folder / "stop").touch()
        found = lines()
        with_new = [line for line in found if line["from"] > 0 or line["time"] > fault + 1]
        first = next(line for line in with_new if line["time"] > fault)
        back = next(line for line in with_new if line["step"] > at)
        p.wait(60)
    return {
        "step": median(line["seconds"] for line in before[1:]),
        "next_step": first["time"] - fault,
        "back": back["time"] - fault,
        "lost": at - first["from"],
        "world": first["world"],
    }


# -- the whole --------------------------------------------------------------------------------------------------------


def make_inputs(folder: Path) -> dict[str, str]:
    """Tokenizer and rows of the standard library's sources."""
    from jobs.presets import make_tokenizer
    from jobs.stdlib_rows import source_files

    make_tokenizer().save_pretrained(folder / "tokenizer")
    texts = [text for _, text in source_files(("json", "email", "asyncio", "unittest")) if text.strip()]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"tokenizer": str(folder / "tokenizer"), "rows": str(folder / "rows.jsonl")}


def bar_of(case: Case, found: Found) -> tuple[float, str]:
    """Seconds from the fault to the next committed step, at most, and how that is put together."""
    parts = {"fault": (0.0, ""), "detection": (found.seen, "detection + "), "timeout": (FROZEN, f"{FROZEN:g} s + ")}
    before, words = parts[case.after]
    return before + case.beyond + found.step, f"{words}{case.beyond:g} s + one step"


def compare(found: Found, unbroken: Found) -> tuple[float, float, bool]:
    """Largest relative deviation of a loss, in worlds of 4 before anything changed size and over all steps; and whether
    the packs are the same, each once, in order.
    """
    ours = [e for e in found.events if e["event"] == "step"]
    theirs = unbroken.steps
    same = [e["step"] for e in ours] == list(range(1, len(ours) + 1))
    same = same and all(e["pack_ids"] == theirs[e["step"]]["pack_ids"] for e in ours)
    deviations = [abs(e["loss"] - theirs[e["step"]]["loss"]) / abs(theirs[e["step"]]["loss"]) for e in ours]
    shrunk = [e["step"] for e in ours if e["grid"]["cp"] != 4]
    first = min(shrunk, default=len(ours) + 1)
    return max(d for e, d in zip(ours, deviations, strict=True) if e["step"] < first), max(deviations), same


def figures(report: Report, cases: dict[str, Case], found: dict[str, Found], unbroken: Found) -> None:
    """The table of our rows, and the bars."""
    rows: list[list[object]] = []
    for name, f in found.items():
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in f.recovered["seconds"].items())
        rows.append([name, f.seen, f.next_step, f.step, f.lost, f.recovered["steps_redone"], phases])
    print("seconds from the fault; seconds by phase of the recovery")
    columns = ("fault", "seen", "next step", "one step", "steps lost", "redone", "phases")
    table(columns, rows)
    for name, f in found.items():
        bar, words = bar_of(cases[name], f)
        report.at_most(f"{name}: next committed step ({words})", f.next_step, bar, " s")
        report.at_most(f"{name}: committed steps lost", max(f.lost, f.recovered["steps_lost"]), 0)
        if f.grown is not None:
            report.at_most(f"{name}, grown back: beyond the step", f.grown, 2.0, " s")
            resized = next(e for e in f.events if e["event"] == "resized")
            report.at_most(f"{name}, grown back: steps lost or redone", resized["steps_redone"], 0)
        same, any_world, packs = compare(f, unbroken)
        report.at_most(f"{name}: losses of the same world against an unbroken run", same, 0.0)
        if any(e["grid"]["cp"] != 4 for e in f.steps.values()):
            degrees = [e["grid"]["cp"] for e in f.steps.values()]
            words = " -> ".join(str(d) for i, d in enumerate(degrees) if i == 0 or d != degrees[i - 1])
            report.at_most(f"{name}: losses through cp {words} against an unbroken run", any_world, 1e-5)
        report.at_least(f"{name}: every pack once, in order", float(packs), 1)


def main() -> int:
    """Exit code 1 if a bar was missed."""
    options = parser(__doc__)
    options.add_argument("--driver", metavar="FILE", help=argparse.SUPPRESS)
    options.add_argument("--only", nargs="+", default=None, help="rows whose name contains one of these words")
    options.add_argument("--folder", help="where runs and logs are kept; default: a temporary folder")
    arguments = options.parse_args()
    if arguments.driver:
        return drive(json.loads(Path(arguments.driver).read_text()))
    report = Report()
    report.header("recovery")

    def wanted(name: str) -> bool:
        return arguments.only is None or any(word in name for word in arguments.only)

    cases = [c for c in CASES if wanted(c.name)][: 1 if arguments.quick else None]
    with tempfile.TemporaryDirectory() as made:
        root = Path(arguments.folder or made)
        root.mkdir(parents=True, exist_ok=True)
        inputs = make_inputs(root)
        found = {c.name: run_case(c, root / f"row-{i}", inputs) for i, c in enumerate(cases)}
        if found:
            longest = max(last_step(f.events) for f in found.values())
            unbroken = run_case(UNBROKEN, root / "unbroken", inputs, until=longest)
            figures(report, {c.name: c for c in cases}, found, unbroken)
        peers: dict[str, dict[str, Any]] = {
            "Ray Train, rank 2 killed": {"workers": 4, "whole": False},
            "Ray Train, node of 2 ranks killed, 4 -> 2": {"workers": [2, 4], "whole": True},
        }
        peers = {n: how for n, how in peers.items() if wanted(n) and not arguments.quick}
        results = {n: run_peer(root / f"peer-{i}", **how) for i, (n, how) in enumerate(peers.items())}
        if results:
            columns = ("fault", "next step", "back", "one step", "steps lost", "world after")
            keys = ("next_step", "back", "step", "lost", "world")
            table(columns, [[n, *(r[k] for k in keys)] for n, r in results.items()])
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
