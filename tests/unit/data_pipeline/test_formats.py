import pytest

from data_pipeline.formats import Conversation, PromptCompletion, Text, detect_format, parser_of
from data_pipeline.sources import Row
from raycp.errors import DataError

USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


@pytest.mark.parametrize(
    ("row", "name", "want"),
    [
        ({"text": "x", "id": 3}, "text", Text("x")),
        ({"prompt": "", "completion": "b"}, "prompt_completion", PromptCompletion("", "b")),
        (
            {"prompt": [USER], "completion": [REPLY]},
            "prompt_completion",
            Conversation((USER, REPLY), num_prompt=1),
        ),
        ({"messages": [USER, REPLY], "text": "ignored"}, "messages", Conversation((USER, REPLY))),
        ({"messages": [USER], "tools": '[{"a": 1}]'}, "messages", Conversation((USER,), [{"a": 1}])),
        ({"messages": [USER], "tools": None}, "messages", Conversation((USER,))),
    ],
)
def test_detected_and_parsed(row, name, want):
    assert detect_format(Row("f:1", row)) == name
    assert parser_of(name)(Row("f:1", row)) == want


def test_null_fields_of_columnar_files_are_absent():
    parsed = parser_of("messages")(Row("f:1", {"messages": [{**USER, "name": None}]}))
    assert parsed == Conversation((USER,))


def test_content_may_be_null_beside_tool_calls():
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}
    parsed = parser_of("messages")(Row("f:1", {"messages": [USER, call]}))
    assert parsed.messages[1] == {"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("text", {"txt": "x"}, "text is missing; the row has 'txt'"),
        ("text", {"text": None}, "text is null, not a string"),
        ("text", {"text": ""}, "text is an empty string"),
        ("prompt_completion", {"prompt": "x"}, "completion is missing"),
        ("prompt_completion", {"prompt": "x", "completion": 3}, "completion is of type int"),
        (
            "prompt_completion",
            {"prompt": [USER], "completion": "x"},
            "completion is of type str, not a list of messages",
        ),
        ("messages", {"messages": "hi"}, "messages is of type str, not a list"),
        ("messages", {"messages": []}, "messages is an empty conversation"),
        ("messages", {"messages": [USER, "yo"]}, r"messages\[1\] is of type str, not an object"),
        ("messages", {"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role is 'robot'"),
        ("messages", {"messages": [{"content": "x"}]}, r"messages\[0\].role is None"),
        ("messages", {"messages": [USER, {"role": "assistant", "content": None}]}, r"messages\[1\].content is null"),
        (
            "messages",
            {"messages": [{"role": "user", "content": ["a"]}]},
            r"messages\[0\].content\[0\] is of type str, not an object",
        ),
        ("messages", {"messages": [USER], "tools": "{"}, "tools is broken JSON"),
        ("messages", {"messages": [USER], "tools": {"a": 1}}, "tools is of type dict, not a list"),
    ],
)
def test_wrong_shapes_name_row_and_field(name, row, message):
    with pytest.raises(DataError, match="f.jsonl:7: " + message) as error:
        parser_of(name)(Row("f.jsonl:7", row))
    assert error.value.details["row"] == "f.jsonl:7"
    assert error.value.fix


def test_unknown_columns_and_formats():
    with pytest.raises(DataError, match="f:1: columns 'question', 'answer' are of no known format"):
        detect_format(Row("f:1", {"question": "x", "answer": "y"}))
    with pytest.raises(DataError, match="'kto' is not a choice"):
        parser_of("kto")
