"""Errors teach, are the standard type that a caller expects, and cross a process boundary whole."""

import pickle

import pytest

from raycp import errors
from raycp.errors import ConfigError, Problem, RaycpError

CLASSES = [thing for thing in vars(errors).values() if isinstance(thing, type) and issubclass(thing, RaycpError)]


def same(left: RaycpError, right: RaycpError) -> bool:
    return (type(left), left.message, left.fix, left.details, str(left)) == (
        type(right),
        right.message,
        right.fix,
        right.details,
        str(right),
    )


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_pickling_keeps_every_field(cls: type[RaycpError]) -> None:
    error = cls("rank 3 died", fix="look at its log", rank=3, node="10.0.0.7")
    assert same(pickle.loads(pickle.dumps(error)), error)


def test_an_error_that_pickles_like_a_plain_exception_loses_fields() -> None:
    class PlainError(RaycpError):
        def __reduce__(self):  # type: ignore[no-untyped-def]
            return (RaycpError, (self.message,))

    error = PlainError("rank 3 died", fix="look at its log", rank=3)
    assert not same(pickle.loads(pickle.dumps(error)), error)


@pytest.mark.parametrize("cls", [c for c in CLASSES if c is not RaycpError], ids=lambda c: c.__name__)
def test_each_error_is_a_standard_error_too(cls: type[RaycpError]) -> None:
    assert issubclass(cls, ValueError | RuntimeError)


def test_text_shows_the_fix() -> None:
    assert str(RaycpError("cp=3", fix="set cp=2")) == "cp=3\n  fix: set cp=2"
    assert str(RaycpError("cp=3")) == "cp=3"


def test_config_error_reports_all_problems() -> None:
    error = ConfigError.from_problems([Problem("lr=0", "set lr"), Problem("cp=3", "set cp")])
    assert str(error).startswith("2 problem(s)")
    assert all(word in str(error) for word in ("lr=0", "set lr", "cp=3", "set cp"))
    assert error.details["problems"] == [("lr=0", "set lr"), ("cp=3", "set cp")]


def test_config_error_without_a_problem_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="no problem"):
        ConfigError.from_problems([])
