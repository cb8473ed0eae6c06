"""What a row can mean, as value objects, and how a field of a row is read.

Guarantees: a field of the wrong shape is a DataError with the row id, the field and what to do; nothing is guessed or
converted silently. numpy only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.rows import Row
from raycp.errors import DataError

ASSISTANT = "assistant"

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages of a chat; those from `num_prompt` on may be trained (0: all of the assistant's).

    `weights` has a loss weight for each message, 0: not trained; None: 1 for all.
    """

    messages: tuple[Message, ...]
    tools: list[Any] | None = None
    num_prompt: int = 0
    weights: tuple[float, ...] | None = None


@dataclass(frozen=True)
class PromptCompletion:
    """Plain strings: the completion is trained, and the end of sequence after it."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """Plain text, trained whole."""

    text: str


@dataclass(frozen=True, eq=False)
class Tokens:
    """Token ids of one document, [n] each: ids, which of them are trained, and their loss weights (None: 1)."""

    ids: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_]
    weights: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, eq=False)
class TokenRow:
    """A row of one document, or of several where it came packed."""

    documents: tuple[Tokens, ...]
    packed: bool = False


Example = Conversation | PromptCompletion | Text | TokenRow


def num_characters(example: Example) -> int:
    """Size of an example, for batches of bounded memory; a token counts 4."""
    if isinstance(example, Conversation):
        return sum(len(message["content"]) for message in example.messages)
    if isinstance(example, PromptCompletion):
        return len(example.prompt) + len(example.completion)
    if isinstance(example, TokenRow):
        return 4 * sum(d.ids.size for d in example.documents)
    return len(example.text)


def bad(row: Row, field: str, problem: str, fix: str) -> DataError:
    """The error of one field."""
    return DataError(f"{row.id}: {field} {problem}", fix=fix, row=row.id, field=field)


def column(row: Row, name: str) -> Any:
    """A column that must be there."""
    if name not in row.data:
        have = ", ".join(map(repr, row.data)) or "(none)"
        raise bad(
            row,
            name,
            f"is missing; the row has {have}",
            f"give every row the columns of the first one, or say which column it is: data.columns='{name}=...'",
        )
    return row.data[name]


def string(row: Row, name: str, value: object, *, empty: bool = False) -> str:
    """A string; an empty one only if `empty`."""
    if not isinstance(value, str):
        raise bad(row, name, f"is {kind(value)}, not a string", f"make {name} a string in every row")
    if not value and not empty:
        raise bad(row, name, "is an empty string", "remove the row: it trains nothing")
    return value


def optional_string(row: Row, name: str) -> str:
    """A string column that may be missing, null or empty: then ""."""
    value = row.data.get(name)
    return "" if value is None else string(row, name, value, empty=True)


def kind(value: object) -> str:
    """A value's type in words."""
    return "null" if value is None else f"of type {type(value).__name__}"


def mapping(row: Row, field: str, value: object, want: str) -> Mapping[str, Any]:
    """A JSON object."""
    if not isinstance(value, Mapping):
        raise bad(row, field, f"is {kind(value)}, not an object", f"write {want}")
    return value


def items(row: Row, field: str, value: object, want: str) -> list[Any]:
    """A list with at least one item."""
    if not isinstance(value, list):
        raise bad(row, field, f"is {kind(value)}, not a list of messages", f"write {want}")
    if not value:
        raise bad(row, field, "is an empty conversation", "remove the row")
    return value
