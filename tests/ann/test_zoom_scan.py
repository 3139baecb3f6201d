"""The code scan against a reference that decodes every code."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier import backend
from memhier.ann.zoom.preview import scan


def make_lists(seed, lists, width, subvectors, count):
    random = np.random.default_rng(seed)
    centroids = random.normal(size=(lists, width * subvectors)).astype(np.float16)
    codebook = random.normal(size=(subvectors, width, 256)).astype(np.float32)
    codes = random.integers(0, 256, (count, subvectors), dtype=np.uint8)
    cuts = np.sort(random.integers(0, count + 1, lists - 1))
    starts = np.concatenate([[0], cuts, [count]]).astype(np.int64)
    return random, centroids, codebook, codes, starts


def reference(query, probes, centroids, starts, codes, codebook, k, inner):
    """Decode each code of the probed lists and compare in float64."""
    found = []
    for number in probes[probes >= 0]:
        for position in range(starts[number], starts[number + 1]):
            decoded = np.concatenate([codebook[m, :, code] for m, code in enumerate(codes[position])])
            vector = centroids[number].astype(np.float64) + decoded
            found.append((float(-2 * query @ vector if inner else np.square(query - vector).sum()), position))
    return sorted(found)[:k]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    lists=st.integers(1, 7),
    width=st.integers(1, 5),
    subvectors=st.sampled_from([1, 3, 4, 9]),
    count=st.sampled_from([0, 1, 3, 97]),
    k=st.integers(1, 120),
    inner=st.booleans(),
)
def test_equals_reference(seed, lists, width, subvectors, count, k, inner):
    random, centroids, codebook, codes, starts = make_lists(seed, lists, width, subvectors, count)
    queries = random.normal(size=(3, width * subvectors)).astype(np.float32)
    probes = np.stack([random.permutation(lists) for _ in queries])
    probes[1, 0] = -1
    positions, distances, scanned = scan.pq_scan(
        queries, probes, scan.ProductLists(centroids, starts, codes, codebook), k, inner=inner
    )
    total = 0
    for row in range(3):
        query = queries[row].astype(np.float64)
        expected = reference(query, probes[row], centroids, starts, codes, codebook, k, inner)
        total += sum(int(starts[p + 1] - starts[p]) for p in probes[row] if p >= 0)
        found = np.flatnonzero(positions[row] >= 0)
        assert len(found) == len(expected)
        assert len(set(positions[row, found])) == len(found)
        np.testing.assert_allclose(distances[row, found], [d for d, _ in expected], rtol=1e-4, atol=1e-4)
        assert (positions[row, len(expected) :] == -1).all()
        assert np.isinf(distances[row, len(expected) :]).all()
    assert scanned == total


@pytest.mark.skipif(backend.core is None, reason="the compiled core is not in use")
@pytest.mark.parametrize("inner", [False, True])
def test_compiled_and_numpy_agree(inner, monkeypatch):
    random, centroids, codebook, codes, starts = make_lists(5, 11, 4, 8, 3000)
    queries = random.normal(size=(9, 32)).astype(np.float32)
    probes = np.stack([random.permutation(11)[:6] for _ in queries])
    lists = scan.ProductLists(centroids, starts, codes, codebook)
    compiled = scan.pq_scan(queries, probes, lists, 50, inner=inner)
    monkeypatch.setattr(backend, "core", None)
    plain = scan.pq_scan(queries, probes, lists, 50, inner=inner)
    np.testing.assert_allclose(compiled[1], plain[1], rtol=1e-5)
    assert (compiled[0] == plain[0]).mean() > 0.99  # rounding may swap codes that are nearly tied
    assert compiled[2] == plain[2]


def test_ties_stand_in_the_order_of_position():
    centroids = np.zeros((2, 4), np.float16)
    codes = np.zeros((10, 2), np.uint8)
    codebook = np.zeros((2, 2, 256), np.float32)
    probes = np.array([[1, 0]])
    lists = scan.ProductLists(centroids, np.array([0, 4, 10]), codes, codebook)
    positions, _, _ = scan.pq_scan(np.ones((1, 4), np.float32), probes, lists, 5)
    assert positions[0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.skipif(backend.core is None, reason="bounds of the compiled core")
@pytest.mark.parametrize(
    ("probes", "starts"), [([[2]], [0, 1, 3]), ([[-2]], [0, 1, 3]), ([[0]], [0, 2, 4]), ([[0]], [0, 2, 1])]
)
def test_bounds_are_checked_before_reading(probes, starts):
    lists = scan.ProductLists(
        np.zeros((2, 4), np.float16), np.array(starts), np.zeros((3, 2), np.uint8), np.zeros((2, 2, 256), np.float32)
    )
    with pytest.raises(ValueError, match="pq_scan"):
        scan.pq_scan(np.ones((1, 4), np.float32), np.array(probes), lists, 2)
