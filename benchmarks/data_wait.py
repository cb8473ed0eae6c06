"""How long training waits for data, as a share of its steps: the slowest rank's wait, as each `step` event has it.

Two runs of a small random Llama over two ranks on the CPU, through `raycp.fit`, one pack a step: 8 192 tokens, whose
steps take about a second and more, and 2 048 tokens, where a step is short and a wait shows most. The first step of a
worker, for which nothing was prepared, is told apart. Packs are read, planned and cut ahead of the step by a thread of
each rank; on a machine of two cores that thread has none of its own.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Report, parser, table


def run(folder: Path, seq_length: int, steps: int) -> list[dict[str, Any]]:
    """The `step` events of a run."""
    import raycp
    from jobs.presets import make_inputs, make_model
    from raycp.events import read_events

    tokenizer, rows = make_inputs(folder / "inputs", seq_length)
    result = raycp.fit(
        model=make_model(seq_length),
        data=str(rows),
        tokenizer=str(tokenizer),
        output_dir=folder / "run",
        config=raycp.FitConfig(
            seq_length=seq_length, workers=2, steps=steps, global_batch=1, device="cpu", dtype="float32"
        ),
    )
    return [event for event in read_events(result.events_path) if event["event"] == "step"]


def main() -> int:
    """Command line."""
    made: argparse.ArgumentParser = parser(__doc__)
    made.add_argument("--tokens", type=int, nargs="+", default=[8_192, 2_048], help="of a pack")
    made.add_argument("--steps", type=int, default=20)
    options = made.parse_args()
    tokens, steps = ([512], 4) if options.quick else (options.tokens, options.steps)
    report = Report()
    report.header("data_wait")
    rows = []
    for seq_length in tokens:
        with tempfile.TemporaryDirectory(prefix="raycp-data-wait-") as root:
            events = run(Path(root), seq_length, steps)
        seconds = [float(event["seconds"]) for event in events]
        waits = [float(event["data_seconds"]) for event in events]
        worst = max(wait / took for wait, took in zip(waits, seconds, strict=True))
        rows.append((seq_length, len(events), median(seconds), median(waits) * 1e3, waits[0] * 1e3, f"{worst:.2%}"))
        for what, first, bar in (("all steps", 0, None), ("steps after the first", 1, 1.0)):
            share = 100 * sum(waits[first:]) / sum(seconds[first:])
            report.at_most(f"{seq_length} tokens: waiting for data, share of {what}", share, bar, " %")
    table(("tokens", "steps", "step, median s", "wait, median ms", "wait of the first, ms", "worst step"), rows)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
