"""Swaps that need not keep classes bring in every class in turn, and memory stays uniform."""

from pathlib import Path

import numpy as np
import pytest

from memhier.recsys.replay import CarouselBuffer, ClassBalanced

SCHEMA = {"x": "int32"}


def sample_of(count: int) -> dict[str, np.ndarray]:
    return {"x": np.arange(count, dtype=np.int32)}


@pytest.mark.parametrize(("swap", "seed"), [("random", 0), ("random", 1), ("deck", 0), ("age", 0)])
def test_the_default_replays_every_class(tmp_path: Path, swap: str, seed: int) -> None:
    classes = 1000
    with CarouselBuffer(tmp_path / "b", memory=100, schema=SCHEMA, swap=swap, seed=seed) as buffer:
        buffer.add(sample_of(4 * classes), labels=np.arange(4 * classes) % classes)
        begun = len(set(buffer.sample(100).labels.tolist()))
        replayed: set[int] = set()
        for _ in range(400):
            batch = buffer.sample(32)
            replayed |= set(batch.labels.tolist())
            buffer.feedback(batch)
        # 6,400 of 4,000 samples came in, of four to a class: one class in 600 is expected to be left out.
        assert len(replayed) > 0.98 * classes > begun


@pytest.mark.parametrize("swap", ["random", "deck"])
def test_class_balanced_replays_every_class_where_slots_are_fewer(tmp_path: Path, swap: str) -> None:
    classes, memory = 400, 40
    counts = np.zeros(classes, np.int64)
    with CarouselBuffer(tmp_path / "b", memory=memory, schema=SCHEMA, admit="class_balanced", swap=swap) as buffer:
        labels = np.repeat(np.arange(classes), 1 + np.arange(classes) % 7)  # of very different sizes
        buffer.add(sample_of(len(labels)), labels=labels)
        for number in range(600):
            batch = buffer.sample(memory)
            assert len(set(batch.labels.tolist())) == memory
            if number % 6 == 0:
                counts[batch.labels] += 1
            buffer.feedback(batch)
            if number == 300:
                buffer.checkpoint()
    assert counts.min() > 0
    assert statistic(counts, memory) < classes - 1 + 6 * np.sqrt(2 * (classes - 1))
    with CarouselBuffer.open(tmp_path / "b") as buffer:
        before = set(buffer.sample(memory).labels.tolist())
        for _ in range(20):
            buffer.feedback(buffer.sample(memory))
        assert len(before & set(buffer.sample(memory).labels.tolist())) < memory // 2


def statistic(counts: np.ndarray, drawn: int) -> float:
    """Return chi-square of how often each of n was among the `drawn`, corrected for drawing without replacement."""
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2).sum() / expected / (1 - drawn / len(counts)))


@pytest.mark.parametrize(("admit", "swap"), [("reservoir", "random"), ("ring", "age")])
def test_the_default_is_uniform_at_every_time(tmp_path: Path, swap: str, admit: str) -> None:
    samples, memory, seeds = 60, 12, 60
    counts = np.zeros((4, samples), np.int64)  # after 3, 6, 9 and 12 steps
    for seed in range(seeds):
        with CarouselBuffer(tmp_path / f"{seed}", memory=memory, schema=SCHEMA, admit=admit, swap=swap, seed=seed) as b:
            for moment in range(4):
                first = moment * samples // 4
                ids = np.arange(first, first + samples // 4)
                # Classes that come one after another, of very different sizes.
                b.add(sample_of(len(ids)), labels=np.minimum(9, (ids // 2) ** 2 // 40), ids=ids)
                for _ in range(3):
                    b.feedback(b.sample(5))
                counts[moment, b.sample(memory).ids] += 1
    for moment in range(4):
        there = (moment + 1) * samples // 4
        assert counts[moment, there:].sum() == 0
        # Chi-square with there - 1 degrees of freedom: six standard deviations above its mean.
        assert statistic(counts[moment, :there], memory) < there - 1 + 6 * np.sqrt(2 * (there - 1))


def test_the_default_is_uniform_over_time(tmp_path: Path) -> None:
    samples, memory = 50, 10
    with CarouselBuffer(tmp_path / "b", memory=memory, schema=SCHEMA, seed=7) as buffer:
        buffer.add(sample_of(samples), labels=np.arange(samples) // 5)
        counts = np.zeros(samples, np.int64)
        for _ in range(150):
            for _ in range(6):  # nearly all of memory has been swapped between two looks
                buffer.feedback(buffer.sample(memory))
            counts[buffer.sample(memory).ids] += 1
    assert statistic(counts, memory) < samples - 1 + 6 * np.sqrt(2 * (samples - 1))


def test_classes_are_kept_where_that_is_asked_for(tmp_path: Path) -> None:
    for place, options in [("a", {"same_class": True}), ("b", {"admit": "class_balanced"})]:
        with CarouselBuffer(tmp_path / place, memory=20, schema=SCHEMA, seed=1, **options) as buffer:  # type: ignore[arg-type]
            buffer.add(sample_of(200), labels=np.arange(200) % 8)
            before = np.sort(buffer.sample(20).labels)
            for _ in range(30):
                buffer.feedback(buffer.sample(10))
            assert buffer.stats()["swapped"] > 100
            assert np.sort(buffer.sample(20).labels).tolist() == before.tolist()


@pytest.mark.parametrize("labelled", [True, False])
def test_all_samples_have_labels_or_none(tmp_path: Path, labelled: bool) -> None:
    with CarouselBuffer(tmp_path / "b", memory=5, schema=SCHEMA) as buffer:
        buffer.add(sample_of(4), labels=range(4) if labelled else None)
        with pytest.raises(ValueError, match="labels"):
            buffer.add(sample_of(4), labels=None if labelled else range(4))
        buffer.checkpoint()
    with CarouselBuffer.open(tmp_path / "b") as buffer, pytest.raises(ValueError, match="labels"):
        buffer.add(sample_of(4), labels=None if labelled else range(4))


def test_a_mixed_buffer_goes_on_class_balanced(tmp_path: Path) -> None:
    with CarouselBuffer(tmp_path / "b", memory=12, storage=40, schema=SCHEMA, seed=2) as buffer:
        buffer.add(sample_of(300), labels=np.arange(300) % 100 // 33)
        for _ in range(5):
            buffer.feedback(buffer.sample(6))
        buffer.checkpoint()
    for _ in range(2):  # and is opened as such
        with CarouselBuffer.open(tmp_path / "b", admit=ClassBalanced()) as buffer:
            buffer.add(sample_of(100), labels=np.arange(100) % 4)
            for _ in range(10):
                buffer.feedback(buffer.sample(12))
            stored = buffer.forget(lambda ids, labels: np.zeros(len(ids), np.bool_))
            assert stored["samples"] == 0
            assert buffer.stats()["storage_samples"] == 40
            buffer.checkpoint()
    filled = CarouselBuffer(tmp_path / "c", memory=12, schema=SCHEMA)
    filled.add(sample_of(9))
    filled.checkpoint()
    filled.close()
    with pytest.raises(ValueError, match="have no labels"):
        CarouselBuffer.open(tmp_path / "c", admit=ClassBalanced())
