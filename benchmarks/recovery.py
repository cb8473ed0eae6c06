"""Seconds from a fault to the next committed step, and the committed steps that it costs; Ray Train beside it.

A tiny Llama on 4 ranks of two nodes of a Ray cluster on this machine (fp32, gloo): one run with a warm spare and one
without, and in each several faults, one after the other, when the run has settled again. A fault is a real signal, sent
in the middle of a step. *Next step* is the first step that was begun after the recovery, when it is committed; *seen*
is when the driver wrote `worker_lost`; "one step" is the median of the steps before it. Losses are compared with
those of a run that nothing happened to: equal bit for bit where the world stayed the same, else to 1e-5; and every pack
has to be counted once, in order.

Ray Train's `TorchTrainer` trains the same model on the same number of tokens a step, data parallel, with a checkpoint
every 20 steps. Its next step is the first one after the restart, though that is an old step computed again; *back*
is when it has reached the step that it was in. Each of our rows stands beside the peer's under the same fault: a rank
killed, or a node. One command runs all of it and prints one table.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.faults import Nodes, driver, read_lines, wait_for
from benchmarks.ray_train import run_peer
from benchmarks.report import Report, parser, table
from workers.actor import TrainWorker
from workers.messages import Probe, Rendezvous

TOKENS = 4096
STEPS = 1000
"""Of the learning-rate schedule; runs are stopped long before."""
BEFORE = 6
"""Committed steps before the fault."""
AFTER = 4
"""Committed steps after the recovery, or after the run has grown back."""
FROZEN = 4.0
"""`elastic.heartbeat_timeout` where something is frozen."""
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
class Fault:
    """One row: what happens.

    Attributes:
        rank: which is hit.
        whole: its whole node is.
        sent: SIGKILL or SIGSTOP.
        beyond: seconds above one step that the next committed step may take.
        after: what `beyond` is counted from: the "fault", its "detection", or the heartbeat's "timeout".
        regrow: the run gets its first size back, on a new node if one was lost.
    """

    name: str
    rank: int
    whole: bool = False
    sent: signal.Signals = signal.SIGKILL
    beyond: float = 2.0
    after: str = "fault"
    regrow: bool = False


STOP = signal.SIGSTOP
RUNS: dict[str, tuple[int, tuple[Fault, ...]]] = {
    "with a warm spare": (
        1,
        (
            Fault(name="rank 0 killed, warm spare", rank=0),
            Fault(name="rank 2 killed, warm spare", rank=2),
            Fault(name="rank 1 frozen, warm spare", rank=1, sent=STOP, after="timeout"),
        ),
    ),
    "without a spare": (
        0,
        (
            Fault(name="rank 1 killed, 4 -> 3", rank=1, regrow=True),
            Fault(name="node of 2 ranks killed, 4 -> 2", rank=3, whole=True, after="detection", regrow=True),
            Fault(name="node of 2 ranks cut off, 4 -> 2", rank=3, whole=True, sent=STOP, after="timeout", beyond=3.0),
        ),
    ),
}
"""By name: spares, faults."""


@dataclass(kw_only=True)
class Found:
    """What a fault led to; times are seconds since the signal."""

    step: float
    seen: float
    next_step: float
    lost: int
    recovered: dict[str, Any]
    grown: float | None
    resized: dict[str, Any] | None


# -- ours: the driver's process ---------------------------------------------------------------------------------------


class TellingWorker(TrainWorker):
    """Writes down which processes are ready, and which became which rank."""

    def probe(self, nonce_path: str, nonce: str) -> Probe:
        found = super().probe(nonce_path, nonce)
        folder = Path(self._spec.output_dir) / "ready"
        folder.mkdir(exist_ok=True)
        (folder / str(os.getpid())).touch()
        return found

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


def run_ours(
    folder: Path, inputs: dict[str, str], *, spares: int = 0, faults: Sequence[Fault] = (), until: int = 0
) -> tuple[list[dict[str, Any]], dict[str, Found]]:
    """One run on a cluster of its own, through the faults.

    Args:
        until: a step that is committed at least before the run is stopped.

    Returns:
        Its events, and what each fault led to.
    """
    elastic = {"spares": spares, "checkpoint_every": 100_000, "heartbeat_timeout": FROZEN}
    folder.mkdir(parents=True)
    settings = folder / "settings.json"
    settings.write_text(json.dumps({**inputs, "folder": str(folder / "out"), "elastic": elastic}))
    events, log = folder / "out" / "events.jsonl", folder / "driver.log"
    found: dict[str, Found] = {}
    with (
        Nodes([2 + spares, 2]) as nodes,
        driver("benchmarks.recovery", ["--driver", str(settings)], address=nodes.address, log=log) as process,
    ):

        def wait(what: str, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
            wait_for(lambda: condition(read_lines(events)), process, seconds=150, what=what, log=log)

        since = 0.0
        for fault in faults:
            since, found[fault.name] = happen(fault, nodes, wait, folder / "out", spares=spares, before=since)
            print(f"{fault.name}: {found[fault.name].next_step:.2f} s", file=sys.stderr, flush=True)
        wait(f"step {until}", lambda e: last_step(e) >= until)
        process.send_signal(signal.SIGINT)  # as Ctrl-C does: the run ends after its step
        process.wait(60)
    return read_lines(events), found


def happen(
    fault: Fault,
    nodes: Nodes,
    wait: Callable[[str, Callable[[list[dict[str, Any]]], bool]], None],
    out: Path,
    *,
    spares: int,
    before: float,
) -> tuple[float, Found]:
    """One fault, when the run has settled after the one at `before`. Returns its time and what it led to."""
    wait(f"{BEFORE} steps and a spare", lambda e: settled(e, out, spares=spares, since=before))
    steps = [e["seconds"] for e in read_lines(out / "events.jsonl") if e["event"] == "step"]
    step = median(steps[-BEFORE + 1 :])
    time.sleep(random.Random(fault.name).random() * step)
    pid = ranks(out)[fault.rank]
    hit = nodes.processes(nodes.node_of(pid)) if fault.whole else [psutil.Process(pid)]
    since = nodes.signal(hit, fault.sent)
    wait(f"{AFTER} steps after {fault.name}", lambda e: steps_after(e, "recovered", since) >= AFTER)
    if fault.regrow:
        if fault.whole:
            nodes.add(2)
        wait(f"{AFTER} steps after growing back", lambda e: steps_after(e, "resized", since) >= AFTER)
    return since, measure(read_lines(out / "events.jsonl"), since=since, step=step)


def last_step(events: Sequence[dict[str, Any]]) -> int:
    """The newest step that was committed; 0 if there is none."""
    return max((e["step"] for e in events if e["event"] == "step"), default=0)


def steps_after(events: Sequence[dict[str, Any]], name: str, since: float) -> int:
    """Steps that were committed after the first event of that name since a time; -1 if there is none."""
    names = [e["event"] for e in events if e["time"] >= since]
    return names[names.index(name) :].count("step") if name in names else -1


def settled(events: Sequence[dict[str, Any]], out: Path, *, spares: int, since: float) -> bool:
    """Whether the run has done some steps since the fault before, and has its spares."""
    if len([e for e in events if e["event"] == "step" and e["time"] > since]) < BEFORE:
        return False
    alive = {int(file.name) for file in (out / "ready").iterdir() if psutil.pid_exists(int(file.name))}
    return len(alive - set(ranks(out).values())) >= spares


def ranks(out: Path) -> dict[int, int]:
    """{rank: pid} of the newest generation."""
    files = sorted((out / "ranks").iterdir())
    newest = files[-1].name.split("-")[0]
    return {int(f.name.split("-")[1]): int(f.read_text()) for f in files if f.name.startswith(newest)}


def measure(events: Sequence[dict[str, Any]], *, since: float, step: float) -> Found:
    """The figures of the first fault since a time, out of the log."""
    later = [e for e in events if e["time"] >= since]
    names = [e["event"] for e in later]

    def first(name: str, at: int = 0) -> dict[str, Any]:
        return next(e for e in later[at:] if e["event"] == name)

    recovered = first("recovered")
    grown, resized = None, None
    if "resized" in names:
        at = names.index("resized")
        before, after = [e for e in later[:at] if e["event"] == "step"][-1], first("step", at)
        grown, resized = after["time"] - before["time"] - after["seconds"], later[at]
    return Found(
        step=step,
        seen=first("worker_lost")["time"] - since,
        next_step=first("step", names.index("recovered"))["time"] - since,
        lost=max(last_step([e for e in events if e["time"] < since]) - recovered["step"], 0),
        recovered=recovered,
        grown=grown,
        resized=resized,
    )


# -- the whole --------------------------------------------------------------------------------------------------------


def make_inputs(folder: Path) -> dict[str, str]:
    """Tokenizer and rows of the standard library's sources."""
    from jobs.presets import make_tokenizer
    from jobs.stdlib_rows import source_files

    make_tokenizer().save_pretrained(folder / "tokenizer")
    texts = [text for _, text in source_files(("json", "email", "asyncio", "unittest")) if text.strip()]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"tokenizer": str(folder / "tokenizer"), "rows": str(folder / "rows.jsonl")}


