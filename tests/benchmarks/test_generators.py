"""Made vectors: the same whatever the blocks, of mixed difficulty, and queries that are no rows."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier.benchmarks import generators
from memhier.benchmarks.exact import exact_neighbours
from memhier.benchmarks.generators import mixed


@settings(max_examples=15, deadline=None)
@given(n=st.sampled_from([0, 1, 3, 97, 65_536, 65_537, 70_001]), rows=st.sampled_from([1, 97, 65_536, 10**6]))
def test_blocks_do_not_change_rows(n: int, rows: int) -> None:
    data = mixed(n, 3, seed=5, clusters=9)
    whole = data.array()
    rows = max(rows, n // 50 + 1)
    sizes, at = [], 0
    for block in data.blocks(rows):
        assert block.dtype == np.float32
        assert np.array_equal(block, whole[at : at + len(block)])
        at += len(block)
        sizes.append(len(block))
    assert at == n
    assert sizes[:-1] == [rows] * max(0, len(sizes) - 1)


def test_a_longer_set_begins_with_the_shorter() -> None:
    assert np.array_equal(mixed(66_000, 4, 1, clusters=5).array()[:97], mixed(97, 4, 1, clusters=5).array())


def test_seeds_differ_and_queries_are_held_out() -> None:
    data = mixed(3000, 16, seed=1)
    assert not np.array_equal(data.array(), mixed(3000, 16, seed=2).array())
    queries = data.queries(200)
    assert np.array_equal(queries[:3], data.queries(3))
    assert exact_neighbours(data.array(), queries, 1)[1].min() > 0
    assert data.queries(0).shape == (0, 16)


def test_difficulty_is_mixed() -> None:
    data = mixed(20_000, 128, seed=0)
    ranks = np.array([len(basis) for basis in data.bases])
    assert ranks.min() <= 6
    assert 48 <= ranks.max() <= 64
    assert data.scales.max() / data.scales.min() > 5
    base, queries = data.array(), data.queries(200)
    near = np.sqrt(exact_neighbours(base, queries, 10)[1][:, 9])
    far = np.array([np.linalg.norm(base - query, axis=1).mean() for query in queries])
    contrast = np.quantile(far / near, [0.05, 0.95])
    # The easy queries have neighbours ten times nearer than the rest; the hard ones hardly nearer.
    assert contrast[0] < 2
    assert contrast[1] > 10


def test_one_row_in_ten_lies_between_two_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    data = mixed(5000, 16, seed=4)
    rows = data.array()
    monkeypatch.setattr(generators, "_BETWEEN", 0.0)
    moved = np.abs(rows - data.array()).max(axis=1) > 0.01
    assert 0.07 < moved.mean() < 0.13


def test_a_stream_is_not_held() -> None:
    data = mixed(500_000, 64, seed=0, clusters=50)
    tracemalloc.start()
    rows = sum(len(block) for block in data.blocks(1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == 500_000
    assert peak < 500_000 * 64 * 4 / 1.5


@pytest.mark.parametrize("bad", [{"n": -1}, {"d": 0}, {"seed": -1}, {"clusters": 0}])
def test_bad_arguments_are_named(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
        mixed(**({"n": 10, "d": 4, "seed": 0} | bad))


def test_bad_requests_are_named() -> None:
    data = mixed(10, 4, 0)
    with pytest.raises(ValueError, match="count=-1"):
        data.queries(-1)
    with pytest.raises(ValueError, match="rows=0"):
        next(data.blocks(0))
