"""Embedding tables at the edges of numbers, of files, and of the interpreter's life."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from memhier.errors import FormatError
from memhier.recsys import SGD, EmbeddingBag, Uniform, read_lightgcn, read_movielens

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()


@pytest.mark.parametrize(
    ("low", "high"), [(2.0**20, 2.0**20 + 1), (-1.0, 0.1), (-(2.0**20) - 1, -(2.0**20)), (0, 1e-45)]
)
def test_uniform_values_stay_below_the_upper_bound(low: float, high: float) -> None:
    values = Uniform(low, high).weights(0, 0, np.arange(100), 50, 100)
    assert values.min() >= np.float32(low)
    assert values.max() < high


@pytest.mark.parametrize(("low", "high"), [(1, 1 + 1e-12), (2, 1), (-3e38, 3e38), (0, float("inf")), (float("nan"), 1)])
def test_bounds_that_float32_cannot_fill_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="low="):
        Uniform(low, high)


def test_gradients_add_up_in_a_table_of_more_numbers_than_fit_64_bits(tmp_path: Path) -> None:
    rows = 2**62
    with EmbeddingBag(
        rows, 4, mode="sum", dram="64MiB", path=tmp_path, touched=100, update="step", optimizer=SGD(lr=1.0)
    ) as bag:
        before = bag.weights([0, 5, rows - 1])
        bag(torch.tensor([[rows - 1, 5]])).sum().backward()
        bag(torch.tensor([[5, 0]])).sum().backward()
        assert float(bag.gradient_norm()) == pytest.approx((4 * (1 + 4 + 1)) ** 0.5)
        bag.optimizer.step()
        moved = torch.tensor([[1.0], [2.0], [1.0]])
        torch.testing.assert_close(bag.weights([0, 5, rows - 1]), before - moved)


def test_ids_without_a_bag_are_refused(tmp_path: Path) -> None:
    none = torch.tensor([], dtype=torch.int64)
    with EmbeddingBag(10, 3, mode="sum", dram="64MiB", path=tmp_path) as bag:
        with pytest.raises(ValueError, match="offsets: expected the beginnings of bags, got none for the 2 ids"):
            bag(torch.tensor([1, 2]), none)
        assert bag(none, none).shape == (0, 3)


def test_numbers_beyond_64_bits_are_named_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(f"0 5\n1 {'9' * 30}\n")
    with pytest.raises(FormatError, match=r"train\.txt: line 2: 9{30}: expected a number of 64 bits"):
        list(read_lightgcn(tmp_path / "train.txt"))
    (tmp_path / "ratings.csv").write_text(f"userId,movieId,rating,timestamp\n1,31,2.5,9\n2,{'9' * 30},4,9\n")
    with pytest.raises(FormatError, match=r"ratings\.csv: line 3: 9{30}: expected a number of 64 bits"):
        list(read_movielens(tmp_path / "ratings.csv"))
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,31,2.5,9\n2,7,much,9\n")
    with pytest.raises(FormatError, match=r"ratings\.csv: line 3: .*much"):
        list(read_movielens(tmp_path / "ratings.csv"))


@pytest.mark.long
def test_an_epoch_that_outlives_its_table_ends_in_silence(tmp_path: Path) -> None:
    script = f"""
import torch
from memhier.recsys import EmbeddingBag, lookahead
bag = EmbeddingBag(100, 3, mode="sum", dram="64MiB", path={str(tmp_path)!r})
epoch = iter(lookahead([torch.zeros(2, 2, dtype=torch.int64)] * 30, bag, ids=lambda batch: batch, window=3))
bag(next(epoch)).sum().backward()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=800, check=True)
    assert ended.stderr == ""
