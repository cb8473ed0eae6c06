"""How far parts are: right at the end, never back, and between the ends of parts too."""

import gzip
import json
from hashlib import sha256

import pytest

from data_pipeline import build_store
from data_pipeline.part_progress import Meter, ProgressFile
from raycp.config import DataConfig

from .tiny_tokenizers import make_tokenizer


def check(shown, rows):
    """Never back, at the end all, and more than the end."""
    assert [n for n, _ in shown] == sorted(n for n, _ in shown)
    assert [share for _, share in shown] == sorted(share for _, share in shown)
    assert shown[-1] == (rows, 1.0)
    assert len({share for _, share in shown}) >= 5


def write(path, kind):
    lines = "".join(
        json.dumps({"text": f"row {i} {sha256(str(i).encode()).hexdigest()} " + "one " * 20}) + "\n"
        for i in range(6000)
    )
    if kind == ".jsonl":
        path.write_text(lines)
    elif kind == ".jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif kind == ".json":
        path.write_text("[" + ",".join(lines.splitlines()) + "]")
    elif kind == ".csv":
        path.write_text("text\n" + "".join(json.loads(line)["text"] + "\n" for line in lines.splitlines()))
    else:
        import pyarrow as pa
        import pyarrow.feather as feather
        import pyarrow.parquet as pq

        table = pa.Table.from_pylist([json.loads(line) for line in lines.splitlines()])
        if kind == ".parquet":
            pq.write_table(table, path, row_group_size=500)
        else:
            feather.write_feather(table, path, compression="uncompressed", chunksize=500)


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet", ".arrow"])
def test_a_file_of_one_part_moves_the_bar_all_the_way(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("data_pipeline.files._COUNTED_BYTES", 4096)
    monkeypatch.setattr("data_pipeline.json_rows._CHUNK", 4096)
    data = tmp_path / f"rows{kind}"
    write(data, kind)
    shown: list[tuple[int, float]] = []
    build_store(
        str(data),
        make_tokenizer(),
        seq_length=512,
        config=DataConfig(),
        folder=tmp_path / "stores",
        progress=lambda *a: shown.append(a),
    )
    check(shown, 6000)
    with pytest.raises(AssertionError):
        check(shown[-1:], 6000)  # what a bar per part would show


def test_what_other_processes_say_is_added_up_and_never_goes_back(tmp_path, monkeypatch):
    monkeypatch.setattr("data_pipeline.part_progress._SECONDS", 0.0)
    shown: list[tuple[int, float]] = []
    meter = Meter({0: 100, 1: 100, 2: 200}, [(0, 7)], lambda *a: shown.append(a), tmp_path)
    meter._next_look = 0.0
    aside = tmp_path / ".part-00002.abc"
    aside.mkdir()
    with ProgressFile(aside) as said:
        said(2, 10, 50)
        meter.look()
        (aside / "progress").write_text("2 1", "utf-8")  # torn: being written
        meter._next_look = 0.0
        meter.look()
        said(2, 5, 20)  # another attempt, after a node was lost
        meter._next_look = 0.0
        meter.look()
    assert not list(aside.iterdir())
    meter.done(2, 20)
    meter.done(1, 3)
    assert shown == [(17, 150 / 400), (27, 300 / 400), (30, 1.0)]


def test_a_process_says_it_at_most_once_a_second(tmp_path):
    with ProgressFile(tmp_path) as said:
        for i in range(100):
            said(0, i, i)
        assert not list(tmp_path.iterdir())
