"""A tier against a dict: any order of gathers, writes, tickets, pins, checkpoints, reopenings, crashes and faults."""

import os
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from memhier.errors import BudgetError, ClosedError
from memhier.files import Fault, FaultyFiles, Files, RealFiles, SimulatedCrash
from memhier.io.reader import Reader
from memhier.policies import LFU, LRU, S3FIFO, Policy, Static
from memhier.store.store import Store
from memhier.table.tiered import KIND, Tiered

# Where a sync costs nothing, hundreds of checkpoints fit into a test.
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
ROWS = 40
DIM = 3
POLICIES: dict[str, Callable[[int], Policy]] = {
    "lru": LRU,
    "lfu": LFU,
    "s3fifo": S3FIFO,
    "static": lambda capacity: Static(capacity, np.arange(capacity // 2)),
}

KEYS = st.lists(st.integers(0, ROWS - 1), max_size=12)


def initial(keys: NDArray[np.int64]) -> NDArray[np.float32]:
    return np.repeat(keys[:, None], DIM, axis=1).astype(np.float32) - 0.5


def smallest_budget(make: Callable[[int], Any]) -> int:
    """Return the budget that the error names as enough; anything less is not."""
    with pytest.raises(BudgetError) as caught:
        make(1)
    found = re.search(r"dram=(\d+) would be enough", str(caught.value))
    assert found is not None
    return int(found[1])


class TieredMachine(RuleBasedStateMachine):
    """`now` has the rows of the table, `durable` its rows at the last checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=FAST)
        self.root = Path(self.folder.name) / "s"
        self.reader = Reader(depth=4)
        self.now: dict[int, list[float]] = {}
        self.durable: dict[int, list[float]] = {}
        self.value = 0.0
        self.tickets: list[Any] = []
        self.pins: list[Any] = []

    @initialize(capacity=st.sampled_from([3, 5, 16, 64]), policy=st.sampled_from(sorted(POLICIES)))
    def make(self, capacity: int, policy: str) -> None:
        self.capacity = capacity
        self.policy = policy
        self.store = Store.create(self.root, KIND)
        self.tier = self.open(smallest_budget(self.open))

    def open(self, dram: int) -> Tiered:
        self.dram = dram
        policy = POLICIES[self.policy](self.capacity)
        return Tiered(
            self.store, "t", np.float32, DIM, rows=ROWS, dram=dram, policy=policy, initial=initial, reader=self.reader
        )

    def expected(self, keys: list[int]) -> list[list[float]]:
        return [self.now.get(key, [key - 0.5] * DIM) for key in keys]

    def new_rows(self, count: int) -> NDArray[np.float32]:
        rows = np.arange(count * DIM, dtype=np.float32).reshape(count, DIM) + self.value
        self.value += rows.size
        return rows

    @rule(keys=KEYS)
    def gather(self, keys: list[int]) -> None:
        with suppress(BudgetError):
            assert self.tier.gather(np.array(keys, np.int64)).tolist() == self.expected(keys)

    @rule(keys=KEYS)
    def scatter(self, keys: list[int]) -> None:
        rows = self.new_rows(len(keys))
        with suppress(BudgetError):
            self.tier.scatter(np.array(keys, np.int64), rows)
            self.now.update(zip(keys, rows.tolist(), strict=True))

    @rule(keys=KEYS)
    def prefetch(self, keys: list[int]) -> None:
        with suppress(BudgetError):
            self.tickets.append(self.tier.prefetch(np.array(keys, np.int64)))

    @precondition(lambda self: self.tickets)
    @rule(wait=st.booleans())
    def release(self, wait: bool) -> None:
        ticket = self.tickets.pop(0)
        if wait:
            ticket.wait()
            assert ticket.done
        ticket.release()
        assert len(ticket) == 0

    @rule(keys=KEYS)
    def pin(self, keys: list[int]) -> None:
        with suppress(BudgetError):
            self.pins.append((keys, self.tier.pin(np.array(keys, np.int64))))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        keys, pin = self.pins.pop()
        misses = self.tier.stats()["misses"]
        with suppress(BudgetError):
            assert self.tier.gather(np.array(keys, np.int64)).tolist() == self.expected(keys)
        assert self.tier.stats()["misses"] == misses, "a pinned row has left"
        pin.release()

    @rule()
    def flush(self) -> None:
        self.tier.flush()
        assert self.tier.stats()["queued"] == 0

    @rule()
    def checkpoint(self) -> None:
        assert self.tier.checkpoint({"step": b"1"}) == self.store.generation
        self.durable = dict(self.now)

    def restart(self, files: Files | None = None) -> None:
        """Leave the table as a process that ends without a checkpoint does."""
        with suppress(OSError, SimulatedCrash):
            self.tier.close()
            self.store.close()
        self.tickets.clear()
        self.pins.clear()
        self.store = Store.open(self.root, KIND, writable=True, files=files)
        self.tier = self.open(self.dram)

    @precondition(lambda self: self.store.generation > 0)
    @rule()
    def reopen(self) -> None:
        self.restart()
        self.now = dict(self.durable)

    @precondition(lambda self: self.store.generation > 0)
    @rule(batches=st.lists(KEYS, min_size=1, max_size=4), call=st.integers(8, 60), fault=st.sampled_from(Fault))
    def fail(self, batches: list[list[int]], call: int, fault: Fault) -> None:
        """Go on from the last checkpoint on files that fail at some call; afterwards it or the next one is there."""
        self.now = dict(self.durable)
        generation = self.store.generation
        saved = False
        with suppress(OSError, ClosedError, SimulatedCrash):
            self.restart(FaultyFiles(RealFiles(), call, fault))
            for keys in batches:
                self.gather(keys)
                self.scatter(keys)
                self.tier.flush()
            self.tier.checkpoint()
            saved = True
        attempted = self.now
        self.restart()
        if saved or self.store.generation > generation:
            self.durable = dict(attempted)
        self.now = dict(self.durable)

    @invariant()
    def whole_table_is_as_expected(self) -> None:
        if not hasattr(self, "tier"):
            return
        assert self.tier.stats()["resident"] <= self.capacity
        for key in range(0, ROWS, 7):
            with suppress(BudgetError):
                assert self.tier.gather([key]).tolist() == self.expected([key])

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
            self.store.close()
        self.reader.close()
        self.folder.cleanup()


TieredMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestTieredMachine = TieredMachine.TestCase
