"""Sub-commands of `raycp`, one file each: a frozen dataclass whose fields are its options and whose `run` does the
work.

Guarantees: importing these modules loads neither torch nor ray, so `raycp --help` is fast; a new command is a file here
and a line in `COMMANDS`. Field docstrings are the help texts; parts of `raycp.config` can be fields as they are.

    inspect    what a run would see of its data
    clean      ends the keepers of a stopped run
    doctor     what this machine has to train with, and what is missing
"""

from collections.abc import Callable
from typing import Protocol

from raycp.commands.clean import Clean
from raycp.commands.doctor import Doctor
from raycp.commands.inspect import Inspect


class Command(Protocol):
    """What `raycp.cli` calls."""

    def run(self) -> int:
        """Does the work; returns the exit code."""


COMMANDS: dict[str, Callable[..., Command]] = {"inspect": Inspect, "clean": Clean, "doctor": Doctor}
"""Name of the sub-command -> its options."""
