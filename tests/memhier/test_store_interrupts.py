"""An interrupt at any line of a call leaves a store and its logs as before the call or as after it."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from memhier.errors import ClosedError
from memhier.io.reader import Reader
from memhier.log.row_log import RowLog
from memhier.log.samples import Samples
from memhier.store.store import Store

WIDTH = 40
KEYS = np.arange(50)


def rows_of(keys: Any, change: int) -> NDArray[np.uint8]:
    return ((np.asarray(keys)[:, None] + np.arange(WIDTH) + change) % 251).astype(np.uint8)


class Logs:
    """A log of rows and one of samples, in two stores, with what they should hold: numbers by key."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.reader = Reader()
        self.stores = [Store.create(place / name, "logs") for name in ("rows", "samples")]
        self.open_logs()
        self.model: dict[int, int] = {}
        self.put(KEYS, 0)
        self.commit()
        self.committed = dict(self.model)

    def open_logs(self) -> None:
        options: dict[str, Any] = {"capacity": 100, "compact_below": 0.5}
        self.rows = RowLog(self.stores[0], "log", WIDTH, self.reader, **options)
        self.samples = Samples(self.stores[1], "log", self.reader, **options)

    def put(self, keys: NDArray[np.int64], change: int) -> None:
        self.put_rows(keys, change)
        self.put_samples(keys, change)
        self.model |= dict.fromkeys(keys.tolist(), change)

    def put_rows(self, keys: NDArray[np.int64], change: int) -> None:
        self.rows.append(keys, rows_of(keys, change))

    def put_samples(self, keys: NDArray[np.int64], change: int) -> None:
        self.samples.put(keys, [row.tobytes() * (change % 3 + 1) for row in rows_of(keys, change)])

    def commit(self) -> None:
        self.rows.commit()
        self.samples.commit()

    def check(self) -> None:
        keys = np.array(sorted(self.model))
        changes = np.array([self.model[key] for key in keys.tolist()])
        rows, found = self.rows.read(keys)
        assert found.all()
        assert np.array_equal(rows, (keys[:, None] + np.arange(WIDTH) + changes[:, None]) % 251)
        for row, change, sample in zip(rows, changes.tolist(), self.samples.get(keys), strict=True):
            assert sample is not None
            assert bytes(sample) == row.tobytes() * (change % 3 + 1)
        gone = np.setdiff1d(KEYS, keys)
        assert not self.rows.contains(gone).any()
        assert not self.samples.contains(gone).any()

    def close(self) -> None:
        for part in (self.rows, self.samples, *self.stores):
            part.close()

    def reopen(self) -> None:
        self.close()
        self.stores = [Store.open(self.place / name, "logs", writable=True) for name in ("rows", "samples")]
        self.open_logs()


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Logs]:
    logs = Logs(tmp_path)
    yield logs
    logs.close()
    logs.reader.close()


@pytest.mark.parametrize("kind", ["rows", "samples"])
def test_an_interrupted_change_of_a_log_is_made_or_not(logs: Logs, interrupts: Any, kind: str) -> None:
    change = 0

    def call() -> None:
        (logs.put_rows if kind == "rows" else logs.put_samples)(np.arange(change, change + 9) % 50, change)

    for point in interrupts.every(call):
        keys = np.arange(change, change + 9) % 50
        if kind == "rows":
            was_made = bool(np.array_equal(logs.rows.read(keys)[0], rows_of(keys, change)))
        else:
            was_made = logs.samples.get(keys)[0] == rows_of(keys[:1], change).tobytes() * (change % 3 + 1)
        interrupts.settled(was_made)
        logs.put(keys, change)
        logs.check()
        if point % 4 == 0:
            logs.commit()
            logs.reopen()
            logs.check()
        change += 1


def test_an_interrupted_deletion_is_made_or_not(logs: Logs, interrupts: Any) -> None:
    for _ in interrupts.every(lambda: logs.rows.delete([3, 4])):
        there = logs.rows.contains([3, 4])
        assert there.all() or not there.any()
        interrupts.settled(not there.any())
        logs.put(np.array([3, 4]), 0)
        logs.check()


def test_an_interrupted_commit_is_made_or_not(logs: Logs, interrupts: Any) -> None:
    change = 0

    def call() -> None:
        logs.rows.commit({"turn": str(change).encode()})
        logs.samples.commit({"turn": str(change).encode()})

    for _ in interrupts.every(call):
        logs.check()
        logs.reopen()
        made = [store.get("turn") == str(change).encode() for store in logs.stores]
        interrupts.settled(all(made))
        before = dict(logs.model)
        logs.model = logs.committed
        if made[0] != made[1]:
            logs.put(KEYS, 0)  # the interrupt came between the two
            logs.commit()
            logs.model = dict.fromkeys(KEYS.tolist(), 0)
        elif made[0]:
            logs.model = before
        logs.check()
        logs.committed = dict(logs.model)
        change += 1
        logs.put(np.arange(change, change + 30) % 50, change)


def test_reads_that_are_interrupted_hold_nothing_up(logs: Logs, interrupts: Any) -> None:
    calls = [
        lambda: logs.rows.read(KEYS),
        lambda: logs.samples.get(KEYS),
        lambda: [logs.rows.contains(KEYS), logs.rows.stats(), [*logs.rows.keys()]],
        lambda: [logs.stores[0].get("log/log"), logs.stores[0].check(), logs.stores[0].segments()],
    ]
    for call in calls:
        for change in interrupts.every(call):
            interrupts.settled(was_made=False)
            logs.put(np.arange(change, change + 5) % 50, change)
            logs.check()


def test_an_interrupted_transaction_is_made_or_not(tmp_path: Path, interrupts: Any) -> None:
    turn = 0
    store = Store.create(tmp_path / "s", "test")

    def call() -> None:
        with store.begin() as tx:
            tx.segment("data").append(np.full(5000, turn, np.int64))
            tx.put("turn", str(turn).encode())
            tx.commit()

    call()
    last = 0
    turn = 1
    for _ in interrupts.every(call):
        try:
            found = int(store.get("turn") or b"-1")
        except ClosedError:
            found = -1
        store.close()
        store = Store.open(tmp_path / "s", "test", writable=True)
        kept = int(store.get("turn") or b"-1")
        assert found in (-1, kept)
        assert kept in (last, turn)
        assert (store.read_segment("data").view(np.int64) == kept).all()
        assert store.check() == []
        interrupts.settled(kept == turn)
        last = kept
        turn += 1
    store.close()


def test_an_interrupted_creation_or_opening_leaves_nothing_locked(tmp_path: Path, interrupts: Any) -> None:
    made: list[Store] = []

    def create() -> None:
        made.append(Store.create(tmp_path / "s", "test"))

    for _ in interrupts.every(create):
        assert not made
        create()
        with made.pop() as store, store.begin() as tx:
            tx.commit()
        shutil.rmtree(tmp_path / "s")
        interrupts.settled(was_made=False)
    with made.pop() as store, store.begin() as tx:
        tx.commit()

    def opened() -> None:
        made.append(Store.open(tmp_path / "s", "test", writable=True))

    for _ in interrupts.every(opened):
        assert not made
        opened()
        made.pop().close()
        interrupts.settled(was_made=False)
    made.pop().close()
