"""Examples to documents: token ids, and which of them are trained.

Guarantees: a trained token is one that the model has to produce when it is used. In a chat those are the words of the
assistant's turns and the end-of-turn token after them, not the role header, nor white space after the end-of-turn
(`template.py` finds the turns). A turn whose end-of-turn token would not be trained is refused: such a model would
never stop. If the tokenizer starts plain text with a BOS and the template does not, one is put there: exactly one BOS
either way. Plain text, and a completion after its prompt, end with the end-of-sequence token, trained; special tokens
in them count, since they may be the user's own rendering of a chat. Rows of token ids are taken as they are. Whether
pad id == eos id makes no difference. A document without a target is refused: it would cost time and teach nothing.
Cost: one pass of the tokenizer per row, in batches.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from data_pipeline.document import Document, shift_targets, shift_weights
from data_pipeline.encode import Encoded, Encoder, Tokenizer
from data_pipeline.examples import Conversation, Example, PromptCompletion, Text, TokenRow
from data_pipeline.rows import BadRow, raise_bad
from data_pipeline.template import Chat, ChatTemplate
from raycp.errors import DataError, ModelError

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]

_CHAT = ("assistant", "last_assistant", "all")
_ALLOWED_TRAIN_ON = {
    "messages": _CHAT,
    "sharegpt": _CHAT,
    "alpaca": _CHAT,
    "prompt_completion": ("completion", "assistant", "last_assistant", "all"),
    "text": ("all",),
    "tokens": ("labels", "all"),
}
"""Format -> what may be trained; the first is meant by "auto". Labels of token ids: the column, or every token."""


class Renderer:
    """Turns examples of one format into documents.

    Args:
        tokenizer: a Hugging Face fast tokenizer.
        train_on: as `DataConfig.train_on`; "auto" is "assistant" for chats, "completion" for prompt + completion, "all"
            for text and the labels for token ids.
        chat_template: as `DataConfig.chat_template`.
        format_name: one of `raycp.config.FORMATS` but "auto".

    Raises:
        DataError: `train_on` does not fit the format.
        ModelError: the tokenizer lacks what the format needs.
    """

    def __init__(self, tokenizer: Tokenizer, *, train_on: str, chat_template: str | None, format_name: str) -> None:
        self.train_on = _resolve_train_on(train_on, format_name)
        self.encoder = Encoder(tokenizer)
        self._given_template = chat_template
        chats = _ALLOWED_TRAIN_ON[format_name] is _CHAT
        self._template = ChatTemplate(self.encoder, chat_template) if chats else None
        self.rows_cut = 0
        """Rows in which a token would have straddled the start of an answer and was cut there."""
        self.rows_ended_inside = 0
        """Rows of token ids of one document that go on behind an end-of-sequence token: packed, or several turns."""

    @property
    def template(self) -> ChatTemplate:
        """The chat template; for prompt + completion rows it is looked up when the first one holds messages."""
        if self._template is None:
            self._template = ChatTemplate(self.encoder, self._given_template)
        return self._template

    def mask_source(self) -> str:
        """Where the loss mask comes from, in words."""
        if self._template is None:
            return {"all": "whole text", "labels": "labels"}.get(self.train_on, "completion")
        return "generation tags" if self._template.has_tags else "prefix rendering"

    def render_batch(self, examples: Sequence[tuple[str, Example]], bad: BadRow = raise_bad) -> list[Document]:
        """Documents of (row id, example), in order; the tokenizer runs once over all texts of them.

        Args:
            examples: a few hundred rows.
            bad: takes the error of a row that the template refuses or that has nothing to train; if it returns, the row
                is left out.

        Raises:
            ModelError: a template that cannot be trained with.
        """
        texts: list[str] = []
        later: list[Callable[[Encoded], list[Document]]] = []
        for row_id, example in examples:
            try:
                text, finish = self._prepared(row_id, example)
            except DataError as error:
                bad(error)
            else:
                texts.append(text)
                later.append(finish)
        documents: list[Document] = []
        for tokens, finish in zip(self.encoder.encode_batch(texts), later, strict=True):
            try:
                documents += finish(tokens)
            except DataError as error:
                bad(error)
        return documents

    def _prepared(self, row_id: str, example: Example) -> tuple[str, Callable[[Encoded], list[Document]]]:
        """(a text to encode with those of other rows, what to do with its tokens)."""
        if isinstance(example, TokenRow):
            return "", lambda _: self._token_documents(row_id, example)
        if isinstance(example, Conversation):
            chat = self.template.render(row_id, example, self.train_on)
            _check_encodable(row_id, chat.text)
            return "" if chat.literals else chat.text, lambda tokens: [self._chat_document(row_id, chat, tokens)]
        if isinstance(example, PromptCompletion):
            _check_encodable(row_id, example.prompt)
            _check_encodable(row_id, example.completion)
            return example.prompt, lambda tokens: [self._completion_document(row_id, example, tokens.ids)]
        assert isinstance(example, Text)
        _check_encodable(row_id, example.text)
        return example.text, lambda tokens: [self._text_document(row_id, tokens.ids)]

    def _text_document(self, row_id: str, tokens: Int64) -> Document:
        ids = self._with_eos(self._with_bos(tokens))
        return _document(row_id, ids, np.ones(ids.size, np.bool_))

    def _token_documents(self, row_id: str, row: TokenRow) -> list[Document]:
        """Documents of a row of token ids; of several, those without a target are padding or context, and kept."""
        several = len(row.documents) > 1
        if not row.packed and self.encoder.eos_id is not None:
            ids = row.documents[0].ids
            ends = np.flatnonzero(ids == self.encoder.eos_id)
            self.rows_ended_inside += bool(ends.size and (ids[ends[0] :] != self.encoder.eos_id).any())
        documents = []
        for number, tokens in enumerate(row.documents, 1):
            trained = np.ones(tokens.ids.size, np.bool_) if self.train_on == "all" else tokens.trained
            name = f"{row_id}#{number}" if row.packed else row_id
            documents.append(_document(name, tokens.ids, trained, tokens.weights, empty=several))
        if not any(document.num_targets for document in documents):
            raise _no_target(row_id)
        return documents

    def _chat_document(self, row_id: str, chat: Chat, tokens: Encoded) -> Document:
        if chat.literals:
            tokens = self.encoder.encode(chat.text, chat.literals)
        cuts = [start for start, _ in chat.spans if self.encoder.straddled(chat.text, tokens, start, chat.literals)]
        if cuts:
            self.rows_cut += 1
            tokens = self.encoder.encode(chat.text, chat.literals, cuts)
        trained = np.full(tokens.ids.size, self.train_on == "all")
        weights = None if chat.weights is None else np.ones(tokens.ids.size, np.float32)
        for number, (start, end) in enumerate(chat.spans):
            first, last = self._trained_range(chat.text, tokens, start, end)
            trained[first:last] = True
            if weights is not None and chat.weights is not None:
                weights[first:last] = chat.weights[number]
            if first == last or tokens.ids[last - 1] not in self.encoder.stop_ids:
                raise self._no_stop(row_id, chat.text[start:end])
        if weights is not None and (weights == 1).all():
            weights = None
        ids = self._with_bos(tokens.ids)
        added = ids.size - tokens.ids.size
        trained = np.concatenate([np.full(added, self.train_on == "all"), trained])
        if weights is not None:
            weights = np.concatenate([np.ones(added, np.float32), weights])
        return _document(row_id, ids, trained, weights)

    def _trained_range(self, text: str, tokens: Encoded, start: int, end: int) -> tuple[int, int]:
        """Tokens of characters [start, end), without white space that follows the end-of-turn token."""
        first, last = tokens.count_before(start), tokens.count_before(end)
        stops = np.flatnonzero(np.isin(tokens.ids[first:last], self.encoder.stop_ids))
        if stops.size:
            stop = first + int(stops[-1])
            if not text[int(tokens.ends[stop]) : end].strip():
                last = stop + 1
        return first, last

    def _completion_document(self, row_id: str, example: PromptCompletion, prompt: Int64) -> Document:
        tokens = self.encoder.encode_batch([example.prompt + example.completion])[0].ids
        if not np.array_equal(tokens[: prompt.size], prompt):
            self.rows_cut += 1
            tokens = np.concatenate([prompt, self.encoder.encode_batch([example.completion])[0].ids])
        with_bos = self._with_bos(tokens)
        ids = self._with_eos(with_bos)
        trained = np.ones(ids.size, np.bool_)
        if self.train_on != "all":
            trained[: prompt.size + with_bos.size - tokens.size] = False
        return _document(row_id, ids, trained)

    def _with_bos(self, ids: Int64) -> Int64:
        """Puts the tokenizer's prefix (its BOS) before `ids`, unless they begin with it."""
        prefix = self.encoder.prefix_ids
        if np.array_equal(ids[: prefix.size], prefix):
            return ids
        return np.concatenate([prefix, ids])

    def _with_eos(self, ids: Int64) -> Int64:
        eos = self.encoder.eos_id
        if eos is None:
            raise ModelError(
                f"tokenizer {self.encoder.tokenizer.name_or_path!r} has no end-of-sequence token to end a text with",
                fix="set tokenizer.eos_token",
            )
        return ids if ids.size and ids[-1] == eos else np.append(ids, eos)

    def _no_stop(self, row_id: str, turn: str) -> ModelError:
        return ModelError(
            f"{row_id}: with {self.template.name} no end-of-turn token of an assistant turn is trained: the trained "
            f"text ends with {turn[-40:]!r}, and a model trained so never stops",
            fix="end each assistant turn with an end-of-turn token of the tokenizer, inside {% generation %} tags if "
            "the template has them (data.chat_template), or set data.train_on='all'",
            row=row_id,
        )


