"""Preparing over a real Ray cluster: the same documents, errors, and going on after what dies."""

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import ray

from data_pipeline import build_store
from data_pipeline.prepare import ProgressBar, Tasks, prepare
from raycp.config import DataConfig
from raycp.errors import ClusterError, DataError

from .tiny_tokenizers import make_tokenizer

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def cluster():
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    yield
    ray.shutdown()


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr("data_pipeline.readers.PART_BYTES", 20_000)
    monkeypatch.setattr("data_pipeline.readers._BLOCK", 5_000)


@pytest.fixture
def rows(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {i} " + "one two " * (i % 40)}) + "\n" for i in range(800)))
    return path


def contents(store):
    return [(d.ids.tolist(), d.targets.tolist(), d.row_id) for d in map(store.document, range(len(store)))]


def settings(folder, **config):
    return {"seq_length": 512, "config": DataConfig(**config), "folder": folder}


def test_tasks_make_the_same_store(cluster, small_parts, rows, tmp_path):
    shown: list[tuple[int, float]] = []
    over_ray = prepare(
        str(rows), make_tokenizer(), **settings(tmp_path / "a"), local_bytes=0, progress=lambda *a: shown.append(a)
    )
    here = build_store(str(rows), make_tokenizer(), **settings(tmp_path / "b"))
    assert contents(over_ray) == contents(here)
    assert over_ray.fingerprint == here.fingerprint
    assert over_ray.key == here.key
    parts = len(list(over_ray.folder.glob("part-*")))
    assert parts >= 5
    assert [n for n, _ in shown] == sorted(n for n, _ in shown)
    assert [share for _, share in shown] == sorted(share for _, share in shown)
    assert shown[-1] == (800, 1.0)
    began = time.perf_counter()
    assert prepare(str(rows), make_tokenizer(), **settings(tmp_path / "a"), local_bytes=0).key == here.key
    assert time.perf_counter() - began < 2


def test_the_bar_moves_inside_a_part_that_a_task_makes(cluster, monkeypatch, tmp_path):
    monkeypatch.setattr("data_pipeline.prepare._LOOK_SECONDS", 0.2)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": f"row {i} " + "one two three " * 40}) + "\n" for i in range(40_000)))
    shown: list[tuple[int, float]] = []
    with monkeypatch.context() as more:
        more.setattr("data_pipeline.readers.PART_BYTES", data.stat().st_size // 2)
        store = prepare(
            str(data), make_tokenizer(), **settings(tmp_path / "a"), local_bytes=0, progress=lambda *a: shown.append(a)
        )
    assert len(list(store.folder.glob("part-*"))) == 2
    assert len(shown) > 4, "two parts, and a few looks at each"
    assert [n for n, _ in shown] == sorted(n for n, _ in shown)
    assert [share for _, share in shown] == sorted(share for _, share in shown)
    assert 0 < shown[0][1] < 0.5
    assert shown[-1] == (40_000, 1.0)
    assert not list(store.folder.rglob("progress")), "what said how far a part was is no part of it"


def test_small_data_asks_for_no_cluster(rows, tmp_path):
    asked: list[int] = []
    prepare(str(rows), make_tokenizer(), **settings(tmp_path / "a"), connect=lambda: asked.append(1))
    assert asked == []


def test_a_bad_row_of_a_task_is_the_same_error_as_here(cluster, small_parts, rows, tmp_path):
    lines = rows.read_text().splitlines()
    lines[700] = '{"text": 7}'
    rows.write_text("\n".join(lines))
    with pytest.raises(DataError, match=rf"{rows}:701: text is of type int") as error:
        prepare(str(rows), make_tokenizer(), **settings(tmp_path / "a"), local_bytes=0)
    assert error.value.details == {"row": f"{rows}:701", "field": "text"}
    assert list((tmp_path / "a").rglob("*.bin")) == []
    skipped = prepare(str(rows), make_tokenizer(), **settings(tmp_path / "a", on_bad_row="skip"), local_bytes=0)
    assert (skipped.report["skipped"], len(skipped)) == (1, 799)


def test_no_task_writes_any_more_when_an_error_of_another_is_raised(cluster, tmp_path):
    """The folder is removed then, and a part came back after that."""

    def works(item):
        (tmp_path / f"begun-{item}").touch()
        if item == 1:
            while not (tmp_path / "begun-0").exists():
                time.sleep(0.01)
            raise DataError("a bad row", fix="repair it")
        while True:
            (tmp_path / "late").touch()
            time.sleep(0.001)

    with pytest.raises(DataError, match="a bad row"):
        list(Tasks(tmp_path)(works, [0, 1]))
    (tmp_path / "late").unlink(missing_ok=True)
    time.sleep(0.5)
    assert not (tmp_path / "late").exists()


def test_a_task_whose_process_dies_is_done_again(cluster, tmp_path):
    mark = str(tmp_path / "died")

    def once(item):
        if item == 2 and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return item * 10

    assert sorted(Tasks(tmp_path)(once, [0, 1, 2, 3, 4])) == [(i, i * 10) for i in range(5)]
    assert os.path.exists(mark)


def test_a_task_that_always_dies_is_an_error_with_its_node(cluster, tmp_path):
    def dies(item):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ClusterError, match="preparing data failed 3 times on part 0, last on node"):
        list(Tasks(tmp_path)(dies, [0]))


def test_nodes_that_do_not_see_the_data_are_not_used(cluster, tmp_path):
    with pytest.raises(ClusterError, match="no node of the cluster with a CPU sees"):
        list(Tasks(tmp_path, {str(tmp_path / "elsewhere.jsonl")})(str, [1]))
    assert list(tmp_path.glob(".sees*")) == []


def test_a_preparation_killed_by_signal_nine_goes_on(rows, small_parts, tmp_path):
    code = f"""
        import sys, time
        sys.path[:0] = [{str(ROOT)!r}]
        import data_pipeline.readers as readers
        readers.PART_BYTES, readers._BLOCK = 20_000, 5_000
        from data_pipeline import build_store
        from raycp.config import DataConfig
        from tests.unit.data_pipeline.tiny_tokenizers import make_tokenizer
        def slowly(function, items, meanwhile=None):
            for index, item in enumerate(items):
                yield index, function(item)
                time.sleep(0.3)
        data, folder = {str(rows)!r}, {str(tmp_path / "a")!r}
        build_store(data, make_tokenizer(), seq_length=512, config=DataConfig(), folder=folder, run=slowly)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT)
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "a").glob("*/part-*"))) < 3:
        assert time.monotonic() < deadline, "no part was written"
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    written = {p.name: p.stat().st_ino for p in (tmp_path / "a").glob("*/part-*")}
    assert not list((tmp_path / "a").glob("*/meta.json"))
    store = build_store(str(rows), make_tokenizer(), **settings(tmp_path / "a"))
    assert contents(store) == contents(build_store(str(rows), make_tokenizer(), **settings(tmp_path / "b")))
    kept = {name: (store.folder / name).stat().st_ino for name in written}
    assert kept == written, "what was written before the kill was used"
    assert len(list(store.folder.glob("part-*"))) > len(written)


def test_the_bar_shows_rows_and_share():
    out = io.StringIO()
    with ProgressBar("preparing data", file=out) as bar:
        bar._bar.delay = 0.0
        bar._bar.mininterval = 0.0
        bar(1500, 0.25)
        bar(3000, 0.5)
        bar._bar.refresh()
    assert "preparing data:  50%" in out.getvalue()
    assert "3,000 rows" in out.getvalue()


def test_relative_paths_mean_the_callers_folder_on_every_node(cluster, small_parts, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    over_ray = prepare(rows.name, make_tokenizer(), **settings("stores"), local_bytes=0)
    assert over_ray.row_id(3) == "rows.jsonl:4"
    assert over_ray.folder.parent == tmp_path / "stores"
    assert over_ray.fingerprint == build_store(str(rows), make_tokenizer(), **settings(tmp_path / "b")).fingerprint
