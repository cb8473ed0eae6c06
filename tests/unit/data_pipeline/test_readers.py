import csv
import gzip
import json
import lzma
import os
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline.files import File, find_files
from data_pipeline.readers import look_at, look_at_all, read_part, read_rows
from data_pipeline.rows import Part, raise_bad
from raycp.errors import DataError

ROWS = [{"text": "one"}, {"text": "caf\u00e9\n two"}, {"text": "three"}]


def write(path, content: str | bytes) -> File:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return File(str(path))


def read(file: File, bad=raise_bad):
    return [(number, dict(row)) for number, row in read_rows(Part(file=file), bad)]


def lines(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


# -- kinds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_csv_rows_are_strings_with_the_line_where_they_begin(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    with path.open("w", newline="", encoding="utf-8-sig") as stream:
        writer = csv.writer(stream, delimiter="\t" if suffix == ".tsv" else ",")
        writer.writerow(["prompt", "completion"])
        writer.writerow(["a, b\n\tc", "001"])
        writer.writerow(["d", 'say "x"'])
    want = [
        (2, {"prompt": "a, b\n\tc", "completion": "001"}),
        (4, {"prompt": "d", "completion": 'say "x"'}),
    ]
    assert read(File(str(path))) == want


def test_a_csv_field_may_be_longer_than_the_modules_limit(tmp_path):
    file = write(tmp_path / "a.csv", "text\n" + "x" * 200_000 + "\n")
    assert len(read(file)[0][1]["text"]) == 200_000


@pytest.mark.parametrize("make", [pa.ipc.new_file, pa.ipc.new_stream])
def test_both_forms_of_arrow(tmp_path, make):
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    assert read(File(str(tmp_path / "a.arrow"))) == list(enumerate(ROWS, 1))


def compress(raw: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(raw)
    if suffix == ".xz":
        return lzma.compress(raw)
    if suffix == ".bz2":
        import bz2

        return bz2.compress(raw)
    return pa.Codec("zstd").compress(raw, asbytes=True)


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".xz"])
@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".txt"])
def test_compressed_files_are_read_as_the_plain_ones(tmp_path, kind, suffix):
    plain = {
        ".jsonl": lines(ROWS),
        ".json": json.dumps(ROWS).encode(),
        ".csv": b"text\none\ntwo\n",
        ".txt": b"some text",
    }[kind]
    whole = write(tmp_path / f"a{kind}", plain)
    packed = write(tmp_path / f"b{kind}{suffix}", compress(plain, suffix))
    assert read(packed) == read(whole)
    assert (packed.kind, packed.compression is not None) == (kind, True)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_several_frames_in_one_file_are_all_read(tmp_path, suffix):
    raw = compress(lines(ROWS[:1]), suffix) + compress(lines(ROWS[1:]), suffix)
    assert [row for _, row in read(write(tmp_path / f"a.jsonl{suffix}", raw))] == ROWS


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz"])
def test_a_torn_compressed_file_is_named(tmp_path, suffix):
    raw = compress(lines([{"text": os.urandom(3000).hex()} for _ in range(50)]), suffix)
    with pytest.raises(DataError, match=rf"a\.jsonl\{suffix}.*broken"):
        read(write(tmp_path / f"a.jsonl{suffix}", raw[: len(raw) // 2]))


# -- .json ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("indent", [None, 1])
def test_one_pretty_printed_object_is_one_row(tmp_path, indent):
    row = {"messages": [{"role": "user", "content": "hi"}], "id": 3}
    assert read(write(tmp_path / "a.json", "\n" + json.dumps(row, indent=indent))) == [(2, row)]


def test_objects_one_after_the_other_over_several_lines(tmp_path):
    text = "\n".join(json.dumps(row, indent=2) for row in ROWS)
    assert read(write(tmp_path / "a.json", text)) == [(1, ROWS[0]), (4, ROWS[1]), (7, ROWS[2])]


def test_an_object_around_the_rows_says_its_columns(tmp_path):
    from data_pipeline.formats import detect_format
    from data_pipeline.rows import Row

    ((_, row),) = read(write(tmp_path / "a.json", json.dumps({"data": ROWS}, indent=1)))
    with pytest.raises(DataError, match="columns 'data' are of no known format"):
        detect_format(Row("a.json:1", row))


@pytest.mark.parametrize("size", [3, 7, 64])
@pytest.mark.parametrize("form", ["list", "lines", "pretty"])
def test_the_window_over_a_json_file_does_not_show(tmp_path, monkeypatch, size, form):
    monkeypatch.setattr("data_pipeline.json_rows._CHUNK", size)
    rows = [{"text": "\u00e9\U0001f600\\" * i, "n": i, "deep": [{"x": [None, True, -1.5e3]}]} for i in range(12)]
    text = {
        "list": json.dumps(rows, ensure_ascii=False, indent=1),
        "lines": "\n".join(json.dumps(row, ensure_ascii=False) for row in rows),
        "pretty": "\n\n".join(json.dumps(row, ensure_ascii=False, indent=3) for row in rows),
    }[form]
    got = read(write(tmp_path / "a.json", text))
    assert [row for _, row in got] == rows
    starts = [i for i, line in enumerate(text.split("\n"), 1) if line.lstrip().startswith('{"') or line in ("{", " {")]
    assert [number for number, _ in got] == starts


def test_a_json_list_is_not_held_in_memory(tmp_path):
    import tracemalloc

    path = tmp_path / "a.json"
    with path.open("w") as stream:
        stream.write("[")
        for i in range(2000):
            stream.write((", " if i else "") + json.dumps({"text": "word " * 2000}))
        stream.write("]")
    tracemalloc.start()
    count = sum(1 for _ in read_rows(Part(file=File(str(path))), raise_bad))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 2000
    assert path.stat().st_size > 15e6 > 1.5 * peak


# -- bad rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "good", "bad_lines"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n3\n{"text": "\xff"}\n{"text": "y"}\n', [1, 5], [2, 3, 4]),
        ("a.json", b'{"text": "x"}\n{"text": oh\n3\n{"text": "y"}\n', [1, 4], [2, 3]),
        ("a.json", b'[{"text": "x"},\n3,\n{"text": "y"}]', [1, 3], [2]),
        ("a.csv", b"text,b\nx,1\ny\nz,2,3\n\xff,1\nw,2\n", [2, 6], [3, 4, 5]),
        ("a.jsonl", b'{"text": "x", "text": "y"}\n{"text": "z"}\n', [2], [1]),
        ("a.txt", b"\xff", [], [1]),
    ],
)
def test_reading_goes_on_after_a_bad_row(tmp_path, name, content, good, bad_lines):
    problems: list[DataError] = []
    got = read(write(tmp_path / name, content), problems.append)
    assert [number for number, _ in got] == good
    assert [p.details["line"] for p in problems] == bad_lines
    assert all(p.fix and str(p).startswith(f"{tmp_path}/{name}:") for p in problems)
    with pytest.raises(DataError, match=f"{name}:{bad_lines[0]}"):
        read(File(str(tmp_path / name)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"text": "x"},\n{"text": }]', "broken JSON"),
        ("a.parquet", b"PAR1 no", "not readable as parquet"),
        ("a.arrow", b"ARROW1 no", "not readable as arrow"),
        ("a.csv", b"text,text\nx,y\n", "the column 'text' is there twice"),
    ],
)
def test_what_is_broken_as_a_whole_is_an_error_in_any_case(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / name, content), lambda error: None)


