"""The promises of a RowLog: its bytes on disk, memory, writes and errors, and its rows after kill -9."""

import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from memhier.errors import BudgetError, ClosedError, CorruptionError, FormatError, LockedError
from memhier.files import Fault, FaultyFiles, RealFiles
from memhier.io.reader import Reader
from memhier.log import compaction
from memhier.log import log as log_module
from memhier.log.index import LogIndex
from memhier.log.row_log import RowLog
from memhier.store.store import Store

KIND = "test"
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        yield Path(folder) / "store"


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    with Reader() as reader:
        yield reader


def random_rows(count: int, row_bytes: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, row_bytes), np.uint8)


def decoded(store: Store, name: str) -> dict[int, bytes]:
    """Read a log as FORMAT.md has it, from the oldest entry to the newest, with none of the code that wrote it."""
    value = store.get(f"log/{name}") or b""
    row_bytes, live, _, parts = struct.unpack_from("<QQQQ", value)
    found: dict[int, bytes] = {}
    assert len(value) == 32 + 32 * parts
    for number, entries, deletions, size in struct.iter_unpack("<QQQQ", value[32:]):
        records = store.read_segment(f"{name}-{number}").tobytes()
        packed = store.read_segment(f"{name}-{number}-keys").tobytes()
        pairs = list(struct.iter_unpack("<qI", packed))
        assert len(pairs) == entries
        assert sum(length == 2**32 - 1 for _, length in pairs) == deletions
        end = 0
        per_page = 4096 // row_bytes if row_bytes and 0 < 4096 % row_bytes <= 372 else 0
        for key, length in pairs:
            if length == 2**32 - 1:
                found.pop(key, None)
                continue
            if length >= 65536 or (per_page and end % 4096 + length > 4096):
                end = -(-end // 4096) * 4096
            found[key] = records[end : end + length]
            end += length
            size -= length
            if length >= 65536:
                end = -(-end // 4096) * 4096
        assert size == 0
        assert len(records) == -(-end // 4096) * 4096
    assert len(found) == live
    return found


@pytest.mark.parametrize("row_bytes", [1, 97, 400, 512, 4096, 5000, 65_536, 100_001])
def test_the_bytes_on_disk(root: Path, reader: Reader, row_bytes: int) -> None:
    count = min(20_000, max(5, 700_000 // row_bytes))
    rng = np.random.default_rng(row_bytes)
    with Store.create(root, KIND) as store, RowLog(store, "t", row_bytes, reader, count) as log:
        expected: dict[int, bytes] = {}
        for turn in range(3):
            keys = rng.integers(0, count, count // 2)
            rows = random_rows(len(keys), row_bytes, turn)
            log.append(keys, rows)
            expected.update((key, row.tobytes()) for key, row in zip(keys.tolist(), rows, strict=True))
            gone = rng.integers(0, count, 3)
            log.delete(gone)
            for key in gone.tolist():
                expected.pop(key, None)
            log.commit()
            assert decoded(store, "t") == expected
        log.compact(1)
        log.commit()
        assert decoded(store, "t") == expected
        assert log.stats()["parts"] == 1


def test_a_deleted_row_stays_deleted_when_its_deletion_is_compacted(root: Path, reader: Reader) -> None:
    with Store.create(root, KIND) as store:
        with RowLog(store, "t", 8, reader, 100) as log:
            log.append(np.arange(50), random_rows(50, 8))
            log.commit()
            log.append([60], random_rows(1, 8))
            log.delete([0, 60])
            log.commit()
            assert log.compact(0.9) == 1, "the second part alone"
            log.commit()
            assert not log.contains([0]).any()
            assert store.segments().keys() == {"t-0", "t-0-keys", "t-2", "t-2-keys"}
        with RowLog(store, "t", 8, reader, 49) as log:
            assert log.contains([0, 1, 60]).tolist() == [False, True, False]
            log.delete(np.arange(50))
            log.commit()
            assert log.compact(0.9) == 3, "deletions can go with their rows"
            log.commit()
            assert store.segments() == {}


def test_other_stores_see_commits_and_keep_their_generation(root: Path, reader: Reader) -> None:
    old, new = random_rows(9, 97, 1), random_rows(9, 97, 2)
    keys = np.arange(9)
    with Store.create(root, KIND) as store, RowLog(store, "t", 97, reader, 9) as log:
        log.append(keys, old)
        log.commit({"step": b"1"})
        with Store.open(root, KIND) as other, RowLog(other, "t", 97, reader, 9) as before:
            log.append(keys, new)
            log.compact(1)
            assert np.array_equal(log.read(keys)[0], new), "visible here before the commit"
            log.commit({"step": b"2"})
            assert log.compact(1) == 0, "all is alive"
            log.commit()
            assert np.array_equal(before.read(keys)[0], old)
            with Store.open(root, KIND) as third, RowLog(third, "t", 97, reader, 9) as after:
                assert np.array_equal(after.read(keys)[0], new)
                assert third.get("step") == b"2"
            for change in (
                lambda: before.append([1], old[:1]),
                lambda: before.delete([1]),
                before.commit,
                before.compact,
            ):
                with pytest.raises(OSError, match="writable=True"):
                    change()
            assert np.array_equal(before.read(keys)[0], old)


def test_one_submission_and_one_page_for_a_packed_row(root: Path, reader: Reader) -> None:
    with Store.create(root, KIND) as store, RowLog(store, "t", 400, reader, 1000) as log:
        log.append(np.arange(500), random_rows(500, 400))
        log.commit()
        log.append(np.arange(500, 1000), random_rows(500, 400, 1))
        log.commit()
        for key in (0, 9, 10, 499, 500, 999):
            before = reader.stats()
            log.read([key, -5])
            after = reader.stats()
            assert (after["pages"] - before["pages"], after["calls"] - before["calls"]) == (1, 1)
        before = reader.stats()
        log.read([3, 777, 1001, 3])
        assert reader.stats()["calls"] - before["calls"] == 1, "two parts, one submission"
        before = reader.stats()
        log.read([-7, -8])
        assert reader.stats()["calls"] == before["calls"]


@pytest.mark.parametrize("row_bytes", [97, 3000, 5000, 65_536, 100_001])
def test_rows_are_readable_while_their_part_grows(root: Path, reader: Reader, row_bytes: int) -> None:
    """Before the commit they lie in the file, in the tail, or across: beginning in one and ending in the other."""
    count = 3 * 2**20 // row_bytes
    table = random_rows(count, row_bytes)
    rng = np.random.default_rng(0)
    with Store.create(root, KIND) as store, RowLog(store, "t", row_bytes, reader, count) as log:
        done = 0
        while done < count:
            step = min(int(rng.integers(1, 1 + count // 5)), count - done)
            log.append(np.arange(done, done + step), table[done : done + step])
            done += step
            rows, found = log.read(np.arange(done + 1))
            assert found[:-1].all()
            assert np.array_equal(rows[:-1], table[:done])
        log.commit()
        assert np.array_equal(log.read(np.arange(count))[0], table)
        assert reader.stats()["files"] == 1
    assert reader.stats()["files"] == 0


def test_memory_is_counted_and_bounded(root: Path, reader: Reader) -> None:
    capacity, rows = 10_000, random_rows(1000, 1000)
    with Store.create(root, KIND) as store, RowLog(store, "t", 1000, reader, capacity) as log:
        idle = log.memory_bytes
        for turn in range(20):
            log.append(np.arange(1000) + 400 * turn, rows)
            index = LogIndex.bytes_for(1000 + 400 * turn) * 5 / 4
            assert log.memory_bytes < idle + index + 2 * 2**20 + 2**17, "buffers of two segments, and checksums"
        log.commit()
        grown = log.memory_bytes - idle
        assert 36 * (8600 - 1024) < grown < 45 * (8600 - 1024) * 5 / 4
        log.append(np.arange(1000), rows)
        log.commit()
        assert log.memory_bytes - idle == grown


def test_parts_stay_few_and_writes_bounded(root: Path, reader: Reader) -> None:
    """Each part is rewritten once per factor of 8 in size: three times at most for 300 equal commits."""
    with Store.create(root, KIND) as store, RowLog(store, "t", 1000, reader, 3000) as log:
        for turn in range(300):
            log.append(np.arange(10) + 10 * turn, random_rows(10, 1000, turn))
            log.commit()
            assert log.stats()["parts"] <= 7 * (1 + int(np.log2(1 + turn)) // 3)
            assert len(os.listdir(root / "segments")) == 2 * log.stats()["parts"]
            assert reader.stats()["files"] == log.stats()["parts"]
        stats = log.stats()
        assert stats["write_amplification"] < 4.1 * (1000 + 12) / 1000
        assert stats["appended_bytes"] == stats["live_bytes"] == 3_000_000
        assert stats["log_bytes"] < 3_150_000


def test_space_comes_back(root: Path, reader: Reader) -> None:
    rng = np.random.default_rng(0)
    with Store.create(root, KIND) as store, RowLog(store, "t", 512, reader, 2000) as log:
        for turn in range(60):
            keys = rng.integers(0, 2000, 500)
            log.append(keys, random_rows(500, 512, turn))
            log.compact(0.5)
            log.commit()
            stats = log.stats()
            assert stats["log_bytes"] <= 2.1 * stats["live_bytes"] + 500 * 524 + 8 * 8192
        assert stats["write_amplification"] < 6


def test_a_full_log_refuses_and_keeps_its_rows(root: Path, reader: Reader) -> None:
    with Store.create(root, KIND) as store, RowLog(store, "t", 4, reader, 3) as log:
        with pytest.raises(BudgetError, match="capacity=3"):
            log.append([1, 2, 3, 4], random_rows(4, 4))
        with store.begin():
            pass  # no transaction was left open
        log.append([1, 2, 2, 3], random_rows(4, 4))
        with pytest.raises(BudgetError, match="capacity=3"):
            log.append([1, 4], random_rows(2, 4, 1))
        assert np.array_equal(log.read([1, 2, 3])[0], random_rows(4, 4)[[0, 2, 3]])
        log.delete([1])
        log.append([4], random_rows(1, 4))
        log.commit()
        log.close()
        with pytest.raises(BudgetError, match="capacity=2: log 't' holds 3 keys"):
            RowLog(store, "t", 4, reader, 2)


def test_arguments_that_are_refused(root: Path, reader: Reader) -> None:
    good = random_rows(2, 4)
    with Store.create(root, KIND) as store, RowLog(store, "t", 4, reader, 9) as log:
        log.append([1, 2], good)
        for keys, rows, error, message in (
            ([1], good, ValueError, r"rows: expected shape \[1, 4\], got \[2, 4\]"),
            ([1, 2], good[:, :3], ValueError, "rows: expected shape"),
            ([1, 2], good.view(np.int8), TypeError, "rows: expected an array of uint8, got int8"),
            ([1, 2], [[1, 2, 3, 4]] * 2, TypeError, "got list"),
            ([[1, 2]], good, ValueError, r"keys: expected shape \[n\]"),
            ([0.5, 1], good, TypeError, "keys: expected integers"),
            (np.array([2**63, 1], np.uint64), good, ValueError, "keys"),
        ):
            with pytest.raises(error, match=message):
                log.append(keys, rows)  # type: ignore[arg-type]
        for out in (np.empty((1, 4), np.uint8), np.empty((2, 8), np.uint8)[:, ::2]):
            with pytest.raises(ValueError, match="out: expected a writable"):
                log.read([1, 2], out)
        for values, error in (({"": b""}, ValueError), ({"a": "b"}, TypeError), ({"log/t": b""}, ValueError)):
            with pytest.raises(error):
                log.commit(values)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="live_below=2"):
            log.compact(2)
        with pytest.raises(LockedError, match="another transaction"):
            RowLog(store, "other", 4, reader, 9).append([1], good[:1])
        assert np.array_equal(log.read([1, 2])[0], good)
        for name, row_bytes in (("a.b", 4), ("", 4), ("a" * 71, 4), ("a", 0), ("a", 2**30 + 1), (3, 4), ("a", 4.0)):
            with pytest.raises((ValueError, TypeError), match=r"name=|row_bytes="):
                RowLog(store, name, row_bytes, reader, 9)  # type: ignore[arg-type]
        log.commit()
        with pytest.raises(FormatError, match="of 4 bytes, expected of 5 bytes"):
            RowLog(store, "t", 5, reader, 9)
    with Store.open(root, KIND) as store, pytest.raises(FormatError, match="no RowLog named 'missing'"):
        RowLog(store, "missing", 4, reader, 9)


def test_rows_and_keys_of_any_layout(root: Path, reader: Reader) -> None:
    base = random_rows(200, 200)
    with Store.create(root, KIND) as store, RowLog(store, "t", 97, reader, 300) as log:
        log.append(np.arange(200, dtype=np.uint16)[::2], base[::2, 3:197:2])
        log.append([], base[:0, :97])
        out = np.empty((100, 97), np.uint8)
        assert log.read(np.arange(0, 200, 2), out)[0] is out
        assert np.array_equal(out, base[::2, 3:197:2])
        assert log.read([])[0].shape == (0, 97)
        assert log.contains([[0, 1], [2, 3]]).tolist() == [[True, False], [True, False]]


def test_damage_is_named(root: Path, reader: Reader) -> None:
    with Store.create(root, KIND) as store, RowLog(store, "t", 4096, reader, 9) as log:
        log.append(np.arange(9), random_rows(9, 4096))
        log.commit()
        paths = [store.segments()[name].path for name in ("t-0", "t-0-keys")]
    for path, byte in ((paths[0], 5 * 4096 + 7), (paths[1], 20)):
        contents = path.read_bytes()
        path.write_bytes(contents[:byte] + bytes([contents[byte] ^ 1]) + contents[byte + 1 :])
        with Store.open(root, KIND) as store:
            if path == paths[0]:
                with RowLog(store, "t", 4096, reader, 9) as log:
                    assert log.read([0, 4])[1].all()
                    with pytest.raises(CorruptionError, match=r"t-0\.00000001\.seg"):
                        log.read([5])
            else:
                with pytest.raises(CorruptionError, match="keys"):
                    RowLog(store, "t", 4096, reader, 9)
        path.write_bytes(contents)


def test_a_damaged_row_keeps_no_one_from_committing(
    root: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "MERGE_PARTS", 2)
    with Store.create(root, KIND) as store, RowLog(store, "t", 4096, reader, 9) as log:
        log.append([0], random_rows(1, 4096))
        log.commit()
        path = store.segments()["t-0"].path
        path.write_bytes(b"!" + path.read_bytes()[1:])
        for key in range(1, 5):
            log.append([key], random_rows(1, 4096, key))
            log.commit()
        assert np.array_equal(log.read([4])[0], random_rows(1, 4096, 4))
        with pytest.raises(CorruptionError):
            log.read([0])
        log.append([0], random_rows(1, 4096))
        assert np.array_equal(log.read([0])[0], random_rows(1, 4096))
        log.commit()
        assert np.array_equal(log.read([0])[0], random_rows(1, 4096))


def test_after_a_failed_write_the_log_is_closed_and_the_store_is_not(root: Path, reader: Reader) -> None:
    rows = random_rows(1000, 4096)
    with Store.create(root, KIND) as store, RowLog(store, "t", 4096, reader, 1000) as log:
        log.append([1], rows[:1])
        log.commit()
    counting = FaultyFiles(RealFiles())
    Store.open(root, KIND, writable=True, files=counting).close()
    # Two segments are begun; the third call appends the first pages.
    files = FaultyFiles(RealFiles(), len(counting.calls) + 3, Fault.ENOSPC)
    with Store.open(root, KIND, writable=True, files=files) as store:
        log = RowLog(store, "t", 4096, reader, 1000)
        with pytest.raises(OSError, match="No space"):
            log.append(np.arange(1000), rows)
        assert "pwrite segments/t-1.00000002.seg" in files.calls[-3:]
        for call in (log.commit, lambda: log.read([1]), lambda: len(log), log.stats):
            with pytest.raises(ClosedError, match="a write failed"):
                call()
        log.close()
        with RowLog(store, "t", 4096, reader, 1000) as again:
            assert len(again) == 1
            again.append(np.arange(1000), rows)
            again.commit()
    with Store.open(root, KIND, verify="open") as store, RowLog(store, "t", 4096, reader, 1000) as log:
        assert np.array_equal(log.read(np.arange(1000))[0], rows)
        assert store.check() == []


def test_reads_beside_changes(root: Path, reader: Reader) -> None:
    """Every row carries its key and version: readers see whole rows, and versions that never go back."""
    keys = np.arange(64)

    def rows(version: int) -> NDArray[np.uint8]:
        return np.repeat((keys * 1000 + version)[:, None], 125, 1).view(np.uint8)

    failures: list[BaseException] = []
    over = threading.Event()

    def read(log: RowLog) -> None:
        newest = np.zeros(len(keys), np.int64)
        try:
            while not over.is_set():
                found = log.read(keys)[0].view(np.int64)
                assert (found == found[:, :1]).all()
                version = found[:, 0] - keys * 1000
                assert (version >= newest).all()
                newest = version
        except BaseException as error:
            failures.append(error)

    with Store.create(root, KIND) as store, RowLog(store, "t", 1000, reader, 64) as log:
        log.append(keys, rows(0))
        threads = [threading.Thread(target=read, args=(log,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for version in range(1, 150):
            log.append(keys, rows(version))
            if version % 7 == 0:
                log.compact(1)
            if version % 5 == 0:
                log.commit()
        over.set()
        for thread in threads:
            thread.join()
        assert failures == []
        log.commit()
        assert reader.stats()["files"] == log.stats()["parts"], "files of dropped parts are closed"


def test_no_key_is_missed_in_the_count_while_a_thread_moves_its_row(
    root: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    bincount = np.bincount

    def slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.002)  # the index counts a record out, then in
        return bincount(*arguments, **options)

    monkeypatch.setattr(np, "bincount", slowly)
    monkeypatch.setattr(log_module, "PART_BYTES", 4096)
    keys, rows = np.arange(100), np.zeros((100, 40), np.uint8)
    with Store.create(root, KIND) as store, RowLog(store, "t", 40, reader, 100, compact_below=0.9) as log:
        for _ in range(10):
            log.append(keys, rows)
            log.commit()
            log.append(keys[::2], rows[::2])
            for _ in range(50):
                assert len(log) == 100
                time.sleep(0.0005)


def test_a_read_that_was_begun_is_as_any_other(tmp_path: Path) -> None:
    rows = np.arange(200 * 3000, dtype=np.uint32).astype(np.uint8).reshape(200, 3000)
    with (
        Store.create(tmp_path / "s", KIND) as store,
        Reader() as reader,
        RowLog(store, "rows", 3000, reader, 1000) as log,
    ):
        log.append(np.arange(200), rows)
        log.commit()
        keys, out = np.array([150, 3, 199, 3]), np.zeros((4, 3000), np.uint8)
        pending = log.begin_read(keys, out)
        if reader.compiled is None:
            assert pending is None
            return
        assert pending is not None
        assert pending.exception() is None
        assert pending.done()
        assert (out == rows[keys]).all()
        assert log.begin_read(np.array([3, 777]), out[:2]) is None  # there is no such row
        log.append(np.array([5]), rows[:1])
        assert log.begin_read(np.array([3, 5]), out[:2]) is None  # it is in the tail
        file = max(tmp_path.glob("s/segments/*"), key=lambda path: path.stat().st_size)
        with file.open("r+b") as damaged:
            damaged.seek(150 * 3000)
            damaged.write(b"\xff\x00" * 1500)
        pending = log.begin_read(np.array([150]), out[:1])
        assert pending is not None
        assert isinstance(pending.exception(), CorruptionError)
        del pending