def _check_encodable(row_id: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{row_id}: character {error.start} of its text is {text[error.start]!a}, half of a surrogate pair, which "
            f"no UTF-8 text has: {text[max(0, error.start - 20) : error.end + 20]!a}",
            fix="write the row again from its source with valid Unicode, or remove the character",
            row=row_id,
        ) from error


def _resolve_train_on(train_on: str, format_name: str) -> str:
    allowed = _ALLOWED_TRAIN_ON[format_name]
    if train_on == "auto":
        return allowed[0]
    if train_on not in allowed:
        raise DataError(
            f"data.train_on={train_on!r} does not fit rows of format {format_name}",
            fix=f"set data.train_on to auto or {', '.join(allowed)}",
        )
    return train_on


def _document(
    row_id: str, ids: Int64, trained: Bool, weights: Float32 | None = None, *, empty: bool = False
) -> Document:
    """A document of tokens and what is trained of them; one without a target only if `empty`."""
    document = Document(
        ids=ids.astype(np.int32),
        targets=shift_targets(ids, trained),
        weights=None if weights is None else shift_weights(weights),
        row_id=row_id,
    )
    if not document.num_targets and not empty:
        raise _no_target(row_id)
    return document


def _no_target(row_id: str) -> DataError:
    return DataError(
        f"{row_id}: the row has no target: none of its tokens is trained",
        fix="remove the row, or set data.on_bad_row='skip'; the first token of a document cannot be one",
        row=row_id,
    )
