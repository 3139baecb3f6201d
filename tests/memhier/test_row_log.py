"""RowLog against a dict: any order of changes, commits, compactions, reopenings, crashes and faults.

`test_row_log_promises.py` has its other promises and its costs.
"""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from memhier.errors import ClosedError
from memhier.files import Fault, FaultyFiles, Files, RealFiles, SimulatedCrash
from memhier.io.reader import Reader
from memhier.log import compaction, replay
from memhier.log import log as log_module
from memhier.log.row_log import RowLog
from memhier.store.store import Store

KIND = "test"
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
KEYS = st.integers(0, 40) | st.sampled_from([-1, -(2**63), 2**63 - 1])


class RowLogMachine(RuleBasedStateMachine):
    """The log must show `now`; a crash must leave `committed`, with its generation."""

    compact_below = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=FAST)
        self.root = Path(self.folder.name) / "s"
        self.reader = Reader()
        self.count = 0

    @initialize(row_bytes=st.sampled_from([1, 3, 97, 400, 1365, 4096, 5000, 70_000]))
    def create(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self.store = Store.create(self.root, KIND)
        self.log = self.open_log()
        self.now: dict[int, bytes] = {}
        self.committed: dict[int, bytes] = {}
        self.generation = self.log.commit()

    def open_log(self) -> RowLog:
        return RowLog(self.store, "t", self.row_bytes, self.reader, 60, compact_below=self.compact_below)

    def rows(self, count: int) -> NDArray[np.uint8]:
        self.count += 1
        return np.random.default_rng(self.count).integers(0, 256, (count, self.row_bytes), np.uint8)

    def append_to(self, log: RowLog, keys: list[int], model: dict[int, bytes]) -> None:
        rows = self.rows(len(keys))
        log.append(keys, rows)
        model.update((key, row.tobytes()) for key, row in zip(keys, rows, strict=True))

    @rule(keys=st.lists(KEYS, max_size=30))
    def append(self, keys: list[int]) -> None:
        self.append_to(self.log, keys, self.now)

    @rule(key=KEYS, times=st.integers(1, 300))
    def append_often(self, key: int, times: int) -> None:
        self.append_to(self.log, [key] * min(times, 2**22 // self.row_bytes), self.now)

    @rule(keys=st.lists(KEYS, max_size=30))
    def delete(self, keys: list[int]) -> None:
        self.log.delete(keys)
        for key in keys:
            self.now.pop(key, None)

    @rule()
    def commit(self) -> None:
        generation = self.log.commit({"count": b"%d" % self.count})
        assert generation == self.generation + 1
        self.generation, self.committed = generation, dict(self.now)

    @rule(live_below=st.sampled_from([0, 0.5, 1]))
    def compact(self, live_below: float) -> None:
        self.log.compact(live_below)
        if live_below == 1 and not self.log.log.fresh:
            stats = self.log.stats()
            assert stats["live_bytes"] == len(self.now) * self.row_bytes

    def reopen(self, files: Files | None = None) -> None:
        self.log.close()
        self.store.close()
        self.store = Store.open(self.root, KIND, writable=True, files=files)
        self.log = self.open_log()

    @rule(exact=st.booleans())
    def restart(self, exact: bool) -> None:
        """Reopen, which loses all changes since the commit; with a capacity that just suffices, too."""
        self.reopen()
        self.now = dict(self.committed)
        if exact and self.now:
            self.log.close()
            self.log = RowLog(self.store, "t", self.row_bytes, self.reader, len(self.now))
            self.every_row_is_the_newest()
            self.reopen()

    @rule(
        keys=st.lists(KEYS, max_size=9),
        gone=st.lists(KEYS, max_size=9),
        call=st.integers(1, 90),
        fault=st.sampled_from(Fault),
    )
    def fail(self, keys: list[int], gone: list[int], call: int, fault: Fault) -> None:
        """Reopen, change and commit on a layer that fails at some call; the old or the new is found afterwards."""
        model, done = dict(self.committed), False
        with suppress(OSError, SimulatedCrash, ClosedError):  # the last where the thread met the fault
            self.reopen(FaultyFiles(RealFiles(), call, fault))
            self.append_to(self.log, keys * 3, model)
            self.log.compact(0.9)
            self.log.delete(gone)
            for key in gone:
                model.pop(key, None)
            self.log.commit()
            done = True
        self.reopen()
        assert self.store.generation in ((self.generation + 1,) if done else (self.generation, self.generation + 1))
        if self.store.generation > self.generation:
            self.generation, self.committed = self.store.generation, model
        self.now = dict(self.committed)

    @invariant()
    def every_row_is_the_newest(self) -> None:
        keys = [*range(-2, 42), -(2**63), 2**63 - 1, *self.now]
        rows, found = self.log.read(keys)
        expected = [self.now.get(key) for key in keys]
        assert found.tolist() == [row is not None for row in expected]
        assert rows.tobytes() == b"".join(row or bytes(self.row_bytes) for row in expected)
        assert len(self.log) == len(self.now)
        assert sorted(key for block in self.log.keys() for key in block.tolist()) == sorted(self.now)  # noqa: SIM118
        assert self.log.contains(keys).tolist() == found.tolist()

    def teardown(self) -> None:
        self.log.close()
        self.store.close()
        self.reader.close()
        self.folder.cleanup()


RowLogMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestRowLogMachine = RowLogMachine.TestCase


class SmallPartsMachine(RowLogMachine):
    """The same with parts that fill up inside of a transaction, and merges at every few commits."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(log_module, "PART_BYTES", 20_000)
        self.patch.setattr(compaction, "MERGE_PARTS", 3)
        self.patch.setattr(log_module, "ENTRIES_BLOCK", 7)
        self.patch.setattr(replay, "BLOCK_ENTRIES", 5)

    def teardown(self) -> None:
        self.patch.undo()
        super().teardown()


SmallPartsMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestSmallPartsMachine = SmallPartsMachine.TestCase


class BackgroundMachine(SmallPartsMachine):
    """The same while a thread rewrites whatever it may, a few hundred bytes at a time."""

    compact_below = 0.9

    def __init__(self) -> None:
        super().__init__()
        self.patch.setattr(compaction, "MOVE_BYTES", 300)


BackgroundMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestBackgroundMachine = BackgroundMachine.TestCase
