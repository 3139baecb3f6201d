"""RowLog under kill -9: a commit that returned survives, and nothing else appears."""

import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from memhier.io.reader import Reader
from memhier.log.row_log import RowLog
from memhier.store.store import Store

KIND = "test"
Killer = Callable[[Callable[[int], None], random.Random], int]
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _change_until_killed(root: Path, report: int, compact_below: float) -> None:
    """Row k of version v is v where k divides v, as of the last such v; deleted where v + k is a multiple of 11."""
    store = Store.open(root, KIND, writable=True)
    log = RowLog(store, "t", 1000, Reader(), 97, compact_below=compact_below)
    while True:
        version = store.generation + 1
        keys = [key for key in range(1, 98) if version % key == 0]
        log.append(keys, np.full((len(keys), 1000), version % 256, np.uint8))
        log.delete([key for key in range(1, 98) if (version + key) % 11 == 0])
        if version % 3 == 0 and not compact_below:
            log.compact(0.6)
        log.commit()
        os.write(report, version.to_bytes(8, "little"))


def _expected(version: int) -> dict[int, int]:
    rows: dict[int, int] = {}
    for past in range(2, version + 1):
        rows.update((key, past % 256) for key in range(1, 98) if past % key == 0)
        for key in range(1, 98):
            if (past + key) % 11 == 0:
                rows.pop(key, None)
    return rows


def _kill_rounds(root: Path, rounds: int, seed: int, work_until_killed: Killer) -> None:
    rng = random.Random(seed)
    with Store.create(root, KIND) as store, Reader() as reader, RowLog(store, "t", 1000, reader, 97) as log:
        log.commit()
    for _ in range(rounds):
        returned = work_until_killed(lambda report: _change_until_killed(root, report, rng.choice([0, 0.7])), rng)
        with Store.open(root, KIND, verify="open") as store, Reader() as reader:
            assert store.generation in (returned, returned + 1), "a commit that returned is lost, or a false one found"
            with RowLog(store, "t", 1000, reader, 97) as log:
                rows, found = log.read(np.arange(98))
                expected = _expected(store.generation)
                assert np.flatnonzero(found).tolist() == sorted(expected)
                assert all((rows[key] == value).all() for key, value in expected.items())
            assert all(finding.harmless for finding in store.check())


def test_kill_during_changes(work_until_killed: Killer) -> None:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        _kill_rounds(Path(folder) / "store", 20, 1, work_until_killed)


@pytest.mark.slow
def test_kill_during_changes_for_longer(tmp_path: Path, work_until_killed: Killer) -> None:
    _kill_rounds(tmp_path / "store", 200, 2, work_until_killed)
