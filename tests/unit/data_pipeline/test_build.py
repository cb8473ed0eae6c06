import json
import subprocess
import sys
from pathlib import Path

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


# -- formats and sources together -----------------------------------------------------------------------------------


def test_sources_of_different_formats_each_by_its_own(tmp_path):
    chats = write(tmp_path / "chats.jsonl", CHATS)
    texts = write(tmp_path / "texts.jsonl", TEXTS)
    store = run({chats: 1, texts: 1}, tmp_path / "s", seq_length=256)
    assert contents(store) == contents(run(chats, tmp_path / "a")) + contents(run(texts, tmp_path / "b"))
    facts = [(s["name"], s["format"], s["train_on"], s["rows"]) for s in store.report["sources"]]
    assert facts == [(chats, "messages", "assistant", 7), (texts, "text", "all", 5)]
    assert store.report["format"] == "messages + text"
    text = describe(store, plan_packs(store.lengths, seq_length=256))
    assert "messages, 7 rows" in text
    assert "text, 5 rows" in text


@pytest.mark.parametrize(
    ("weight", "counts"), [(2, [2] * 5), (0.4, [0, 0, 0, 1, 1]), (1.6, [1, 1, 2, 2, 2]), (0.01, [1])]
)
def test_a_weight_is_how_often_rows_are_seen(tmp_path, weight, counts):
    chats, texts = write(tmp_path / "c.jsonl", CHATS), write(tmp_path / "t.jsonl", TEXTS)
    store = run({chats: 1, texts: weight}, tmp_path / "s", seq_length=256)
    seen = [store.row_id(i) for i in range(len(store))]
    assert [seen.count(f"{chats}:{i}") for i in range(1, 8)] == [1] * 7
    assert sorted(seen.count(f"{texts}:{i}") for i in range(1, 6)) == ([0] * (5 - len(counts)) + counts)
    by_row = {store.row_id(i): store.document(i).ids.tolist() for i in range(len(store))}
    plain = run(texts, tmp_path / "p", seq_length=256)
    assert all(by_row.get(plain.row_id(i), ids) == ids for i, (ids, _) in enumerate(contents(plain)))
    assert store.num_tokens == sum(len(store.document(i)) for i in range(len(store)))
    assert store.num_targets.sum() == sum(store.document(i).num_targets for i in range(len(store)))
    again = run({chats: 1, texts: weight}, tmp_path / "other", seq_length=256)
    assert again.fingerprint == store.fingerprint
    assert run({chats: 1, texts: weight + 1}, tmp_path / "s", seq_length=256).fingerprint != store.fingerprint


def test_token_rows_and_packed_rows(tmp_path):
    rows = [{"input_ids": [5, 6, 7, 9, 8, 9]}, {"input_ids": [4, 9]}]
    store = run(rows, tmp_path / "s", eod_token_id=9)
    assert contents(store) == [([5, 6, 7, 9], [6, 7, 9, -100]), ([8, 9], [9, -100]), ([4, 9], [9, -100])]
    assert [store.row_id(i) for i in range(3)] == ["rows:1#1", "rows:1#2", "rows:2"]
    weighted = run([{"input_ids": [5, 6, 7], "weights": [1, 2, 0.5]}], tmp_path / "w")
    assert weighted.document(0).weights.tolist() == [2, 0.5, 1]
    assert weighted.target_weights.tolist() == [2.5]
    with pytest.raises(DataError, match="rows:1: input_ids holds 5000"):
        run([{"input_ids": [5000, 1]}], tmp_path / "x")


def test_columns_and_eod_are_part_of_the_key(tmp_path):
    file = write(tmp_path / "a.jsonl", [{"a": "one two", "b": "three four"}])
    one = run(file, tmp_path / "s", columns="prompt=a, completion=b")
    other = run(file, tmp_path / "s", columns="prompt=b, completion=a")
    assert contents(one) != contents(other)
    assert one.report["format"] == "prompt_completion"


# -- bad rows -------------------------------------------------------------------------------------------------------

BAD = [
    {"messages": []},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": chat("no answer")},
    {"messages": [{"role": "robot", "content": "x"}]},
    {"other": 1},
]


@pytest.mark.parametrize("place", [0, 3, 7])
def test_bad_rows_are_skipped_counted_and_listed(tmp_path, place):
    rows = CHATS[:place] + BAD + CHATS[place:]
    file = tmp_path / "a.jsonl"
    write(file, rows)
    file.write_text(file.read_text() + '{"messages": \n')
    store = run(str(file), tmp_path / "s", on_bad_row="skip", format="messages")
    assert contents(store) == contents(run(CHATS, tmp_path / "t"))
    report = store.report
    assert (report["rows"], report["skipped"], report["documents"]) == (13, 6, 7)
    lines = [json.loads(line) for line in Path(report["skipped_file"]).read_text().splitlines()]
    assert {line["row"] for line in lines} == {f"{file}:{n}" for n in [*range(place + 1, place + 6), 13]}
    assert all(line["problem"] and line["fix"] for line in lines)
    assert f"skipped   6 rows that cannot be used: {report['skipped_file']}" in describe(
        store, plan_packs(store.lengths, seq_length=64)
    )
    with pytest.raises(DataError, match=f"{file}:{place + 1}: "):
        run(str(file), tmp_path / "s", format="messages")


