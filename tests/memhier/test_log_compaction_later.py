"""Logs whose commits leave rewriting to be done beside the changes that follow."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from memhier.io.reader import Reader
from memhier.log.compaction import Compactor
from memhier.log.row_log import RowLog
from memhier.store.store import Store

KIND = "test"
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        yield Path(folder) / "store"


@pytest.fixture
def reader() -> Iterator[Reader]:
    with Reader() as reader:
        yield reader


def leave_all_to_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compactor, "run", lambda compactor: None)


def random_rows(count: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, width), np.uint8)


@pytest.mark.parametrize("threaded", [False, True])
def test_commits_leave_rewriting_for_later(
    root: Path, reader: Reader, threaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not threaded:
        leave_all_to_commits(monkeypatch)
    width, keys, truth = 64, 2000, {}
    rng = np.random.default_rng(0)
    for session in range(3):
        with (
            Store.create(root, KIND) if session == 0 else Store.open(root, KIND, writable=True) as store,
            RowLog(store, "r", width, reader, keys, compact_below=0.5) as log,
        ):
            log.compact_later()
            for _ in range(12):
                due = set(log.compactor.due)
                some = rng.choice(keys, 700, replace=False)
                rows = random_rows(len(some), width, int(rng.integers(2**31)))
                log.append(some, rows)
                truth.update(zip(some.tolist(), rows, strict=True))
                if threaded:
                    assert log.compactor.job is None or log.compactor.job.result(60) is None
                    # Beside the changes, before any commit.
                    assert not due & {part.number for part in log.log.parts.values()}
                written = log.stats()["written_bytes"]
                before = {part.number for part in log.log.parts.values()} - due
                log.commit()
                # Nothing that became due by this transaction was rewritten.
                assert before <= {part.number for part in log.log.parts.values()}
                assert not threaded or log.stats()["written_bytes"] - written < 3 * 4096
                # Half of the log at most was dead before this transaction, which killed no more than it wrote.
                assert log.stats()["dead_bytes"] <= log.stats()["live_bytes"] + 700 * width
            found = log.stats()
            assert found["dead_bytes"] < 2 * found["live_bytes"]
            assert found["parts"] < 2 * 8
            read, there = log.read(np.arange(keys))
            assert [key for key in range(keys) if there[key]] == sorted(truth)
            assert all(np.array_equal(read[key], row) for key, row in truth.items())


def test_parts_left_for_later_stay_few_without_help_from_the_thread(
    root: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_all_to_commits(monkeypatch)
    rows = random_rows(300, 64)
    with Store.create(root, KIND) as store, RowLog(store, "t", 64, reader, 300, compact_below=0.5) as log:
        log.compact_later()
        for key in range(300):
            log.append([key], rows[key : key + 1])
            log.commit()
            assert log.stats()["parts"] <= 64 + 2 * 8
        assert log.stats()["dead_bytes"] == 0, "nothing else calls for rewriting"
        assert log.stats()["write_amplification"] < 12
        assert np.array_equal(log.read(np.arange(300))[0], rows)
