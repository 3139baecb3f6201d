"""Logs that share a transaction, and logs that grow."""

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier.errors import ClosedError
from memhier.files import Fault, FaultyFiles, RealFiles
from memhier.io.reader import Reader
from memhier.log.index import LogIndex
from memhier.log.row_log import RowLog
from memhier.log.samples import Samples
from memhier.store.store import Store


def rows(*values: int) -> np.ndarray:
    return np.array(values, "<i8").reshape(-1, 1).view(np.uint8)


def test_one_commit_makes_both_durable(tmp_path: Path) -> None:
    with Store.create(tmp_path / "s", "test") as store, Reader() as reader:
        first = RowLog(store, "first", 8, reader, 10)
        second = Samples(store, "second", reader, 10, beside=first)
        second.put([4], [b"four"])
        first.append([3], rows(30))
        assert first.commit() == 1
        second.delete([4])
        second.put([5], [b"five"])
        assert first.commit() == 2
        first.append([9], rows(90))
        second.put([9], [b"nine"])
        first.close()
        second.close()
    with Store.open(tmp_path / "s", "test") as store, Reader() as reader:
        with RowLog(store, "first", 8, reader, 10) as first, Samples(store, "second", reader, 10) as second:
            assert first.read([3, 9])[1].tolist() == [True, False]
            assert [None if text is None else bytes(text) for text in second.get([4, 5, 9])] == [None, b"five", None]
        assert store.check() == []


def test_a_log_beside_another_does_not_commit_by_itself(tmp_path: Path) -> None:
    with (
        Store.create(tmp_path / "s", "test") as store,
        Reader() as reader,
        RowLog(store, "first", 8, reader, 10) as first,
        RowLog(store, "second", 8, reader, 10, beside=first) as log,
    ):
        with pytest.raises(ValueError, match="commit that one"):
            log.commit()
        with pytest.raises(ValueError, match="commits by itself"):
            RowLog(store, "third", 8, reader, 10, beside=log)


def test_a_log_reads_on_after_another_of_its_group_was_closed(tmp_path: Path) -> None:
    with Store.create(tmp_path / "s", "test") as store, Reader() as reader:
        first = RowLog(store, "first", 8, reader, 10)
        second = RowLog(store, "second", 8, reader, 10, beside=first)
        third = Samples(store, "third", reader, 10, beside=first)
        second.append([1], rows(10))
        third.put([2], [b"two"])
        first.close()
        found, there = second.read([1, 2])
        assert (found[:1] == rows(10)).all()
        assert there.tolist() == [True, False]
        assert [None if one is None else bytes(one) for one in third.get([1, 2])] == [None, b"two"]
        with pytest.raises(ClosedError):
            second.append([3], rows(30))
        second.close()
        assert bytes(third.get([2])[0] or b"") == b"two"
        third.close()
        assert store.segments() == {}


def test_a_leader_commits_nothing_once_a_log_beside_it_was_closed(tmp_path: Path) -> None:
    with Store.create(tmp_path / "s", "test") as store, Reader() as reader:
        first = RowLog(store, "first", 8, reader, 10)
        second = RowLog(store, "second", 8, reader, 10, beside=first)
        second.close()
        first.append([1], rows(10))
        assert first.read([1])[1].all()
        with pytest.raises(ClosedError, match="second"):
            first.commit()
        first.close()
        assert store.segments() == {}


def test_the_buffers_of_a_shared_transaction_count_once(tmp_path: Path) -> None:
    with (
        Store.create(tmp_path / "s", "test") as store,
        Reader() as reader,
        RowLog(store, "first", 8, reader, 10) as first,
        RowLog(store, "second", 8, reader, 10, beside=first) as log,
    ):
        held = first.memory_bytes, log.memory_bytes
        log.append([1], rows(1))
        assert log.memory_bytes == held[1]
        assert first.memory_bytes > held[0]


@pytest.mark.parametrize("fails", ["first", "second"])
def test_a_failed_write_of_one_closes_both(tmp_path: Path, fails: str) -> None:
    files = FaultyFiles(RealFiles())
    with Store.create(tmp_path / "s", "test", files=files) as store, Reader() as reader:
        first = RowLog(store, "first", 8, reader, 10**6)
        second = RowLog(store, "second", 8, reader, 10**6, beside=first)
        for log in (first, second):
            log.append([1], rows(1))
        first.commit()
        for log in (first, second):
            log.append([2], rows(2))
        files.fail_at, files.fault = len(files.calls) + 1, Fault.ENOSPC
        many = np.arange(10**6)
        with pytest.raises(OSError, match="No space"):
            (first if fails == "first" else second).append(many, np.zeros((10**6, 8), np.uint8))
        for log in (first, second):
            with pytest.raises(ClosedError, match="No space"):
                log.read([1])
            log.close()
    with Store.open(tmp_path / "s", "test") as store, Reader() as reader:
        for name in ("first", "second"):
            with RowLog(store, name, 8, reader, 10) as log:
                assert log.read([1, 2])[1].tolist() == [True, False]


def test_closing_one_forgets_the_changes_of_both(tmp_path: Path) -> None:
    with Store.create(tmp_path / "s", "test") as store, Reader() as reader:
        first = RowLog(store, "first", 8, reader, 10)
        second = RowLog(store, "second", 8, reader, 10, beside=first)
        first.append([1], rows(1))
        first.commit()
        second.append([1], rows(1))
        second.close()
        with pytest.raises(ClosedError):
            first.commit()
        first.close()
    with (
        Store.open(tmp_path / "s", "test") as store,
        Reader() as reader,
        RowLog(store, "first", 8, reader, 10) as first,
        RowLog(store, "second", 8, reader, 10) as second,
    ):
        assert (len(first), len(second)) == (1, 0)


