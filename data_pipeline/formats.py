"""What a row means: a conversation, a prompt with its completion, plain text, or token ids.

Guarantees: one format for a whole source, named or detected from the columns of its first row and reported; a row of
any other shape is a DataError with the row id and the field. Columns of other names are mapped, never guessed. The
order of user and assistant is the chat template's business in `messages`; refused here is what no template can mean: an
unknown role, no message, content that is null or no string, a system message or a tool's answer out of place.

    messages           messages: [{role, content, tool_calls?, train?, weight?}], tools?
    sharegpt           conversations: [{from, value}], system?, tools?              (chat_formats)
    alpaca             instruction, input?, output, system?, history?               (chat_formats)
    prompt_completion  prompt, completion: strings or lists of messages; tools?
    text               text
    tokens             input_ids, labels?, weights?, seq_lengths?                   (token_formats)
"""

from collections.abc import Callable, Mapping

from data_pipeline.chat_formats import messages_of, parse_alpaca, parse_messages, parse_sharegpt, tools_of
from data_pipeline.examples import Conversation as Conversation
from data_pipeline.examples import Example as Example
from data_pipeline.examples import PromptCompletion, Text, column, string
from data_pipeline.rows import Row
from data_pipeline.token_formats import parse_tokens
from raycp.config import FORMATS, column_map
from raycp.errors import DataError

Parser = Callable[[Row], Example]

_SHOWN_BY = (
    ("tokens", ("input_ids",)),
    ("messages", ("messages",)),
    ("sharegpt", ("conversations",)),
    ("alpaca", ("instruction", "output")),
    ("prompt_completion", ("prompt", "completion")),
    ("text", ("text",)),
)
"""Format -> columns that show it; the first that fits."""


def detect_format(row: Row, columns: str = "") -> str:
    """Name of the format that the columns of `row` show, under our names by `DataConfig.columns`.

    Raises:
        DataError: no format has these columns.
    """
    ours = renamed(row, columns).data
    for name, shown_by in _SHOWN_BY:
        if all(c in ours for c in shown_by):
            return name
    missing = [theirs for theirs in column_map(columns).values() if theirs not in row.data]
    said = f"; data.columns={columns!r} names {', '.join(map(repr, missing))}, which is not there" if missing else ""
    inside = next((k for k, v in row.data.items() if isinstance(v, list) and v and isinstance(v[0], Mapping)), None)
    raise DataError(
        f"{row.id}: columns {', '.join(map(repr, row.data)) or '(none)'} are of no known format{said}",
        fix=(f"if the rows are the list {inside!r}, write that list alone into the file; or " if inside else "")
        + "rename columns, or say which is which, as in data.columns='prompt=question, completion=answer'; known are "
        + "; ".join(" + ".join(shown_by) for _, shown_by in _SHOWN_BY),
        row=row.id,
    )


def renamed(row: Row, columns: str) -> Row:
    """The row with columns under our names, by `DataConfig.columns`."""
    names = column_map(columns)
    if not names:
        return row
    theirs = set(names.values())
    data = {k: v for k, v in row.data.items() if k not in theirs and k not in names}
    return Row(row.id, data | {ours: row.data[name] for ours, name in names.items() if name in row.data})


def parser_of(format_name: str, *, columns: str = "", eod_token_id: int | None = None, vocabulary: int = 0) -> Parser:
    """The function that turns rows of a format into examples; it raises DataError on another shape.

    Args:
        format_name: one of FORMATS but "auto".
        columns: as `DataConfig.columns`.
        eod_token_id: as `DataConfig.eod_token_id`.
        vocabulary: number of token ids that the tokenizer has; 0: any id is right.

    Raises:
        DataError: no such format.
    """
    parsers: dict[str, Parser] = {
        "messages": parse_messages,
        "sharegpt": parse_sharegpt,
        "alpaca": parse_alpaca,
        "prompt_completion": _parse_prompt_completion,
        "text": _parse_text,
        "tokens": lambda row: parse_tokens(row, eod_token_id, vocabulary),
    }
    if format_name not in parsers:
        choices = ", ".join(FORMATS)
        raise DataError(f"data.format={format_name!r} is not a choice", fix=f"set data.format to one of {choices}")
    parse = parsers[format_name]
    return (lambda row: parse(renamed(row, columns))) if columns else parse


def _parse_text(row: Row) -> Text:
    return Text(string(row, "text", column(row, "text")))


def _parse_prompt_completion(row: Row) -> Conversation | PromptCompletion:
    prompt, completion = column(row, "prompt"), column(row, "completion")
    if not isinstance(prompt, list) and not isinstance(completion, list):
        return PromptCompletion(string(row, "prompt", prompt, empty=True), string(row, "completion", completion))
    before, _ = messages_of(row, "prompt", prompt)
    after, weights = messages_of(row, "completion", completion)
    return Conversation(
        (*before, *after),
        tools_of(row),
        num_prompt=len(before),
        weights=None if weights is None else (*(1.0,) * len(before), *weights),
    )
