"""How long training waits for the copies of its state in memory: `stall_seconds` of a run's `snapshot` events.

`jobs/llama_128k.py --preset tiny` (4 CPU ranks) on a Ray cluster of two nodes on this machine, so that every copy is
sent to the other node too, at its true length and at shorter ones, where a step gives the copy less time. The stall of
a step is the wait of the slowest rank, just before it updates, for the copy of the step before; the first has none.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.faults import Nodes, driver, read_lines
from benchmarks.report import Report, parser, table

STEPS = {4096: 12, 16384: 6, 131072: 2}
"""Optimizer steps by length."""
BAR = 3.0
"""Percent of a step."""


def measure(tokens: int, folder: Path) -> tuple[list[float], list[float], int]:
    """Seconds of steps 2, 3, ..., the stall of each, and bytes that a step copies."""
    flags = ["--preset", "tiny", "--seq-length", str(tokens), "--steps", str(STEPS[tokens])]
    log = folder.with_suffix(".log")
    with (
        Nodes([2, 2]) as nodes,
        driver("jobs.llama_128k", [*flags, "--output-dir", str(folder)], address=nodes.address, log=log) as process,
    ):
        if process.wait() != 0:
            raise RuntimeError(f"the job failed:\n{log.read_text()[-2000:]}")
    events = read_lines(folder / "events.jsonl")
    seconds = {e["step"]: e["seconds"] for e in events if e["event"] == "step"}
    copies = {e["step"]: e for e in events if e["event"] == "snapshot"}
    later = sorted(s for s in copies if s > 1)
    return [seconds[s] for s in later], [copies[s]["stall_seconds"] for s in later], copies[later[0]]["bytes"]


def main() -> int:
    """Exit code 1 if a bar was missed."""
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, nargs="+", choices=STEPS, default=list(STEPS), help="lengths")
    arguments = options.parse_args()
    report = Report()
    report.header("stall")
    rows: list[list[object]] = []
    shares: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as made:
        for tokens in [min(arguments.tokens)] if arguments.quick else arguments.tokens:
            seconds, stalls, size = measure(tokens, Path(made) / f"run-{tokens}")
            shares[tokens] = 100 * sum(stalls) / sum(seconds)
            milliseconds = [1000 * s for s in stalls]
            rows.append([tokens, len(seconds), median(seconds), size / 2**20, median(milliseconds), max(milliseconds)])
    columns = ("tokens", "steps measured", "s / step", "MiB copied a step", "stall, median, ms", "stall, largest, ms")
    table(columns, rows)
    for tokens, share in shares.items():
        report.at_most(f"stall of the step time, {tokens} tokens", share, BAR, " %")
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
