"""What counts as committed: every way of damage, of failing, of two at once, and of coming back too late."""

import contextlib
import errno
import json
import threading
from dataclasses import replace

import pytest

from raycp.errors import CheckpointError, StaleGenerationError
from raycp.training.checkpoint import write_shard
from raycp.training.committed import (
    commit,
    commit_if_whole,
    committed_run,
    discard_uncommitted,
    load_manifest,
    newest,
    newest_committed,
    prune,
    step_folder,
    verify,
)
from raycp.training.latest import LATEST, fence, read_latest
from tests.unit.training.flaky_storage import FlakyFileSystem, Killed, VendorError, flaky
from tests.unit.training.places import (
    DAMAGES,
    KINDS,
    cut,
    flip,
    lose,
    overwrite,
    place,
    save,
    shards_of,
    tensors,
    write,
)
from workers.storage import storage_fix


@pytest.fixture(params=KINDS)
def root(request, tmp_path):
    return place(request.param, tmp_path)


def steps(root):
    return [name for name in root.names() if name.startswith("step-")]


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_a_damaged_step_is_set_aside_and_the_older_is_used(root, damage):
    save(root, 2)
    folder, manifest = save(root, 3)
    assert newest(root).storage == folder
    damage(folder, manifest.shards[1].file)
    found = newest(root)
    assert found.storage == step_folder(root, 2)
    assert found.manifest is not None
    assert found.manifest.step == 2
    assert len(found.messages) == 1
    assert "step-00000003 is damaged" in found.messages[0]
    assert "damaged-step-00000003" in root.names()
    assert not newest(root).messages
    save(root, 3)
    assert newest(root).storage == folder


def test_the_same_step_damaged_twice_is_set_aside_twice(root):
    for _ in range(2):
        folder, manifest = save(root, 3)
        flip(folder, manifest.shards[0].file)
        assert newest(root).manifest is None
    assert "damaged-step-00000003-2" in root.names()


def test_another_version_stops_the_run_and_is_not_taken_for_damage(root):
    save(root, 1)
    folder, manifest = save(root, 2)
    overwrite(folder, "manifest.json", lambda _: replace(manifest, version=2).to_bytes())
    with pytest.raises(CheckpointError, match="version 2"):
        load_manifest(folder)
    with pytest.raises(CheckpointError, match="use the raycp that wrote"):
        newest(root)
    assert steps(root) == ["step-00000001", "step-00000002"]


def test_a_storage_that_does_not_answer_is_no_damage(tmp_path, monkeypatch):
    root = place("flaky", tmp_path)
    save(root, 1)
    save(root, 2)

    def refuse(self, path, start=None, end=None, **kwargs):
        raise VendorError("503 slow down")

    with monkeypatch.context() as patch:
        patch.setattr(FlakyFileSystem, "cat_file", refuse)
        with pytest.raises(OSError, match="503 slow down"):
            newest(root)
    assert steps(root) == ["step-00000001", "step-00000002"]
    assert newest(root).manifest.step == 2


def test_a_bad_sector_is_damage(tmp_path, monkeypatch):
    root = place("path", tmp_path)
    save(root, 1)
    folder, manifest = save(root, 2)
    read = type(root).read_range

    def refuse(self, name, start, stop):
        if self == folder and name == manifest.shards[2].file:
            raise OSError(errno.EIO, "Input/output error")
        return read(self, name, start, stop)

    monkeypatch.setattr(type(root), "read_range", refuse)
    found = newest(root)
    assert found.manifest.step == 1
    assert "Input/output error" in found.messages[0]


# -- committing -------------------------------------------------------------------------------------------------------


def test_nothing_is_committed_with_a_missing_or_double_shard(root):
    manifest = write(root, 1)
    folder = step_folder(root, 1)
    with pytest.raises(CheckpointError, match="missing"):
        commit(folder, replace(manifest, shards=manifest.shards[:2]))
    with pytest.raises(CheckpointError, match="given twice"):
        commit(folder, replace(manifest, shards=(*manifest.shards, manifest.shards[0])))
    assert newest(root) == (None, None, ())


@pytest.mark.parametrize("damage", [cut, lose])
def test_nothing_is_committed_while_a_file_is_short_or_missing(root, damage):
    save(root, 1)
    manifest = write(root, 2)
    folder = step_folder(root, 2)
    damage(folder, manifest.shards[1].file)
    assert commit_if_whole(folder, manifest) is False
    with pytest.raises(CheckpointError, match=manifest.shards[1].file):
        commit(folder, manifest)
    assert newest(root).manifest.step == 1
    write_shard(folder, 1, shards_of(tensors(2), 1, 3), generation=1)
    assert commit_if_whole(folder, manifest) is True
    assert newest(root).manifest.step == 2


