"""A chat template: a conversation's text, and which characters of it the assistant has to produce.

Guarantees: spans come from the template's `{% generation %}` tags where it has them, else from rendering prefixes: the
text before an assistant turn, with the generation prompt, must be what the whole text begins with. A template that
rewrites earlier turns fails this and is refused, with both token lists at the first difference; there is no fallback.
What users wrote cannot forge a turn: special-token strings inside messages, tool calls and tool schemas are protected
before the template runs. A template that leaves tools or tool calls out of the text is refused: such a row would train
an empty answer.
Cost: two renderings per trained turn (one in all with tags), about 30 us each for a short chat.

Seam: `transformers.utils.chat_template_utils.render_jinja_template`, the function behind `apply_chat_template`, since
the latter gives the tags' character spans to nobody.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_pipeline.encode import Encoder, Tokenizer
from data_pipeline.examples import ASSISTANT, Conversation, Message
from raycp.errors import DataError, ModelError

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SHOWN = 6  # tokens on each side of a difference in an error

Span = tuple[int, int]


@dataclass(frozen=True)
class Chat:
    """A rendered conversation: characters [start, end) of each span are the assistant's, its end-of-turn included."""

    text: str
    literals: list[str]
    """Protected pieces of `text`, see `Encoder.protect`."""
    spans: list[Span]
    weights: list[float] | None = None
    """Loss weight of each span; None: 1."""


