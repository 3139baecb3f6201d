"""Storage is a uniform sample of the stream, memory a uniform sample of storage, at all times: chi-square tests.

In one run each id is held or not, and as many are held as there is room for, so counts over many runs have
hypergeometric variance: the statistic is scaled by it. Each fails by chance once in 100,000; the seeds are fixed.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memhier.recsys.replay import AgeSwap, DeckSwap, RandomSwap, Schema, SwapPolicy
from memhier.recsys.replay.ahead import BatchQueue
from memhier.recsys.replay.division import Buffers
from memhier.recsys.replay.placement.memory import Memory
from memhier.recsys.replay.placement.named import admission
from memhier.recsys.replay.placement.placement import Placement
from memhier.recsys.replay.settings import BufferSettings
from memhier.recsys.replay.streams import Purpose, Uniforms
from memhier.recsys.replay.swapper import Swapper

RUNS = 400
STREAM = 24
# chi-square above which one run in 100,000 lies, by degrees of freedom (Wilson and Hilferty, 1931).
Z = 4.265


SCHEMA = Schema({"x": "int64"})


class DictStorage:
    """Stands in for `Storage`; reads at once, in the swapper's thread."""

    def __init__(self) -> None:
        self.samples: dict[int, int] = {}
        self.buffers = Buffers()
        self.together = 1024

    def begin_read(self, positions: Any, out: Any, flushes: bool = True) -> None:
        """Leave it to `read_settled`."""

    def append(self, positions: np.ndarray, columns: dict[str, np.ndarray]) -> None:
        self.samples.update(zip(positions.tolist(), columns["x"].tolist(), strict=True))

    def settle(self, positions: np.ndarray) -> None:
        """Have no samples that wait."""

    def read_settled(self, positions: np.ndarray, out: dict[str, np.ndarray]) -> None:
        out["x"][:] = [self.samples[position] for position in positions.tolist()]

    def round_trip(self, columns: Any) -> Any:
        return columns


class Rehearsal:
    """The calls of `CarouselBuffer` that decide on positions and slots."""

    def __init__(
        self, seed: int, slots: int, limit: int | None, admit: str, policy: SwapPolicy | None, delay: int,
        labelled: bool = False,
    ) -> None:  # fmt: skip
        settings = BufferSettings(SCHEMA, {}, admission(admit), policy, seed, delay, labelled)
        storage: Any = DictStorage()
        self.admission = settings.admission
        self.placement = Placement(seed, slots, limit, settings.by_class)
        self.memory = Memory.make(SCHEMA, slots)
        ahead = BatchQueue(settings.encoding, self.placement)
        self.swapper = Swapper(settings, storage, self.placement, self.memory, ahead)
        self.draws = Uniforms(seed, Purpose.SAMPLE)

    def add(self, ids: np.ndarray, labels: np.ndarray | None = None) -> None:
        marks = np.full(len(ids), -1, np.int64) if labels is None else labels
        decisions = self.admission.admit(self.placement, marks, ids, marks)
        self.swapper.take_in(decisions, {"x": ids}, marks, ids)

    def draw(self, n: int) -> np.ndarray:
        count = self.placement.count
        return self.placement.order[self.draws.distinct(min(n, count), count)]

    def end_step(self, slots: np.ndarray) -> None:
        self.swapper.end_step(slots, self.memory.ids[slots], None)

    def in_memory(self) -> np.ndarray:
        """Return the ids that memory holds."""
        occupied = self.placement.occupied()
        ids = self.memory.ids[occupied]
        assert (self.memory.views["x"][occupied] == ids).all()
        return ids

    def in_storage(self) -> np.ndarray:
        """Return the ids that storage holds."""
        return self.placement.members.ids

    def close(self) -> None:
        self.swapper.close()
        self.memory.close()


def limit(freedom: int) -> float:
    return freedom * (1 - 2 / (9 * freedom) + Z * (2 / (9 * freedom)) ** 0.5) ** 3


def assert_uniform(held: np.ndarray, name: str) -> None:
    """Assert that ids are equally often held; `held` is bool [runs, ids], with as many True in every run."""
    runs, ids = held.shape
    each = int(held[0].sum())
    assert (held.sum(axis=1) == each).all(), name
    if each == ids:
        return
    expected = runs * each / ids
    statistic = ((held.sum(axis=0) - expected) ** 2 / expected).sum() * (ids - 1) / (ids - each)
    assert statistic < limit(ids - 1), f"{name}: {statistic:.1f}, {held.sum(axis=0)}"


