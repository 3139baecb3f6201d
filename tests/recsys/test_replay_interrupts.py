"""An interrupt at any line of a call leaves a replay buffer as before the call or as after it, and never in between."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier.errors import MemhierError
from memhier.recsys.replay import CarouselBuffer, Field, RandomSwap
from memhier.recsys.replay.loader import ReplayBatchSampler
from memhier.recsys.replay.stored import StoredSamples

SCHEMA = {
    "x": Field("int64", (16,)),
    "logits": Field("float32", (4,), mutable=True),
    "age": Field("int64", mutable=True),
}


def columns(ids: Any) -> dict[str, Any]:
    """Each sample's own bytes, by which it is known again."""
    ids = np.asarray(ids, np.int64)
    return {
        "x": np.repeat(ids[:, None] * 1000, 16, axis=1) + np.arange(16),
        "logits": np.zeros((len(ids), 4), np.float32),
        "age": np.zeros(len(ids), np.int64),
    }


class Run:
    """A buffer, and of each sample the ages that it may have: those of before and after a call that was interrupted."""

    def __init__(self, place: Path, **options: Any) -> None:
        self.place = place
        self.turn = 0
        self.ages: dict[int, set[int]] = {}
        settings: dict[str, Any] = {"memory": 24, "schema": SCHEMA, "seed": 3, "swap": RandomSwap(0.5)}
        self.buffer = CarouselBuffer(place, **settings | options)
        self.add(range(80))
        for _ in range(3):
            self.step()
        self.commit()

    def add(self, ids: Any) -> None:
        ids = np.asarray([*ids])
        self.ages |= {id: {0} for id in ids.tolist()}
        self.buffer.add(columns(ids), labels=ids % 4, ids=ids)

    def update(self, batch: Any) -> dict[str, Any]:
        """New values for the samples of a batch; from now on they may have them."""
        self.turn += 1
        for id in batch.ids.tolist():
            self.ages[id].add(self.turn)
        return {"age": np.full(len(batch), self.turn), "logits": np.full((len(batch), 4), self.turn, np.float32)}

    def step(self) -> None:
        batch = self.buffer.sample(8)
        self.buffer.feedback(batch, update=self.update(batch))
        for id in batch.ids.tolist():
            self.ages[id] = {self.turn}

    def check_batch(self, batch: Any) -> None:
        """Every sample has its own bytes, and of its values all are of one time."""
        expected = columns(batch.ids)
        assert np.array_equal(batch["x"], expected["x"])
        assert np.array_equal(batch.labels, batch.ids % 4)
        for id, age, logits in zip(batch.ids.tolist(), batch["age"].tolist(), batch["logits"].tolist(), strict=True):
            assert age in self.ages[id]
            assert logits == [age] * 4

    def check(self) -> None:
        """Memory is right, for some steps more, with swaps that arrive."""
        for _ in range(3):
            batch = self.buffer.sample(24)
            self.check_batch(batch)
            self.buffer.feedback(batch)

    def commit(self) -> None:
        self.buffer.checkpoint()

    def check_stored(self) -> None:
        """Storage is right after a checkpoint, and so is the buffer when it is opened again."""
        self.commit()
        assert self.buffer.check() == []
        self.buffer.close()
        self.read_all()
        self.buffer = CarouselBuffer.open(self.place)
        self.check()

    def read_all(self) -> None:
        with StoredSamples(self.place) as stored:
            for batch in stored.blocks():
                self.check_batch(batch)

    def settle(self, interrupts: Any, was_made: bool) -> None:
        """Check everything after an interrupt; where the buffer refuses, open it again."""
        interrupts.settled(was_made)
        try:
            self.check()
            if self.turn % 4 == 0:
                self.check_stored()
        except MemhierError:
            interrupts.seen["refused"] += 1
            self.buffer.close()
            self.read_all()
            self.buffer = CarouselBuffer.open(self.place)
            self.check()


