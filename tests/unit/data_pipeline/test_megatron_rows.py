"""Megatron's .bin and .idx files, written here byte by byte as their format says."""

import json
import os
import struct

import pytest

from data_pipeline import build_store, describe, plan_packs
from data_pipeline.files import File, find_files
from data_pipeline.readers import look_at, look_at_all, read_part
from raycp.config import DataConfig
from raycp.errors import DataError

from .tiny_tokenizers import make_tokenizer

CODES = {"B": 1, "b": 2, "h": 3, "i": 4, "q": 5, "d": 6, "f": 7, "H": 8}
EOD = 9


def write(prefix, sequences, kind="i", *, version=1, code=None, magic=b"MMIDIDX\x00\x00", lengths=None):
    """A pair of files; returns the path of the index."""
    lengths = [len(s) for s in sequences] if lengths is None else lengths
    size = struct.calcsize(f"<{kind}")
    index = magic + struct.pack("<Q", version) + struct.pack("<B", CODES[kind] if code is None else code)
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(sequences) + 1)
    index += b"".join(struct.pack("<i", n) for n in lengths)
    index += b"".join(struct.pack("<q", size * sum(lengths[:i])) for i in range(len(sequences)))
    index += b"".join(struct.pack("<q", i) for i in range(len(sequences) + 1))
    os.makedirs(os.path.dirname(prefix), exist_ok=True)
    with open(f"{prefix}.idx", "wb") as stream:
        stream.write(index)
    with open(f"{prefix}.bin", "wb") as stream:
        stream.write(b"".join(struct.pack(f"<{len(s)}{kind}", *s) for s in sequences))
    return f"{prefix}.idx"


def write_packed(prefix, ids, labels, mask):
    """What MindSpeed-LLM's `preprocess_data.py --handler-name AlpacaStyleInstructionHandler` writes."""
    for name, sequences in (("input_ids", ids), ("labels", labels), ("attention_mask", mask)):
        write(f"{prefix}_packed_{name}_document", sequences)
    return prefix


IDS = [[1, 2, EOD, 3, 4, 5, EOD, 0, 0], [6, 7, 8, EOD, 1, EOD]]
LABELS = [[-100, 2, EOD, -100, -100, 5, EOD, -100, -100], [-100, 7, 8, EOD, -100, EOD]]
NUMBERS = [[1, 1, 1, 2, 2, 2, 2, 0, 0], [1, 1, 1, 1, 2, 2]]
ONES = [[1] * 9, [1] * 6]
DOCUMENTS = [
    ([1, 2, EOD], [2, EOD, -100]),
    ([3, 4, 5, EOD], [-100, 5, EOD, -100]),
    ([6, 7, 8, EOD], [7, 8, EOD, -100]),
    ([1, EOD], [EOD, -100]),
]


def rows(file: File):
    return [
        {name: value.tolist() for name, value in row.data.items()}
        for row in read_part(look_at(file, 1 << 20).parts(file)[0])
    ]


def store(data, folder, **config):
    return build_store(data, make_tokenizer(), seq_length=64, config=DataConfig(**config), folder=folder)


def documents(made):
    return [(d.ids.tolist(), d.targets.tolist()) for d in map(made.document, range(len(made)))]


@pytest.mark.parametrize("kind", ["B", "b", "h", "i", "q", "H"])
def test_every_type_of_whole_numbers(kind, tmp_path):
    path = write(f"{tmp_path}/c4_text_document", [[1, 2, 3], [], [100]], kind)
    assert rows(File(path)) == [{"input_ids": [1, 2, 3]}, {"input_ids": []}, {"input_ids": [100]}]


def test_ids_that_need_two_bytes_are_not_negative(tmp_path):
    assert rows(File(write(f"{tmp_path}/x", [[65_535]], "H"))) == [{"input_ids": [65_535]}]


@pytest.mark.parametrize(
    "name", ["{p}", "{p}_packed", "{p}_packed_input_ids_document", "{p}_packed_input_ids_document.idx",
             "{p}_packed_input_ids_document.bin", "{d}", "{d}/*", "{d}/*.idx"]
)  # fmt: skip
def test_all_names_that_a_user_may_give(name, tmp_path):
    prefix = write_packed(f"{tmp_path}/d/alpaca", IDS, LABELS, NUMBERS)
    (file,) = find_files(name.format(p=prefix, d=tmp_path / "d"))
    assert file.path == f"{prefix}_packed_input_ids_document.idx"
    assert rows(file)[1] == {"input_ids": IDS[1], "labels": LABELS[1], "attention_mask": NUMBERS[1]}


def test_neat_packed_rows_are_cut_where_their_mask_says(tmp_path):
    made = store(write_packed(f"{tmp_path}/d/alpaca", IDS, LABELS, NUMBERS), tmp_path / "s")
    assert documents(made) == DOCUMENTS
    assert made.report["format"] == "tokens"
    assert made.row_id(1).endswith("alpaca_packed_input_ids_document.idx:1#2")
    faulty = [[1, 1, 1, 1, 2, 2, 2, 0, 0], NUMBERS[1]]
    assert documents(store(write_packed(f"{tmp_path}/e/a", IDS, LABELS, faulty), tmp_path / "s")) != DOCUMENTS


def test_packed_rows_are_cut_after_each_end_of_document_and_padding_is_left_out(tmp_path):
    made = store(write_packed(f"{tmp_path}/d/alpaca", IDS, LABELS, ONES), tmp_path / "s", eod_token_id=EOD)
    assert documents(made) == DOCUMENTS
    whole = store(write_packed(f"{tmp_path}/d/alpaca", IDS, LABELS, ONES), tmp_path / "s")
    assert len(whole) == 2, "nothing says where documents end"


