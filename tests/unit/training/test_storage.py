"""Storage: the same promises on a path, a file URL, memory and an object store that fails."""

import contextlib
import errno
import gc
import pickle
import resource
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import pytest

from raycp.errors import ConfigError
from raycp.training.storage import PathStorage, Storage
from tests.unit.training.flaky_storage import FlakyFileSystem, Killed, VendorError, flaky
from tests.unit.training.places import KINDS, place
from workers.storage import storage_fix

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(params=KINDS)
def storage(request, tmp_path):
    return place(request.param, tmp_path)


def test_what_is_written_is_read(storage):
    assert storage.names() == []
    assert storage.size("a") is None
    storage.write("a", [b"12", memoryview(b"345"), b"", memoryview(bytearray(b"6789"))])
    assert storage.read("a") == b"123456789"
    assert storage.read_range("a", 2, 5) == b"345"
    assert storage.size("a") == 9
    storage.write("empty", [])
    assert (storage.read("empty"), storage.size("empty")) == (b"", 0)
    storage.replace("a", b"new")
    assert b"".join(storage.blocks("a")) == b"new"
    assert storage.names() == ["a", "empty"]


def test_a_long_file_goes_through_in_pieces(storage):
    data = bytes(range(251)) * 200_000  # 50 MB, more than one block
    storage.write("big", [memoryview(data)])
    assert storage.size("big") == len(data)
    assert b"".join(storage.blocks("big")) == data


def test_folders_are_made_listed_renamed_and_deleted(storage):
    folder = storage.child("one").child("two")
    folder.write("x", [b"1"])
    folder.write("y", [b"2"])
    assert folder.parent == storage.child("one")
    assert (folder.name, folder.parent.name) == ("two", "one")
    assert storage.names() == ["one"]
    assert storage.size("one") is None
    storage.rename("one", "three")
    assert storage.names() == ["three"]
    assert folder.names() == []
    assert storage.child("three").child("two").read("y") == b"2"
    storage.child("three").child("two").rename("y", "z")
    assert storage.child("three").child("two").names() == ["x", "z"]
    storage.delete("three")
    storage.delete("never there")
    assert storage.names() == []


def test_missing_files_and_short_ranges_are_errors(storage):
    storage.write("a", [b"123"])
    with pytest.raises(FileNotFoundError) as caught:
        storage.read("b")
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(OSError, match="4 bytes were asked for, 2 came"):
        storage.read_range("a", 1, 5)


def test_travels_as_its_address(storage):
    other = pickle.loads(pickle.dumps(storage))
    assert other == storage
    assert hash(other) == hash(storage)
    storage.write("a", [b"1"])
    assert other.read("a") == b"1"
    assert str(storage) == storage.where


def test_a_source_that_fails_half_way_makes_no_file(storage):
    storage.write("a", [b"old"])

    def source():
        yield b"n" * 5000
        raise RuntimeError("the slot is gone")

    for name in ("a", "b"):
        with pytest.raises(RuntimeError, match="the slot is gone"):
            storage.write(name, source())
    if "memory" not in storage.where:  # which has no uploads: there a torn file is seen by its length
        assert storage.read("a") == b"old"
        assert storage.names() == ["a"]


