"""Samples against a dict: sizes from nothing to many pages, any order of changes, commits, reopenings and faults."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from memhier.errors import BudgetError, ClosedError, CorruptionError, FormatError
from memhier.files import Fault, FaultyFiles, Files, RealFiles, SimulatedCrash
from memhier.io.reader import Reader
from memhier.log import compaction, replay
from memhier.log import log as log_module
from memhier.log.row_log import RowLog
from memhier.log.samples import Samples
from memhier.store.store import Store

KIND = "test"
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
KEYS = st.integers(0, 17) | st.sampled_from([-1, -(2**63), 2**63 - 1])
SIZES = st.sampled_from([0, 0, 1, 3, 97, 4095, 4096, 4097, 65_535, 65_536, 65_537, 300_000, 2**20 - 1, 2**20 + 1])
CHANGES = st.lists(st.tuples(KEYS, SIZES), max_size=12)


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        yield Path(folder) / "store"


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    with Reader() as reader:
        yield reader


def record(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


class SamplesMachine(RuleBasedStateMachine):
    """The samples must show `now`; a crash must leave `committed`, with its generation."""

    compact_below = 0.0
    part_bytes, merge_parts, block = log_module.PART_BYTES, compaction.MERGE_PARTS, replay.BLOCK_ENTRIES

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(log_module, "PART_BYTES", self.part_bytes)
        self.patch.setattr(compaction, "MERGE_PARTS", self.merge_parts)
        self.patch.setattr(replay, "BLOCK_ENTRIES", self.block)
        self.folder = tempfile.TemporaryDirectory(dir=FAST)
        self.root = Path(self.folder.name) / "s"
        self.reader = Reader()
        self.seed = 0
        self.store = Store.create(self.root, KIND)
        self.samples = Samples(self.store, "s", self.reader, 21, compact_below=self.compact_below)
        self.now: dict[int, bytes] = {}
        self.committed: dict[int, bytes] = {}
        self.generation = self.samples.commit()

    def put_into(self, samples: Samples, changes: list[tuple[int, int]], model: dict[int, bytes]) -> None:
        records = [record(size, self.seed + index) for index, (_, size) in enumerate(changes)]
        self.seed += len(records)
        samples.put([key for key, _ in changes], records)
        model.update(zip((key for key, _ in changes), records, strict=True))

    @rule(changes=CHANGES)
    def put(self, changes: list[tuple[int, int]]) -> None:
        self.put_into(self.samples, changes, self.now)

    @rule(keys=st.lists(KEYS, max_size=12))
    def delete(self, keys: list[int]) -> None:
        self.samples.delete(keys)
        for key in keys:
            self.now.pop(key, None)

    @rule()
    def commit(self) -> None:
        self.generation, self.committed = self.samples.commit(), dict(self.now)

    @rule(live_below=st.sampled_from([0.5, 1]))
    def compact(self, live_below: float) -> None:
        self.samples.compact(live_below)

    @rule()
    def restart(self) -> None:
        self.reopen()
        self.now = dict(self.committed)

    def reopen(self, files: Files | None = None) -> None:
        self.samples.close()
        self.store.close()
        self.store = Store.open(self.root, KIND, writable=True, files=files)
        self.samples = Samples(self.store, "s", self.reader, 21, compact_below=self.compact_below)

    @rule(changes=CHANGES, gone=st.lists(KEYS, max_size=4), call=st.integers(1, 90), fault=st.sampled_from(Fault))
    def fail(self, changes: list[tuple[int, int]], gone: list[int], call: int, fault: Fault) -> None:
        model, done = dict(self.committed), False
        with suppress(OSError, SimulatedCrash, ClosedError):  # the last where the thread met the fault
            self.reopen(FaultyFiles(RealFiles(), call, fault))
            self.put_into(self.samples, changes, model)
            self.samples.compact(0.9)
            self.samples.delete(gone)
            for key in gone:
                model.pop(key, None)
            self.samples.commit()
            done = True
        self.reopen()
        assert self.store.generation in ((self.generation + 1,) if done else (self.generation, self.generation + 1))
        if self.store.generation > self.generation:
            self.generation, self.committed = self.store.generation, model
        self.now = dict(self.committed)

    @invariant()
    def every_record_is_the_newest(self) -> None:
        keys = [*range(-2, 22), -(2**63), 2**63 - 1, *self.now]
        found = [None if view is None else bytes(view) for view in self.samples.get(keys)]
        assert found == [self.now.get(key) for key in keys]
        assert len(self.samples) == len(self.now)
        assert self.samples.stats()["live_bytes"] == sum(map(len, self.now.values()))

    def teardown(self) -> None:
        self.patch.undo()
        self.samples.close()
        self.store.close()
        self.reader.close()
        self.folder.cleanup()


class SmallPartsMachine(SamplesMachine):
    """The same with parts that fill up inside of a transaction, and merges at every few commits."""

    part_bytes, merge_parts, block = 100_000, 3, 5


class BackgroundMachine(SmallPartsMachine):
    """The same while a thread rewrites whatever it may."""

    compact_below = 0.9


SamplesMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
SmallPartsMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestSamplesMachine = SamplesMachine.TestCase
TestSmallPartsMachine = SmallPartsMachine.TestCase
BackgroundMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestBackgroundMachine = BackgroundMachine.TestCase


def test_one_submission_and_whole_pages(root: Path, reader: Reader) -> None:
    """A record costs the pages it touches, each read once, however many records are asked for."""
    with Store.create(root, KIND) as store, Samples(store, "s", reader, 10) as samples:
        samples.put([1, 2, 3, 4], [b"a" * 4000, b"b" * 200, b"c" * 100_000, b"d" * 10])
        samples.commit()
        before = reader.stats()
        views = samples.get([2, 1, 1])
        after = reader.stats()
        assert [bytes(view) for view in views if view is not None] == [b"b" * 200, b"a" * 4000, b"a" * 4000]
        assert after["calls"] - before["calls"] == 1
        assert after["pages"] - before["pages"] == 2
        samples.get([3])
        assert reader.stats()["pages"] - after["pages"] == 25, "a large record begins on a page"
        assert all(view is not None and view.readonly for view in samples.get([1, 3]))
        assert samples.get([]) == []


def test_an_empty_record_and_the_next_one_at_its_place(
    root: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "BLOCK_ENTRIES", 2)
    with Store.create(root, KIND) as store, Samples(store, "s", reader, 10) as samples:
        samples.put([1, 2], [b"x" * 9, b""])
        samples.put([2, 3], [b"full", b""])
        samples.commit()
        samples.delete([1])
        assert samples.compact(1) == 1
        assert [bytes(view or b"?") for view in samples.get([2])] == [b"full"]
        assert samples.get([3]) == [b""]


def test_arguments_that_are_refused(root: Path, reader: Reader) -> None:
    with Store.create(root, KIND) as store, Samples(store, "s", reader, 2) as samples:
        samples.put([1], [np.arange(6, dtype=np.int16).reshape(2, 3)])
        for keys, records, error, message in (
            ([1, 2], [b"a"], ValueError, "records: expected 2, one for each key, got 1"),
            ([1], b"a", TypeError, "records: expected a list"),
            ([1], ["a"], TypeError, r"records\[0\]: expected bytes"),
            ([1], [np.zeros((4, 4))[:, 1]], ValueError, r"records\[0\]: expected C-contiguous"),
            ([[1]], [b"a"], ValueError, "keys: expected shape"),
            ([0.5], [b"a"], TypeError, "keys: expected integers"),
            ([1, 2, 3], [b"a"] * 3, BudgetError, "capacity=2"),
        ):
            with pytest.raises(error, match=message):
                samples.put(keys, records)
            assert samples.get([1, 2]) == [np.arange(6, dtype=np.int16).tobytes(), None]
        samples.commit()
        with pytest.raises(FormatError, match="records of different lengths, expected of 4 bytes"):
            RowLog(store, "s", 4, reader, 2)
        samples.close()
        with pytest.raises(ClosedError, match="Samples 's' is closed"):
            samples.get([1])


def test_a_flipped_bit_is_found_when_its_record_is_read(root: Path, reader: Reader) -> None:
    with Store.create(root, KIND) as store, Samples(store, "s", reader, 9) as samples:
        samples.put([1, 2], [b"a" * 4096, b"b" * 4096])
        samples.commit()
        path = store.segments()["s-0"].path
    with open(path, "r+b") as file:
        file.seek(4097)
        file.write(b"c")
    with Store.open(root, KIND) as store, Samples(store, "s", reader, 9) as samples:
        assert samples.get([1]) == [b"a" * 4096]
        with pytest.raises(CorruptionError, match=r"s-0\.00000001\.seg"):
            samples.get([1, 2])