def test_if_no_row_is_left_the_first_problem_is_said(tmp_path):
    with pytest.raises(DataError, match=r"none of 2 rows can be used; the first problem: rows:1: messages is an empty"):
        run(BAD[:2], tmp_path / "s", on_bad_row="skip")
    file = tmp_path / "a.jsonl"
    file.write_text("{\n{\n")
    with pytest.raises(DataError, match=rf"data has 0 rows: {file}:1: broken JSON"):
        run(str(file), tmp_path / "s", on_bad_row="skip")


def test_a_template_that_cannot_be_trained_with_is_no_bad_row(tmp_path):
    with pytest.raises(ModelError, match="no end-of-turn token"):
        run(CHATS, tmp_path / "s", on_bad_row="skip", chat_template=tiny.NO_STOP)


# -- parts ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr("data_pipeline.readers.PART_BYTES", 2000)
    monkeypatch.setattr("data_pipeline.readers._BLOCK", 500)


@pytest.fixture
def many(tmp_path) -> str:
    return write(tmp_path / "many.jsonl", [{"text": f"number {i} " + "one two " * (i % 17)} for i in range(300)])


def parts_of(store) -> list[str]:
    return sorted(p.name for p in store.folder.glob("part-*"))


def test_parts_do_not_show(tmp_path, many, request):
    whole = run(many, tmp_path / "s")
    request.getfixturevalue("small_parts")
    cut = run(many, tmp_path / "t")
    assert len(parts_of(cut)) > 5 > len(parts_of(whole)) == 1
    assert contents(cut) == contents(whole)
    assert cut.fingerprint == whole.fingerprint
    assert [cut.row_id(i) for i in range(len(cut))] == [whole.row_id(i) for i in range(len(whole))]
    assert cut.report["rows"] == whole.report["rows"] == 300
    assert contents(run([json.loads(x) for x in Path(many).read_text().splitlines()], tmp_path / "u")) == contents(
        whole
    )


def test_parts_made_in_any_order_are_the_same(tmp_path, many, small_parts):
    def backwards(function, items, meanwhile=None):
        for index in reversed(range(len(items))):
            yield index, function(items[index])

    one = run(many, tmp_path / "s")
    two = build_store(many, make_tokenizer(), seq_length=64, config=DataConfig(), folder=tmp_path / "t", run=backwards)
    assert contents(one) == contents(two)
    assert one.fingerprint == two.fingerprint


@pytest.mark.parametrize("stop", [1, 4])
def test_a_preparation_that_was_killed_goes_on_with_the_parts_that_are_missing(tmp_path, many, small_parts, stop):
    done: list[str] = []

    def killed(function, items, meanwhile=None):
        for index, item in enumerate(items):
            if hasattr(item, "name") and item.name.startswith("part-"):
                if len(done) == stop:
                    raise KeyboardInterrupt
                done.append(item.name)
            yield index, function(item)

    def settings(run):
        return {"seq_length": 64, "config": DataConfig(), "folder": tmp_path / "s", "run": run}

    with pytest.raises(KeyboardInterrupt):
        build_store(many, make_tokenizer(), **settings(killed))
    (folder,) = [p for p in (tmp_path / "s").iterdir() if p.is_dir() and p.name != "spool"]
    stamps = {p.name: (p / META).stat().st_mtime_ns for p in folder.glob("part-*")}
    assert sorted(stamps) == sorted(done)
    torn = folder / done[0]
    (torn / "ids.bin").write_bytes(b"")
    made: list[str] = []

    def counted(function, items, meanwhile=None):
        for index, item in enumerate(items):
            made.append(getattr(item, "name", ""))
            yield index, function(item)

    store = build_store(many, make_tokenizer(), **settings(counted))
    assert contents(store) == contents(run(many, tmp_path / "t"))
    assert done[0] in made, "a torn part is made again"
    assert not set(done[1:]) & set(made)
    assert {n: (store.folder / n / META).stat().st_mtime_ns for n in done[1:]} == {n: stamps[n] for n in done[1:]}


def test_a_part_of_other_bytes_is_not_taken_for_it(tmp_path, many, small_parts):
    store = run(many, tmp_path / "s")
    names = parts_of(store)
    want = contents(store)
    (store.folder / META).unlink()
    (store.folder / names[1]).rename(tmp_path / "aside")
    (store.folder / names[2]).rename(store.folder / names[1])
    (tmp_path / "aside").rename(store.folder / names[2])
    assert contents(run(many, tmp_path / "s")) == want


def test_a_document_of_a_million_tokens(tmp_path):
    file = write(tmp_path / "a.jsonl", [{"input_ids": [5, 6, 7]}, {"input_ids": [i % 300 for i in range(1_000_000)]}])
    with pytest.raises(
        DataError, match=rf"1 document\(s\) have more than seq_length=131072 .* has 1000000, row {file}:2"
    ):
        run(file, tmp_path / "s", seq_length=131_072)
    store = run(file, tmp_path / "s", seq_length=131_072, overflow="split")
    assert store.lengths.tolist() == [3, *[131_072] * 7, 1_000_000 - 7 * 131_072]
    assert store.max_positions == 1_000_000
    assert store.report["overflow"]["targets_lost"] == 7
    assert run(file, tmp_path / "s", seq_length=131_072, overflow="split_restart").max_positions == 131_072
