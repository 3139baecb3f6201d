"""Compaction in the background: the same rows, whatever the thread manages; bounded space; no fault loses a commit."""

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from memhier.errors import BudgetError, ClosedError, LockedError
from memhier.files import Fault, FaultyFiles, Files, RealFiles, SimulatedCrash
from memhier.io.reader import Reader
from memhier.log import compaction
from memhier.log.index import LogIndex, place
from memhier.log.row_log import RowFormat, RowLog
from memhier.log.samples import Samples
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


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave everything to the commits, so that every run is the same."""
    monkeypatch.setattr(compaction.Compactor, "run", lambda compactor: None)


def random_rows(count: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, width), np.uint8)


def settle(log: RowLog) -> None:
    """Wait until the thread has nothing more to do."""
    if log.compactor.job is not None:
        log.compactor.job.result(60)


@settings(max_examples=60, deadline=None)
@given(
    length=st.sampled_from([None, 8]),
    steps=st.lists(
        st.tuples(
            st.booleans(), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=8), st.integers(0, 20)
        ),
        max_size=20,
    ),
)
def test_live_records_are_counted(length: int | None, steps: list[tuple[bool, list[tuple[int, int]], int]]) -> None:
    """The counts kept by part equal those of a pass over all records, empty ones at one place included."""
    index = LogIndex(10, length)
    ends: dict[int, int] = {}
    newest: dict[int, tuple[int, int]] = {}
    for is_put, pairs, part in steps:
        keys = np.array([key for key, _ in pairs], np.int64)
        if not is_put:
            index.erase(keys)
            for key, _ in pairs:
                newest.pop(key, None)
            continue
        lengths = np.array([length or size for _, size in pairs], np.int64)
        offsets = ends.get(part, 0) + np.cumsum(lengths) - lengths
        ends[part] = ends.get(part, 0) + int(lengths.sum())
        index.point(index.reserve(keys), place(part, offsets), lengths)
        newest.update((key, (part, size)) for (key, _), size in zip(pairs, lengths.tolist(), strict=True))
    records, sizes = index.live(25)
    for part in range(25):
        inside = [size for its, size in newest.values() if its == part]
        assert (records[part], sizes[part]) == (len(inside), sum(inside))


def test_a_thread_moves_while_a_transaction_is_open(root: Path, reader: Reader) -> None:
    rows = random_rows(2000, 4096)
    with (
        Store.create(root, KIND) as store,
        RowLog(store, "t", 4096, reader, 2000, compact_below=0.5) as log,
    ):
        log.append(np.arange(2000), rows)
        log.commit()
        with store.begin():
            pass  # a log without changes leaves the store to others
        log.append(np.arange(1200), rows[:1200])
        settle(log)
        assert log.stats()["parts"] == 1, "all that was alive is in the new part"
        assert np.array_equal(log.read(np.arange(2000))[0], rows)
        with pytest.raises(LockedError):
            store.begin()
        log.commit()
        assert store.segments().keys() == {"t-1", "t-1-keys"}
        assert log.compactor.debt == 0
    with Store.open(root, KIND, verify="open") as store, RowLog(store, "t", 4096, reader, 2000) as log:
        assert np.array_equal(log.read(np.arange(2000))[0], rows)
        assert store.check() == []


def test_a_part_is_rewritten_over_many_transactions(
    root: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch, no_thread: None
) -> None:
    """Each commit moves the bytes that are due and no more; changes of rows that are still to be moved count."""
    monkeypatch.setattr(compaction, "MOVE_BYTES", 2000)
    model = {key: row.tobytes() for key, row in enumerate(random_rows(1000, 100))}
    with (
        Store.create(root, KIND) as store,
        RowLog(store, "t", 100, reader, 1000, compact_below=0.8) as log,
    ):
        log.append(np.arange(1000), random_rows(1000, 100))
        log.commit()
        rng, moved = np.random.default_rng(0), 0
        while "t-0" in store.segments():
            before = log.stats()["written_bytes"]
            keys = rng.integers(0, 1000, 25)
            log.append(keys, random_rows(25, 100, int(keys[0])))
            model.update(zip(keys.tolist(), map(bytes, random_rows(25, 100, int(keys[0]))), strict=True))
            gone = rng.integers(0, 1000, 3)
            log.delete(gone)
            for key in gone.tolist():
                model.pop(key, None)
            log.commit()
            extra = log.stats()["written_bytes"] - before - 25 * 112
            moved += extra > 3 * 12 + 4096
            assert extra < 4 * 28 * 112 + 2000 + 2 * 4096 + 4 * 7 * 8000, "and merges of the small parts"
            with Store.open(root, KIND) as other, RowLog(other, "t", 100, reader, 1000) as copy:
                found = {key: bytes(row) for key, row in zip(range(1000), copy.read(range(1000))[0], strict=True)}
                assert {key: found[key] for key in model} == model
                assert len(copy) == len(model)
        assert moved > 5, "in several transactions"


def test_space_stays_bounded_without_help_from_the_thread(root: Path, reader: Reader, no_thread: None) -> None:
    rng = np.random.default_rng(0)
    with (
        Store.create(root, KIND) as store,
        RowLog(store, "t", 512, reader, 2000, compact_below=0.5) as log,
    ):
        for turn in range(80):
            keys = rng.integers(0, 2000, 300)
            log.append(keys, random_rows(300, 512, turn))
            log.commit()
            stats = log.stats()
            assert stats["log_bytes"] <= 2.3 * stats["live_bytes"] + 300 * 524 + 8 * 8192
        assert stats["write_amplification"] < 6
        assert len(os.listdir(root / "segments")) == 2 * stats["parts"]


def test_moves_stop_where_a_change_comes_between(root: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are changed and deleted after the thread has read them and before it appends them."""
    rows, new = random_rows(100, 4096), random_rows(100, 4096, 1)
    there, go = threading.Event(), threading.Event()
    with (
        Store.create(root, KIND) as store,
        RowLog(store, "t", 4096, reader, 100, compact_below=0.9) as log,
    ):
        log.append(np.arange(100), rows)
        log.commit()
        fetch = RowFormat.fetch

        def fetch_and_wait(*arguments: Any) -> Any:
            records = fetch(*arguments)
            there.set()
            assert go.wait(30)
            return records

        monkeypatch.setattr(RowFormat, "fetch", fetch_and_wait)
        log.append(np.arange(20), new[:20])
        assert there.wait(30)
        log.append(np.arange(20, 40), new[20:40])
        log.delete(np.arange(40, 60))
        go.set()
        log.commit()
        assert log.read(np.arange(40, 60))[1].sum() == 0
        expected = np.concatenate([new[:40], rows[60:]])
        assert np.array_equal(log.read([*range(40), *range(60, 100)])[0], expected)
    with Store.open(root, KIND) as store, RowLog(store, "t", 4096, reader, 100) as log:
        assert np.array_equal(log.read([*range(40), *range(60, 100)])[0], expected)
        assert len(log) == 80