def test_keepers_without_a_driver_commit_when_the_last_one_has_written(root):
    save(root, 1)
    manifest = write(place("memory", None), 2)
    folder = step_folder(root, 2)
    done = []
    for rank in range(3):
        write_shard(folder, rank, shards_of(tensors(2), rank, 3), generation=1)
        done.append(commit_if_whole(folder, manifest))
    assert done == [False, False, True]
    assert verify(folder).step == newest(root).manifest.step == read_latest(root).step == 2


def test_committing_again_or_from_a_copy_that_travelled_changes_nothing(root):
    folder, manifest = save(root, 2)
    travelled = type(manifest).from_dict(json.loads(json.dumps(manifest.to_dict())))
    before = folder.read("manifest.json")
    for again in (manifest, travelled):
        commit(folder, again)
        assert commit_if_whole(folder, again)
    assert folder.read("manifest.json") == before


def test_several_commit_at_once(root):
    manifest = write(root, 2)
    folder = step_folder(root, 2)
    results, errors = [], []

    def go():
        try:
            results.append(commit_if_whole(folder, manifest))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert results == [True] * 8
    assert verify(folder).step == 2
    assert not [name for name in folder.names() if name.endswith(".part")]


def test_a_manifest_that_the_storage_cut_is_an_error_at_once(tmp_path):
    root = place("flaky", tmp_path)
    save(root, 1)
    manifest = write(root, 2)
    with flaky(truncate=1), pytest.raises(OSError, match="bytes were written"):
        commit(step_folder(root, 2), manifest)
    found = newest(root)
    assert found.manifest.step == 1
    assert "step-00000002 is damaged" in found.messages[0]


@pytest.mark.parametrize("kind", ["fail", "cut", "kill"])
def test_whatever_operation_fails_the_newest_step_is_whole(tmp_path, kind):
    """Every upload operation of a save in turn; then the next save works."""
    saved = 0
    for at in range(1, 60):
        root = place("flaky", tmp_path)
        save(root, 1)
        error = Killed() if kind == "kill" else OSError(errno.ENOSPC, "no space left")
        with flaky(fail_at=0 if kind == "cut" else at, error=error) as faults:
            with contextlib.suppress(OSError, Killed):
                if kind == "cut":
                    save_cutting(root, at, faults)
                else:
                    save(root, 2)
                saved += 1
            done = faults.operations < at
        found = newest(root)
        assert found.manifest.step in (1, 2)
        assert verify(found.storage).step == found.manifest.step
        if done:
            assert found.manifest.step == 2
            break
        save(root, 2)
        assert newest(root).manifest.step == 2
    assert saved >= 1
    assert at > 5


def save_cutting(root, at, faults):
    """Saves step 2 while the storage forgets the end of the file of the at-th operation."""
    operate = FlakyFileSystem.operate

    def counted(self):
        operate(self)
        faults.truncate = 2 if faults.operations == at else 0

    FlakyFileSystem.operate = counted
    try:
        save(root, 2)
    finally:
        FlakyFileSystem.operate = operate


def test_a_full_storage_says_so_and_leaves_the_older_steps_whole(tmp_path):
    root = place("flaky", tmp_path)
    save(root, 1)
    with flaky(fail_at=3), pytest.raises(OSError, match="no space left") as caught:
        save(root, 2)
    assert "free space" in storage_fix(caught.value)
    assert read_latest(root).step == 1
    assert newest(root).manifest.step == 1
    assert discard_uncommitted(root) == ["step-00000002"]
    assert steps(root) == ["step-00000001"]


# -- zombies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [50, 60, 70])
def test_an_older_generation_commits_nothing_after_a_newer_one(root, step):
    save(root, 50, generation=2)
    save(root, 60, generation=3)
    held = newest(root).manifest
    manifest = write(root, step, generation=2)
    for late in (commit, commit_if_whole):
        with pytest.raises(StaleGenerationError, match="generation 3 has taken over"):
            late(step_folder(root, step), manifest)
    assert newest(root).manifest.to_bytes() == held.to_bytes()
    assert (read_latest(root).generation, read_latest(root).step) == (3, 60)


def test_a_zombie_that_was_not_refused_in_time_still_does_not_win(root):
    """It looked before the newer generation committed, and wrote after it."""
    save(root, 60, generation=3)
    root.delete(LATEST)
    late, _ = save(root, 70, generation=2)
    assert newest(root).manifest.age == (3, 60)
    assert newest_committed(root).age == (3, 60)
    assert prune(root, keep=1) == ["step-00000070"]
    assert late.names() == []
    save(root, 70, generation=3)
    assert newest(root).manifest.age == (3, 70)


