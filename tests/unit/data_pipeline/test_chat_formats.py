import json

import pytest

from data_pipeline.examples import Conversation
from data_pipeline.formats import detect_format, parser_of, renamed
from data_pipeline.rows import Row
from raycp.config import DataConfig, FitConfig, column_map
from raycp.errors import DataError

USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
WEATHER = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}
CALL = {"name": "weather", "arguments": {"city": "Paris"}}


def parse(row, name=None, **kwargs):
    one = Row("f:1", row)
    return parser_of(name or detect_format(renamed(one, kwargs.get("columns", ""))), **kwargs)(one)


def turn(who, words):
    return {"from": who, "value": words}


def roles(example: Conversation) -> list[str]:
    return [m["role"] for m in example.messages]


# -- sharegpt, as LLaMA-Factory and MindSpeed-LLM have it ------------------------------------------------------------


def test_sharegpt_roles_system_and_tools():
    row = {
        "conversations": [
            turn("human", "weather?"),
            turn("function_call", json.dumps(CALL)),
            turn("observation", '{"sky": "blue"}'),
            turn("gpt", "blue"),
        ],
        "system": "be brief",
        "tools": json.dumps([WEATHER]),
    }
    assert detect_format(Row("f:1", row)) == "sharegpt"
    got = parse(row)
    assert roles(got) == ["system", "user", "assistant", "tool", "assistant"]
    assert got.messages[2] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": CALL}],
    }
    assert got.tools == [{"type": "function", "function": WEATHER}]
    assert got.weights is None


@pytest.mark.parametrize("tools", [None, "", "[]", []])
def test_no_tools_in_all_its_forms(tools):
    assert parse({"conversations": [turn("human", "a"), turn("gpt", "b")], "tools": tools}).tools is None


def test_several_calls_of_one_turn():
    row = {"conversations": [turn("human", "a"), turn("function_call", json.dumps([CALL, {"name": "time"}]))]}
    calls = parse(row).messages[1]["tool_calls"]
    assert [c["function"]["name"] for c in calls] == ["weather", "time"]
    assert calls[1]["function"]["arguments"] == {}


def test_conversations_in_the_form_of_messages():
    assert parse({"conversations": [USER, REPLY]}) == Conversation((USER, REPLY))


def test_a_system_turn_of_its_own_wins_over_the_column():
    row = {"conversations": [turn("system", "own"), turn("human", "a"), turn("gpt", "b")], "system": "column"}
    assert parse(row).messages[0] == {"role": "system", "content": "own"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"conversations": []}, "conversations is an empty conversation"),
        ({"conversations": None}, "conversations is null, not a list"),
        ({"conversations": [turn("robot", "a")]}, r"conversations\[0\].from is 'robot', which is no role"),
        ({"conversations": [turn("human", None)]}, r"conversations\[0\].value is null"),
        ({"conversations": [turn("gpt", "a")]}, r"conversations\[0\].from is out of order: the roles are assistant"),
        ({"conversations": [turn("human", "a"), turn("human", "b")]}, "roles are user, user"),
        ({"conversations": [turn("human", "a"), turn("function_call", "{")]}, r"conversations\[1\].value is no JSON"),
        ({"conversations": [turn("human", "a"), turn("function_call", "{}")]}, "names no function"),
        ({"conversations": ["hi"]}, r"conversations\[0\] is of type str, not an object"),
        ({"conversations": [turn("human", "a"), turn("gpt", "b")], "system": 3}, "system is of type int"),
    ],
)
def test_wrong_sharegpt_rows(row, message):
    with pytest.raises(DataError, match="f:1: .*" + message) as error:
        parse(row)
    assert error.value.fix


# -- alpaca ---------------------------------------------------------------------------------------------------------


def test_alpaca_with_everything():
    row = {
        "instruction": "translate",
        "input": "chat",
        "output": "cat",
        "system": "s",
        "history": [["q", "a"], ["r", "b"]],
    }
    got = parse(row)
    assert roles(got) == ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in got.messages] == ["s", "q", "a", "r", "b", "translate\nchat", "cat"]


@pytest.mark.parametrize("empty", ["", None])
def test_alpaca_with_the_least(empty):
    row = {"instruction": "say", "input": empty, "output": "hi", "system": empty, "history": None, "text": "all of it"}
    assert detect_format(Row("f:1", row)) == "alpaca"
    assert [m["content"] for m in parse(row).messages] == ["say", "hi"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output": ""}, "output is an empty string"),
        ({"output": None}, "output is null"),
        ({"instruction": ""}, "instruction and input are empty"),
        ({"history": [["q"]]}, r"history\[0\] is no pair"),
        ({"history": "q"}, "history is of type str"),
        ({"history": [["q", None]]}, r"history\[0\] is null"),
        ({"input": 4}, "input is of type int"),
    ],
)
def test_wrong_alpaca_rows(change, message):
    with pytest.raises(DataError, match="f:1: .*" + message):
        parse({"instruction": "i", "output": "o"} | change)