def run(
    policy: SwapPolicy | None, seed: int, slots: int, storage: int | None, admit: str, delay: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the ids in memory and in storage after each of some moments of a training run."""
    rehearsal = Rehearsal(seed, slots, storage, admit, policy, delay)
    memory, stored = [], []
    came = 0

    def note() -> None:
        memory.append(np.isin(np.arange(came), rehearsal.in_memory()))
        stored.append(np.isin(np.arange(came), rehearsal.in_storage()))

    def add(count: int) -> None:
        nonlocal came
        rehearsal.add(np.arange(came, came + count))
        came += count
        note()

    add(9)
    for count in (3, 1, 0, 5, 2, 0, 4):
        used = rehearsal.draw(3)
        # Between sampling and the end of the step, and after it.
        add(count // 2)
        rehearsal.end_step(used)
        note()
        add(count - count // 2)
    rehearsal.close()
    assert came == STREAM
    return memory, stored


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "storage", "admit", "delay"),
    [
        (lambda: RandomSwap(0.7), None, "reservoir", 1),
        (lambda: RandomSwap(1.0), 11, "reservoir", 2),
        (lambda: AgeSwap(0.7), None, "everything", 1),
        (lambda: RandomSwap(0.7), 11, "ring", 0),
        (lambda: None, 11, "reservoir", 1),
        (lambda: DeckSwap(0.7), None, "reservoir", 1),
        (lambda: DeckSwap(1.0), 11, "reservoir", 2),
    ],
    ids=["random", "random, little storage", "age", "ring", "no swaps", "deck", "deck, little storage"],
)
def test_every_sample_is_equally_likely_everywhere(
    policy: Callable[[], SwapPolicy | None], storage: int | None, admit: str, delay: int
) -> None:
    runs = [run(policy(), seed, 6, storage, admit, delay) for seed in range(RUNS)]
    for moment in range(len(runs[0][0])):
        memory = np.stack([memory[moment] for memory, _ in runs])
        stored = np.stack([stored[moment] for _, stored in runs])
        assert not (memory & ~stored).any()
        if admit == "ring":
            # The newest, all of them equally likely in memory.
            assert (stored == stored[0]).all()
            assert stored[0, -storage:].all()
            memory = memory[:, stored[0]]
        else:
            assert_uniform(stored, f"storage at moment {moment}")
        assert_uniform(memory, f"memory at moment {moment}")


def test_a_deck_keeps_memory_uniform_and_brings_all_in_once() -> None:
    held = np.zeros((RUNS, 20), np.bool_)
    for seed in range(RUNS):
        rehearsal = Rehearsal(seed, 5, None, "reservoir", DeckSwap(1.0), delay=1)
        rehearsal.add(np.arange(20))
        came: list[int] = []
        while len(came) < 10:
            before = rehearsal.in_memory()
            rehearsal.end_step(rehearsal.draw(2))
            came.extend(np.setdiff1d(rehearsal.in_memory(), before).tolist())
        assert len(set(came)) == len(came)
        held[seed, rehearsal.in_memory()] = True
        rehearsal.close()
    assert_uniform(held, "deck")


@pytest.mark.parametrize("storage", [None, 14], ids=["all stored", "little storage"])
def test_every_sample_is_equally_likely_within_its_class(storage: int | None) -> None:
    # Classes come one after the other, the last one with few samples.
    labels = np.array([0] * 9 + [1] * 8 + [0] * 3 + [2] * 6 + [1] * 4 + [3] * 2)
    memory, stored = (np.zeros((RUNS, len(labels)), np.bool_) for _ in range(2))
    for seed in range(RUNS):
        rehearsal = Rehearsal(seed, 8, storage, "class_balanced", RandomSwap(0.6), delay=1, labelled=True)
        for start in range(0, len(labels), 4):
            some = slice(start, start + 4)
            rehearsal.add(np.arange(len(labels))[some], labels[some])
            used = rehearsal.draw(3)
            rehearsal.end_step(used)
        memory[seed, rehearsal.in_memory()] = True
        stored[seed, rehearsal.in_storage()] = True
        rehearsal.close()
    assert not (memory & ~stored).any()
    for label in range(4):
        of_class = labels == label
        if storage is None:
            assert memory[:, of_class].sum(axis=1).tolist() == [2] * RUNS
        else:
            assert set(stored[:, of_class].sum(axis=1).tolist()) <= ({2} if label == 3 else {4})
            assert_uniform(stored[:, of_class], f"class {label} in storage")
        for count in set(memory[:, of_class].sum(axis=1).tolist()):
            those = memory[memory[:, of_class].sum(axis=1) == count][:, of_class]
            assert_uniform(those, f"class {label}, {count} in memory")


def test_the_statistic_tells_a_biased_reservoir() -> None:
    """Drawing below the number seen before, as CarM's code does, keeps new samples too often."""
    runs = 10 * RUNS
    held = np.zeros((runs, STREAM), np.bool_)
    for seed in range(runs):
        random = np.random.default_rng(seed)
        slots = list(range(6))
        for id in range(6, STREAM):
            slot = int(random.integers(id))
            if slot < 6:
                slots[slot] = id
        held[seed, slots] = True
    with pytest.raises(AssertionError, match="biased"):
        assert_uniform(held, "biased")


@pytest.mark.parametrize(("n", "count"), [(1, 1), (3, 20), (9, 20), (11, 20), (20, 20), (0, 5)])
def test_batches_hold_distinct_slots_all_equally_likely(n: int, count: int) -> None:
    draws = Uniforms(7, Purpose.SAMPLE)
    held = np.zeros((4000, count), np.bool_)
    for run in range(len(held)):
        drawn = draws.distinct(n, count)
        assert len(set(drawn.tolist())) == len(drawn) == n
        held[run, drawn] = True
    if n:
        assert_uniform(held, "batches")


def test_uniforms_are_the_same_from_any_place_on() -> None:
    one, other = Uniforms(3, Purpose.ADMIT), Uniforms(3, Purpose.ADMIT)
    taken = np.concatenate([one.take(size) for size in (1, 3, 97, 4096, 0, 5000)])
    assert np.array_equal(taken, other.at(0, len(taken)))
    assert np.array_equal(taken[4000:4200], other.at(4000, 200))
    assert not np.isin(taken, Uniforms(3, Purpose.SAMPLE).take(len(taken))).any()
    assert not np.isin(taken, Uniforms(4, Purpose.ADMIT).take(len(taken))).any()