def test_a_fence_holds_before_the_new_generation_has_committed_anything(root):
    save(root, 50, generation=2)
    fence(root, "run", 3)
    manifest = write(root, 60, generation=2)
    with pytest.raises(StaleGenerationError):
        commit(step_folder(root, 60), manifest)
    assert newest(root).manifest.step == 50
    fence(root, "run", 2)
    assert read_latest(root).fence == 3
    commit(step_folder(root, 60), manifest, by=3)
    assert newest(root).manifest.age == (2, 60), "the new generation has inherited it from memory"
    save(root, 55, generation=3)
    assert newest(root).manifest.step == 55


def test_keepers_save_their_step_although_a_driver_fenced_and_died_before_it_committed(root):
    save(root, 50, generation=2)
    fence(root, "run", 3)
    manifest = write(root, 57, generation=2)
    assert commit_if_whole(step_folder(root, 57), manifest)
    assert newest(root).manifest.age == (2, 57)
    save(root, 55, generation=3)
    with pytest.raises(StaleGenerationError):
        commit_if_whole(step_folder(root, 58), write(root, 58, generation=2))
    assert newest(root).manifest.age == (3, 55)


def test_a_fence_of_another_run_that_was_in_the_folder_binds_nobody(root):
    save(root, 50, generation=9)
    root.delete("step-00000050")
    manifest = replace(write(root, 1, generation=1), run_id="another")
    commit(step_folder(root, 1), manifest)
    assert newest(root).manifest.run_id == "another"
    assert (read_latest(root).run_id, read_latest(root).fence) == ("another", 1)


def test_a_later_generation_may_go_back_and_write_a_step_again(root):
    save(root, 60, generation=2)
    folder, manifest = save(root, 60, world_size=2, generation=3)
    assert load_manifest(folder).to_bytes() == manifest.to_bytes()
    save(root, 55, generation=4)
    assert newest(root).manifest.age == (4, 55)


# -- lists late, prune, leftovers -------------------------------------------------------------------------------------


def test_a_step_that_is_not_listed_yet_is_found_kept_and_not_deleted(tmp_path):
    root = place("flaky", tmp_path)
    for step in (1, 2, 3):
        save(root, step)
    with flaky(unlisted=("step-00000003",)):
        assert steps(root) == ["step-00000001", "step-00000002"]
        assert newest(root).manifest.step == 3
        assert committed_run(root) == "run"
        assert discard_uncommitted(root) == []
        assert prune(root, keep=2) == ["step-00000001"]
    assert steps(root) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"step": "3"}', b'{"run_id": "run", "fence": 99}'])
def test_a_torn_latest_says_nothing_and_is_written_again(root, text):
    save(root, 1)
    root.write(LATEST, [text])
    assert newest(root).manifest.step == 1
    save(root, 2)
    assert (read_latest(root).step, newest(root).manifest.step) == (2, 2)


def test_a_step_without_manifest_was_never_committed(root):
    assert newest(root.child("nothing here")) == (None, None, ())
    save(root, 1)
    write(root, 2)
    found = newest(root)
    assert found.storage == step_folder(root, 1)
    assert found.messages == ()


def test_pruning_keeps_the_newest_and_what_is_being_written(root):
    for step in (1, 2, 4):
        save(root, step)
    write(root, 3)
    write(root, 5)
    assert prune(root, keep=2) == ["step-00000003", "step-00000001"]
    assert steps(root) == ["step-00000002", "step-00000004", "step-00000005"]
    assert prune(root.child("none"), keep=2) == []


def test_a_kill_while_pruning_leaves_no_half_step_that_looks_committed(tmp_path, monkeypatch):
    root = place("path", tmp_path)
    for step in (1, 2):
        save(root, step)

    def killed(path):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(Killed):
            prune(root, keep=1)
    assert step_folder(root, 1).size("manifest.json") is None
    assert newest(root).messages == ()
    assert prune(root, keep=1) == ["step-00000001"]


def test_half_written_steps_are_discarded_so_that_a_full_disk_does_not_stay_full(root):
    save(root, 2)
    for step in (1, 4):
        write(root, step)
    half = step_folder(root, 2)
    half.write(".shard.part", [b"a writer was killed"])
    assert discard_uncommitted(root) == ["step-00000001", "step-00000004"]
    assert steps(root) == ["step-00000002"]
    assert ".shard.part" not in half.names()
    assert newest(root).manifest.step == 2
    assert discard_uncommitted(root.child("missing")) == []


def test_whose_checkpoints_these_are(root):
    assert committed_run(root.child("missing")) is None
    write(root, 9)
    assert committed_run(root) is None
    folder, _ = save(root, 2)
    assert committed_run(root) == "run"
    overwrite(folder, "manifest.json", lambda _: b"torn")
    assert committed_run(root) is None