def test_a_key_twice_is_named(tmp_path):
    file = write(tmp_path / "a.jsonl", b'{"text": "x", "id": 1, "text": "y"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:1: broken JSON, the key 'text' is there twice"):
        read(file)


def test_a_parquet_column_twice_is_named(tmp_path):
    table = pa.table([["x"], ["y"]], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="'text' is there twice"):
        read(File(str(tmp_path / "a.parquet")))


# -- parts ----------------------------------------------------------------------------------------------------------


def large(tmp_path, kind: str) -> File:
    rng = np.random.default_rng(0)
    rows = [{"text": "x" * int(n), "n": i} for i, n in enumerate(rng.integers(0, 3000, 600))]
    path = tmp_path / f"large{kind}"
    table = pa.Table.from_pylist(rows)
    if kind == ".parquet":
        pq.write_table(table, path, row_group_size=50, compression=None)
    elif kind == ".arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=40)
    else:
        text = lines(rows).replace(b"\n", b"\n\n", 20)
        path.write_bytes(text[:-1] if kind == ".jsonl" else text)
    return File(str(path))


@pytest.mark.parametrize("kind", [".jsonl", ".ndjson", ".parquet", ".arrow"])
@pytest.mark.parametrize("part_bytes", [1, 100_000, 300_000, 1 << 30])
def test_parts_together_are_the_file(tmp_path, monkeypatch, kind, part_bytes):
    monkeypatch.setattr("data_pipeline.readers._BLOCK", 50_000)
    file = large(tmp_path, kind)
    look = look_at(file, part_bytes)
    parts = look.parts(file)
    assert len(parts) == 1 if part_bytes == 1 << 30 else len(parts) >= 2
    got = [(n, dict(row)) for part in parts for n, row in read_rows(part, raise_bad)]
    assert got == read(file)
    assert [p.whole for p in parts] == [len(parts) == 1] * len(parts)
    assert look == look_at(file, part_bytes)


def test_a_line_at_the_edge_of_a_part_that_is_lost_would_be_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("data_pipeline.readers._BLOCK", 50_000)
    file = large(tmp_path, ".jsonl")
    start, stop, first, size = look_at(file, 100_000).cuts[1]
    late = [n for n, _ in read_rows(Part(file=file, start=start, stop=stop - 1, first=first, size=size), raise_bad)]
    whole = [n for n, _ in read_rows(Part(file=file, start=start, stop=stop, first=first, size=size), raise_bad)]
    assert late == whole  # the last line begins before its end
    short = [n for n, _ in read_rows(Part(file=file, start=start, stop=start + 1, first=first, size=size), raise_bad)]
    assert short == whole[:1] != whole


def test_a_file_that_changed_since_the_look_is_refused(tmp_path):
    file = write(tmp_path / "a.jsonl", lines(ROWS))
    (part,) = look_at(file, 1 << 20).parts(file)
    write(tmp_path / "a.jsonl", lines(ROWS[:1]))
    with pytest.raises(DataError, match=r"bytes here, and had \d+ when the run looked at it"):
        list(read_rows(part, raise_bad))


# -- looks ----------------------------------------------------------------------------------------------------------


def test_looks_are_remembered_until_the_file_changes(tmp_path, monkeypatch):
    file = write(tmp_path / "a.jsonl", lines(ROWS))
    old = time.time() - 100
    os.utime(file.name, (old, old))
    memory = tmp_path / "memory" / "looks.json"
    first = look_at_all([file], memory=memory)
    read_again: list[str] = []
    real = look_at

    def counted(file, *, part_bytes):
        read_again.append(file.name)
        return real(file, part_bytes)

    monkeypatch.setattr("data_pipeline.readers.look_at", counted)
    assert look_at_all([file], memory=memory) == first
    assert read_again == []
    write(tmp_path / "a.jsonl", lines(ROWS[::-1]))  # the same size
    changed = look_at_all([file], memory=memory)
    assert changed[0].digest != first[0].digest
    assert read_again == [file.name]
    look_at_all([file], memory=memory)
    assert read_again == [file.name] * 2, "a file that changed just now may change again unseen"
    memory.write_text("{torn")
    assert look_at_all([file], memory=memory) == changed


# -- finding --------------------------------------------------------------------------------------------------------


def test_a_folder_that_datasets_saved(tmp_path):
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    assert [os.path.basename(f.name) for f in find_files(str(tmp_path / "one"))] == ["data-00000-of-00001.arrow"]
    both = datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS))
    both.save_to_disk(tmp_path / "two")
    with pytest.raises(DataError, match="holds the splits train, test") as error:
        find_files(str(tmp_path / "two"))
    assert str(tmp_path / "two" / "train") in error.value.fix
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(tmp_path / "three")
    (file,) = find_files(str(tmp_path / "three"))
    assert [row for _, row in read(file)] == ROWS


