"""A full disk under a cache or a pull: reads go on with the room that there is, or say which folder has none."""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memhier.remote.place
from memhier import Reader, Store
from memhier.benchmarks.simulated_store import Bucket, simulated
from memhier.errors import FormatError

URL = "simulated://bucket/store"
EXTENT = 64 * 1024
ENGINES = [None, "python"]
ROWS = 40 * EXTENT + 5000

SetRoom = Callable[[int], None]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setattr(memhier.remote.place, "FIRST_WAIT_S", 0.0)
    with simulated("bucket") as bucket:
        yield bucket


@pytest.fixture
def rows(tmp_path: Path, bucket: Bucket) -> np.ndarray:
    """Push a store with a segment and return the segment's bytes."""
    rows = np.random.default_rng(0).integers(0, 256, ROWS, dtype=np.uint8)
    with Store.create(tmp_path / "store", "test") as store:
        with store.begin() as tx:
            tx.segment("rows").append(rows)
            tx.commit()
        store.push(URL)
    return rows


def used_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*.seg"))


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetRoom:
    """Let segment files below `tmp_path` take no more than some bytes of the disk."""
    free = [2**62]
    plain, lock = os.pwrite, threading.Lock()

    def write_at(fd: int, data: memoryview, offset: int) -> int:
        if not os.readlink(f"/proc/self/fd/{fd}").endswith(".seg"):
            return plain(fd, data, offset)
        with lock:
            space = free[0] - used_bytes(tmp_path)
            if space < 4096:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return plain(fd, data[: space // 4096 * 4096], offset)  # a part of it, as a disk takes that runs full

    monkeypatch.setattr(os, "pwrite", write_at)
    return lambda count: free.__setitem__(0, used_bytes(tmp_path) + count)


def opened(tmp_path: Path, **options: Any) -> Store:
    return Store.open(URL, "test", cache=tmp_path / "cache", **options)


def check_reads(reader: Reader, handle: int, rows: np.ndarray, seed: int, rounds: int, count: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(rounds):
        offsets = random.integers(0, ROWS - 10, count)
        found = reader.read(handle, offsets, 10)
        assert np.array_equal(found, np.stack([rows[at : at + 10] for at in offsets]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("extents", [3, 8])
def test_reads_go_on_with_the_room_there_is(
    tmp_path: Path, bucket: Bucket, rows: np.ndarray, room: SetRoom, engine: str | None, extents: int
) -> None:
    with opened(tmp_path) as store, Reader(engine) as reader:
        room(extents * EXTENT)
        handle = store.attach("rows", reader)
        check_reads(reader, handle, rows, 0, 60, 2)
        assert used_bytes(tmp_path / "cache") <= extents * EXTENT
        assert used_bytes(tmp_path / "cache") > EXTENT
        room(2**40)  # and with more of it, once there is more
        check_reads(reader, handle, rows, 1, 60, 2)
        assert used_bytes(tmp_path / "cache") > 20 * EXTENT


@pytest.mark.parametrize("engine", ENGINES)
def test_a_call_that_does_not_fit_names_the_folder(
    tmp_path: Path, bucket: Bucket, rows: np.ndarray, room: SetRoom, engine: str | None
) -> None:
    offsets = np.arange(0, ROWS - 10, EXTENT)
    with opened(tmp_path) as store, Reader(engine) as reader:
        handle = store.attach("rows", reader)
        for space in (0, 4 * EXTENT):
            room(space)
            with pytest.raises(OSError, match="make room") as caught:
                reader.read(handle, offsets, 10)
            assert caught.value.errno == errno.ENOSPC
            assert str(caught.value.filename).startswith(str(tmp_path / "cache"))
        # Whole segments are read past the cache.
        assert np.array_equal(store.read_segment("rows"), rows)
        assert store.check() == []
        check_reads(reader, handle, rows, 0, 20, 1)
        room(2**40)
        found = reader.read(handle, offsets, 10)
        assert np.array_equal(found, np.stack([rows[at : at + 10] for at in offsets]))
    with opened(tmp_path) as store, Reader(engine) as reader:  # nothing wrong stayed
        assert np.array_equal(store.read_segment("rows"), rows)


def test_threads_on_a_full_disk(tmp_path: Path, bucket: Bucket, rows: np.ndarray, room: SetRoom) -> None:
    failures: list[BaseException] = []
    done: list[int] = []
    with opened(tmp_path) as store, Reader() as reader:
        room(6 * EXTENT)
        handle = store.attach("rows", reader)

        def work(seed: int) -> None:
            for turn in range(30):
                try:
                    check_reads(reader, handle, rows, 100 * seed + turn, 1, 2)
                    done.append(turn)
                except OSError as error:
                    if error.filename is None or not str(error.filename).startswith(str(tmp_path / "cache")):
                        failures.append(error)
                except BaseException as error:
                    failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert done
        check_reads(reader, handle, rows, 999, 10, 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_folder_that_is_removed(tmp_path: Path, bucket: Bucket, rows: np.ndarray, engine: str | None) -> None:
    with opened(tmp_path, cache_bytes=4 * EXTENT) as store, Reader(engine) as reader:
        handle = store.attach("rows", reader)
        check_reads(reader, handle, rows, 0, 20, 2)
        shutil.rmtree(tmp_path / "cache")
        check_reads(reader, handle, rows, 1, 40, 2)
        assert np.array_equal(store.read_segment("rows"), rows)
        with opened(tmp_path) as other, Reader(engine) as beside:  # makes it again
            check_reads(beside, other.attach("rows", beside), rows, 2, 20, 2)
            check_reads(reader, handle, rows, 3, 20, 2)


def test_space_that_a_killed_process_left_comes_back(tmp_path: Path, bucket: Bucket, rows: np.ndarray) -> None:
    with opened(tmp_path) as store, Reader() as reader:
        check_reads(reader, store.attach("rows", reader), rows, 0, 100, 2)
    (marks,) = [path for path in (tmp_path / "cache").rglob("*.map") if path.stat().st_size > 1]
    kept = np.frombuffer(marks.read_bytes(), np.uint8).copy()
    kept[4:] = 0  # extents that were written, but not marked
    marks.write_bytes(kept.tobytes())
    assert used_bytes(tmp_path / "cache") > 20 * EXTENT
    with opened(tmp_path) as store, Reader() as reader:
        assert used_bytes(tmp_path / "cache") <= 5 * EXTENT
        check_reads(reader, store.attach("rows", reader), rows, 0, 100, 2)


def test_no_room_for_the_marks(tmp_path: Path, bucket: Bucket, rows: np.ndarray, monkeypatch: Any) -> None:
    def refuse(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match=r"pass another folder as cache: .*\.map") as caught:
        opened(tmp_path)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("space", [0, 3 * EXTENT])
def test_a_pull_onto_a_full_disk_goes_on(
    tmp_path: Path, bucket: Bucket, rows: np.ndarray, room: SetRoom, space: int
) -> None:
    room(space)
    with pytest.raises(OSError, match=r"No space left.*\.seg") as caught:
        Store.pull(URL, tmp_path / "copy")
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(FormatError, match="unfinished"):
        Store.open(tmp_path / "copy", "test")
    room(2**40)
    Store.pull(URL, tmp_path / "copy")
    with Store.open(tmp_path / "copy", "test") as copy:
        assert np.array_equal(copy.read_segment("rows"), rows)
        assert copy.check() == []


def test_a_pull_that_updates_a_copy_leaves_it_on_a_full_disk(
    tmp_path: Path, bucket: Bucket, rows: np.ndarray, room: SetRoom
) -> None:
    Store.pull(URL, tmp_path / "copy")
    with Store.open(tmp_path / "store", "test", writable=True) as store:
        with store.begin() as tx:
            tx.segment("rows").append(rows[::-1].copy())
            tx.commit()
        store.push(URL)
    room(4096)
    with pytest.raises(OSError, match="No space left"):
        Store.pull(URL, tmp_path / "copy")
    with Store.open(tmp_path / "copy", "test") as copy:
        assert (copy.generation, np.array_equal(copy.read_segment("rows"), rows)) == (1, True)
    room(2**40)
    Store.pull(URL, tmp_path / "copy")
    with Store.open(tmp_path / "copy", "test") as copy:
        assert (copy.generation, np.array_equal(copy.read_segment("rows"), rows[::-1])) == (2, True)
    assert len([*(tmp_path / "copy" / "segments").iterdir()]) == 1
