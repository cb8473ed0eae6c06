"""What a row means: a conversation, a prompt with its completion, or plain text.

Guarantees: one format for a whole source, named or detected from the columns of its first row and reported; a row of
any other shape is a DataError with the row id and the field. The order of roles is the chat template's business;
refused here is only what no template can mean: an unknown role, no message, content that is null or no string.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from data_pipeline.sources import Row
from raycp.config import FORMATS
from raycp.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
ASSISTANT = "assistant"

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages of a chat; those from `num_prompt` on may be trained (0: all of the assistant's)."""

    messages: tuple[Message, ...]
    tools: list[Any] | None = None
    num_prompt: int = 0


@dataclass(frozen=True)
class PromptCompletion:
    """Plain strings: the completion is trained, and the end of sequence after it."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """Plain text, trained whole."""

    text: str


Example = Conversation | PromptCompletion | Text


def detect_format(row: Row) -> str:
    """Name of the format that the columns of `row` show.

    Raises:
        DataError: no format has these columns.
    """
    columns = row.data
    if "messages" in columns:
        return "messages"
    if "prompt" in columns and "completion" in columns:
        return "prompt_completion"
    if "text" in columns:
        return "text"
    raise DataError(
        f"{row.id}: columns {', '.join(map(repr, columns)) or '(none)'} are of no known format",
        fix="rename columns to messages, to prompt and completion, or to text",
        row=row.id,
    )


def parser_of(format_name: str) -> Callable[[Row], Example]:
    """The function that turns rows of a format into examples; it raises DataError on another shape.

    Raises:
        DataError: no such format.
    """
    if format_name not in _PARSERS:
        choices = ", ".join(FORMATS)
        raise DataError(f"data.format={format_name!r} is not a choice", fix=f"set data.format to one of {choices}")
    return _PARSERS[format_name]


def _bad(row: Row, field: str, problem: str, fix: str) -> DataError:
    return DataError(f"{row.id}: {field} {problem}", fix=fix, row=row.id, field=field)


def _column(row: Row, name: str) -> Any:
    if name not in row.data:
        have = ", ".join(map(repr, row.data)) or "(none)"
        raise _bad(row, name, f"is missing; the row has {have}", "give every row the columns of the first one")
    return row.data[name]


def _string(row: Row, name: str, value: object, *, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise _bad(row, name, f"is {_kind(value)}, not a string", f"make {name} a string in every row")
    if not value and not empty:
        raise _bad(row, name, "is an empty string", "remove the row: it trains nothing")
    return value


def _kind(value: object) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


def _parse_text(row: Row) -> Text:
    return Text(_string(row, "text", _column(row, "text")))


def _parse_messages(row: Row) -> Conversation:
    messages = _messages(row, "messages", _column(row, "messages"))
    return Conversation(messages, _tools(row))


def _parse_prompt_completion(row: Row) -> Conversation | PromptCompletion:
    prompt, completion = _column(row, "prompt"), _column(row, "completion")
    if isinstance(prompt, list) or isinstance(completion, list):
        before = _messages(row, "prompt", prompt)
        return Conversation((*before, *_messages(row, "completion", completion)), _tools(row), num_prompt=len(before))
    return PromptCompletion(_string(row, "prompt", prompt, empty=True), _string(row, "completion", completion))


def _tools(row: Row) -> list[Any] | None:
    tools = row.data.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise _bad(row, "tools", f"is broken JSON: {error.msg}", "write tools as a list of JSON schemas") from error
    if not tools:
        return None
    if not isinstance(tools, list):
        raise _bad(row, "tools", f"is {_kind(tools)}, not a list", "write tools as a list of JSON schemas")
    return tools


def _messages(row: Row, field: str, value: object) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise _bad(
            row, field, f"is {_kind(value)}, not a list of messages", 'write [{"role": ..., "content": ...}, ...]'
        )
    if not value:
        raise _bad(row, field, "is an empty conversation", "remove the row")
    return tuple(_message(row, f"{field}[{i}]", item) for i, item in enumerate(value))


def _message(row: Row, field: str, value: object) -> Message:
    if not isinstance(value, Mapping):
        raise _bad(row, field, f"is {_kind(value)}, not an object", 'write {"role": ..., "content": ...}')
    message = {k: v for k, v in value.items() if v is not None}  # columnar files fill absent keys with null
    role = message.get("role")
    if role not in ROLES:
        raise _bad(row, f"{field}.role", f"is {role!r}, which is no role", f"use one of {', '.join(ROLES)}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return {**message, "content": ""}
    if not isinstance(content, str):
        raise _bad(
            row, f"{field}.content", f"is {_kind(content)}, not a string", "write the message's text as a string"
        )
    return message


_PARSERS: dict[str, Callable[[Row], Example]] = {
    "messages": _parse_messages,
    "prompt_completion": _parse_prompt_completion,
    "text": _parse_text,
}
