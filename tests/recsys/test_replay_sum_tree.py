"""The sum tree: its nodes are those of its leaves, its draws have their distribution, and both cores agree."""

from typing import Any

import numpy as np
import pytest

from memhier.recsys.replay.transitions import SumTree, python_sum_tree

SIZES = (1, 2, 15, 16, 17, 255, 256, 257, 5000)


class Levels:
    """The arrays of a tree, for the calls of the Python core."""

    def __init__(self, leaves: int) -> None:
        padded = -(-leaves // 16) * 16
        nodes = python_sum_tree.level_starts(padded)[-1]
        self.arrays: dict[str, Any] = {
            "leaves": np.zeros(padded, np.float32),
            "sums": np.zeros(nodes),
            "least": np.full(nodes, np.inf, np.float32),
        }

    def set(self, places: Any, values: Any) -> None:
        python_sum_tree.set_leaves(**self.arrays, places=places, values=values)

    def draw(self, uniforms: Any, taking: bool) -> Any:
        places = np.empty(len(uniforms), np.int64)
        python_sum_tree.draw_leaves(**self.arrays, uniforms=uniforms, places=places, taking=taking)
        return places


def changes(leaves: int, seed: int) -> tuple[Any, Any]:
    """Places that repeat, values over many magnitudes, a third of them zero."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 80))
    values = (10.0 ** rng.uniform(-20, 20, count) * (rng.random(count) > 0.3)).astype(np.float32)
    return rng.integers(0, leaves, count), values


@pytest.mark.parametrize("leaves", SIZES)
def test_both_cores_agree_bit_for_bit(leaves: int) -> None:
    tree, twin = SumTree(leaves), Levels(leaves)
    rng = np.random.default_rng(leaves)
    for turn in range(30):
        places, values = changes(leaves, turn)
        tree.set(places, values)
        twin.set(places, values)
        assert (tree.leaves == twin.arrays["leaves"][:leaves]).all()
        uniforms = np.concatenate([rng.random(40), [0.0, np.nextafter(1, 0)]])
        taking = turn % 5 == 4
        found = tree.take(uniforms) if taking else tree.draw(uniforms)
        assert (found == twin.draw(uniforms, taking)).all()
        assert tree.total == twin.arrays["sums"][python_sum_tree.level_starts(-(-leaves // 16) * 16)[-2]]


@pytest.mark.parametrize("leaves", SIZES)
def test_total_and_least_are_those_of_the_leaves(leaves: int) -> None:
    tree, plain = SumTree(leaves), np.zeros(leaves, np.float32)
    for turn in range(20):
        places, values = changes(leaves, turn)
        tree.set(places, values)
        for place, value in zip(places.tolist(), values, strict=True):
            plain[place] = value
        assert (tree.leaves == plain).all()
        assert np.isclose(tree.total, plain.sum(dtype=np.float64), rtol=1e-12, atol=0)
        assert tree.least == (plain[plain > 0].min() if (plain > 0).any() else np.inf)


def test_a_tree_does_not_remember_how_it_came_about() -> None:
    rng = np.random.default_rng(5)
    values = rng.random(300).astype(np.float32)
    once, often = SumTree(300), SumTree(300)
    for _ in range(50):
        often.set(rng.integers(0, 300, 40), rng.random(40) * 1e9)
    often.set(np.arange(300), values)
    once.set(np.arange(300), values)
    assert often.total == once.total


@pytest.mark.parametrize("leaves", [7, 300])
def test_draws_have_the_distribution_of_the_leaves(leaves: int) -> None:
    rng = np.random.default_rng(leaves)
    weights = (rng.random(leaves) ** 3 * (rng.random(leaves) > 0.2)).astype(np.float32)
    tree = SumTree(leaves)
    tree.set(np.arange(leaves), weights)
    draws = 200_000
    counts = np.bincount(tree.draw(rng.random(draws)), minlength=leaves)
    assert (counts[weights == 0] == 0).all()
    expected = draws * weights.astype(np.float64) / weights.sum(dtype=np.float64)
    kept = expected > 5
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


def test_no_number_falls_on_a_zero() -> None:
    tree = SumTree(64)
    tree.set([0, 17, 63], [1e-30, 1e30, 1e-30])
    edges = np.concatenate([[0.0, np.nextafter(1, 0)], np.linspace(0, 1, 1000, endpoint=False)])
    assert set(tree.draw(edges).tolist()) <= {0, 17, 63}


def test_take_gives_each_once_and_then_none() -> None:
    tree = SumTree(100)
    tree.set(np.arange(100), np.ones(100))
    taken = tree.take(np.random.default_rng(0).random(103))
    assert sorted(taken[:100].tolist()) == list(range(100))
    assert taken[100:].tolist() == [-1, -1, -1]
    assert tree.draw([0.5]).tolist() == [-1]


@pytest.mark.parametrize(
    ("places", "values", "said"),
    [
        ([100], [1.0], r"places\[0\]=100: expected 0 to 99"),
        ([3, -1], [1.0, 1.0], r"places\[1\]=-1"),
        ([3], [-1.0], r"values\[0\]=-1.0: expected a finite number"),
        ([3], [np.inf], r"values\[0\]=inf"),
        ([3, 4], [1.0, np.nan], r"values\[1\]=nan"),
        ([3], [1.0, 2.0], "expected one for each"),
    ],
)
def test_unfit_changes_change_nothing(places: Any, values: Any, said: str) -> None:
    tree = SumTree(100)
    tree.set([3], [5.0])
    with pytest.raises(ValueError, match=said):
        tree.set(places, values)
    assert tree.total == 5


@pytest.mark.parametrize("uniforms", [[1.0], [-0.1], [np.nan]])
def test_unfit_numbers_draw_nothing(uniforms: Any) -> None:
    tree = SumTree(100)
    tree.set([3], [5.0])
    with pytest.raises(ValueError, match="from 0 to below 1"):
        tree.draw(uniforms)


def test_memory_is_what_it_says() -> None:
    for leaves in (1, 16, 1000, 100_000):
        assert SumTree(leaves).memory_bytes == SumTree.bytes_for(leaves)
    assert SumTree.bytes_for(1_000_000) < 4.81e6