@pytest.fixture(params=["reservoir", "ring"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "b", admit=request.param, storage=120, delay=1 if request.param == "reservoir" else 0)
    yield run
    run.buffer.close()


def test_an_interrupted_feedback_ends_the_step_or_not(run: Run, interrupts: Any) -> None:
    batch, step = run.buffer.sample(8), run.buffer.step
    update = run.update(batch)

    def call() -> None:
        run.buffer.feedback(batch, update=update)

    for _ in interrupts.every(call):
        assert run.buffer.step in (step, step + 1)
        run.settle(interrupts, run.buffer.step > step)
        batch, step = run.buffer.sample(8), run.buffer.step
        update = run.update(batch)


def test_an_interrupted_refresh_gives_values_or_does_not(run: Run, interrupts: Any) -> None:
    batch = run.buffer.sample(8)
    update = run.update(batch)

    def call() -> None:
        run.buffer.refresh(batch, update)

    for _ in interrupts.every(call):
        now = run.buffer.sample(24)
        run.settle(interrupts, bool((now["age"] == run.turn).any()))
        batch = run.buffer.sample(8)
        update = run.update(batch)


def test_an_interrupted_add_takes_samples_in_or_does_not(run: Run, interrupts: Any) -> None:
    begin = 1000
    before = run.buffer.stats()["arrivals"]

    def call() -> None:
        run.add(range(begin, begin + 8))

    for _ in interrupts.every(call):
        arrivals = run.buffer.stats()["arrivals"]
        assert arrivals in (before, before + 8)
        run.settle(interrupts, arrivals > before)
        before, begin = run.buffer.stats()["arrivals"], begin + 8


def test_an_interrupted_sample_or_hold_changes_no_sample(run: Run, interrupts: Any) -> None:
    turn = 0
    calls = [
        lambda: run.check_batch(run.buffer.sample(8)),
        lambda: run.buffer.hold(np.arange(turn, turn + 6) % 80),
        lambda: [run.buffer.stats(), run.buffer.reader().read([0, 1])],
        lambda: [*ReplayBatchSampler(run.buffer, 4, steps=3, ahead=3)],
    ]
    for call in calls:
        for _ in interrupts.every(call):
            run.settle(interrupts, was_made=False)
            turn += 1


def test_an_interrupted_forget_removes_samples_or_does_not(run: Run, interrupts: Any) -> None:
    doomed = np.array([0, 5, 9])
    for _ in interrupts.every(lambda: run.buffer.forget({"id": doomed})):
        run.buffer.close()
        with StoredSamples(run.place) as stored:
            left = np.isin(doomed, stored.ids)
        run.buffer = CarouselBuffer.open(run.place)
        run.settle(interrupts, not left.any())
        if not left.any():
            run.add(doomed)
            run.commit()


def test_an_interrupted_resize_is_made_or_not(run: Run, interrupts: Any) -> None:
    other = 20

    def call() -> None:
        run.buffer.resize(memory=other)

    for _ in interrupts.every(call):
        assert run.buffer.capacity in (20, 24)
        run.settle(interrupts, run.buffer.capacity == other)
        other = 44 - run.buffer.capacity
    run.check_stored()


def test_an_interrupted_checkpoint_is_taken_or_not(run: Run, interrupts: Any) -> None:
    turn = 0

    def call() -> None:
        run.buffer.checkpoint({"turn": str(turn).encode()})

    for _ in interrupts.every(call):
        run.check()
        run.buffer.close()
        run.read_all()
        run.buffer = CarouselBuffer.open(run.place)
        found = run.buffer.value("turn")
        run.settle(interrupts, found == str(turn).encode())
        turn += 1


def test_an_interrupted_close_or_opening_leaves_nothing_locked(run: Run, interrupts: Any) -> None:

    def closed() -> None:
        run.buffer.close()

    for _ in interrupts.every(closed):
        run.buffer.close()
        run.buffer = CarouselBuffer.open(run.place)
        run.settle(interrupts, was_made=True)
    run.buffer.close()

    def opened() -> None:
        run.buffer = CarouselBuffer.open(run.place)

    for _ in interrupts.every(opened):
        opened()
        run.settle(interrupts, was_made=False)
        run.buffer.close()


def test_an_interrupted_creation_can_be_made_again(tmp_path: Path, interrupts: Any) -> None:
    made: list[CarouselBuffer] = []

    def make() -> None:
        made.append(CarouselBuffer(tmp_path / "made", memory=4, schema={"x": "int64"}))

    for _ in interrupts.every(make):
        assert not made
        interrupts.settled(was_made=(tmp_path / "made" / "catalog.sum").exists())
        try:
            make()
        except FileExistsError:
            made.append(CarouselBuffer.open(tmp_path / "made"))
        made.pop().close()
        shutil.rmtree(tmp_path / "made")
    made.pop().close()
