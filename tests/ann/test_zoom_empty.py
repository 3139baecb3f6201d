"""An index that begins without vectors, and more neighbours than there are."""

import numpy as np
import pytest

from memhier.ann import ZoomIndex
from memhier.errors import BudgetError


def make(count, seed=0, dimension=12):
    random = np.random.default_rng(seed)
    centres = random.normal(size=(10, dimension)) * 3
    return (centres[random.integers(0, 10, count)] + random.normal(size=(count, dimension))).astype(np.float32)


def nothing(result, shape):
    assert result.ids.shape == result.distances.shape == shape
    assert set(result.ids.reshape(-1).tolist()) <= {-1, None}
    assert np.isinf(result.distances).all()


def looked_through(index):
    """Search an index without vectors in every way."""
    query = np.zeros(index.dimension, np.float32)
    for recall in (None, 0.5, 1.0):
        nothing(index.search(query, 3, recall=recall), (3,))
        nothing(index.search(query[None], 3, recall=recall), (1, 3))
    nothing(index.search(query, 2, candidates=5), (2,))
    assert len(index.range_search(query, 10.0).ids) == 0
    assert sum(len(each.ids) for each in index.search_iter(query)) == 0
    assert index.explain(query)
    assert index.stats()["vectors"] == len(index) == 0
    assert index.check() == []
    assert 7 not in index if index.stats()["id_kind"] == "int64" else "a" not in index


@pytest.mark.long
@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8"])
def test_an_index_of_no_vectors_is_searched_and_filled(tmp_path, metric, dtype, renewed):
    path = tmp_path / "index"
    ZoomIndex.build(path, np.empty((0, 12), dtype), metric=metric, dram="4MiB", grow_to=2000).close()
    with ZoomIndex.open(path) as index:
        looked_through(index)
        assert index.stats()["dtype"] == ("uint8" if dtype == "uint8" else "float32")
    vectors = make(700)
    if dtype == "uint8":
        vectors = np.clip(vectors * 8 + 100, 0, 255).astype(np.uint8)
    with ZoomIndex.open(path, writable=True) as index:
        index.commit()
        looked_through(index)
        for start in (0, 1, 30, 200, 450):
            stop = {0: 1, 1: 30, 30: 200, 200: 450, 450: 700}[start]
            index.add(vectors[start:stop])
            assert len(index) == stop
            held(index, vectors[:stop], metric)
            index.commit()
            held(index, vectors[:stop], metric)
        renewed(index)
        assert index.stats()["lists"] > 1
        assert index.memory_bytes <= 4 << 20
        held(index, vectors, metric)
        assert index.search(vectors[:50], 5, recall=0.9).stats["calibrated"]
    with ZoomIndex.open(path) as index:
        assert index.check() == []
        held(index, vectors, metric)


def held(index, vectors, metric):
    """Hold searches against all vectors."""
    np.testing.assert_array_equal(index.reconstruct(np.arange(len(vectors))), vectors)
    queries = vectors[:: max(1, len(vectors) // 20)].astype(np.float64)
    rows, k = vectors.astype(np.float64), min(5, len(vectors))
    if metric == "l2":
        away = np.square(queries[:, None] - rows).sum(axis=2)
    elif metric == "ip":
        away = -(queries @ rows.T)
    else:
        away = 1 - queries @ rows.T / np.linalg.norm(queries, axis=1)[:, None] / np.linalg.norm(rows, axis=1)
    true = np.sort(away, axis=1)[:, :k]
    np.testing.assert_allclose(index.search(queries, k, recall=1.0).distances, true, rtol=1e-4, atol=1e-4)
    found = index.search(queries, k, recall=0.95).distances
    assert (found <= true[:, -1:] + 1e-4 * (1 + np.abs(true[:, -1:]))).mean() >= 0.9


def test_uncommitted_vectors_of_an_empty_index_are_gone(tmp_path, small_sizes):
    path = tmp_path / "index"
    with ZoomIndex.build(path, np.empty((0, 12), np.float32), dram="4MiB") as index:
        index.add(1e-3 * make(200))  # more than wait in DRAM
        assert index.stats()["parts"] > 0
    with ZoomIndex.open(path, writable=True) as index:
        looked_through(index)
        assert index.add(make(200, 1)).tolist() == list(range(200))
        index.commit()
        held(index, make(200, 1), "l2")


@pytest.mark.parametrize("strings", [False, True])
def test_an_index_of_no_vectors_takes_ids_and_attributes(tmp_path, strings):
    ids = np.array([], str) if strings else None
    empty = {"price": np.empty(0, np.int64), "lang": []}
    with ZoomIndex.build(tmp_path / "index", np.empty((0, 12)), ids=ids, attributes=empty, dram="4MiB") as index:
        looked_through(index)
        nothing(index.search(np.zeros(12), 2, where="price > 3"), (2,))
        names = ["a", "b", "c"] if strings else [5, 6, 7]
        index.add(make(3), ids=names, attributes={"price": [1, 2, 3], "lang": ["en", None, "de"]})
        index.commit()
        assert index.search(np.zeros(12), 3, where="price == 2 and lang is null").ids.tolist()[0] == names[1]


def test_limits_of_an_empty_index(tmp_path):
    unknown = np.empty((0, 0))
    for vectors, words in (([], "two dimensions"), (iter([]), r"numpy\.empty"), (unknown, "at least 1")):
        with pytest.raises(ValueError, match=words):
            ZoomIndex.build(tmp_path / "index", vectors)
    with pytest.raises(ValueError, match="pq"):
        ZoomIndex.build(tmp_path / "index", np.empty((0, 12)), preview="pq")
    with pytest.raises(BudgetError, match="dram"):
        ZoomIndex.build(tmp_path / "index", np.empty((0, 12)), dram="64KiB")
    assert not (tmp_path / "index").exists()


def test_more_neighbours_than_vectors_are_padded(tmp_path):
    vectors = make(20)
    with ZoomIndex.build(tmp_path / "index", vectors, ids=[f"v{row}" for row in range(20)], dram="4MiB") as index:
        for recall in (None, 1.0):
            result = index.search(vectors[:3], 50, recall=recall)
            assert result.ids.shape == result.distances.shape == (3, 50)
            assert {*result.ids[0, :20]} == {f"v{row}" for row in range(20)}
            assert (result.ids[:, 20:] == None).all()  # noqa: E711
            assert np.isinf(result.distances[:, 20:]).all()
            nearest = index.search(vectors[:3], 20, recall=recall)
            np.testing.assert_array_equal(result.distances[:, :20], nearest.distances)
        assert index.search(vectors[0], 30, candidates=30).ids.shape == (30,)
        assert index.explain(vectors[0], 30)
        with pytest.raises(ValueError, match="k=0"):
            index.search(vectors[0], 0)
