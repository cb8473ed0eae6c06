"""The command `raycp`: one parser, made from the dataclasses in `raycp.commands`.

Guarantees: an option is a field with a type and a docstring, said once; a wrong word is refused with the nearest option
that exists (exit code 2); an error of raycp is printed with its fix and without a traceback (exit code 1).
Cost: 0.2 s; torch and ray are loaded by the commands that need them.
"""

import sys
from collections.abc import Sequence

import tyro

from raycp.commands import COMMANDS, Command
from raycp.errors import RaycpError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sub-command; returns the exit code.

    Args:
        arguments: words of the command line; those of this process by default.
    """
    command: Command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS, prog="raycp", description=_DESCRIPTION, args=arguments
    )
    try:
        return command.run()
    except RaycpError as error:
        print(f"raycp: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        sys.stderr.close()
        return 0


_DESCRIPTION = "Exact, elastic fine-tuning of Hugging Face models on long packed sequences."


if __name__ == "__main__":
    sys.exit(main())
