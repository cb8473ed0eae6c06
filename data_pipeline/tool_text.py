"""Tools as plain words, for chat templates that do not know them (`DataConfig.tools="text"`).

Guarantees: nothing of a row is lost: schemas become lines of the system message, calls words of the assistant's turn
(so they are trained), answers of tools a user's turn. Several answers in a row become one turn, since templates of this
kind want user and assistant to take turns. The model then has to be used in the same way.
"""

import json

from data_pipeline.examples import ASSISTANT, Conversation, Message

_INTRODUCTION = 'You can use tools. To call one, answer with {"name": ..., "arguments": {...}}. The tools are:'


def tools_as_text(chat: Conversation) -> Conversation:
    """The conversation without `tools`, `tool_calls` and the role "tool"; as it is where it has none of them."""
    uses = chat.tools or any(m.get("tool_calls") or m["role"] == "tool" for m in chat.messages)
    if not uses:
        return chat
    said = chat.weights or (1.0,) * len(chat.messages)
    messages: list[Message] = []
    weights: list[float] = []
    num_prompt, after_tool = 0, False
    for place, (message, weight) in enumerate(zip(chat.messages, said, strict=True)):
        if place == chat.num_prompt:
            num_prompt = len(messages)
        if message["role"] == "tool" and after_tool:
            messages[-1]["content"] += "\n" + message["content"]
            continue
        after_tool = message["role"] == "tool"
        messages.append(_as_text(message))
        weights.append(weight)
    if chat.tools:
        schemas = "\n".join([_INTRODUCTION, *(json.dumps(tool.get("function", tool)) for tool in chat.tools)])
        if messages[0]["role"] == "system":
            messages[0]["content"] = f"{messages[0]['content']}\n\n{schemas}"
        else:
            messages.insert(0, {"role": "system", "content": schemas})
            weights.insert(0, 1.0)
            num_prompt += chat.num_prompt > 0
    return Conversation(
        tuple(messages), num_prompt=num_prompt, weights=None if chat.weights is None else tuple(weights)
    )


def _as_text(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": message["content"]}
    if message["role"] != ASSISTANT or not message.get("tool_calls"):
        return dict(message)
    calls = [json.dumps(call.get("function", call)) for call in message["tool_calls"]]
    words = "\n".join(part for part in (message["content"], *calls) if part)
    return {k: v for k, v in message.items() if k != "tool_calls"} | {"content": words}
