"""Rows that are conversations: OpenAI's messages, sharegpt's conversations, alpaca's instruction and output.

Guarantees: whatever the file calls its roles, a `Conversation` has the names that chat templates know, and tool calls
in the form that they read (a list of functions with arguments as objects). Which messages are trained can be said per
message: `train` (or ms-swift's `loss`) true or false, or a `weight`. Files of LLaMA-Factory and MindSpeed-LLM are read
as they are: function calls and observations of sharegpt, history and system of alpaca.
"""

import json
from collections.abc import Mapping
from typing import Any

from data_pipeline.examples import (
    ASSISTANT,
    Conversation,
    Message,
    bad,
    column,
    items,
    kind,
    mapping,
    optional_string,
    string,
)
from data_pipeline.rows import Row

ROLES = ("system", "developer", "user", "assistant", "tool")
_HEADS = ("system", "developer")
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "model": ASSISTANT,
    "bot": ASSISTANT,
    "assistant": ASSISTANT,
    "function_call": ASSISTANT,
    "tool_call": ASSISTANT,
    "observation": "tool",
    "tool": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "system": "system",
}
_CALLS = ("function_call", "tool_call")
_OWN_KEYS = ("train", "loss", "weight")

Weights = tuple[float, ...] | None


def parse_messages(row: Row) -> Conversation:
    """Column `messages`, and `tools`."""
    messages, weights = messages_of(row, "messages", column(row, "messages"))
    return Conversation(messages, tools_of(row), weights=weights)


def parse_sharegpt(row: Row) -> Conversation:
    """Column `conversations`, and `system` and `tools`; items may also be in the form of `messages`."""
    raw = items(row, "conversations", column(row, "conversations"), '[{"from": "human", "value": ...}, ...]')
    if all(isinstance(item, Mapping) and "role" in item for item in raw):
        messages, weights = messages_of(row, "conversations", raw)
    else:
        turned = [_from_sharegpt(row, f"conversations[{i}]", item) for i, item in enumerate(raw)]
        _check_turns(row, turned)
        messages, weights = messages_of(row, "conversations", turned)
    system = optional_string(row, "system")
    if system and messages[0]["role"] not in _HEADS:
        messages = ({"role": "system", "content": system}, *messages)
        weights = None if weights is None else (1.0, *weights)
    return Conversation(messages, tools_of(row), weights=weights)


def parse_alpaca(row: Row) -> Conversation:
    """Columns `instruction` and `output`; `input` is put below the instruction, `history` is turns before it."""
    messages: list[Message] = []
    system = optional_string(row, "system")
    if system:
        messages.append({"role": "system", "content": system})
    history = row.data.get("history") or []
    if not isinstance(history, list):
        raise bad(row, "history", f"is {kind(history)}, not a list", "write [[question, answer], ...]")
    for i, pair in enumerate(history):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise bad(row, f"history[{i}]", "is no pair", "write [[question, answer], ...]")
        for role, words in zip(("user", ASSISTANT), pair, strict=True):
            messages.append({"role": role, "content": string(row, f"history[{i}]", words, empty=True)})
    question = string(row, "instruction", column(row, "instruction"), empty=True)
    more = optional_string(row, "input")
    question = "\n".join(part for part in (question, more) if part)
    if not question:
        raise bad(row, "instruction", "and input are empty strings", "remove the row: it asks nothing")
    messages.append({"role": "user", "content": question})
    messages.append({"role": ASSISTANT, "content": string(row, "output", column(row, "output"))})
    return Conversation(tuple(messages), tools_of(row))


def tools_of(row: Row) -> list[Any] | None:
    """Column `tools`: a list of JSON schemas, or that as a string; None if there are none."""
    tools = row.data.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise bad(row, "tools", f"is broken JSON: {why}", "write tools as a list of JSON schemas") from error
    if not tools or isinstance(tools, str):
        return None
    if not isinstance(tools, list):
        raise bad(row, "tools", f"is {kind(tools)}, not a list", "write tools as a list of JSON schemas")
    return [_schema(tool) for tool in tools]


def _schema(tool: Any) -> Any:
    """A bare function schema in the envelope that chat templates read."""
    bare = isinstance(tool, Mapping) and "name" in tool and "function" not in tool
    return {"type": "function", "function": dict(tool)} if bare else tool


def messages_of(row: Row, field: str, value: object) -> tuple[tuple[Message, ...], Weights]:
    """Messages of a field and their loss weights (None: nothing was said)."""
    raw = items(row, field, value, '[{"role": ..., "content": ...}, ...]')
    messages = [_message(row, f"{field}[{i}]", item) for i, item in enumerate(raw)]
    for i, message in enumerate(messages):
        before = messages[i - 1]["role"] if i else None
        if message["role"] in _HEADS and before not in (None, *_HEADS):
            raise bad(
                row,
                f"{field}[{i}].role",
                f"is {message['role']!r} after {before!r}",
                "put it before all other messages",
            )
        if message["role"] == "tool" and before not in (ASSISTANT, "tool") and i:
            raise bad(
                row,
                f"{field}[{i}].role",
                f"is 'tool' after {before!r}",
                "put it after the assistant's message that called",
            )
    said = [_said_weight(row, f"{field}[{i}]", message) for i, message in enumerate(messages)]
    plain = tuple({k: v for k, v in m.items() if k not in _OWN_KEYS} for m in messages)
    if all(weight is None for weight in said):
        return plain, None
    return plain, tuple(1.0 if weight is None else weight for weight in said)


