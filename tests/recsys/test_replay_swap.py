"""Swap policies by their definitions: which samples leave first, and how many."""

from pathlib import Path

import numpy as np
import pytest

from memhier.recsys.replay import (
    AgeSwap,
    CarouselBuffer,
    DeckSwap,
    FixedRatio,
    GateSwap,
    LossSwap,
    RandomSwap,
    SteeredRatio,
    Used,
)
from memhier.recsys.replay.policies import gate_scores, swap_policy, swaps


def used(labels: list[int], scores: np.ndarray | None = None, swapped: list[int] | None = None) -> Used:
    marks = np.array(labels, np.int64)
    return Used(marks, marks, np.array(swapped or [-1] * len(labels), np.int64), scores)


def test_the_gate_orders_from_known_to_confidently_wrong() -> None:
    logits = np.array([[9.0, 0, 0], [1.0, 0.5, 0.4], [0.4, 0.5, 0.4], [0, 9.0, 0]])
    scores = gate_scores(logits, np.zeros(4, np.int64))
    assert (np.diff(scores) > 0).all()
    assert 0 <= scores[0] < 0.1
    assert scores[1] < 0.5 < scores[2]
    assert 0.9 < scores[3] <= 1
    probabilities = np.exp(logits[2]) / np.exp(logits[2]).sum()
    entropy = -(probabilities * np.log(probabilities)).sum()
    assert scores[2] == pytest.approx(1 - 0.5 * entropy / np.log(3))
    # Logits of any size.
    assert np.isfinite(gate_scores(np.array([[1e4, -1e4]]), np.array([1]))).all()


def test_the_gate_takes_each_class_its_share() -> None:
    random = np.random.default_rng(0)
    labels = [0] * 6 + [1] * 4 + [2] * 1
    logits = random.normal(size=(11, 3))
    policy = GateSwap(0.5)
    scores = gate_scores(logits, np.array(labels))
    for seed in range(20):
        chosen = policy.victims(used(labels, logits), 6, np.random.default_rng(seed))
        assert len(set(chosen.tolist())) == 6
        counts = np.bincount(np.array(labels)[chosen], minlength=3)
        # 6/11 of each, rounded down, is 3, 2 and 0: one more is anybody's.
        assert (counts >= [3, 2, 0]).all()
        for label, count in enumerate(counts.tolist()):
            of_class = [index for index in range(11) if labels[index] == label]
            easiest = sorted(of_class, key=lambda index: scores[index])[:count]
            assert set(easiest) <= set(chosen.tolist())


def test_loss_and_age() -> None:
    random = np.random.default_rng(0)
    losses = np.array([3.0, 1.0, 2.0, 0.5])
    assert LossSwap(1.0).victims(used([0] * 4, losses), 2, random).tolist() == [3, 1]
    assert set(AgeSwap(1.0).victims(used([0] * 4, None, [5, -1, 7, 2]), 2, random).tolist()) == {1, 3}


@pytest.mark.parametrize(("share", "count", "expected"), [
    (0.1, 30, 3), (0.2, 32, 7), (0.5, 5, 3), (1.0, 7, 7), (0.0, 9, 0), (0.7, 0, 0),
])  # fmt: skip
def test_ratios_round_up(share: float, count: int, expected: int) -> None:
    assert swaps(FixedRatio(share), count) == expected


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), "1", True])
def test_unfit_ratios_are_refused(share: object) -> None:
    with pytest.raises((ValueError, TypeError), match=r"ratio=.*: expected a number"):
        FixedRatio(share)  # type: ignore[arg-type]


def test_policies_by_name() -> None:
    for name in ("random", "deck", "gate", "loss", "age"):
        policy = swap_policy(name)
        assert policy is not None
        assert (policy.name, policy.ratio.share()) == (name, 0.5)
    own = RandomSwap(SteeredRatio(0.3))
    assert swap_policy(own) is own
    assert swap_policy(None) is None


@pytest.mark.parametrize("admit", ["reservoir", "class_balanced"])
def test_a_deck_goes_on_where_samples_came_while_it_dealt(tmp_path: Path, admit: str) -> None:
    drawn: list[list[list[int]]] = []
    for name in ("whole", "resumed"):
        place, random = tmp_path / name, np.random.default_rng(8)
        buffer = CarouselBuffer(place, memory=12, schema={"x": "int64"}, admit=admit, swap=DeckSwap(0.5), seed=5)
        drawn.append([])
        for step in range(40):
            ids = np.arange(4 * step, 4 * step + 4)
            buffer.add({"x": ids}, labels=random.integers(0, 3, 4))
            batch = buffer.sample(6)
            assert (batch["x"] == batch.ids).all()
            buffer.feedback(batch)
            drawn[-1].append(batch.ids.tolist())
            if name == "resumed" and step % 13 == 7:
                buffer.checkpoint()
                buffer.close()
                buffer = CarouselBuffer.open(place)
        buffer.close()
    assert drawn[0] == drawn[1]
