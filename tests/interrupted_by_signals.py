"""Works with one of the systems while a timer's signal interrupts it, and checks what each interrupt has left.

Run as ``python interrupted_by_signals.py SYSTEM ROUNDS SEED PATH``; prints how many rounds there were, and what came.
"""

import random
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np

from memhier.errors import BudgetError, MemhierError

LONGEST_S = 0.006
np.random.default_rng(0)  # loaded before anything is interrupted: an import that is, fails in ways of its own


class System(Protocol):
    """What is interrupted."""

    def work(self) -> None:
        """Make some calls."""

    def check(self) -> None:
        """Make sure that nothing is wrong or stuck."""

    def reopen(self) -> None:
        """Close, open again, and make sure that what was committed is there."""

    def close(self) -> None:
        """Let go of everything."""


class TierSystem:
    """A tier whose rows are numbers by key, at most those of the last call."""

    def __init__(self, place: Path) -> None:
        self.place, self.turn = place, 0
        self.low = np.zeros(200, np.int64)
        self.high = np.zeros(200, np.int64)
        self.committed = self.low.copy()
        self.open()

    def open(self) -> None:
        from memhier.policies import LRU
        from memhier.table.tiered import Tiered

        self.tier = Tiered(self.place, "t", np.int64, 4, rows=200, dram="8MiB", policy=LRU(40), batch=40, key_space=200)

    def work(self) -> None:
        self.turn += 1
        rng = np.random.default_rng(self.turn)
        keys = rng.choice(200, 12, replace=False)
        self.high[keys] = self.turn
        self.tier.scatter(keys, np.full((12, 4), self.turn))
        self.low[keys] = self.turn
        self.tier.gather(rng.choice(200, 20))
        some = rng.choice(200, 10, replace=False)
        with self.tier.prefetch(some):
            self.tier.gather(some)
        with self.tier.lend(some) as loan, loan.changing() as rows:
            rows[loan.slots] += 0
        with self.tier.pin(some[:4]):
            self.tier.stats()
        if self.turn % 16 == 0:
            self.tier.checkpoint()
            self.committed = self.low.copy()

    def check(self) -> None:
        rows = np.concatenate([self.tier.gather(np.arange(start, start + 20)) for start in range(0, 200, 20)])
        assert (rows == rows[:, :1]).all(), "a row of two times"
        assert (rows[:, 0] >= self.low).all()
        assert (rows[:, 0] <= self.high).all()
        self.low[:] = self.high[:] = rows[:, 0]
        try:
            self.pin_all()
        except BudgetError:
            for key in range(200):
                while self.unpins(key):  # a pin whose owner the interrupt has kept from it
                    continue
            self.pin_all()

    def pin_all(self) -> None:
        with self.tier.pin(np.arange(40)):
            pass

    def unpins(self, key: int) -> bool:
        try:
            self.tier.unpin([key])
        except ValueError:
            return False
        return True

    def reopen(self) -> None:
        self.tier.close()
        self.open()
        self.low[:] = self.committed
        self.high[:] = np.maximum(self.high, self.committed)
        self.check()
        self.tier.checkpoint()
        self.committed = self.low.copy()

    def close(self) -> None:
        self.tier.close()


