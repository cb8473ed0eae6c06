import json
import subprocess
import sys

import pytest

from data_pipeline import build_store, describe, plan_packs
from data_pipeline.build import remove_leftovers
from data_pipeline.store import META
from raycp.config import DataConfig
from raycp.errors import DataError, ModelError

from . import tiny_tokenizers as tiny
from .tiny_tokenizers import chat, make_tokenizer

CHATS = [{"messages": chat("hello " * i, "fine " * i)} for i in range(1, 8)]
TEXTS = [{"text": "one two three " * i} for i in range(1, 6)]


def run(data, folder, *, seq_length: int = 64, tokenizer=None, progress=None, **config):
    tokenizer = tokenizer or make_tokenizer()
    return build_store(
        data, tokenizer, seq_length=seq_length, config=DataConfig(**config), folder=folder, progress=progress
    )


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def contents(store) -> list[tuple[list[int], list[int]]]:
    return [(d.ids.tolist(), d.targets.tolist()) for d in map(store.document, range(len(store)))]


def test_what_a_killed_preparation_left_is_removed_and_nothing_else(tmp_path):
    kept = run(CHATS, tmp_path)
    (tmp_path / ".0123.abcd").mkdir()
    (tmp_path / ".0123.abcd" / "ids.bin").write_bytes(b"half")
    (tmp_path / "spool" / "rows-abcd.jsonl").write_text("{}")
    (kept.folder / ".part-00001.abcd").mkdir()
    before = sorted(p for p in kept.folder.rglob("*") if not p.name.startswith("."))
    remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([kept.folder.name, "spool"])
    assert sorted(kept.folder.rglob("*")) == before
    assert list((tmp_path / "spool").iterdir()) == []
    assert contents(run(CHATS, tmp_path)) == contents(kept)
    remove_leftovers(tmp_path / "not made yet")


def test_files_and_iterables_give_the_same_documents(tmp_path):
    file = write(tmp_path / "a.jsonl", CHATS)
    from_file, from_rows = run(file, tmp_path / "s"), run(iter(CHATS), tmp_path / "t")
    assert contents(from_file) == contents(from_rows)
    assert from_file.fingerprint == from_rows.fingerprint
    assert from_file.row_id(2) == f"{file}:3"
    report = from_file.report
    assert (report["format"], report["detected"], report["train_on"]) == ("messages", True, "assistant")
    assert (report["mask"], report["rows"], report["documents"]) == ("prefix rendering", 7, 7)
    assert report["tokens"] == from_file.num_tokens
    assert report["targets"] == from_file.num_targets.sum() > 0
    assert report["longest"] == from_file.longest


def test_batches_do_not_show(tmp_path, monkeypatch):
    whole = run(CHATS, tmp_path / "a")
    seen: list[int] = []
    monkeypatch.setattr("data_pipeline.part_worker._BATCH_ROWS", 2)
    store = run(CHATS, tmp_path / "b", progress=lambda rows, share: seen.append(rows))
    assert contents(store) == contents(whole)
    assert seen == [2, 4, 6, 7]
    monkeypatch.setattr("data_pipeline.part_worker._BATCH_CHARACTERS", 1)
    assert contents(run(CHATS, tmp_path / "c")) == contents(whole)


def test_a_second_call_finds_the_first(tmp_path):
    file = write(tmp_path / "a.jsonl", TEXTS)
    first = run(file, tmp_path / "s")
    stamp = (first.folder / META).stat().st_mtime_ns
    calls: list[int] = []
    again = run(file, tmp_path / "s", progress=lambda rows, share: calls.append(rows))
    assert (again.folder, calls) == (first.folder, [])
    assert (again.folder / META).stat().st_mtime_ns == stamp
    assert again.report == first.report


def test_whatever_matters_gives_another_store(tmp_path):
    file = write(tmp_path / "a.jsonl", CHATS)
    base = {"data": file, "folder": tmp_path / "s"}
    changes = [
        {},
        {"data": write(tmp_path / "b.jsonl", CHATS[:-1])},
        {"tokenizer": make_tokenizer("llama3", tiny.LLAMA3)},
        {"chat_template": tiny.CHATML_TAGS},
        {"tokenizer": make_tokenizer(template="{# other #}" + tiny.CHATML)},
        {"train_on": "all"},
        {"overflow": "split"},
        {"overflow": "split", "seq_length": 32},
        {"overflow": "truncate", "seq_length": 32},
    ]
    folders = [run(**{**base, **change}).folder for change in changes]
    assert len(set(folders)) == len(changes)
    assert run(**base, seq_length=65).folder == folders[0]  # with overflow="raise" it changes no document


