"""`raycp clean OUTPUT_DIR`: ends the keepers of the run in that folder and says how much memory that freed.

Guarantees: those of `raycp.driver.clean`: a live run is left alone, and what only the keepers hold is on storage before
they end. Cost: a few seconds to connect, and the time to write that step.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True, kw_only=True)
class Clean:
    """Ends the keepers of a stopped run, on the Ray cluster of RAY_ADDRESS or the one on this machine."""

    output_dir: tyro.conf.Positional[Path]
    """Folder of the run, where its run.json lies."""
    discard: bool = False
    """Gives up a step that is only in memory, instead of writing it to storage first."""

    def run(self) -> int:
        """See `raycp.driver.clean.clean_run`."""
        from raycp.driver.clean import clean_run, describe

        print(describe(clean_run(self.output_dir, discard=self.discard, say=print)))
        return 0
