"""An interrupt at any line of a call leaves a tier as before the call or as after it, and never in between."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from memhier.policies import LRU
from memhier.table.tiered import Tiered

DIM, ROWS, SLOTS = 8, 60, 16


def numbered(keys: Any, change: float = 0) -> NDArray[np.float32]:
    return np.repeat(np.asarray(keys, np.float32)[:, None] + np.float32(change), DIM, axis=1)


class Table:
    """A tier beside a dict: after each call both have the same rows."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.tier = self.opened()
        self.model = {key: np.zeros(DIM, np.float32) for key in range(ROWS)}
        self.scatter(np.arange(ROWS // 2), 0.5)
        self.tier.checkpoint()
        self.committed = dict(self.model)

    def opened(self) -> Tiered:
        return Tiered(self.place, "t", np.float32, DIM, rows=ROWS, dram="8MiB", policy=LRU(SLOTS), batch=SLOTS)

    def scatter(self, keys: NDArray[np.int64], change: float) -> None:
        for start in range(0, len(keys), SLOTS):
            some = keys[start : start + SLOTS]
            self.tier.scatter(some, numbered(some, change))
        self.model |= dict(zip(keys.tolist(), numbered(keys, change), strict=True))

    def rows(self) -> NDArray[np.float32]:
        keys = np.arange(ROWS)
        return np.concatenate([self.tier.gather(keys[start : start + SLOTS]) for start in range(0, ROWS, SLOTS)])

    def check(self) -> None:
        """All rows are the model's, and each slot can be had: none has leaked."""
        assert np.array_equal(self.rows(), np.stack([self.model[key] for key in range(ROWS)]))
        with self.tier.pin(np.arange(SLOTS)):
            pass

    def check_stored(self) -> None:
        """Committed rows are there when the tier is opened again."""
        self.tier.close()
        self.tier, self.model = self.opened(), dict(self.committed)
        self.check()


@pytest.fixture
def table(tmp_path: Path) -> Any:
    table = Table(tmp_path / "s")
    yield table
    table.tier.close()


def test_an_interrupted_gather_or_prefetch_leaves_rows_and_slots(table: Table, interrupts: Any) -> None:
    turn = 0

    def keys() -> NDArray[np.int64]:
        return np.arange(turn, turn + SLOTS // 2) * 7 % ROWS

    calls = [
        lambda: table.tier.gather(keys()),
        lambda: table.tier.gather(keys(), keep=False),
        lambda: table.tier.prefetch(keys()).release(),
        lambda: table.tier.prefetch(keys()).wait(),
        lambda: table.tier.lend(keys()).release(),
        lambda: table.tier.lend(keys(), ticket=table.tier.prefetch(keys())).share().release(),
        lambda: [table.tier.stats(), table.tier.memory_bytes],
    ]
    for call in calls:
        for turn in interrupts.every(call):
            interrupts.settled(was_made=False)
            table.scatter(np.array([turn % ROWS]), turn)
            table.check()


def test_an_interrupted_pin_is_made_or_not(table: Table, interrupts: Any) -> None:
    for _ in interrupts.every(lambda: table.tier.pin([5]).release()):
        try:
            table.tier.unpin([5])  # made, and the interrupt came before its owner let it go
        except ValueError:
            interrupts.settled(was_made=False)
        else:
            interrupts.settled(was_made=True)
        table.check()


def test_an_interrupted_scatter_is_made_or_not(table: Table, interrupts: Any) -> None:
    turn = 0

    def call() -> None:
        keys = np.arange(turn, turn + 10) % ROWS
        table.tier.scatter(keys, numbered(keys, turn + 1000))

    for turn in interrupts.every(call):
        keys = np.arange(turn, turn + 10) % ROWS
        found = table.tier.gather(keys)
        was_made = bool((found == numbered(keys, turn + 1000)).any())
        interrupts.settled(was_made)
        if was_made:
            table.model |= dict(zip(keys.tolist(), numbered(keys, turn + 1000), strict=True))
        table.check()
        turn += 1


def test_an_interrupted_unpin_is_made_or_not(table: Table, interrupts: Any) -> None:
    table.tier.pin([1, 2])
    for _ in interrupts.every(lambda: table.tier.unpin([1, 2])):
        try:
            table.tier.unpin([1, 2])
        except ValueError:
            interrupts.settled(was_made=True)
        else:
            interrupts.settled(was_made=False)
        table.check()
        table.tier.pin([1, 2])
    table.check()


@pytest.mark.parametrize("way", ["checkpoint", "start_checkpoint", "flush"])
def test_an_interrupted_checkpoint_is_taken_or_not(table: Table, interrupts: Any, way: str) -> None:
    turn = 0

    def call() -> None:
        if way == "checkpoint":
            table.tier.checkpoint({"turn": str(turn).encode()})
        elif way == "flush":
            table.tier.flush()
        else:
            table.tier.start_checkpoint({"turn": str(turn).encode()}).result()

    for turn in interrupts.every(call):
        table.check()
        before, now = table.committed, dict(table.model)
        table.tier.close()
        table.tier = table.opened()
        found = table.rows()
        was_made = np.array_equal(found, np.stack([now[key] for key in range(ROWS)]))
        interrupts.settled(was_made)
        table.committed = now if was_made else before
        table.check_stored()
        table.scatter(np.arange(turn, turn + 5) % ROWS, turn + 2000)


def test_interrupted_changes_of_lent_rows(table: Table, interrupts: Any) -> None:
    loan = table.tier.lend([3, 4])

    def call() -> None:
        with loan.changing() as rows:
            rows[loan.slots] += 1

    for _ in interrupts.every(call):
        if interrupts.refuses(lambda: table.tier.gather([3, 4])):
            table.check_stored()
            loan = table.tier.lend([3, 4])
            continue
        found = table.tier.gather([3, 4])
        was_made = bool((found != np.stack([table.model[3], table.model[4]])).any())
        interrupts.settled(was_made)
        if was_made:
            table.model |= {3: table.model[3] + 1, 4: table.model[4] + 1}
        loan.release()
        table.check()
        loan = table.tier.lend([3, 4])


def test_an_interrupted_close_can_be_made_again(table: Table, interrupts: Any) -> None:
    def call() -> None:
        table.tier.close()

    for _ in interrupts.every(call):
        table.check_stored()
        interrupts.settled(was_made=True)


def test_an_interrupted_opening_leaves_nothing_locked(table: Table, interrupts: Any) -> None:
    table.tier.close()

    def call() -> None:
        table.tier = table.opened()

    for _ in interrupts.every(call):
        interrupts.settled(was_made=False)
        table.tier = table.opened()
        table.check_stored()
        table.tier.close()