def test_a_torn_store_is_built_again(tmp_path):
    first = run(TEXTS, tmp_path / "s")
    want = contents(first)
    (first.folder / "part-00000" / "ids.bin").write_bytes(b"")
    assert contents(run(TEXTS, tmp_path / "s")) == want


def test_raise_reports_all_long_documents_and_keeps_the_work(tmp_path):
    rows = [*TEXTS, {"text": "one two three " * 50}, {"text": "one two three " * 60}]
    file = write(tmp_path / "a.jsonl", rows)
    calls: list[int] = []
    for _ in range(2):
        with pytest.raises(DataError, match=rf"2 document\(s\) .* seq_length=64 .* row {file}:7") as error:
            run(file, tmp_path / "s", progress=lambda rows, share: calls.append(rows))
    longest = error.value.details["longest"]
    assert len(calls) == 1
    assert run(file, tmp_path / "s", seq_length=longest).longest == longest


@pytest.mark.parametrize("policy", ["split", "truncate", "drop"])
def test_overflow_is_reported(tmp_path, policy):
    rows = [*TEXTS, {"text": "one two three " * 50}]
    store = run(rows, tmp_path / "s", overflow=policy)
    account = store.report["overflow"]
    assert account["tokens_in"] == account["tokens_kept"] + account["tokens_lost"]
    assert account["tokens_kept"] == store.num_tokens
    assert account["targets_in"] == account["targets_kept"] + account["targets_lost"]
    assert store.longest <= 64
    assert store.max_positions == (account["longest"] if policy == "split" else store.longest)
    assert "1 documents over 64" in describe(store, plan_packs(store.lengths, seq_length=64))


def test_describe_says_what_was_found(tmp_path):
    store = run(CHATS, tmp_path / "s")
    text = describe(store, plan_packs(store.lengths, seq_length=64))
    assert "detected  messages, 7 rows (rows); trained: assistant by prefix rendering" in text
    assert f"{len(store)} documents, {store.num_tokens:,} tokens" in text
    assert f"max {store.longest}" in text
    assert "% full" in text


@pytest.mark.parametrize(
    ("rows", "config", "message"),
    [
        ([], {}, "data has 0 rows"),
        ([{"question": "x"}], {}, "columns 'question' are of no known format"),
        ([*TEXTS, {"txt": "x"}], {}, "rows:6: text is missing"),
        (TEXTS, {"format": "messages"}, "rows:1: messages is missing"),
        (TEXTS, {"train_on": "assistant"}, "does not fit rows of format text"),
        ([{"messages": chat("hi")}], {}, "rows:1: no assistant turn"),
        ([{"text": "one two three " * 50}], {"overflow": "drop"}, "nothing is left to train of 1 rows"),
        ([{"text": "<|im_end|>"}], {}, "rows:1: the row has no target"),
    ],
)
def test_bad_data_is_refused_and_leaves_nothing(tmp_path, rows, config, message):
    with pytest.raises(DataError, match=message):
        run(rows, tmp_path / "s", **config)
    assert [p for p in (tmp_path / "s").rglob("*") if p.is_file()] == []


def test_a_bad_row_of_a_file_is_named_by_its_line(tmp_path):
    file = tmp_path / "a.jsonl"
    write(file, [*CHATS, {"messages": [{"role": "user", "content": None}]}])
    with pytest.raises(DataError, match=rf"{file}:8: messages\[0\].content is null"):
        run(file, tmp_path / "s")
    file.write_text(file.read_text() + '{"messages": ')
    with pytest.raises(DataError, match="8"):
        run(file, tmp_path / "s")


def test_a_template_that_trains_no_token_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"generation %} tags on 0 of 1 assistant turns"):
        run(CHATS, tmp_path / "s", chat_template=tiny.TAGS_AROUND_NOTHING)


def test_a_long_document_takes_no_memory_that_grows_with_its_square(tmp_path):
    import tracemalloc

    tokenizer = make_tokenizer()
    tracemalloc.start()
    store = run([{"text": "the capital " * 32_768}], tmp_path / "s", seq_length=1 << 17, tokenizer=tokenizer)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert store.longest > 60_000
    assert peak < 2000 * store.longest


def test_importing_the_package_is_light():
    code = (
        "import sys, data_pipeline\n"
        "from data_pipeline import Document, DocumentStore, PackLoader, StepSchedule, describe, split_pack\n"
        "print(sorted({'torch', 'ray', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