# -- messages -------------------------------------------------------------------------------------------------------


def test_openai_arguments_as_a_string_become_an_object():
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    got = parse({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]})
    assert got.messages[1]["tool_calls"][0]["function"] == CALL
    bad = {**call, "function": {"name": "weather", "arguments": "{"}}
    with pytest.raises(DataError, match="arguments are broken JSON"):
        parse({"messages": [USER, {"role": "assistant", "tool_calls": [bad]}]})


@pytest.mark.parametrize(
    ("said", "weight"),
    [
        ({"train": True}, 1.0),
        ({"train": False}, 0.0),
        ({"loss": False}, 0.0),
        ({"weight": 0.25}, 0.25),
        ({"weight": 0}, 0),
    ],
)
def test_what_a_message_says_about_its_own_loss(said, weight):
    got = parse({"messages": [USER, {**REPLY, **said}, USER, REPLY]})
    assert got.weights == (1.0, weight, 1.0, 1.0)
    assert got.messages[1] == REPLY, "the template does not see it"
    again = parse({"conversations": [turn("human", "hi"), {**turn("gpt", "yo"), **said}]})
    assert again.weights == (1.0, weight)
    pair = parse({"prompt": [USER], "completion": [{**REPLY, **said}]})
    assert (pair.num_prompt, pair.weights) == (1, (1.0, weight))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([USER, {**REPLY, "train": "yes"}], r"messages\[1\].train is of type str, not true or false"),
        ([USER, {**REPLY, "weight": -1}], r"messages\[1\].weight is -1"),
        ([{**USER, "train": True}, REPLY], r"messages\[0\] is of role 'user' and to be trained"),
        ([USER, {"role": "system", "content": "s"}, REPLY], r"messages\[1\].role is 'system' after 'user'"),
        ([USER, {"role": "tool", "content": "t"}, REPLY], r"messages\[1\].role is 'tool' after 'user'"),
    ],
)
def test_wrong_messages(messages, message):
    with pytest.raises(DataError, match="f:1: .*" + message):
        parse({"messages": messages})


# -- columns of other names -----------------------------------------------------------------------------------------


def test_columns_are_mapped_before_the_format_is_looked_for():
    row = {"question": "q", "answer": "a", "prompt": "not this", "id": 7}
    columns = "prompt=question, completion=answer"
    one = Row("f:1", row)
    assert renamed(one, columns).data == {"id": 7, "prompt": "q", "completion": "a"}
    assert detect_format(renamed(one, columns)) == "prompt_completion"
    assert parse(row, columns=columns).prompt == "q"
    assert parse({"dialog": [USER, REPLY]}, columns="messages=dialog") == Conversation((USER, REPLY))
    with pytest.raises(DataError, match=r"completion is missing; .*") as error:
        parse({"question": "q"}, "prompt_completion", columns=columns)
    assert "data.columns='completion=...'" in error.value.fix


def test_an_unknown_row_is_told_how_to_map():
    with pytest.raises(DataError, match="columns 'question', 'answer' are of no known format") as error:
        detect_format(Row("f:1", {"question": "x", "answer": "y"}))
    assert "data.columns='prompt=question, completion=answer'" in error.value.fix


def test_a_mapping_to_a_column_that_is_not_there_is_said():
    with pytest.raises(DataError, match=r"columns 'text' are of no known .* names 'body', which is not there"):
        detect_format(Row("f:1", {"text": "x"}), "text=body")


def test_rows_inside_another_list_are_seen():
    with pytest.raises(DataError, match="columns 'version', 'data' are of no known format") as error:
        detect_format(Row("f:1", {"version": 1, "data": [{"text": "x"}]}))
    assert "if the rows are the list 'data', write that list alone" in error.value.fix


def test_content_in_parts_is_their_text():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    got = parse({"messages": [{"role": "user", "content": parts}, REPLY]})
    assert got.messages[0] == {"role": "user", "content": "one two"}
    parts[1] = {"type": "image_url", "image_url": {}}
    with pytest.raises(DataError, match=r"messages\[0\].content\[1\] is a part of type 'image_url'"):
        parse({"messages": [{"role": "user", "content": parts}, REPLY]})
    with pytest.raises(DataError, match=r"messages\[0\].content\[0\].text is null, not a string"):
        parse({"messages": [{"role": "user", "content": [{"type": "text"}]}, REPLY]})


@pytest.mark.parametrize(
    ("columns", "why"),
    [("prompt", "'prompt' is no pair"), ("prompt=", "is no pair"), ("a=b, a=c", "'a' is there twice"), (3, "is a int")],
)
def test_a_column_map_that_is_none_is_a_problem_of_the_configuration(columns, why):
    problems = FitConfig(data=DataConfig(columns=columns)).problems()
    assert [why in p.message for p in problems] == [True]
    assert column_map(" prompt = question ,completion=answer,") == {"prompt": "question", "completion": "answer"}
