"""How a benchmark speaks: its command and machine first, then figures, each with its bar and PASS or FAIL.

Guarantees: a figure that has a bar is never printed without it; the exit code is 1 if one was missed.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Options that every benchmark has; `doc` is its docstring."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs; bars are not meant for it")
    return made


@dataclass
class Report:
    """Prints figures as they come and remembers which bars were missed."""

    missed: list[str] = field(default_factory=list)

    def header(self, name: str) -> None:
        """The command that was given, when, and on what."""
        print(f"command: python -m benchmarks.{name} {' '.join(sys.argv[1:])}".rstrip())
        print(f"date: {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC; machine: {machine()}")

    def at_most(self, what: str, value: float, bar: float | None, unit: str = "") -> None:
        """A figure that should not exceed its bar."""
        self._line(what, value, bar, unit, "<=", bar is None or value <= bar)

    def at_least(self, what: str, value: float, bar: float | None, unit: str = "") -> None:
        """A figure that should reach its bar."""
        self._line(what, value, bar, unit, ">=", bar is None or value >= bar)

    def _line(self, what: str, value: float, bar: float | None, unit: str, sign: str, good: bool) -> None:
        if bar is None:
            print(f"{what}: {value:.4g}{unit}", flush=True)
            return
        print(f"{what}: {value:.4g}{unit} (bar {sign} {bar:g}{unit}) {'PASS' if good else 'FAIL'}", flush=True)
        if not good:
            self.missed.append(what)

    def end(self) -> int:
        """Exit code."""
        print(f"{len(self.missed)} bars missed" + "".join(f"\n  {name}" for name in self.missed))
        return 1 if self.missed else 0


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a Markdown table; floats with four digits."""
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row) + " |", flush=True)


def machine() -> str:
    """Processor, cores that this process may use, load and versions."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{cores} cores of {_processor()}, load {os.getloadavg()[0]:.1f}; {versions}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return f"{platform.machine()} {line.split(':', 1)[1].strip()}"
    return platform.processor() or platform.machine()
