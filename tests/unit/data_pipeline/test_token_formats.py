import numpy as np
import pytest

from data_pipeline.formats import detect_format, parser_of
from data_pipeline.render import Renderer
from data_pipeline.rows import Row
from raycp.errors import DataError

from .tiny_tokenizers import make_tokenizer

EOD = 9


def parse(row, *, eod=None, vocabulary=0):
    return parser_of("tokens", eod_token_id=eod, vocabulary=vocabulary)(Row("f:1", row))


def documents(row, **kwargs) -> list[list[int]]:
    return [d.ids.tolist() for d in parse(row, **kwargs).documents]


def rendered(row, *, train_on="auto", **kwargs):
    renderer = Renderer(make_tokenizer(), train_on=train_on, chat_template=None, format_name="tokens")
    return renderer.render_batch([("f:1", parse(row, **kwargs))])


def test_ids_alone_are_trained_whole_and_nothing_is_added():
    assert detect_format(Row("f:1", {"input_ids": [5], "text": "x"})) == "tokens"
    (document,) = rendered({"input_ids": [5, 6, 7]})
    assert document.ids.tolist() == [5, 6, 7]
    assert document.targets.tolist() == [6, 7, -100]
    assert (document.weights, document.row_id) == (None, "f:1")


@pytest.mark.parametrize(
    "column",
    [
        {"labels": [-100, 6, -100, 8]},
        {"loss_mask": [0, 1, 0, 1]},
        {"assistant_masks": [0, 1, 0, 1]},
        {"completion_mask": np.array([0, 1, 0, 1])},
        {"labels": [-100, 6, 7, 8], "loss_mask": [1, 1, 0, 1]},
    ],
)
def test_labels_are_shifted_once(column):
    (document,) = rendered({"input_ids": [5, 6, 7, 8], **column})
    assert document.targets.tolist() == [6, -100, 8, -100]
    (whole,) = rendered({"input_ids": [5, 6, 7, 8], **column}, train_on="all")
    assert whole.targets.tolist() == [6, 7, 8, -100]