# -- URLs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket():
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.pipe("/bucket/b.jsonl", lines(ROWS[:1]))
    fs.pipe("/bucket/a.csv", b"text\nx\n")
    fs.pipe("/bucket/sub/c.jsonl.gz", gzip.compress(lines(ROWS)))
    fs.pipe("/bucket/notes.md", b"no rows")
    fs.pipe("/bucket/dataset_info.json", b"{}")
    table = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(ROWS), table)
    fs.pipe("/bucket/d.parquet", table.getvalue().to_pybytes())
    yield "memory://bucket"
    fs.rm("/bucket", recursive=True)


def test_a_bucket_is_read_like_a_folder(bucket):
    names = [f.name.rpartition("bucket/")[2] for f in find_files(bucket)]
    assert names == ["a.csv", "b.jsonl", "d.parquet", "sub/c.jsonl.gz"]
    (zipped,) = find_files(f"{bucket}/sub/*.gz")
    assert [row for _, row in read(zipped)] == ROWS
    (parquet,) = find_files(f"{bucket}/d.parquet")
    assert [row for _, row in read(parquet)] == ROWS
    (file,) = find_files(f"{bucket}/b.jsonl")
    assert (file.remote, file.size(), file.kind) == (True, len(lines(ROWS[:1])), ".jsonl")
    assert look_at(file, 1 << 20).digest == look_at(find_files(f"{bucket}/b.jsonl")[0], 1 << 20).digest