def bar_of(fault: Fault, found: Found) -> tuple[float, str]:
    """Seconds from the fault to the next committed step, at most, and how that is put together."""
    parts = {"fault": (0.0, ""), "detection": (found.seen, "detection + "), "timeout": (FROZEN, f"{FROZEN:g} s + ")}
    before, words = parts[fault.after]
    return before + fault.beyond + found.step, f"{words}{fault.beyond:g} s + one step"


def show_faults(
    report: Report, faults: Sequence[Fault], found: Mapping[str, Found], peers: Mapping[str, Mapping[str, Any]]
) -> None:
    """The table: our rows, each with what became of the peer under the same fault; then the bars."""
    rows: list[list[object]] = []
    for fault in faults:
        f = found[fault.name]
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in f.recovered["seconds"].items())
        ours = [f.seen, f.next_step, bar_of(fault, f)[0], f.step, f.lost, f.recovered["steps_redone"], f.grown or ""]
        peer = peers.get(peer_of(fault))
        theirs = [""] * 5 if peer is None else [peer[k] for k in ("next_step", "back", "step", "lost")]
        ratio = [] if peer is None else [peer["next_step"] / f.next_step]
        rows.append([fault.name, *ours, *theirs, *ratio, phases])
    print("ours, then Ray Train's (RT); seconds from the fault; RT / ours: of the next step; ours by phase")
    columns = ("fault", "seen", "next step", "bar", "one step", "lost", "redone", "grown back")
    peer_columns = ("RT next step", "RT back", "RT one step", "RT lost", "RT / ours")
    table((*columns, *peer_columns, "phases"), rows)
    for fault in faults:
        f = found[fault.name]
        bar, words = bar_of(fault, f)
        report.at_most(f"{fault.name}: next committed step ({words})", f.next_step, bar, " s")
        report.at_most(f"{fault.name}: committed steps lost", max(f.lost, f.recovered["steps_lost"]), 0)
        if f.grown is not None and f.resized is not None:
            report.at_most(f"{fault.name}, grown back: beyond the step", f.grown, 2.0, " s")
            cost = f.resized["steps_lost"] + f.resized["steps_redone"]
            report.at_most(f"{fault.name}, grown back: steps lost or redone", cost, 0)