def _message(row: Row, field: str, value: object) -> Message:
    found = mapping(row, field, value, '{"role": ..., "content": ...}')
    message = {k: v for k, v in found.items() if v is not None}  # columnar files fill absent keys with null
    role = message.get("role")
    if role not in ROLES:
        raise bad(row, f"{field}.role", f"is {role!r}, which is no role", f"use one of {', '.join(ROLES)}")
    if message.get("tool_calls"):
        message["tool_calls"] = [_call(row, f"{field}.tool_calls", call) for call in message["tool_calls"]]
        message.setdefault("content", "")
    message["content"] = _words(row, f"{field}.content", message.get("content"))
    return message


def _words(row: Row, field: str, content: Any) -> str:
    """A message's text: a string, or OpenAI's list of parts, all of them text."""
    if isinstance(content, list):
        parts = [mapping(row, f"{field}[{i}]", part, '{"type": "text", "text": ...}') for i, part in enumerate(content)]
        for i, part in enumerate(parts):
            if part.get("type", "text") != "text":
                problem = f"is a part of type {part['type']!r}, and text is all that is trained"
                raise bad(row, f"{field}[{i}]", problem, "leave such rows out")
        return "".join(string(row, f"{field}[{i}].text", part.get("text")) for i, part in enumerate(parts))
    if not isinstance(content, str):
        raise bad(row, field, f"is {kind(content)}, not a string", "write the message's text as a string")
    return content


def _call(row: Row, field: str, value: object) -> dict[str, Any]:
    """A tool call with its arguments as an object; OpenAI's files have them as a string."""
    call = dict(mapping(row, field, value, '{"type": "function", "function": {"name": ..., "arguments": {...}}}'))
    if "function" not in call:
        return call
    function = dict(mapping(row, f"{field}.function", call["function"], '{"name": ..., "arguments": {...}}'))
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except ValueError as error:
            raise bad(row, f"{field}.function.arguments", f"are broken JSON: {error}", "write a JSON object") from error
    return {**call, "function": function}


def _said_weight(row: Row, field: str, message: Message) -> float | None:
    """Loss weight that a message says for itself, or None."""
    said: float | None = None
    for key in ("train", "loss"):
        if key in message:
            if not isinstance(message[key], bool):
                raise bad(row, f"{field}.{key}", f"is {kind(message[key])}, not true or false", "write true or false")
            said = float(message[key])
    if "weight" in message:
        weight = message["weight"]
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
            raise bad(row, f"{field}.weight", f"is {weight!r}", "write a number of 0 or more")
        said = float(weight) * (1.0 if said is None else said)
    if said and message["role"] != ASSISTANT:
        raise bad(
            row, field, f"is of role {message['role']!r} and to be trained", "train the assistant's messages only"
        )
    return said


def _from_sharegpt(row: Row, field: str, value: object) -> Message:
    item = mapping(row, field, value, '{"from": "human", "value": ...}')
    name = item.get("from")
    if name not in _SHAREGPT_ROLES:
        choices = ", ".join(_SHAREGPT_ROLES)
        raise bad(row, f"{field}.from", f"is {name!r}, which is no role", f"use one of {choices}")
    words = string(row, f"{field}.value", item.get("value"), empty=True)
    own = {key: item[key] for key in _OWN_KEYS if item.get(key) is not None}
    if name in _CALLS:
        return {"role": ASSISTANT, "content": "", "tool_calls": _calls(row, f"{field}.value", words), **own}
    return {"role": _SHAREGPT_ROLES[str(name)], "content": words, **own}


def _calls(row: Row, field: str, words: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(words)
    except ValueError as error:
        raise bad(
            row, field, f"is no JSON: {words[:60]!r}", 'write {"name": ..., "arguments": {...}}, or a list of them'
        ) from error
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise bad(row, field, f"names no function: {words[:60]!r}", 'write {"name": ..., "arguments": {...}}')
    return [{"type": "function", "function": {"name": call["name"], "arguments": {}, **call}} for call in calls]


def _check_turns(row: Row, messages: list[Message]) -> None:
    """Sharegpt's rule: after an optional system message, a person (or a tool) and the assistant take turns."""
    roles = [m["role"] for m in messages]
    offset = 1 if roles[0] == "system" else 0
    for i, role in enumerate(roles[offset:], offset):
        want = ("user", "tool") if (i - offset) % 2 == 0 else (ASSISTANT,)
        if role not in want:
            raise bad(
                row,
                f"conversations[{i}].from",
                f"is out of order: the roles are {', '.join(roles)}",
                "let human (or observation) and gpt (or function_call) take turns, human first",
            )
