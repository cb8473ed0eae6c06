import os
import threading
import time

import numpy as np
import pytest

from data_pipeline import Document, DocumentStore
from data_pipeline.local_copy import on_network, open_near
from data_pipeline.store_writer import StoreWriter


def make(folder, tokens=(1, 2, 3)) -> DocumentStore:
    with StoreWriter(folder) as writer:
        writer.append(Document(ids=np.array(tokens), targets=np.array([*tokens[1:], -100]), row_id="f:1"))
        return writer.commit(key="k", report={})


def copies(cache):
    return sorted(p.name for p in cache.iterdir() if p.is_dir())


def test_a_store_on_a_disk_of_the_node_is_read_where_it_is(tmp_path):
    make(tmp_path / "s")
    for mode in ("auto", "never"):
        assert open_near(tmp_path / "s", mode=mode, cache=tmp_path / "cache").folder == tmp_path / "s"
    assert not (tmp_path / "cache").exists()


def test_a_copy_is_made_once_and_found_again(tmp_path):
    store = make(tmp_path / "s")
    near = open_near(tmp_path / "s", mode="always", cache=tmp_path / "cache")
    assert near.folder.parent == tmp_path / "cache"
    assert near.fingerprint == store.fingerprint
    assert near.document(0).ids.tolist() == [1, 2, 3]
    stamp = (near.folder / "ids.bin").stat().st_mtime_ns
    again = open_near(tmp_path / "s", mode="always", cache=tmp_path / "cache")
    assert (again.folder, (again.folder / "ids.bin").stat().st_mtime_ns) == (near.folder, stamp)
    (near.folder / "ids.bin").write_bytes(b"")
    assert open_near(tmp_path / "s", mode="always", cache=tmp_path / "cache").document(0).ids.tolist() == [1, 2, 3]


def test_a_copy_tells_of_every_piece(tmp_path, monkeypatch):
    """A large store was copied without a sign: whoever looked could not tell that from a disk that hangs."""
    monkeypatch.setattr("data_pipeline.local_copy._PIECE", 64)
    store = make(tmp_path / "s", tokens=range(1000))
    pieces = []
    near = open_near(tmp_path / "s", mode="always", cache=tmp_path / "cache", on_piece=lambda: pieces.append(1))
    assert len(pieces) > store.num_bytes // 64
    assert near.document(0).ids.tolist() == list(range(1000))
    open_near(tmp_path / "s", mode="always", cache=tmp_path / "cache", on_piece=lambda: pieces.append(2))
    assert 2 not in pieces


def test_ranks_of_a_node_copy_once(tmp_path, monkeypatch):
    import shutil

    make(tmp_path / "s")
    made: list[str] = []
    real = shutil.copytree

    def slow(*args, **kwargs):
        made.append("copy")
        time.sleep(0.2)
        return real(*args, **kwargs)

    monkeypatch.setattr("data_pipeline.local_copy.shutil.copytree", slow)
    found: list[str] = []

    def rank():
        found.append(open_near(tmp_path / "s", mode="always", cache=tmp_path / "cache").row_id(0))

    threads = [threading.Thread(target=rank) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (made, found) == (["copy"], ["f:1"] * 4)


def test_what_a_killed_rank_left_is_removed(tmp_path):
    store = make(tmp_path / "s")
    aside = tmp_path / "cache" / f".{store.fingerprint[:32]}.123"
    aside.mkdir(parents=True)
    near = open_near(tmp_path / "s", mode="always", cache=tmp_path / "cache")
    assert copies(tmp_path / "cache") == [near.folder.name]


def test_old_copies_are_removed(tmp_path):
    for i in range(6):
        make(tmp_path / f"s{i}", (i, i + 1, 7))
        near = open_near(tmp_path / f"s{i}", mode="always", cache=tmp_path / "cache")
        os.utime(near.folder, (1000 + i, 1000 + i))
    assert len(copies(tmp_path / "cache")) == 4
    assert near.folder.name in copies(tmp_path / "cache")


def test_without_room_the_store_is_read_where_it_is(tmp_path, monkeypatch):
    from collections import namedtuple

    make(tmp_path / "s")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("data_pipeline.local_copy.shutil.disk_usage", lambda path: usage(1, 1, 10))
    assert open_near(tmp_path / "s", mode="always", cache=tmp_path / "cache").folder == tmp_path / "s"


@pytest.mark.parametrize(
    ("kind", "network"), [("nfs4", True), ("lustre", True), ("fuse.s3fs", True), ("ext4", False), ("fuseblk", False)]
)
def test_what_is_a_network_file_system(tmp_path, kind, network):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path} {kind} rw 0 0\n/dev/b {tmp_path}x ext4 rw 0 0\n")
    assert on_network(tmp_path / "runs", mounts=str(mounts)) is network
    assert on_network(tmp_path.parent, mounts=str(mounts)) is False
    assert on_network(tmp_path, mounts=str(tmp_path / "none")) is False