@pytest.mark.parametrize("kind", [RowLog, Samples])
def test_a_log_that_grows_takes_any_key(tmp_path: Path, kind: type[RowLog] | type[Samples]) -> None:
    def make(store: Store, reader: Reader, keys: int) -> RowLog | Samples:
        if kind is RowLog:
            return RowLog(store, "log", 8, reader, keys, key_space=keys, grows=True)
        return Samples(store, "log", reader, keys, key_space=keys, grows=True)

    def read(log: RowLog | Samples, keys: range) -> list[int | None]:
        if isinstance(log, RowLog):
            there, found = log.read(keys)
            return [int(row) if some else None for row, some in zip(there.view("<i8").ravel(), found, strict=True)]
        return [None if record is None else int.from_bytes(record, "little") for record in log.get(keys)]

    with Store.create(tmp_path / "s", "test") as store, Reader() as reader, make(store, reader, 3) as log:
        before = log.memory_bytes
        for start in range(0, 97, 5):
            some = rows(*range(start, start + 5))
            log.append(range(start, start + 5), some) if isinstance(log, RowLog) else log.put(
                range(start, start + 5), list(some)
            )
        assert log.capacity == 3 * 2**6
        assert log.memory_bytes > before
        assert len(log) == 100
        assert not log.contains([100, 10**9, -1]).any()
        log.delete([7, 1000])
        log.commit()
        assert read(log, range(102)) == [None if key in (7, 100, 101) else key for key in range(102)]
    # Its memory at open may differ from before: entries name the keys.
    with Store.open(tmp_path / "s", "test") as store, Reader() as reader, make(store, reader, 99) as log:
        assert log.capacity == 198
        assert read(log, range(102)) == [None if key in (7, 100, 101) else key for key in range(102)]
    with (
        Store.open(tmp_path / "s", "test", writable=True) as store,
        Reader() as reader,
        RowLog(store, "fixed", 8, reader, 3, key_space=3) as fixed,
        pytest.raises(ValueError, match="key_space"),
    ):
        fixed.append([3], rows(3))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 40), max_size=12)), max_size=12),
    st.sampled_from([None, 8]),
)
def test_a_growing_index_equals_a_dict(changes: list[tuple[bool, list[int]]], length: int | None) -> None:
    index, expected, place = LogIndex(1, length, 1, grows=True), dict[int, int](), 0
    for add, keys in changes:
        wanted = np.array(keys, np.int64)
        if add:
            places = np.arange(place, place + len(keys))
            index.point(index.reserve(wanted), places, np.full(len(keys), 8))
            expected.update(zip(keys, places.tolist(), strict=True))
            place += len(keys)
        else:
            index.erase(np.unique(wanted))
            for key in keys:
                expected.pop(key, None)
        everything = np.arange(42)
        assert index.places(everything).tolist() == [expected.get(key, -1) for key in everything.tolist()]
        assert len(index) == len(expected) <= index.capacity
        records, sizes = index.live(1)
        assert (records[0], sizes[0]) == (len(expected), 8 * len(expected))


def test_threads_that_compact_take_turns_with_changes_of_either_log(tmp_path: Path) -> None:
    """They write in one transaction, which is for one thread at a time."""
    with Store.create(tmp_path / "s", "test") as store, Reader() as reader:
        first = RowLog(store, "first", 2048, reader, 500, compact_below=0.9)
        second = RowLog(store, "second", 2048, reader, 500, compact_below=0.9, beside=first)
        random = np.random.default_rng(0)
        expected = {log: np.zeros((500, 2048), np.uint8) for log in (first, second)}
        for _ in range(12):
            for _ in range(6):
                for log, contents in expected.items():
                    keys = random.choice(500, 200, replace=False)
                    contents[keys] = random.integers(0, 256, (200, 2048), np.uint8)
                    log.append(keys, contents[keys])
            first.commit()
        for log, contents in expected.items():
            found, there = log.read(np.arange(500))
            assert np.array_equal(found[there], contents[there])
            assert there.all()
        first.close()
        second.close()
        assert store.check() == []


def test_logs_of_one_transaction_have_one_lock(tmp_path: Path) -> None:
    with (
        Store.create(tmp_path / "s", "test") as store,
        Reader() as reader,
        RowLog(store, "first", 8, reader, 10) as first,
        RowLog(store, "second", 8, reader, 10, beside=first) as second,
        RowLog(store, "third", 8, reader, 10) as third,
    ):
        assert second.log.group.lock is first.log.group.lock
        assert third.log.group.lock is not first.log.group.lock


def test_the_memory_of_closed_logs_is_free_at_once(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    gc.disable()  # beside torch's many objects Python hardly ever looks for cycles
    request.addfinalizer(gc.enable)
    with Store.create(tmp_path / "s", "test") as store, Reader() as reader:
        first = RowLog(store, "first", 8, reader, 10, compact_below=0.5)
        second = RowLog(store, "second", 8, reader, 10, beside=first)
        for log in (first, second):
            log.append([1], rows(1))
        first.commit()
        indexes = [weakref.ref(log.log.index) for log in (first, second)]
        for log in (first, second):
            log.close()
        del log, first, second
        assert [index() for index in indexes] == [None, None]
