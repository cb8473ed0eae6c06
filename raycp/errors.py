"""Every error that raycp raises at a user, in one small tree.

Guarantees: each error says what was found and carries `fix`, the thing to change; each also inherits the standard
type that a caller would expect (`ValueError`, `RuntimeError`, ...); each survives pickling, so that it can cross a
Ray actor boundary without losing a field. Costs nothing: no torch, no ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class RaycpError(Exception):
    """Base of all errors of raycp.

    Args:
        message: what was found: the value, the limit, the cause.
        fix: what to change, in the words of the argument or flag that the user knows.
        fields: facts for programs (rank, node, path, line, ...), also readable as attributes of `details`.
    """

    def __init__(self, message: str, *, fix: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.details: dict[str, Any] = fields

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.fix}" if self.fix else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.fix, self.details))


def _rebuild(cls: type[RaycpError], message: str, fix: str, fields: dict[str, Any]) -> RaycpError:
    return cls(message, fix=fix, **fields)


class ConfigError(RaycpError, ValueError):
    """Configuration that cannot be right. `details["problems"]` lists every problem that was found."""

    @classmethod
    def from_problems(cls, problems: Sequence[Problem]) -> ConfigError:
        """One error that reports all problems at once.

        Raises:
            ValueError: `problems` is empty.
        """
        if not problems:
            raise ValueError("no problem to report")
        lines = [f"{len(problems)} problem(s) with this configuration:"]
        lines += [f"  {i}. {p.message}\n     fix: {p.fix}" for i, p in enumerate(problems, 1)]
        return cls("\n".join(lines), problems=[(p.message, p.fix) for p in problems])


class DataError(RaycpError, ValueError):
    """A data file or row that cannot be used; `details` names file and line where they are known."""


class PlanError(RaycpError, ValueError):
    """A pack, grid or layout that no plan exists for."""


class ModelError(RaycpError, ValueError):
    """A model, tokenizer or chat template that raycp cannot train, by name and reason."""


class CheckpointError(RaycpError, RuntimeError):
    """A checkpoint that is torn, or belongs to another run, model, data set or configuration."""


class ClusterError(RaycpError, RuntimeError):
    """The Ray cluster does not have, or no longer has, what the run asked for."""


class DeviceError(ClusterError):
    """A device computes wrong numbers, does not answer, or is full: no rank can have it."""


class WorkerError(RaycpError, RuntimeError):
    """A rank died or raised. `details`: rank, node, cause, step, generation."""


class StaleGenerationError(RaycpError, RuntimeError):
    """A message of an older generation reached a worker (or the reverse): it is fenced off."""


class Problem:
    """One configuration problem: what was found, what to change, and the error that said so, if one did."""

    __slots__ = ("error", "fix", "message")

    def __init__(self, message: str, fix: str, error: RaycpError | None = None) -> None:
        self.message = message
        self.fix = fix
        self.error = error

    def __repr__(self) -> str:
        return f"Problem({self.message!r}, fix={self.fix!r})"


def one_error(problems: Sequence[Problem]) -> RaycpError:
    """The error to raise for these problems: a single one as it was raised, if it was; else all of them in one report.

    Raises:
        ValueError: `problems` is empty.
    """
    if len(problems) == 1 and problems[0].error is not None:
        return problems[0].error
    return ConfigError.from_problems(problems)