def show_losses(
    report: Report, name: str, events: Sequence[dict[str, Any]], unbroken: Sequence[dict[str, Any]]
) -> None:
    """A run against the one that nothing happened to."""
    ours = [e for e in events if e["event"] == "step"]
    theirs = {e["step"]: e for e in unbroken if e["event"] == "step"}
    order = [e["step"] for e in ours] == list(range(1, len(ours) + 1))
    packs = all(e["pack_ids"] == theirs[e["step"]]["pack_ids"] for e in ours)
    losses = [(e["loss"], theirs[e["step"]]["loss"]) for e in ours]
    deviation = max(abs(mine - true) / abs(true) for mine, true in losses)
    degrees = [e["grid"]["cp"] for e in ours]
    worlds = [d for i, d in enumerate(degrees) if i == 0 or d != degrees[i - 1]]
    through = " -> ".join(str(d) for d in worlds)
    bar = 0.0 if len(worlds) == 1 else 1e-5
    report.at_most(f"{name}: largest relative deviation of {len(ours)} losses, cp {through}", deviation, bar)
    report.at_least(f"{name}: every pack once, in order", float(order and packs), 1)


def main() -> int:
    """Exit code 1 if a bar was missed."""
    options = parser(__doc__)
    options.add_argument("--driver", metavar="FILE", help=argparse.SUPPRESS)
    options.add_argument("--only", nargs="+", default=None, help="rows whose name contains one of these words")
    options.add_argument("--without-peer", action="store_true", help="leave Ray Train out")
    options.add_argument("--folder", help="where runs and logs are kept; default: a temporary folder")
    arguments = options.parse_args()
    if arguments.driver:
        return drive(json.loads(Path(arguments.driver).read_text()))
    report = Report()
    report.header("recovery")

    def wanted(name: str) -> bool:
        return arguments.only is None or any(word in name for word in arguments.only)

    with tempfile.TemporaryDirectory() as made:
        root = Path(arguments.folder or made)
        root.mkdir(parents=True, exist_ok=True)
        inputs = make_inputs(root)
        runs: dict[str, list[dict[str, Any]]] = {}
        happened: list[Fault] = []
        found: dict[str, Found] = {}
        for name, (spares, faults) in RUNS.items():
            chosen = [f for f in faults if wanted(f.name)][: 1 if arguments.quick else None]
            if not chosen or (arguments.quick and runs):
                continue
            runs[name], led_to = run_ours(root / name.replace(" ", "-"), inputs, spares=spares, faults=chosen)
            happened += chosen
            found |= led_to
        unbroken: list[dict[str, Any]] = []
        if runs:
            longest = max(last_step(events) for events in runs.values())
            unbroken, _ = run_ours(root / "unbroken", inputs, until=longest)
        peers = {} if arguments.without_peer else run_peers(report, root, {peer_of(fault) for fault in happened})
        show_faults(report, happened, found, peers)
        for name, events in runs.items():
            show_losses(report, name, events, unbroken)
    return report.end()