def test_several_writers_of_one_file_leave_a_whole_one(storage):
    contents = [bytes([65 + i]) * 100_000 for i in range(6)]
    threads = [threading.Thread(target=storage.write, args=("a", [c[:50_000], c[50_000:]])) for c in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert storage.read("a") in contents
    assert storage.names() == ["a"]


def test_a_file_of_another_node_is_seen_in_spite_of_the_listing_cache(tmp_path):
    storage = place("flaky", tmp_path)
    storage.write("a", [b"1"])
    assert storage.names() == ["a"]
    FlakyFileSystem.store[f"{storage.where.removeprefix('flaky://')}/b"] = b"2"
    assert fsspec.core.url_to_fs(storage.where)[0].ls(storage.where, detail=False)[-1].endswith("/a"), "it does cache"
    assert storage.names() == ["a", "b"]


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
def test_a_full_object_store_is_an_oserror_with_a_fix_and_leaves_the_old_file(tmp_path, fail_at):
    storage = place("flaky", tmp_path)
    storage.write("a", [b"old"])
    with flaky(fail_at=fail_at) as faults, pytest.raises(OSError, match="no space left") as caught:
        storage.write("a", [b"1" * 1500, b"2" * 1500])
    assert caught.value.errno == errno.ENOSPC
    assert "free space" in storage_fix(caught.value)
    assert storage.read("a") == b"old"
    assert faults.uploads_open == 0, "an upload that is never aborted is paid for"


def test_a_killed_upload_is_not_completed_by_its_finalizer(tmp_path):
    storage = place("flaky", tmp_path)
    with flaky(fail_at=2, error=Killed()), pytest.raises(Killed):
        storage.write("a", [b"1" * 1500, b"2" * 1500])
    gc.collect()
    assert storage.names() == []


def test_an_upload_left_to_python_would_be_completed_short(tmp_path):
    """The planted fault of the test above: what `with fs.open(...)` does."""
    storage = place("flaky", tmp_path)
    fs, path = fsspec.core.url_to_fs(f"{storage.where}/a")
    with contextlib.suppress(RuntimeError), fs.open(path, "wb") as file:
        file.write(b"1" * 500)
        raise RuntimeError("half way")
    assert storage.size("a") == 500


def test_a_storage_that_forgets_bytes_is_found_out(tmp_path):
    storage = place("flaky", tmp_path)
    with flaky(truncate=3), pytest.raises(OSError, match="10 bytes were written, the storage holds 7") as caught:
        storage.write("a", [b"0123456789"])
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("error", [VendorError("slow down"), OSError("no number"), TimeoutError("late")])
def test_errors_of_a_vendor_come_as_oserrors_with_a_number(tmp_path, error):
    storage = place("flaky", tmp_path)
    with flaky(fail_at=1, error=error), pytest.raises(OSError, match=str(error)) as caught:
        storage.write("a", [b"1"])
    assert caught.value.errno == errno.EIO
    assert storage_fix(caught.value)
    assert caught.value.__cause__ is error


def test_a_failed_write_to_a_path_leaves_nothing(tmp_path, monkeypatch):
    storage = place("path", tmp_path)
    storage.write("a", [b"old"])

    def refuse(descriptor):
        raise OSError(errno.EDQUOT, "quota")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OSError, match="quota") as caught:
        storage.write("a", [b"new"])
    assert caught.value.filename == f"{storage.where}/a"
    assert storage.names() == ["a"]
    assert storage.read("a") == b"old"


WRITE = """
import resource, signal, sys
from raycp.training.storage import Storage
from workers.storage import storage_fix
storage = Storage.of(sys.argv[1])
storage.write("old", [b"o" * 1000])
limit = int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    storage.write("new", (b"n" * 65536 for _ in range(64)))
except OSError as error:
    print(error.errno, storage_fix(error), storage.names(), len(storage.read("old")), error.filename, sep="|")
"""


def run_write(folder, limit, before=()):
    command = [*before, sys.executable, "-c", WRITE, str(folder), str(limit)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip().split("|")


def test_a_file_over_the_limit_of_the_process_says_so(tmp_path):
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    number, fix, names, old, file = run_write(tmp_path, 1 << 20)
    assert int(number) == errno.EFBIG
    assert "files of this size" in fix
    assert (names, old) == ("['old']", "1000")
    assert file == f"{tmp_path}/new"
    assert run_write(tmp_path, 0) == [""], "without the limit the same write works"


def test_a_full_disk_says_so_and_keeps_what_was_there(tmp_path):
    """A real one: a tmpfs of 1 MiB in a mount namespace of its own."""
    script = f'mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec "$@"'
    before = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system allows no mount in a namespace")
    number, fix, names, old, _ = run_write(tmp_path, 0, before)
    assert int(number) == errno.ENOSPC
    assert "free space" in fix
    assert (names, old) == ("['old']", "1000")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("runs/one", "relative"),
        ("file://runs", "relative"),
        ("simplecache::s3://bucket/runs", "chain"),
        ("sftp://me:secret@host/runs", "password"),
        ("nosuch://bucket/runs", "cannot be opened"),
    ],
)
def test_addresses_that_cannot_be_right_are_refused(where, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Storage.of(where)
    assert caught.value.fix
    assert "secret" not in str(caught.value)


def test_addresses_have_one_form(tmp_path):
    assert Storage.of(f"file://{tmp_path}") == Storage.of(tmp_path) == Storage.of(f"{tmp_path}/")
    assert isinstance(Storage.of(f"file://{tmp_path}"), PathStorage)
    assert Storage.of("memory://a/b/").where == "memory://a/b"
    assert Storage.of("memory://a").parent.where == "memory://"
    assert Storage.of("memory://").child("a").where == "memory://a"
    assert Storage.of("/").child("a").where == "/a"
    assert Storage.of("/a").parent.where == "/"
    assert Storage.of(Storage.of("/a")).local_path() == Path("/a")
    assert Storage.of("memory://a").local_path() is None
