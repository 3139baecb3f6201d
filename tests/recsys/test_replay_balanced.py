"""Balanced batches: equal shares of labels, samples of a label equally likely, and weights that undo it."""

from pathlib import Path

import numpy as np
import pytest

from memhier.recsys.replay import CarouselBuffer

LABELS = np.repeat([3, 8, 9, 20], [50, 30, 19, 1])


def filled(place: Path, seed: int = 0) -> CarouselBuffer:
    buffer = CarouselBuffer(place, memory=100, schema={"x": "int64"}, seed=seed)
    buffer.add({"x": np.arange(100)}, labels=LABELS)
    return buffer


@pytest.mark.parametrize("n", [0, 1, 3, 4, 10, 47, 400])
def test_labels_have_equal_shares(tmp_path: Path, n: int) -> None:
    with filled(tmp_path / "b") as buffer:
        for _ in range(5):
            batch = buffer.sample(n, balanced=True)
            assert len(batch) == n
            assert np.array_equal(batch.labels, LABELS[batch["x"]])
            shares = np.array([np.count_nonzero(batch.labels == label) for label in (3, 8, 9, 20)])
            assert shares.max() - shares.min() <= 1
            for label, share in zip((3, 8, 9, 20), shares.tolist(), strict=True):
                times = np.unique(batch["x"][batch.labels == label], return_counts=True)[1]
                size = np.count_nonzero(label == LABELS)
                assert len(times) == min(size, share)
                assert times.max(initial=0) - times.min(initial=0 if share < size else share) <= 1
            sizes = np.array([np.count_nonzero(label == LABELS) for label in batch.labels])
            assert batch.weights is not None
            assert np.array_equal(batch.weights, 4 * sizes / 100)


def test_weights_give_the_mean_of_memory(tmp_path: Path) -> None:
    """Every sample comes as often as the inverse of its weight says: chi-square within labels, and the mean."""
    drawn, total = np.zeros(100), 0.0
    with filled(tmp_path / "b", seed=5) as buffer:
        for _ in range(4000):
            batch = buffer.sample(6, balanced=True)
            np.add.at(drawn, batch["x"], 1)
            total += float((batch.weights * batch["x"]).sum())
    assert total / 24_000 == pytest.approx(49.5, abs=0.8)
    for label in (3, 8, 9):
        found = drawn[label == LABELS]
        expected = found.mean()
        assert ((found - expected) ** 2 / expected).sum() < len(found) + 4 * np.sqrt(2 * len(found))
    assert drawn[-1] == pytest.approx(6000, abs=200)


def test_a_resumed_run_draws_the_same(tmp_path: Path) -> None:
    with filled(tmp_path / "b") as buffer:
        buffer.feedback(buffer.sample(5, balanced=True))
        buffer.checkpoint()
        expected = [buffer.sample(9, balanced=True) for _ in range(3)]
    with CarouselBuffer.open(tmp_path / "b") as buffer:
        for batch in expected:
            assert np.array_equal(buffer.sample(9, balanced=True).slots, batch.slots)
        out = buffer.empty(20)
        some = buffer.sample(9, out, balanced=True)
        assert len(some) == 9
        assert np.shares_memory(some["x"], out["x"])
        assert buffer.sample(9, some).weights is None


def test_samples_without_labels_and_an_empty_buffer(tmp_path: Path) -> None:
    with CarouselBuffer(tmp_path / "b", memory=4, schema={"x": "int64"}) as buffer:
        assert len(buffer.sample(3, balanced=True)) == 0
        buffer.add({"x": np.arange(4)})
        with pytest.raises(ValueError, match="have no labels"):
            buffer.sample(3, balanced=True)
