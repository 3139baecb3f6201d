"""A change of an index that fails leaves it as it was before, and committed vectors stay."""

import errno
import os
import shutil
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from memhier.ann import ZoomIndex
from memhier.ann.zoom.renewal import life
from memhier.ann.zoom.storage import part
from memhier.ann.zoom.storage.catalog import KIND
from memhier.errors import ClosedError
from memhier.files import Fault, FaultyFiles, RealFiles
from memhier.store.store import Store

DEADLINE_S = 100.0  # of a machine under load; pytest ends a test later


def make(count, dimension=12, seed=0, shift=0.0):
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(20, dimension)) * 4 + shift
    return (centers[rng.integers(0, 20, count)] + rng.normal(size=(count, dimension))).astype(np.float32)


def contents(index):
    """Return id and vector of all that an index holds."""
    found = index.search(np.zeros(index.dimension), max(1, len(index)), recall=1.0).ids
    ids = np.sort(found[found >= 0])
    return ids.tolist(), index.reconstruct(ids)


def old_of(index):
    return index.search(make(1)[0], 630, recall=1.0, where="kind == 'old'").ids


def same(one, other):
    return one[0] == other[0] and np.array_equal(one[1], other[1])


def contents_of(path):
    with ZoomIndex.open(path) as index:
        return contents(index)


def break_files(switch, fail_at, fault):
    switch.files = FaultyFiles(RealFiles(), fail_at, fault)
    return switch.files


