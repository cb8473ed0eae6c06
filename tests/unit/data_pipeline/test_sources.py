import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline.readers import read_part
from data_pipeline.rows import raise_bad
from data_pipeline.sources import _hub_parts, open_source, open_sources, paths_of
from raycp.errors import DataError

ROWS = [{"text": "one"}, {"text": "caf\u00e9"}]


def rows_of(data, tmp_path):
    source = open_source(data, tmp_path / "spool")
    try:
        first = [(r.id, dict(r.data)) for r in source.rows(raise_bad)]
        assert [(r.id, dict(r.data)) for r in source.rows(raise_bad)] == first  # can be read again
        assert [(r.id, dict(r.data)) for part in source.parts() for r in read_part(part)] == first
        assert len(source.fingerprint) == 64
        return first
    finally:
        source.close()


def write(path, text: str | bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_jsonl_ids_are_file_and_line(tmp_path):
    file = write(tmp_path / "a.jsonl", '\ufeff{"text": "one"}\r\n\n{"text": "caf\u00e9"}')
    assert rows_of(file, tmp_path) == [(f"{file}:1", ROWS[0]), (f"{file}:3", ROWS[1])]
    assert rows_of(str(file), tmp_path) == rows_of([file], tmp_path)


def test_json_list_ids_are_lines_too(tmp_path):
    file = write(tmp_path / "a.json", '[\n {"text": "one"},\n\n {"text":\n "caf\u00e9"}\n]\n')
    assert rows_of(file, tmp_path) == [(f"{file}:2", ROWS[0]), (f"{file}:4", ROWS[1])]


def test_json_that_is_jsonl(tmp_path):
    file = write(tmp_path / "a.json", '{"text": "one"}\n{"text": "caf\u00e9"}\n')
    assert [r for _, r in rows_of(file, tmp_path)] == ROWS


def test_parquet(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet", tmp_path) == [
        (f"{tmp_path}/a.parquet:{i + 1}", r) for i, r in enumerate(ROWS)
    ]


def test_txt_is_one_row_per_file(tmp_path):
    file = write(tmp_path / "a.txt", "two\nlines\n")
    assert rows_of(file, tmp_path) == [(f"{file}:1", {"text": "two\nlines\n"})]


def test_folder_glob_and_list(tmp_path):
    folder = tmp_path / "data"
    for name in ("b.jsonl", "a.txt", "sub/c.jsonl", ".hidden/d.jsonl", "notes.md"):
        write(folder / name, json.dumps({"text": name}))
    names = [i.removeprefix(f"{folder}/") for i, _ in rows_of(folder, tmp_path)]
    assert names == ["a.txt:1", "b.jsonl:1", "sub/c.jsonl:1"]
    assert [i for i, _ in rows_of(f"{folder}/**/*.jsonl", tmp_path)] == [
        f"{folder}/b.jsonl:1",
        f"{folder}/sub/c.jsonl:1",
    ]
    twice = rows_of([folder / "b.jsonl", folder / "a.txt", f"{folder}/*.jsonl"], tmp_path)
    assert [i for i, _ in twice] == [f"{folder}/b.jsonl:1", f"{folder}/a.txt:1"]


def test_dataset_and_iterables(tmp_path):
    want = [("rows:1", ROWS[0]), ("rows:2", ROWS[1])]
    dataset = datasets.Dataset.from_list(ROWS)
    assert rows_of(dataset, tmp_path) == want
    assert rows_of(ROWS, tmp_path) == want
    assert rows_of((dict(r) for r in ROWS), tmp_path) == want
    assert rows_of(dataset.to_iterable_dataset(), tmp_path) == want
    assert list((tmp_path / "spool").iterdir()) == []


def test_fingerprint_is_of_content(tmp_path):
    a = write(tmp_path / "a.jsonl", '{"text": "one"}\n')
    b = write(tmp_path / "b.jsonl", '{"text": "one"}\n')
    c = write(tmp_path / "c.jsonl", '{"text": "two"}\n')
    prints = [open_source(f, tmp_path).fingerprint for f in (a, b, c)]
    assert prints[0] == prints[1] != prints[2]
    assert open_source([a, c], tmp_path).fingerprint != open_source([c, a], tmp_path).fingerprint
    spooled = [open_source(iter(rows), tmp_path / "spool") for rows in (ROWS, ROWS, ROWS[:1])]
    assert spooled[0].fingerprint == spooled[1].fingerprint != spooled[2].fingerprint


@pytest.mark.parametrize(
    ("name", "content", "line", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": "y"\n', 2, "broken JSON"),
        ("a.jsonl", b'{"text": "x"}\n\n["y"]\n', 3, "not an object"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', 2, "0xff is not UTF-8"),
        ("a.json", b'[{"text": "x"},\n\n{"text": }]', 3, "broken JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"n": ' + b"9" * 5000 + b"}\n", 2, "broken JSON"),
        ("a.json", b'[{"text": "x"},\n{"n": ' + b"9" * 5000 + b"}]", 2, "broken JSON"),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000, 1, "broken JSON"),
        ("a.json", b'[{"text": "x"}\n{"text": "y"}]', 2, "want ',' or ']'"),
        ("a.json", b'[{"text": "x"},\n3]', 2, "not an object"),
        ("a.json", b'[{"text": "x"},\n{"text": "\xff"}]', 2, "is not UTF-8"),
        ("a.txt", b"fine\nnot \xfe", 2, "is not UTF-8"),
        ("a.parquet", b"PAR1 no", 1, "not readable as parquet"),
    ],
)
def test_bad_content_names_file_and_line(tmp_path, name, content, line, message):
    file = write(tmp_path / name, content)
    with pytest.raises(DataError, match=message) as error:
        rows_of(file, tmp_path)
    assert str(error.value).startswith(f"{file}:{line}: ")
    assert error.value.details == {"file": str(file), "line": line}
    assert error.value.fix


def test_missing_files_hint_at_near_names(tmp_path):
    write(tmp_path / "train.jsonl", '{"text": "x"}')
    with pytest.raises(DataError, match="there is no file or folder") as error:
        open_source(tmp_path / "trian.jsonl", tmp_path)
    assert "did you mean train.jsonl" in error.value.fix
    with pytest.raises(DataError, match="there is no file"):
        open_source(["a raw text", "another"], tmp_path)


@pytest.mark.parametrize("content", ["", "\n \n"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_empty_files_are_named(tmp_path, name, content):
    file = write(tmp_path / name, content)
    with pytest.raises(DataError, match=f"{file} is empty"):
        rows_of(file, tmp_path)


def test_what_is_no_source(tmp_path):
    write(tmp_path / "empty" / "notes.md", "x")
    for data, message in (
        (f"{tmp_path}/*.jsonl", "matches no file"),
        (tmp_path / "empty", "holds no .jsonl"),
        (tmp_path / "empty" / "notes.md", "of a kind that cannot be read"),
        ({"text": "x"}, "is a dict"),
        (3, "is a int"),
        (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), "DatasetDict of train"),
        ([{"text": "x"}, "y"], "row 2 is a str"),
    ):
        with pytest.raises(DataError, match=message):
            open_source(data, tmp_path / "spool")
    assert list((tmp_path / "spool").iterdir()) == []


def test_an_error_of_the_users_iterable_is_theirs_and_leaves_nothing(tmp_path):
    def rows():
        yield {"text": "x"}
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        open_source(rows(), tmp_path / "spool")
    assert list((tmp_path / "spool").iterdir()) == []


# -- several sources, hub names, data sets ---------------------------------------------------------------------------


def test_several_sources_with_weights(tmp_path):
    a, b = write(tmp_path / "a.jsonl", '{"text": "one"}\n'), write(tmp_path / "b.txt", "two")
    by_name = open_sources({str(a): 2, str(b): 0.5}, tmp_path / "spool")
    assert [(s.name, s.weight) for s in by_name] == [(str(a), 2.0), (str(b), 0.5)]
    mixed = open_sources(
        [(a, 1), ([dict(r) for r in ROWS], 3), (datasets.Dataset.from_list(ROWS), 1.5)], tmp_path / "s"
    )
    assert [s.weight for s in mixed] == [1, 3, 1.5]
    ids = [row.id for s in mixed for row in s.source.rows(raise_bad)]
    assert ids == [f"{a}:1", "rows2:1", "rows2:2", "rows3:1", "rows3:2"]
    for s in mixed:
        s.source.close()
    assert list((tmp_path / "s").iterdir()) == []
    assert [s.weight for s in open_sources([a, b], tmp_path)] == [1.0]


@pytest.mark.parametrize("weight", [0, -1, float("inf"), float("nan"), True])
def test_a_weight_must_be_above_zero(tmp_path, weight):
    file = write(tmp_path / "a.jsonl", '{"text": "one"}\n')
    with pytest.raises(DataError, match="the weight of"):
        open_sources([(file, weight)], tmp_path)


def test_what_paths_data_names(tmp_path):
    a = str(write(tmp_path / "a.jsonl", '{"text": "one"}\n'))
    rows = [dict(r) for r in ROWS]
    missing = str(tmp_path / "b.jsonl")
    for data, want in (
        (a, [a]),
        ([a, missing], [a, missing]),
        ({a: 1, missing: 2}, [a, missing]),
        ([(a, 1), (rows, 2), ([a, missing], 3)], [a, a, missing]),
        (rows, []),
        (iter(rows), []),
        ("owner/name", []),
        ("s3://bucket/x", ["s3://bucket/x"]),
        (datasets.Dataset.from_list(ROWS), []),
    ):
        assert paths_of(data) == want


def test_a_data_set_with_nested_columns_gives_the_rows_that_it_shows(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "n": i}
        for i in range(5)
    ]
    dataset = datasets.Dataset.from_list(rows)
    want = [(f"rows:{i}", row) for i, row in enumerate(dataset, 1)]
    assert rows_of(dataset, tmp_path) == want
    assert [r["n"] for _, r in rows_of(dataset.select([3, 1]), tmp_path)] == [3, 1]
    shuffled = dataset.shuffle(seed=1)
    assert [r["n"] for _, r in rows_of(shuffled, tmp_path)] == shuffled["n"][:]
    upper = dataset.with_transform(lambda batch: {"n": [-n for n in batch["n"]]})
    assert [r for _, r in rows_of(upper, tmp_path)] == [{"n": -i} for i in range(5)]
    dataset.save_to_disk(tmp_path / "saved")
    saved = datasets.load_from_disk(tmp_path / "saved")
    assert open_source(saved, tmp_path).fingerprint == open_source(dataset, tmp_path).fingerprint
    assert open_source(dataset.select([0]), tmp_path).fingerprint != open_source(dataset, tmp_path).fingerprint


def test_numpy_values_of_an_iterable_become_lists(tmp_path):
    import numpy as np

    assert rows_of([{"input_ids": np.arange(3), "n": np.int64(4)}], tmp_path) == [
        ("rows:1", {"input_ids": [0, 1, 2], "n": 4})
    ]


def test_a_hub_name_is_no_path(tmp_path, monkeypatch):
    assert _hub_parts("owner/name") == ("owner/name", None, "train")
    assert _hub_parts("owner/name:config[test]") == ("owner/name", "config", "test")
    assert _hub_parts("owner/na.me[train[:10%]") is None
    assert _hub_parts("owner/name[train+test]") == ("owner/name", None, "train+test")
    for path in ("data/train.jsonl", "./a/b", "a/b/c", "train", "data/x.csv.gz"):
        assert _hub_parts(path) is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert _hub_parts("runs/name") is None, "a folder of this name is there: a path with a typo"


def test_a_hub_data_set_that_is_in_the_cache_is_read_without_a_network(tmp_path, monkeypatch):
    """`datasets` finds what an earlier download left; the cache is made here from a local file."""
    import subprocess
    import sys
    import textwrap

    write(tmp_path / "src" / "train.jsonl", "".join(json.dumps(r) + "\n" for r in ROWS))
    code = f"""
        import os, shutil
        from pathlib import Path
        os.environ["HF_DATASETS_CACHE"] = {str(tmp_path / "cache")!r}
        os.environ["HF_HUB_OFFLINE"] = "1"
        import datasets
        datasets.load_dataset({str(tmp_path / "src")!r}, split="train")
        (made,) = [p for p in Path({str(tmp_path / "cache")!r}).iterdir() if p.is_dir()]
        made.rename(made.parent / "owner___name")
        inner, = (made.parent / "owner___name").iterdir()
        inner.rename(inner.parent / "default")
        for info in made.parent.glob("owner___name/**/dataset_info.json"):
            info.write_text(info.read_text().replace(made.name, "name"))
            (arrow,) = info.parent.glob("*-train.arrow")
            arrow.rename(arrow.with_name("name-train.arrow"))
        from data_pipeline.rows import raise_bad
        from data_pipeline.sources import open_source
        source = open_source("owner/name", Path({str(tmp_path / "spool")!r}))
        print([(r.id, r.data["text"]) for r in source.rows(raise_bad)])
        try:
            open_source("owner/other", Path("/nowhere"))
        except Exception as error:
            print(type(error).__name__, error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "[('owner/name:1', 'one'), ('owner/name:2', 'caf\u00e9')]" in done.stdout
    assert "DataError there is no file or folder 'owner/other'" in done.stdout


def test_keys_of_spooled_rows_keep_their_order(tmp_path):
    """Templates write tool schemas as they come: sorted keys would be another text than that of the same file."""
    ((_, row),) = rows_of([{"tools": [{"name": "b", "a": 1, "description": 2}]}], tmp_path)
    assert list(row["tools"][0]) == ["name", "a", "description"]
