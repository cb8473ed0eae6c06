import json

import pytest

from data_pipeline import build_store
from data_pipeline.examples import Conversation
from data_pipeline.tool_text import tools_as_text
from raycp.config import DataConfig
from raycp.errors import DataError

from . import tiny_tokenizers as tiny
from .test_golden_templates import CALL, TOOL, TOOL_TALK, marked
from .tiny_tokenizers import chat, make_tokenizer

TALK = Conversation(tuple(TOOL_TALK), [TOOL])


def test_schemas_calls_and_answers_become_words():
    got = tools_as_text(TALK)
    assert [m["role"] for m in got.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert json.dumps(TOOL["function"]) in got.messages[0]["content"]
    assert got.messages[2] == {"role": "assistant", "content": json.dumps(CALL["function"])}
    assert got.messages[3]["content"] == "3"
    assert (got.tools, got.weights, got.num_prompt) == (None, None, 0)
    assert TALK.messages[1]["tool_calls"], "the row itself is as it was"


def test_a_system_message_is_kept_and_answers_in_a_row_are_one_turn():
    system, answer = {"role": "system", "content": "be nice"}, {"role": "tool", "content": "4"}
    messages = (system, *TOOL_TALK[:3], answer, TOOL_TALK[3])
    got = tools_as_text(Conversation(messages, [TOOL], weights=(1, 1, 0.5, 1, 1, 0)))
    assert [m["role"] for m in got.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert got.messages[0]["content"].startswith("be nice\n\n")
    assert got.messages[3]["content"] == "3\n4"
    assert got.weights == (1, 1, 0.5, 1, 0)


@pytest.mark.parametrize(("num_prompt", "want"), [(0, 0), (1, 2), (3, 4)])
def test_the_prompt_ends_where_it_did(num_prompt, want):
    got = tools_as_text(Conversation(tuple(TOOL_TALK), [TOOL], num_prompt=num_prompt))
    assert got.num_prompt == want


def test_a_chat_without_tools_is_as_it_is():
    plain = Conversation(tuple(chat("a", "b")))
    assert tools_as_text(plain) is plain


@pytest.mark.parametrize(("family", "template"), [("chatml", tiny.CHATML), ("llama2", tiny.LLAMA2)])
def test_a_tool_row_with_a_template_that_knows_no_tools(tmp_path, family, template):
    """As LLaMA-Factory has it: function_call, observation and a tools column as a string."""
    row = {
        "conversations": [
            {"from": "human", "value": "sum"},
            {"from": "function_call", "value": json.dumps(CALL["function"])},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "it is 3"},
        ],
        "tools": json.dumps([TOOL["function"]]),
    }
    tokenizer = make_tokenizer(family, template)
    settings = {"seq_length": 1024, "folder": tmp_path}
    with pytest.raises(
        DataError, match=r"leaves tools out|refuses messages of roles user, assistant, tool, assistant"
    ) as error:
        build_store([row], tokenizer, config=DataConfig(), **settings)
    assert "data.tools='text'" in error.value.fix
    store = build_store([row], tokenizer, config=DataConfig(tools="text"), **settings)
    text = marked(tokenizer, store.document(0))
    stop = tokenizer.eos_token
    space = " " if family == "llama2" else ""
    assert f'{{{space}{{"name": "add", "arguments": {{"a": 1}}}}{space}{stop}}}' in text
    assert f"{{{space}it is 3{space}{stop}}}" in text
    assert '"description": "sums"' in text.split("{" + space + "{")[0]