def test_weights_go_with_the_tokens_that_they_are_of():
    (document,) = rendered({"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "weights": [9, 0.5, 2]})
    assert document.targets.tolist() == [6, 7, -100]
    assert document.weights.tolist() == [0.5, 2, 1]
    assert document.target_weight == 2.5


def test_packed_by_lengths_by_eod_and_by_both():
    ids = [1, 2, EOD, 3, EOD, 4, 5, 6]
    want = [[1, 2, EOD], [3, EOD], [4, 5, 6]]
    assert documents({"input_ids": ids, "seq_lengths": [3, 2, 3]}) == want
    assert documents({"input_ids": ids, "seq_lens": [3, 2, 3]}) == want
    assert documents({"input_ids": ids}, eod=EOD) == want
    assert documents({"input_ids": ids, "seq_lengths": [3, 2, 3]}, eod=EOD) == want
    assert documents({"input_ids": ids, "seq_lengths": [5, 3]}, eod=EOD) == [ids[:5], ids[5:]], "an EOD may end a turn"
    assert documents({"input_ids": ids}) == [ids]


def test_padding_is_left_out():
    ids = [1, 2, EOD, 3, 4, EOD, EOD, EOD]
    assert documents({"input_ids": ids}, eod=EOD) == [[1, 2, EOD], [3, 4, EOD]]
    assert documents({"input_ids": ids, "seq_lengths": [3, 3, 0]}) == [[1, 2, EOD], [3, 4, EOD]]
    assert documents({"input_ids": [1, 2, 0, 0], "attention_mask": [1, 1, 0, 0]}) == [[1, 2]]


def test_documents_of_a_packed_row_have_ids_and_targets_of_their_own():
    found = rendered({"input_ids": [1, 2, EOD, 3, 4, EOD]}, eod=EOD)
    assert [d.row_id for d in found] == ["f:1#1", "f:1#2"]
    assert [d.targets.tolist() for d in found] == [[2, EOD, -100], [4, EOD, -100]]


def test_a_document_of_a_pack_may_have_no_target_but_not_all():
    found = rendered({"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4], "seq_lengths": [2, 2]})
    assert [d.num_targets for d in found] == [0, 1]
    with pytest.raises(DataError, match="f:1: the row has no target"):
        rendered({"input_ids": [1, 2, 3, 4], "labels": [-100] * 4, "seq_lengths": [2, 2]})
    with pytest.raises(DataError, match="f:1: the row has no target"):
        rendered({"input_ids": [1, 2], "labels": [1, -100]})


@pytest.mark.parametrize(
    ("row", "kwargs", "message"),
    [
        ({"input_ids": []}, {}, "input_ids is an empty list"),
        ({"input_ids": "12"}, {}, "input_ids is of type str, not a list"),
        ({"input_ids": [[1, 2]]}, {}, "input_ids is not a flat list"),
        ({"input_ids": [1, 2.5]}, {}, "input_ids is not a flat list"),
        ({"input_ids": [1, None]}, {}, "input_ids is not a flat list"),
        ({"input_ids": [1, -2]}, {}, "input_ids holds -2"),
        ({"input_ids": [1, 400]}, {"vocabulary": 400}, "input_ids holds 400, and the tokenizer has ids 0 to 399"),
        ({"input_ids": [1, 2], "labels": [1]}, {}, "labels has 1 entries, input_ids 2"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, {}, r"labels \[0\] is 2, input_ids\[0\] is 1"),
        ({"input_ids": [1, 2], "weights": [1]}, {}, "weights has 1 entries"),
        ({"input_ids": [1, 2], "weights": [1, -1]}, {}, "weights has a number below 0"),
        ({"input_ids": [1, 2], "weights": [1, float("nan")]}, {}, "weights has a number below 0, or none"),
        ({"input_ids": [1, 2], "seq_lengths": [1, 2]}, {}, "seq_lengths sums to 3, input_ids has 2"),
        ({"input_ids": [1, 2], "seq_lengths": []}, {}, "seq_lengths sums to 0"),
        ({"input_ids": [1, 2, 3], "seq_lengths": [2, -1, 2]}, {}, "seq_lengths sums to 3"),
        (
            {"input_ids": [1, 9, 3, 4], "seq_lengths": [3, 1]},
            {"eod": 9},
            "ends a document at token 3, which is not after",
        ),
        ({"input_ids": [9, 9, 9]}, {"eod": 9}, "is padding only"),
        ({"input_ids": [1, 2, 3, 4], "position_ids": [0, 1, 0, 1]}, {}, "position_ids shows several documents"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 3, 2]}, {}, "attention_mask goes from 3 to 2 at token 2"),
        ({"input_ids": [1, 2, 3], "attention_mask": [2, 0, 3]}, {}, "attention_mask goes from 2 to 0 at token 1"),
        (
            {"input_ids": [1, 2, 3, 4], "attention_mask": [1, 1, 2, 2], "seq_lengths": [3, 1]},
            {},
            "seq_lengths and attention_mask differ on whether a document ends at token 2",
        ),
    ],
)
def test_wrong_rows(row, kwargs, message):
    with pytest.raises(DataError, match="f:1: .*" + message) as error:
        parse(row, **kwargs)
    assert error.value.fix


def test_positions_that_start_again_are_fine_where_boundaries_are_given():
    row = {"input_ids": [1, 2, 3, 4], "position_ids": [0, 1, 0, 1], "seq_lengths": [2, 2]}
    assert documents(row) == [[1, 2], [3, 4]]


def test_an_attention_mask_that_numbers_documents_says_where_they_end():
    ids = [1, 2, 3, 4, 5, 0, 0]
    assert documents({"input_ids": ids, "attention_mask": [1, 1, 2, 2, 2, 0, 0]}) == [[1, 2], [3, 4, 5]]
    assert documents({"input_ids": ids, "attention_mask": [2, 2, 3, 3, 3, 0, 0]}) == [[1, 2], [3, 4, 5]]
    both = {"input_ids": ids, "attention_mask": [1, 1, 2, 2, 2, 0, 0], "seq_lengths": [2, 3]}
    assert documents(both) == [[1, 2], [3, 4, 5]]


def test_padding_behind_the_last_end_of_document_is_left_out():
    ids = [1, 2, EOD, 3, EOD, 7, 7, 7]
    masked = [-100, 2, EOD, 3, EOD, -100, -100, -100]
    assert documents({"input_ids": ids, "labels": masked}, eod=EOD) == [[1, 2, EOD], [3, EOD]]
    assert documents({"input_ids": ids, "attention_mask": [1] * 5 + [0] * 3}, eod=EOD) == [[1, 2, EOD], [3, EOD]]
    assert documents({"input_ids": ids}, eod=EOD)[-1] == [7, 7, 7], "trained: no padding"
