"""What a person sees of a run: a line per phase, one progress bar, and the loss picture.

Guarantees: one bar for the whole run, drawn by the driver only; it moves inside long steps too; into a file or a job's
log it is written every few seconds only; nothing here can end a run (a pipe whose reader left or a log on a full disk
gets no more lines; a missing plotting library leaves the picture out and says so). Costs one redraw per second at most.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from tqdm import tqdm

from workers.progress import EVAL, STEP


class Display:
    """The run's bar. Use as a context manager.

    Args:
        total_steps: length of the bar.
        file: where to draw; standard error by default.
    """

    def __init__(self, *, total_steps: int, file: TextIO | None = None) -> None:
        self._file = _Screen(file or sys.stderr)
        self._live = self._file.isatty()
        self._bar = tqdm(
            total=total_steps,
            file=self._file,
            unit="step",
            dynamic_ncols=self._live,
            mininterval=0.5 if self._live else 5.0,
        )
        self._shown: dict[str, str] = {}
        self._last_inside = 0.0
        self._token_flops = 0.0
        self._peak: Callable[[], float | None] = lambda: None

    def count_flops(self, per_token: float, peak: Callable[[], float | None]) -> None:
        """Shows from now on what share of the devices' peak FLOP/s (mfu) steps reach.

        Args:
            per_token: FLOP that the model needs for a token.
            peak: FLOP/s of all devices of the ranks that run; None where that is not known: nothing is shown.
        """
        self._token_flops, self._peak = per_token, peak

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.set_postfix(self._shown, refresh=False)
        self._bar.close()

    def phase(self, text: str) -> None:
        """Names what the run is doing, left of the bar."""
        self._bar.set_description_str(text, refresh=self._live)

    def resume(self, done: int) -> None:
        """Moves the bar to where the run continues; steps before it do not count for its rate."""
        self._bar.n = self._bar.initial = done
        self._bar.last_print_n = done

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._bar.write(text, file=self._file)

    def inside(self, progress: Mapping[str, Any]) -> None:
        """Shows how far the running step is: micro-batch and ring steps of rank 0."""
        now = time.monotonic()
        if now - self._last_inside < (1.0 if self._live else 30.0) or progress.get("call") not in (STEP, EVAL):
            return
        self._last_inside = now
        part = f"{progress['micro_batch']}/{progress['micro_batches']} packs, {progress['ring_steps_done']} ring steps"
        self._bar.set_postfix({**self._shown, str(progress["phase"]): part}, refresh=True)

    def step(self, *, loss: float, tokens_per_second: float, lr: float, data_share: float = 0.0) -> None:
        """One step is done; `data_share` of its time the slowest rank waited for data."""
        self._shown = {"loss": f"{loss:.4f}", "tokens/s": f"{tokens_per_second:,.0f}", "lr": f"{lr:.2e}"}
        peak = self._peak()
        if peak:
            self._shown["mfu"] = f"{tokens_per_second * self._token_flops / peak:.1%}"
        self._shown["data wait"] = f"{data_share:.1%}"
        self._bar.set_postfix(self._shown, refresh=False)
        self._bar.update(1)


class _Screen:
    """A stream that may be gone: what cannot be written is left out."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it was closed
            return self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def draw_losses(losses: Mapping[int, float], evals: Mapping[int, float], path: Path) -> bool:
    """Writes the loss curve as PNG; False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(list(losses), list(losses.values()), marker="." if len(losses) < 50 else "", label="training loss")
    if evals:
        axes.plot(list(evals), list(evals.values()), marker="o", linestyle="--", label="held-out loss")
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy per target (nats)")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path)
    return True
