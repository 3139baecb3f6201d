"""RowLog where two things happen at once: each test holds one of them at the moment that matters."""

import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from memhier.errors import ClosedError
from memhier.io.reader import Reader
from memhier.log.row_log import RowLog
from memhier.store.store import Store

KIND = "test"
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        yield Path(folder) / "store"


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def random_rows(count: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, width), np.uint8)


class Gate:
    """Where a thread stops until it is let on."""

    def __init__(self) -> None:
        self.there, self.go = threading.Event(), threading.Event()

    def stop(self) -> None:
        self.there.set()
        assert self.go.wait(30)


class WatchedLock:
    """A lock that sets `asked` when a thread has to wait for it."""

    def __init__(self) -> None:
        self.lock, self.asked = threading.Lock(), threading.Event()

    def __enter__(self) -> None:
        if self.lock.locked():
            self.asked.set()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


class SlowReader(Reader):
    """Stops before it reads, once."""

    gate: Gate | None = None

    def read(self, *args: Any, **kwargs: Any) -> Any:
        gate, self.gate = self.gate, None
        if gate is not None:
            gate.stop()
        return super().read(*args, **kwargs)


def test_a_part_is_sealed_only_when_no_thread_reads_its_tail(
    root: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread found its rows in the tail and has yet to copy them; a commit that empties the tail has to wait."""
    rows, gate, lock = random_rows(9, 1000), Gate(), WatchedLock()
    with Store.create(root, KIND) as store, Reader() as reader, RowLog(store, "t", 1000, reader, 9) as log:
        log.append(np.arange(9), rows)
        tail, opened = log.log.tail, log.log.fresh[-1]
        copy, seal = tail.rows, opened.seal

        def copy_late(offsets: Any, length: int) -> NDArray[np.uint8]:
            gate.stop()
            return copy(offsets, length)

        def seal_and_tell() -> None:
            seal()
            lock.asked.set()

        monkeypatch.setattr(tail, "rows", copy_late)
        monkeypatch.setattr(opened, "seal", seal_and_tell)
        monkeypatch.setattr(log.log, "lock", lock)
        reading = threads.submit(log.read, np.arange(9))
        assert gate.there.wait(30)
        committing = threads.submit(log.commit)
        assert lock.asked.wait(30)
        gate.go.set()
        assert np.array_equal(reading.result(30)[0], rows)
        assert committing.result(30) == 1
        assert np.array_equal(log.read(np.arange(9))[0], rows)


def test_a_file_outlives_its_part_until_the_last_read_of_it(root: Path, threads: ThreadPoolExecutor) -> None:
    rows, new, gate = random_rows(9, 1000), random_rows(9, 1000, 1), Gate()
    with Store.create(root, KIND) as store, SlowReader() as reader, RowLog(store, "t", 1000, reader, 9) as log:
        log.append(np.arange(9), rows)
        log.commit()
        reader.gate = gate
        reading = threads.submit(log.read, np.arange(9))
        assert gate.there.wait(30)
        log.append(np.arange(9), new)
        assert log.compact(1) == 1
        log.commit()
        assert not (root / "segments" / "t-0.00000001.seg").exists()
        assert np.array_equal(log.read(np.arange(9))[0], new), "another read ends meanwhile"
        assert reader.stats()["files"] == 2
        gate.go.set()
        assert np.array_equal(reading.result(30)[0], rows), "as it was when the read began"
        assert reader.stats()["files"] == 1


def test_the_error_that_closed_a_log_causes_its_later_errors(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.create(root, KIND) as store, Reader() as reader, RowLog(store, "t", 10, reader, 9) as log:
        log.append([1], random_rows(1, 10))
        broken = OSError(5, "broken")

        def fail() -> None:
            raise broken

        monkeypatch.setattr(log.log.fresh[-1], "seal", fail)
        with pytest.raises(OSError, match="broken"):
            log.commit()
        with pytest.raises(ClosedError, match="a write failed") as refused:
            log.read([1])
        assert refused.value.__cause__ is broken


def test_values_that_cannot_be_committed_change_nothing(root: Path) -> None:
    rows = random_rows(1, 10)
    with Store.create(root, KIND) as store, Reader() as reader, RowLog(store, "t", 10, reader, 9) as log:
        log.append([1], rows)
        for values in ({"large": bytes(2**24 + 1)}, {"k" * 401: b""}, {"log/t": b""}):
            with pytest.raises(ValueError, match=r"value|key="):
                log.commit(values)
        assert np.array_equal(log.read([1])[0], rows)
        assert log.commit({"large": bytes(2**24)}) == 1