class ChatTemplate:
    """A Jinja chat template with its tokenizer's special tokens.

    Args:
        encoder: of the tokenizer whose template it is.
        template: Jinja source that replaces the tokenizer's own, or None.

    Raises:
        ModelError: neither has a template.
    """

    def __init__(self, encoder: Encoder, template: str | None) -> None:
        self.encoder = encoder
        tokenizer: Tokenizer = encoder.tokenizer
        self.name = "data.chat_template" if template else f"the chat template of tokenizer {tokenizer.name_or_path!r}"
        if template is None and not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                f"tokenizer {tokenizer.name_or_path!r} has no chat template, which rows of messages need",
                fix="set data.chat_template, use an instruction-tuned model, or give prompt + completion rows",
            )
        self.source = template or tokenizer.get_chat_template()
        self.has_tags = _GENERATION_TAG.search(self.source) is not None
        self._variables = dict(tokenizer.special_tokens_map)

    def render(self, row_id: str, chat: Conversation, train_on: str) -> Chat:
        """Text of a conversation, with the spans that `train_on` asks for.

        Args:
            row_id: for errors.
            chat: the conversation; turns before `chat.num_prompt` are not trained.
            train_on: "last_assistant", "all" (no spans: everything is trained), else every assistant turn.

        Raises:
            DataError: the template refuses the row, or the row has no turn to train.
            ModelError: the template cannot say what is the assistant's.
        """
        literals: list[str] = []
        messages = [
            {k: v if k == "role" else self._protect(v, literals) for k, v in message.items()}
            for message in chat.messages
        ]
        tools = self._protect(chat.tools, literals)
        said = chat.weights or (1.0,) * len(messages)
        turns = [i for i, m in enumerate(messages) if m["role"] == ASSISTANT and i >= chat.num_prompt and said[i]]
        if not turns and train_on != "all":
            raise DataError(
                f"{row_id}: no assistant turn to train", fix="remove the row, or set data.train_on='all'", row=row_id
            )
        text, tagged = self._run(row_id, messages, tools)
        self._check_tools(row_id, messages, tools, text)
        if train_on == "all":
            return Chat(text, literals, [])
        if train_on == "last_assistant":
            turns = turns[-1:]
        weights = [said[turn] for turn in turns] if chat.weights else None
        if self.has_tags:
            return Chat(text, literals, self._tagged_spans(row_id, messages, turns, tagged), weights)
        spans = [self._prefix_span(row_id, messages, tools, turn, text, literals) for turn in turns]
        return Chat(text, literals, spans, weights)

    def _protect(self, value: Any, literals: list[str]) -> Any:
        """A message's field with every string in it protected."""
        if isinstance(value, str):
            return self.encoder.protect(value, literals)
        if isinstance(value, list | tuple):
            return [self._protect(item, literals) for item in value]
        if isinstance(value, Mapping):
            return {key: self._protect(item, literals) for key, item in value.items()}
        return value

    def _check_tools(self, row_id: str, messages: Sequence[Message], tools: list[Any] | None, text: str) -> None:
        """Whether every function that the row names is in the text."""
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        for what, entries in (("tools", tools or []), ("tool calls", calls)):
            for entry in entries:
                function = entry.get("function", entry) if isinstance(entry, Mapping) else {}
                name = function.get("name") if isinstance(function, Mapping) else None
                if name and str(name) not in text:
                    raise DataError(
                        f"{row_id}: {self.name} leaves {what} out of the text ({name!r} is not in it), so the model "
                        "would not see what it is to learn",
                        fix="set data.chat_template to one that renders tools, or data.tools='text' (as words)",
                        row=row_id,
                    )

    def _run(
        self, row_id: str, messages: Sequence[Message], tools: list[Any] | None, *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """(text, characters inside generation tags); with the generation prompt at the end if `prompt`."""
        from jinja2.exceptions import TemplateError, TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, tagged = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self.source,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=self.has_tags,
                **self._variables,
            )
        except TemplateSyntaxError as error:
            raise ModelError(
                f"{self.name} is no template that can be read: line {error.lineno}: {error.message}",
                fix="repair it, or set data.chat_template",
            ) from error
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            roles = ", ".join(str(m["role"]) for m in messages)
            why = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise DataError(
                f"{row_id}: {self.name} refuses messages of roles {roles or '(none)'}: {why}",
                fix="change the row, or set data.chat_template"
                + (", or data.tools='text' to write tools as words" if "tool" in roles else ""),
                row=row_id,
            ) from error
        return texts[0], [(int(a), int(b)) for a, b in tagged[0]] if self.has_tags else []

    def _tagged_spans(
        self, row_id: str, messages: Sequence[Message], turns: Sequence[int], tagged: Sequence[Span]
    ) -> list[Span]:
        """Of the spans in generation tags, those of `turns`."""
        spans = [(a, b) for a, b in tagged if b > a]
        order = [i for i, m in enumerate(messages) if m["role"] == ASSISTANT]
        if len(spans) != len(order):
            raise ModelError(
                f"{row_id}: {self.name} has {{% generation %}} tags on {len(spans)} of {len(order)} assistant turns",
                fix="put the tags around the text of every assistant turn, or set data.chat_template",
                row=row_id,
            )
        return [spans[order.index(turn)] for turn in turns]

    def _prefix_span(
        self,
        row_id: str,
        messages: Sequence[Message],
        tools: list[Any] | None,
        turn: int,
        text: str,
        literals: list[str],
    ) -> Span:
        """Characters of assistant turn `turn`, by rendering what comes before it and what ends with it."""
        before, _ = self._run(row_id, messages[:turn], tools, prompt=True)
        upto, _ = self._run(row_id, messages[: turn + 1], tools) if turn + 1 < len(messages) else (text, [])
        for prefix, whole, what in (
            (before, upto, f"the prompt of message {turn}"),
            (upto, text, f"the chat up to message {turn}"),
        ):
            if not whole.startswith(prefix):
                raise self._not_a_prefix(row_id, what, prefix, whole, literals)
        return len(before), len(upto)

    def _not_a_prefix(self, row_id: str, what: str, prefix: str, text: str, literals: list[str]) -> ModelError:
        left, right = self.encoder.encode(prefix, literals).ids, self.encoder.encode(text, literals).ids
        size = min(left.size, right.size)
        differ = np.flatnonzero(left[:size] != right[:size])
        place = int(differ[0]) if differ.size else size
        show = slice(max(0, place - _SHOWN), place + _SHOWN)
        tokens = self.encoder.tokenizer.convert_ids_to_tokens
        return ModelError(
            f"{row_id}: {self.name} renders {what} differently when more follows, so what would be trained is not what "
            f"the model sees when it is used. They differ at token {place}:\n"
            f"    alone    {tokens(left[show].tolist())}\n    in place {tokens(right[show].tolist())}",
            fix="set data.chat_template to one that leaves earlier turns as they are or has {% generation %} tags "
            "around assistant turns, or give one row per assistant turn with data.train_on='last_assistant'",
            row=row_id,
            token=place,
        )