def test_rows_read_as_their_transaction_ended_are_moved_in_the_next(
    root: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(100, 4096)
    there, go = threading.Event(), threading.Event()
    with (
        Store.create(root, KIND) as store,
        RowLog(store, "t", 4096, reader, 100, compact_below=0.9) as log,
    ):
        log.append(np.arange(100), rows)
        log.commit()
        fetch = RowFormat.fetch

        def fetch_and_wait(*arguments: Any) -> Any:
            records = fetch(*arguments)
            there.set()
            assert go.wait(30)
            return records

        monkeypatch.setattr(RowFormat, "fetch", fetch_and_wait)
        log.append(np.arange(20), rows[20:40])
        assert there.wait(30)
        with monkeypatch.context() as patch:
            patch.setattr(log.compactor, "pay", lambda: None)  # or the commit would wait for the thread
            log.commit()
        go.set()
        settle(log)
        assert log.memory_bytes > 80 * 4096, "a step waits"
        log.append([0], rows[20:21])
        settle(log)
        log.commit()
        assert "t-0" not in store.segments()
        assert np.array_equal(log.read(np.arange(100))[0], np.concatenate([rows[20:40], rows[20:]]))


@pytest.mark.parametrize("when", ["between steps", "before a read"])
def test_a_part_that_goes_meanwhile(root: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """The part that the thread works at is rewritten by a call of the user's, and its place in the table reused."""
    monkeypatch.setattr(compaction, "MOVE_BYTES", 10 * 4096)
    rows = random_rows(100, 4096)
    there, go = threading.Event(), threading.Event()
    with (
        Store.create(root, KIND) as store,
        RowLog(store, "t", 4096, reader, 100, compact_below=0.9) as log,
    ):
        log.append(np.arange(100), rows)
        log.commit()
        take = log.compactor.steps

        def late(steps: Any) -> Any:
            if when == "before a read":
                yield next(steps)
            else:
                step = next(steps)
            there.set()
            assert go.wait(30)
            if when == "between steps":
                yield step
            yield from steps

        def take_late(part: Any) -> Any:
            in_thread = threading.current_thread().name.startswith("compact") and not go.is_set()
            return late(take(part)) if in_thread else take(part)

        monkeypatch.setattr(log.compactor, "steps", take_late)
        log.append(np.arange(50), rows[50:])
        assert there.wait(30)
        assert log.compact(0.9) == 1
        with monkeypatch.context() as patch:
            patch.setattr(log.compactor, "pay", lambda: None)  # or the commit would wait for the thread
            log.commit()
        log.append(np.arange(3), rows[:3])
        go.set()
        settle(log)
        log.commit()
        expected = np.concatenate([rows[:3], rows[53:], rows[50:]])
        assert np.array_equal(log.read(np.arange(100))[0], expected)
        assert store.check() == []


def test_deletions_that_count_are_no_reason_to_rewrite_them(root: Path, reader: Reader) -> None:
    with Store.create(root, KIND) as store, RowLog(store, "t", 100, reader, 100) as log:
        log.append(np.arange(100), random_rows(100, 100))
        log.commit()
        log.delete(np.arange(10))
        log.commit()
        assert log.compact(0.8) == 0
        assert log.compact(0.95) == 2


@pytest.mark.parametrize("fault", Fault)
def test_a_fault_at_every_call(root: Path, reader: Reader, fault: Fault, no_thread: None) -> None:
    """Also in a commit that moves rows: the old or the new ones are found, and none is lost or double."""
    old, new = random_rows(60, 1000), random_rows(60, 1000, 1)
    with Store.create(root, KIND) as store, RowLog(store, "t", 1000, reader, 60) as log:
        log.append(np.arange(60), old)
        log.commit()

    def work(path: Path, files: Files) -> None:
        with (
            Store.open(path, KIND, writable=True, files=files) as store,
            RowLog(store, "t", 1000, reader, 60, compact_below=0.5) as log,
        ):
            log.append(np.arange(20), new[:20])
            log.commit()
            log.append(np.arange(20, 45), new[20:45])
            log.commit()
            assert "t-0" not in store.segments()

    counting = FaultyFiles(RealFiles())
    shutil.copytree(root, root.parent / "counted")
    work(root.parent / "counted", counting)
    images = [np.concatenate([new[:count], old[count:]]) for count in (0, 20, 45)]
    seen = set()
    for call in range(1, len(counting.calls) + 1):
        path, done = root.parent / f"copy{call}", False
        shutil.copytree(root, path)
        with suppress(OSError, SimulatedCrash, ClosedError):
            work(path, FaultyFiles(RealFiles(), call, fault))
            done = True
        with Store.open(path, KIND, verify="open") as store, RowLog(store, "t", 1000, reader, 60) as log:
            assert len(log) == 60
            found = log.read(np.arange(60))[0]
        which = [number for number, image in enumerate(images) if np.array_equal(image, found)]
        assert which == [2] if done else len(which) == 1, counting.calls[call - 1]
        seen.update(which)
        shutil.rmtree(path)
    assert seen == {0, 1, 2}


def test_an_error_in_the_thread_closes_the_log(root: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(100, 4096)
    with Store.create(root, KIND) as store:
        log = RowLog(store, "t", 4096, reader, 100, compact_below=0.9)
        log.append(np.arange(100), rows)
        log.commit()
        broken = ZeroDivisionError("broken")

        def fail(*_: Any) -> Any:
            raise broken

        monkeypatch.setattr(log.compactor, "take_locked", fail)
        log.append(np.arange(50), rows[:50])
        settle(log)
        with pytest.raises(ClosedError, match="broken") as refused:
            log.commit()
        assert refused.value.__cause__ is broken
        log.close()
        with RowLog(store, "t", 4096, reader, 100) as again:
            assert np.array_equal(again.read(np.arange(100))[0], rows)


@pytest.mark.parametrize("fault", ["a flipped bit", "no file of entries"])
def test_damage_keeps_no_one_from_going_on(root: Path, reader: Reader, fault: str) -> None:
    rows = random_rows(300, 4096)
    with (
        Store.create(root, KIND) as store,
        RowLog(store, "t", 4096, reader, 300, compact_below=0.9) as log,
    ):
        log.append(np.arange(300), rows)
        log.commit()
        if fault == "a flipped bit":
            path = store.segments()["t-0"].path
            path.write_bytes(b"!" + path.read_bytes()[1:])
        else:
            store.segments()["t-0-keys"].path.unlink()
        for turn in range(1, 5):
            log.append(np.arange(100 + turn, 200), rows[100 + turn : 200])
            settle(log)
            log.commit()
        assert "t-0" in store.segments()
        assert np.array_equal(log.read(np.arange(1, 300))[0], rows[1:])


def test_closing_ends_the_thread_and_lets_go(root: Path) -> None:
    rows = random_rows(2000, 4096)
    with Store.create(root, KIND) as store, Reader() as reader:
        log = RowLog(store, "t", 4096, reader, 2000, compact_below=0.9)
        idle = log.memory_bytes
        log.append(np.arange(2000), rows)
        log.commit()
        log.append(np.arange(1000), rows[:1000])
        assert log.memory_bytes > idle
        log.close()
        assert reader.stats()["files"] == 0
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("compact")]
        with RowLog(store, "t", 4096, reader, 2000) as again:
            assert np.array_equal(again.read(np.arange(2000))[0], rows)


def test_arguments_that_are_refused(root: Path, reader: Reader) -> None:
    with Store.create(root, KIND) as store:
        for share, error in (
            (0.91, ValueError),
            (-0.1, ValueError),
            (True, TypeError),
            ("a", TypeError),
            (float("nan"), ValueError),
        ):
            for open_log in (
                lambda share=share: RowLog(store, "t", 4, reader, 9, compact_below=share),
                lambda share=share: Samples(store, "t", reader, 9, compact_below=share),
            ):
                with pytest.raises(error, match="compact_below="):
                    open_log()
        with RowLog(store, "t", 4, reader, 2, compact_below=0.5) as log:
            with pytest.raises(BudgetError):
                log.append([1, 2, 3], random_rows(3, 4))
            with store.begin():
                pass