def test_rows_that_may_be_packed_and_do_not_say_so_are_pointed_out(tmp_path):
    eos = make_tokenizer().eos_token_id
    ids = [[1, 2, eos, 3, 4, eos], [1, 2, eos, eos], [1, 2]]
    prefix = write_packed(f"{tmp_path}/d/a", ids, ids, [[1] * len(s) for s in ids])

    def report(**config):
        made = store(prefix, tmp_path / "s", **config)
        return describe(made, plan_packs(made.lengths, seq_length=64))

    assert "note      1 rows of token ids go on behind an end-of-sequence token" in report()
    assert "go on behind" not in report(eod_token_id=eos)


def test_a_document_that_was_cut_has_a_number_and_no_end(tmp_path):
    ids, numbers = [[1, 2, 3, 4, EOD]], [[1, 1, 1, 2, 2]]
    made = store(write_packed(f"{tmp_path}/d/a", ids, ids, numbers), tmp_path / "s", eod_token_id=EOD)
    assert [d for d, _ in documents(made)] == [[1, 2, 3], [4, EOD]]


def test_pre_training_data_are_trained_whole(tmp_path):
    made = store(f"{tmp_path}/c4", tmp_path / "s") if write(f"{tmp_path}/c4_text_document", [[1, 2, 3]]) else None
    assert documents(made) == [([1, 2, 3], [2, 3, -100])]


def test_parts_are_cut_between_sequences_and_hold_the_same_rows(tmp_path):
    ids = [[i % 50 + 1] * (i % 7 + 1) for i in range(200)]
    (file,) = find_files(write_packed(f"{tmp_path}/d/a", ids, ids, [[1] * len(s) for s in ids]))
    look = look_at(file, 1000)
    assert look.size == file.size() == sum(p.stat().st_size for p in (tmp_path / "d").iterdir())
    parts = look.parts(file)
    assert len(parts) > 5
    assert sum(part.size for part in parts) == sum(3 * 4 * len(s) for s in ids)
    found = [(row.id, row.data["input_ids"].tolist()) for part in parts for row in read_part(part)]
    assert found == [(f"{file.name}:{i}", s) for i, s in enumerate(ids, 1)]


def test_a_change_of_any_of_the_files_is_another_data_set(tmp_path):
    prefix = write_packed(f"{tmp_path}/d/a", IDS, LABELS, NUMBERS)
    (file,) = find_files(prefix)
    memory = tmp_path / "looks.json"
    for path in (tmp_path / "d").iterdir():
        os.utime(path, (1, 1))
    (before,) = look_at_all([file], memory=memory)
    assert json.loads(memory.read_text())
    for column in ("input_ids", "labels", "attention_mask"):
        path = tmp_path / "d" / f"a_packed_{column}_document.bin"
        raw = path.read_bytes()
        path.write_bytes(raw[:-4] + struct.pack("<i", 3))
        assert look_at_all([file], memory=memory)[0].digest != before.digest
        path.write_bytes(raw)
    assert look_at_all([file], memory=memory)[0].digest == before.digest


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"magic": b"TNTIDX\x00\x00\x00"}, "does not begin as Megatron's indexes do"),
        ({"version": 2}, "is of version 2, and version 1 is known"),
        ({"code": 7}, "holds float32, not token ids"),
        ({"code": 11}, "has the unknown type 11"),
        ({"lengths": [3, 4]}, r"names tokens up to byte 28 of x\.bin, which has 20"),
        ({"lengths": [-1, 4]}, "has a negative length"),
    ],
)
def test_a_broken_index_is_named(how, message, tmp_path):
    path = write(f"{tmp_path}/x", [[1, 2, 3], [4, 5]], **how)
    with pytest.raises(DataError, match=rf"x\.idx {message}") as error:
        rows(File(path))
    assert error.value.fix


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    prefix = write_packed(f"{tmp_path}/d/a", IDS, LABELS[:1], ONES)
    with pytest.raises(DataError, match=r"labels_document\.idx \(labels\) has 1 sequences, and .* 2"):
        store(prefix, tmp_path / "s")
    write_packed(prefix, IDS, [LABELS[0], LABELS[1][1:]], ONES)
    with pytest.raises(DataError, match=r"\(labels\) has 5 numbers in sequence 2, and .* 6"):
        store(prefix, tmp_path / "s")
    os.remove(f"{prefix}_packed_labels_document.bin")
    with pytest.raises(DataError, match=r"has no a_packed_labels_document\.bin beside it"):
        store(prefix, tmp_path / "s")


def test_a_torn_index_and_one_behind_a_url(tmp_path):
    path = write(f"{tmp_path}/x", [[1, 2, 3], [4, 5]])
    os.truncate(path, os.path.getsize(path) - 30)
    with pytest.raises(DataError, match=r"has 52 bytes, and 2 sequences in 3 documents take 82"):
        rows(File(path))
    with pytest.raises(DataError, match="from a mounted disk only"):
        File("s3://bucket/x.idx").check()


def test_labels_of_another_tokenizer_are_a_bad_row_with_its_number(tmp_path):
    prefix = write_packed(f"{tmp_path}/d/a", [IDS[0], [5000, 1]], [LABELS[0], [5000, 1]], [ONES[0], [1, 1]])
    with pytest.raises(DataError, match=r"input_ids_document\.idx:2: input_ids holds 5000, and the tokenizer has"):
        store(prefix, tmp_path / "s", eod_token_id=EOD)
    made = store(prefix, tmp_path / "s", eod_token_id=EOD, on_bad_row="skip")
    assert made.report["skipped"] == 1