RANK_KILLED, NODE_KILLED = "rank 2 killed", "node with rank 3 killed, 4 -> 2"
PEERS: dict[str, dict[str, Any]] = {
    RANK_KILLED: {"workers": 4, "whole": False},
    NODE_KILLED: {"workers": [2, 4], "whole": True},
}
"""What happens to the peer. It has no spares; and what is frozen it never sees, but for the time-out of gloo."""


def peer_of(fault: Fault) -> str:
    """The same fault among those of the peer; "" if there is none."""
    if fault.sent == STOP:
        return ""
    return NODE_KILLED if fault.whole else RANK_KILLED


def run_peers(report: Report, root: Path, wanted: Collection[str]) -> dict[str, dict[str, Any]]:
    """Ray Train through those faults, each in a run of its own; what does not end is a missed bar."""
    try:
        import ray.train.torch  # noqa: F401
    except ImportError as error:
        print(f"without Ray Train ({error}): pip install 'ray[train]'")
        return {}
    results: dict[str, dict[str, Any]] = {}
    for number, (name, how) in enumerate(PEERS.items()):
        if name not in wanted:
            continue
        try:
            results[name] = run_peer(root / f"peer-{number}", model=MODEL, tokens=TOKENS, **how)
        except (RuntimeError, TimeoutError) as error:
            report.missed.append(f"TorchTrainer, {name}: {error}")
            continue
        print(f"TorchTrainer, {name}: {results[name]['next_step']:.2f} s", file=sys.stderr, flush=True)
    return results


if __name__ == "__main__":
    sys.exit(main())