class ReplaySystem:
    """A buffer whose samples tell their ids, and how often they were given new values."""

    def __init__(self, place: Path) -> None:
        from memhier.recsys.replay import CarouselBuffer, Field, RandomSwap

        schema = {"x": Field("int64", (64,)), "a": Field("int64", mutable=True), "b": Field("int64", mutable=True)}
        self.place, self.turn, self.added = place, 0, 0
        self.buffer = CarouselBuffer(place, memory=60, schema=schema, swap=RandomSwap(0.5), seed=5, storage=500)
        self.add(300)
        self.buffer.checkpoint()

    def add(self, count: int) -> None:
        ids = np.arange(self.added, self.added + count)
        self.added += count
        zeros = np.zeros(count, np.int64)
        self.buffer.add({"x": ids[:, None] * 1000 + np.arange(64), "a": zeros, "b": zeros}, labels=ids % 5, ids=ids)

    def work(self) -> None:
        self.turn += 1
        batch = self.buffer.sample(16)
        values = batch.ids * 1_000_000 + self.turn
        self.buffer.feedback(batch, update={"a": values, "b": -values})
        self.add(2)
        batch = self.buffer.sample(8)
        values = batch.ids * 1_000_000 + self.turn
        self.buffer.refresh(batch, {"a": values, "b": -values})
        if self.turn % 20 == 0:
            self.buffer.checkpoint()
        if self.turn % 50 == 0:
            self.buffer.hold(batch.ids[:3])

    def check_batch(self, batch: Any) -> None:
        assert (batch["x"] == batch.ids[:, None] * 1000 + np.arange(64)).all(), "another sample's bytes"
        assert (batch.labels == batch.ids % 5).all()
        assert (batch["a"] == -batch["b"]).all(), "values of two times"
        assert ((batch["a"] == 0) | (batch["a"] // 1_000_000 == batch.ids)).all(), "another sample's values"

    def check(self) -> None:
        for _ in range(2):
            batch = self.buffer.sample(60)
            self.check_batch(batch)
            self.buffer.feedback(batch)

    def reopen(self) -> None:
        from memhier.recsys.replay import CarouselBuffer
        from memhier.recsys.replay.stored import StoredSamples

        try:
            self.buffer.checkpoint()
            assert self.buffer.check() == []
        finally:
            self.buffer.close()
            with StoredSamples(self.place) as stored:
                for batch in stored.blocks():
                    self.check_batch(batch)
            self.buffer = CarouselBuffer.open(self.place)
        self.check()

    def close(self) -> None:
        self.buffer.close()


class IndexSystem:
    """An index whose vectors are made from their ids."""

    def __init__(self, place: Path) -> None:
        from memhier.ann import ZoomIndex

        self.place, self.turn = place, 0
        self.index = ZoomIndex.build(place, self.vectors(np.arange(500)), dram="16MiB", grow_to=20_000)

    def vectors(self, ids: Any) -> Any:
        return np.random.default_rng(0).normal(size=(20_000, 8)).astype(np.float32)[ids]

    def work(self) -> None:
        self.turn += 1
        ids = 500 + np.arange(3 * self.turn, 3 * self.turn + 3) % 15_000
        self.index.add(self.vectors(ids), ids=ids)
        self.index.search(self.vectors(ids), 5)
        self.index.remove(ids[:1])
        self.index.update(ids[1:], self.vectors(ids[1:]))
        if self.turn % 30 == 0:
            self.index.commit(compact=False)

    def check(self) -> None:
        ids = np.array([id for id in range(500 + 3 * self.turn + 3) if id < 500 or id % 7 == self.turn % 7])
        known = np.array([id for id in ids.tolist() if id < 500 or id in self.index])
        assert (self.index.reconstruct(known) == self.vectors(known)).all()
        found = self.index.search(self.vectors(known[:20]), 1, recall=1)
        assert (found.ids[:, 0] == known[:20]).all()

    def reopen(self) -> None:
        from memhier.ann import ZoomIndex

        self.index.close()
        self.index = ZoomIndex.open(self.place, writable=True)
        assert self.index.check() == []
        self.check()

    def close(self) -> None:
        self.index.close()


class TableSystem:
    """Tables whose gradients are ones: each row says how often it was trained."""

    def __init__(self, place: Path) -> None:
        self.place, self.turn = place, 0
        self.open(resume=False)

    def open(self, resume: bool) -> None:
        from memhier.recsys import EmbeddingBag
        from memhier.recsys.embedding.initial import Normal
        from memhier.recsys.embedding.optimizers import SGD

        self.bag = EmbeddingBag(
            2000,
            4,
            dram="16MiB",
            path=self.place,
            optimizer=SGD(lr=1.0),
            resume=resume,
            mode="sum",
            initial=Normal(0, 0),
        )

    def work(self) -> None:
        import torch

        from memhier.recsys import lookahead

        self.turn += 1
        rng = np.random.default_rng(self.turn)
        batches = [torch.from_numpy(rng.integers(0, 2000, (16, 3))) for _ in range(3)]
        for batch in lookahead(batches, self.bag, ids=lambda batch: batch):
            self.bag(batch).sum().backward()
        self.bag(batches[0]).sum().backward()
        if self.turn % 10 == 0:
            self.bag.checkpoint({"turn": self.turn})

    def check(self) -> None:
        weights = self.bag.weights(np.arange(2000)).numpy()
        assert (weights == weights[:, :1]).all(), "a row that was trained in part"
        assert (weights == np.round(weights)).all()
        assert weights.sum() <= 0

    def reopen(self) -> None:
        self.bag.checkpoint()
        before = self.bag.weights(np.arange(2000)).numpy()
        self.bag.close()
        self.open(resume=True)
        assert (self.bag.weights(np.arange(2000)).numpy() == before).all()
        self.check()

    def close(self) -> None:
        self.bag.close()


def main() -> None:
    """Interrupt work, once or several times in a row, and check."""
    kind, rounds, seed, place = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    kinds = {"tier": TierSystem, "replay": ReplaySystem, "index": IndexSystem, "tables": TableSystem}
    system: System = kinds[kind](place)
    seen: Counter[str] = Counter()
    rng = random.Random(seed)
    fired = most = 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal fired
        if fired < most:
            fired += 1
            raise KeyboardInterrupt

    def strike() -> None:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0001, LONGEST_S), 0.0005 if most > 1 else 0)
        while not fired:
            system.work()

    signal.signal(signal.SIGALRM, interrupt)
    for number in range(rounds):
        fired, most = 0, 2 if number % 5 == 4 else 1
        was_raised = False
        try:
            try:
                strike()
            except KeyboardInterrupt:
                was_raised = True
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:  # the second one
            was_raised = True
        fired = most
        signal.setitimer(signal.ITIMER_REAL, 0)
        seen["interrupts" if was_raised else "vanished"] += 1
        try:
            system.check()
            if number % 10 == 9:
                system.reopen()
        except MemhierError as error:
            print(f"round {number}: {error!r}", file=sys.stderr)
            seen["refused"] += 1
            system.reopen()
        seen["rounds"] += 1
    system.close()
    print(*(f"{name}={count}" for name, count in sorted(seen.items())))


if __name__ == "__main__":
    main()
