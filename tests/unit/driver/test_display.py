"""What a person sees of a run."""

import io

import pytest

from raycp.driver.display import Display


@pytest.mark.parametrize(("peak", "shown"), [(4e12, "mfu=25.0%"), (None, None)])
def test_the_share_of_the_peak_is_shown_where_the_peak_is_known(peak: float | None, shown: str | None) -> None:
    screen = io.StringIO()
    with Display(total_steps=1, file=screen) as display:
        display.count_flops(1e9, lambda: peak)
        display.step(loss=1.0, tokens_per_second=1000.0, lr=0.1)
    assert ("mfu" in screen.getvalue()) == (shown is not None)
    assert shown is None or shown in screen.getvalue()


@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left"), ValueError("closed")]
)
def test_a_screen_that_is_gone_ends_no_run(error: Exception) -> None:
    """`... 2>&1 | head`, or a log on a disk that is full: the run failed at its next line."""

    class Gone(io.StringIO):
        asked = 0

        def write(self, text: str) -> int:
            self.asked += 1
            raise error

        def flush(self) -> None:
            raise error

    gone = Gone()
    with Display(total_steps=2, file=gone) as display:
        display.phase("training")
        display.say("one line")
        display.step(loss=1.0, tokens_per_second=1.0, lr=0.1)
        display.resume(1)
    assert gone.asked > 1, "it is written to all the same"
