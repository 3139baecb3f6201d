"""Reads that go on between calls: as any other read, by every engine, few or many, one or several at a time."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier import Reader, RowLog, Store, backend
from memhier.errors import ClosedError, CorruptionError

pytestmark = pytest.mark.skipif(backend.core is None, reason="the pure Python reader begins no reads")
LENGTH = 3000


@pytest.fixture(params=["uring", "aio", "threads"])
def reader(request: pytest.FixtureRequest) -> Reader:
    try:
        return Reader(request.param, depth=16)
    except (OSError, RuntimeError) as error:
        pytest.skip(f"{request.param}: {error}")


@pytest.fixture
def rows(tmp_path: Path) -> np.ndarray:
    made = np.random.default_rng(0).integers(0, 256, (300, LENGTH)).astype(np.uint8)
    (tmp_path / "rows").write_bytes(made.tobytes())
    return made


@pytest.mark.parametrize("count", [1, 5, 300])
def test_rows_arrive_while_other_calls_read(reader: Reader, rows: np.ndarray, tmp_path: Path, count: int) -> None:
    with reader:
        handle = reader.add(tmp_path / "rows")
        random = np.random.default_rng(count)
        for _ in range(5):
            begun = []
            for _ in range(3):
                keys, out = random.integers(0, 300, count), np.zeros((count, LENGTH), np.uint8)
                pending = reader.begin_read(np.full(count, handle, np.int32), keys * LENGTH, LENGTH, out)
                assert pending is not None
                begun.append((pending, keys, out))
            read = reader.read(handle, np.arange(50) * LENGTH, LENGTH)
            assert (read == rows[:50]).all()
            for pending, keys, out in reversed(begun):
                while not pending.done():
                    pass
                assert pending.exception() is None
                assert pending.done()
                assert pending.seconds > 0
                assert (out == rows[keys]).all()
        assert reader.stats()["requests"] == 5 * (3 * count + 50)


def test_a_read_that_nobody_waits_for_ends(reader: Reader, rows: np.ndarray, tmp_path: Path) -> None:
    with reader:
        handle = reader.add(tmp_path / "rows")
        for turn in range(20):
            out = np.zeros((4, LENGTH), np.uint8)
            pending = reader.begin_read(np.full(4, handle, np.int32), np.arange(turn, turn + 4) * LENGTH, LENGTH, out)
            if turn % 2:
                del pending
        assert (reader.read(handle, [0], LENGTH) == rows[:1]).all()


def test_a_reader_closes_while_it_reads(reader: Reader, rows: np.ndarray, tmp_path: Path) -> None:
    handle, out = reader.add(tmp_path / "rows"), np.zeros((4, LENGTH), np.uint8)
    pending = reader.begin_read(np.full(4, handle, np.int32), np.arange(4) * LENGTH, LENGTH, out)
    assert pending is not None
    reader.close()
    assert pending.exception() is None
    assert (out == rows[:4]).all()
    with pytest.raises(ClosedError):
        reader.begin_read(np.full(4, handle, np.int32), np.arange(4) * LENGTH, LENGTH, out)


@pytest.mark.timeout(100)
def test_a_reader_closes_while_another_thread_begins_to_read(rows: np.ndarray, tmp_path: Path) -> None:
    for turn in range(60):
        reader = Reader(depth=16)
        handle, begun, wrong, ready = reader.add(tmp_path / "rows"), [], [], threading.Event()

        def work(reader: Reader = reader, handle: int = handle, begun: list[Any] = begun, wrong: list[int] = wrong,
                 ready: threading.Event = ready, turn: int = turn) -> None:  # fmt: skip
            with suppress(ClosedError):
                while True:
                    out = np.zeros((4, LENGTH), np.uint8)
                    pending = reader.begin_read(np.full(4, handle, np.int32), np.arange(4) * LENGTH, LENGTH, out)
                    assert pending is not None
                    begun[:] = [pending]
                    ready.set()
                    pending.done()
                    if pending.exception() is None and (out != rows[:4]).any():
                        wrong.append(turn)

        thread = threading.Thread(target=work)
        thread.start()
        ready.wait()
        time.sleep(turn * 1e-5)
        reader.close()
        thread.join()
        assert not wrong
        for pending in begun:
            pending.exception()
            assert pending.done()


def test_damage_and_short_files_are_told_at_the_end(reader: Reader, rows: np.ndarray, tmp_path: Path) -> None:
    with reader:
        pages = -(-rows.size // 4096)
        handle, out = (
            reader.add(tmp_path / "rows", checksums=np.zeros(pages, np.uint32)),
            np.zeros((4, LENGTH), np.uint8),
        )
        for _ in range(3):
            pending = reader.begin_read(np.full(4, handle, np.int32), np.arange(4) * LENGTH, LENGTH, out)
            assert pending is not None
            assert isinstance(pending.exception(), CorruptionError)
        other = reader.add(tmp_path / "rows")
        (tmp_path / "rows").write_bytes(b"")
        pending = reader.begin_read(np.full(4, other, np.int32), np.arange(4) * LENGTH, LENGTH, out)
        assert pending is not None
        assert isinstance(pending.exception(), CorruptionError)


def test_an_interrupt_harms_no_log_whose_rows_were_not_committed(tmp_path: Path, interrupts: Any) -> None:
    rows = np.arange(3000, dtype=np.int32).repeat(LENGTH // 4).reshape(3000, -1).view(np.uint8)
    keys, out = np.array([5, 2000]), np.zeros((2, LENGTH), np.uint8)
    with Store.create(tmp_path / "s", "test") as store, Reader() as reader:
        log = RowLog(store, "rows", LENGTH, reader, 3000, key_space=3000)
        log.append(np.arange(3000), rows)
        log.read(keys)  # writes them
        for _ in interrupts.every(lambda: log.begin_read(keys, out, flushes=False)):
            pending = log.begin_read(keys, out, flushes=False)
            assert pending is not None
            assert pending.exception() is None
            assert (out == rows[keys]).all()
        log.close()


def test_a_child_closes_a_reader_whose_parent_reads(reader: Reader, rows: np.ndarray, tmp_path: Path) -> None:
    """A checker of addresses finds here whether it asks for a read that is gone."""
    with reader:
        handle = reader.add(tmp_path / "rows")
        for begins in (False, True):
            out = np.zeros((4, LENGTH), np.uint8)
            read = np.full(4, handle, np.int32), np.arange(4) * LENGTH, LENGTH
            pending = reader.begin_read(*read, out)
            assert pending is not None
            child = os.fork()
            if child == 0:
                code = 2
                try:
                    if begins:
                        own = reader.begin_read(*read, out)
                    del pending
                    reader.close()
                    right = not begins or (own is not None and own.exception() is None and (out == rows[:4]).all())
                    code = 0 if right else 1
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
            assert pending.exception() is None
            assert (out == rows[:4]).all()