CHANGES = {
    "add": lambda index: index.add(make(200, seed=5), attributes={"kind": ["new"] * 200, "size": [1.5] * 200}),
    "update": lambda index: index.update(np.arange(100, 250), make(150, seed=6), {"kind": ["other"] * 150}),
    "fields": lambda index: index.update(np.arange(100, 250), attributes={"kind": ["other"] * 150}),
    "upsert": lambda index: index.upsert(np.arange(400, 600), make(200, seed=7), {"kind": ["other"] * 200}),
    "commit": lambda index: index.commit(),
    "compact": lambda index: index.compact(),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    path = tmp_path_factory.mktemp("built") / "index"
    ZoomIndex.build(path, make(500), dram="4MiB", attributes={"kind": ["old"] * 500}).close()
    return path


@pytest.fixture
def folder():
    """A folder on a file system where many commits are fast."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as path:
        yield Path(path)


def open_changed(path, switch):
    """Return an index with changes that were not committed, some of them on SSD, and its file layer."""
    index = ZoomIndex(Store.open(path, kind=KIND, writable=True, files=switch))
    index.add(make(150, seed=2), ids=np.arange(1000, 1150))
    index.remove(np.arange(40, 60))
    index.update(np.arange(30, 35), make(5, seed=3))
    index.update(np.arange(200, 300), attributes={"kind": ["changed"] * 100})  # attributes alone
    return index, switch


def fails(change, index):
    try:
        change(index)
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EIO)
    return False


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("fault", [Fault.SHORT_WRITE, Fault.EIO])
def test_a_fault_leaves_the_index_as_it_was(folder, built, small_sizes, switched_files, name, fault):
    shutil.copytree(built, folder / "counted")
    index, switch = open_changed(folder / "counted", switched_files())
    with index:
        faulty = break_files(switch, 0, fault)
        CHANGES[name](index)
        last = len(faulty.calls)  # before the end, which removes the files of unfinished work beside the commits
    assert last > 30
    for fail_at in {*range(1, last, last // 3), last - 1}:
        path = folder / f"failed{fail_at}"
        shutil.copytree(built, path)
        index, switch = open_changed(path, switched_files())
        with index:
            before, where = contents(index), old_of(index)
            faulty = break_files(switch, fail_at, fault)
            if not fails(CHANGES[name], index):  # what the store does after a commit may fail without harm
                assert faulty.calls[fail_at - 1].split()[0] in ("open-r", "lock", "remove", "list"), faulty.calls[
                    fail_at - 1
                ]
                continue
            assert same(contents(index), before)
            np.testing.assert_array_equal(old_of(index), where)
            try:
                index.commit()
                allowed = [before]
            except ClosedError:
                allowed = [before, contents_of(built)] if name in ("commit", "compact") else [contents_of(built)]
            assert same(contents(index), before)
        with ZoomIndex.open(path, writable=True) as index:
            assert index.check() == []
            assert any(same(contents(index), each) for each in allowed)
            if same(contents(index), before):
                np.testing.assert_array_equal(old_of(index), where)
        shutil.rmtree(path)


@pytest.mark.parametrize("name", ["commit", pytest.param("compact", marks=pytest.mark.long)])
def test_a_full_disk_changes_nothing_and_the_call_can_be_repeated(folder, built, small_sizes, switched_files, name):
    shutil.copytree(built, folder / "counted")
    index, switch = open_changed(folder / "counted", switched_files())
    with index:
        before = contents(index)
        faulty = break_files(switch, 0, Fault.SHORT_WRITE)
        CHANGES[name](index)
        # All that takes room, but for the guard of LMDB's commit.
        takes = [
            number
            for number, call in enumerate(faulty.calls, 1)
            if call.startswith(("pwrite", "append", "fdatasync", "open-x", "open-w")) and "catalog" not in call
        ]
    assert len(takes) > 30
    for fail_at in takes[:: len(takes) // 9]:
        path = folder / f"failed{fail_at}"
        shutil.copytree(built, path)
        index, switch = open_changed(path, switched_files())
        with index:
            break_files(switch, fail_at, Fault.SHORT_WRITE)
            with pytest.raises(OSError, match="No space"):
                CHANGES[name](index)
            assert same(contents(index), before)
            CHANGES[name](index)
            assert same(contents(index), before)
        with ZoomIndex.open(path, verify="open") as index:
            assert index.check() == []
            assert same(contents(index), before)
        shutil.rmtree(path)


@pytest.mark.parametrize("fault", [Fault.SHORT_WRITE, Fault.EIO])
def test_a_fault_beside_the_commits_is_told_and_changes_nothing(folder, built, small_sizes, switched_files, fault):
    path = folder / "index"
    shutil.copytree(built, path)
    index, switch = open_changed(path, switched_files())
    with index:
        before = contents(index)
        switch.beside = FaultyFiles(RealFiles(), 2, fault)
        deadline = time.monotonic() + DEADLINE_S
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            while not told:
                assert time.monotonic() < deadline, switch.beside.calls
                index.commit()
        assert "beside its commits: OSError" in str(told[0].message)
        assert same(contents(index), before)
    with ZoomIndex.open(path, verify="open") as index:
        assert index.check() == []
        assert same(contents(index), before)


def test_a_change_that_fails_between_its_parts_can_be_tried_again(tmp_path, small_sizes, monkeypatch):
    path = tmp_path / "index"
    with ZoomIndex.build(path, make(500), dram="4MiB") as index:
        index.add(make(120, seed=1))
        index.remove([3, 501])
        before = contents(index)
        written = life.merge_parts
        calls = []

        def fail(*arguments):
            calls.append(1)
            if len(calls) == 3:
                raise InterruptedError("stopped")
            return written(*arguments)

        monkeypatch.setattr(life, "merge_parts", fail)
        with pytest.raises(InterruptedError):
            index.add(make(1000, seed=2), attributes={"new": list(range(1000))})
        assert index.stats()["parts"] > 1
        assert index.check() == []  # as every part can be read, though they were joined meanwhile
        assert same(contents(index), before)
        with pytest.raises(ValueError, match="no attributes"):
            index.search(make(1)[0], 1, where="new == 1")
        monkeypatch.undo()
        index.commit()
        assert same(contents(index), before)
        names = index.add(make(300, seed=2), attributes={"new": ["text"] * 300})
        assert names[0] == 620
        index.commit()
        after = contents(index)
    with ZoomIndex.open(path) as index:
        assert index.check() == []
        assert same(contents(index), after)


def test_a_commit_that_is_not_read_back_ends_all_changes(tmp_path, monkeypatch):
    path = tmp_path / "index"
    with ZoomIndex.build(path, make(300), dram="4MiB") as index:
        index.add(make(200, seed=1))
        index.commit(compact=False)
        index.add(make(400, seed=2))
        before = contents(index)
        opened = part.PartFiles.open
        names = []

        def fail(self, name, *arguments):
            names.append(name)
            if len(names) == 2:
                raise OSError(errno.EMFILE, "too many open files")
            return opened(self, name, *arguments)

        monkeypatch.setattr(part.PartFiles, "open", fail)
        with pytest.raises(OSError, match="too many"):
            index.commit(compact=False)
        assert same(contents(index), before)
        for change in (lambda: index.add(make(1)), lambda: index.remove([0]), index.commit, index.compact):
            with pytest.raises(ClosedError, match="open the index again"):
                change()
        assert same(contents(index), before)
    with ZoomIndex.open(path, writable=True) as index:
        assert same(contents(index), before)