def test_what_cannot_be_reached_is_a_data_error_with_the_url(bucket):
    for url, message in (
        (f"{bucket}/missing.jsonl", "no file of rows at"),
        ("nosuchprotocol://x/a.jsonl", "cannot be read: ValueError: Protocol not known"),
        ("http://127.0.0.1:9/a.jsonl", "127.0.0.1:9"),
    ):
        with pytest.raises(DataError, match=message) as error:
            find_files(url)
        assert error.value.fix


def test_a_file_behind_http(tmp_path):
    import functools
    import http.server
    import threading

    write(tmp_path / "a.jsonl", lines(ROWS))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (file,) = find_files(f"http://127.0.0.1:{server.server_address[1]}/a.jsonl")
        assert read(file) == list(enumerate(ROWS, 1))
        assert look_at(file, 1 << 20).digest == look_at(File(str(tmp_path / "a.jsonl")), 1 << 20).digest
        (asked,) = find_files(f"{file.name}?download=true")
        assert read(asked) == list(enumerate(ROWS, 1)), "a question mark is no pattern here"
        server.shutdown()


def test_a_file_system_that_fails_in_an_own_way_while_it_is_read_names_the_url(bucket, monkeypatch):
    class OwnError(Exception):
        """Of a library that knows neither OSError nor us."""

    def broken(self, size=-1):
        raise OwnError("the connection was lost")

    from fsspec.implementations.memory import MemoryFile

    (file,) = find_files(f"{bucket}/b.jsonl")
    monkeypatch.setattr(MemoryFile, "read", broken)
    with pytest.raises(DataError, match=r"memory:///bucket/b\.jsonl cannot be read: OwnError: the connection was lost"):
        read(file)


def test_a_parquet_file_is_not_read_as_a_whole_for_its_first_row(tmp_path):
    path = tmp_path / "rows.parquet"
    words = [{"text": os.urandom(500).hex()} for _ in range(2000)]
    pq.write_table(pa.Table.from_pylist(words), path, row_group_size=200)
    read: list[int] = []
    rows = read_part(Part(file=File(str(path), on_read=read.append), whole=True))
    next(rows)
    assert sum(read) < path.stat().st_size / 2, "two row groups of ten, and the footer"
    assert sum(1 for _ in rows) == 1999
