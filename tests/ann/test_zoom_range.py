"""Vectors within a radius against brute force, and neighbours that come a few at a time."""

import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier.ann import ZoomIndex
from memhier.ann.zoom.search import range_search
from memhier.ann.zoom.search.results import SearchResult, iterate
from memhier.errors import ClosedError

ALL = {"candidates": 10**9, "nprobe": 10**9}


def make(count, dimension, dtype, seed):
    random = np.random.default_rng(seed)
    centres = random.normal(size=(12, dimension)) * 20
    points = centres[random.integers(0, 12, count)] + random.normal(size=(count, dimension)) * 4
    points[count // 2 : count // 2 + count // 10] = points[: count // 10]
    return (np.clip(points, -128, 127) if dtype == "int8" else points).astype(dtype)


def brute(index, queries, radius):
    """Return the vectors within a radius of each query among all that the index ranks exactly."""
    found = index.search(queries, len(index), **ALL)
    return [(ids[near <= radius], near[near <= radius]) for ids, near in zip(found.ids, found.distances, strict=True)]


def assert_same(result, expected):
    assert result.offsets.tolist() == [0, *np.cumsum([len(ids) for ids, _ in expected])]
    np.testing.assert_array_equal(result.ids, np.concatenate([ids for ids, _ in expected]))
    np.testing.assert_array_equal(result.distances, np.concatenate([near for _, near in expected]))


@pytest.mark.filterwarnings("ignore:calibration found")
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    count=st.sampled_from([1, 3, 97, 900]),
    dimension=st.sampled_from([1, 3, 33]),
    dtype=st.sampled_from(["float32", "float16", "int8"]),
    metric=st.sampled_from(["l2", "ip", "cosine"]),
    rank=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_everything_within_a_radius_is_found(tmp_path_factory, seed, count, dimension, dtype, metric, rank, scale):
    scale = np.float32(scale if dtype == "float32" else 1)
    vectors = make(count, dimension, dtype, seed) * scale.astype(dtype)
    queries = make(13, dimension, "float32", seed + 1)[:3] * scale
    path = tmp_path_factory.mktemp("range") / "index"
    with ZoomIndex.build(path, vectors, metric=metric, dram="4MiB", seed=seed) as index:
        near = np.sort(index.search(queries[0], count, **ALL).distances)
        radius = float(near[int(rank * (count - 1))])  # a distance there is: what lies just there is within
        assert_same(index.range_search(queries, radius, recall=1), brute(index, queries, radius))
    shutil.rmtree(path.parent)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    path = tmp_path_factory.mktemp("built") / "index"
    vectors = make(3000, 24, "float32", 0)
    attributes = {"even": np.arange(3000) % 2 == 0}
    with ZoomIndex.build(path, vectors, dram="4MiB", attributes=attributes) as index:
        yield index, vectors


def test_more_than_fits_is_scanned_a_few_lists_at_a_time(built, monkeypatch):
    index, vectors = built
    wide = float(np.median(index.search(vectors[5], 3000, **ALL).distances))
    expected = brute(index, vectors[:4], wide)
    assert max(len(ids) for ids, _ in expected) > range_search._LIMIT
    assert_same(index.range_search(vectors[:4], wide, recall=1), expected)
    monkeypatch.setattr(range_search, "_LIMIT", 3)  # not even one list fits
    assert_same(index.range_search(vectors[:4], wide, recall=1), expected)


def test_a_small_radius_reads_little(built):
    index, vectors = built
    close = float(index.search(vectors[5], 5).distances[-1])
    result = index.range_search(vectors[5], close)
    assert 5 <= len(result.ids) <= result.stats["ranked"] < 60
    assert result.stats["page_requests"] < 20
    everything = index.range_search(vectors[5], 1e9)
    assert len(everything.ids) == 3000
    assert everything.stats["scanned"] == 3000


def test_a_declared_recall_is_kept_within_a_radius(built):
    index, vectors = built
    queries = vectors[::30] + np.float32(1)
    radius = float(np.median(index.search(queries, 20, **ALL).distances[:, -1]))
    expected = sum(len(ids) for ids, _ in brute(index, queries, radius))
    for recall in (0.8, 0.95, None):
        result = index.range_search(queries, radius, recall=recall)
        assert len(result.ids) >= ((recall or 0.99) - 0.02) * expected
        assert result.stats["calibrated"]


def test_filters_apply_within_a_radius(built):
    index, vectors = built
    everything = index.range_search(vectors[:5], 900.0, recall=1)
    even = index.range_search(vectors[:5], 900.0, recall=1, where="even == true")
    kept = everything.ids % 2 == 0
    assert 0 < kept.sum() < len(kept)
    np.testing.assert_array_equal(even.ids, everything.ids[kept])
    assert len(index.range_search(vectors[:5], 900.0, where="even == true and even == false").ids) == 0


def test_single_empty_and_hopeless_queries(built):
    index, vectors = built
    one = index.range_search(vectors[3], 0.0)
    assert one.offsets.tolist() == [0, len(one.ids)]
    assert 3 in one.ids
    assert (one.distances == 0).all()
    none = index.range_search(np.empty((0, 24)), 5.0)
    assert none.offsets.tolist() == [0]
    assert index.range_search(vectors[:3], -1.0).offsets.tolist() == [0, 0, 0, 0]


def test_fresh_and_removed_vectors_within_a_radius(tmp_path):
    vectors = make(500, 8, "float32", 1)
    with ZoomIndex.build(tmp_path / "index", vectors, dram="4MiB") as index:
        ids = index.add(vectors[:3] + np.float32(0.001))
        index.add(vectors[:3], ids=[-7, -8, -9])  # before those as near, which were there before
        index.remove([1])
        found = index.range_search(vectors[:3], 1.0, recall=1)
        of_query = [set(found.ids[a:b]) for a, b in zip(found.offsets, found.offsets[1:], strict=False)]
        assert all(int(new) in inside for new, inside in zip(ids, of_query, strict=True))
        assert [row in of_query[row] for row in range(3)] == [True, False, True]
        assert_same(found, brute(index, vectors[:3], 1.0))


@pytest.mark.parametrize(
    ("radius", "options", "error", "message"),
    [
        (np.nan, {}, ValueError, "radius=nan"),
        (np.inf, {}, ValueError, "radius=inf"),
        ("near", {}, TypeError, "radius='near'"),
        (True, {}, TypeError, "radius=True"),
        (1.0, {"recall": 0}, ValueError, "recall=0"),
        (1.0, {"where": "odd == true"}, ValueError, "odd"),
    ],
)
def test_bad_range_searches_name_the_argument(built, radius, options, error, message):
    with pytest.raises(error, match=message):
        built[0].range_search(built[1][0], radius, **options)


def test_codes_without_bounds_have_no_range_search(tmp_path):
    vectors = make(300, 8, "float32", 2)
    index = ZoomIndex.build(tmp_path / "index", vectors, preview="pq", dram="8MiB")
    with index, pytest.raises(ValueError, match="preview='rabitq'"):
        index.range_search(vectors[0], 1.0)
    with pytest.raises(ClosedError):
        index.range_search(vectors[0], 1.0)


@pytest.mark.parametrize("batch", [1, 7, 10, 5000])
def test_neighbours_come_in_order_each_once(built, batch):
    index, vectors = built
    expected = index.search(vectors[9], 300, **ALL)
    ids, near = [], []
    for found in index.search_iter(vectors[9], batch, recall=1):
        assert len(found.ids) == batch or batch == 5000
        ids += found.ids.tolist()
        near += found.distances.tolist()
        if len(ids) >= 300:
            break
    assert ids[:300] == expected.ids.tolist()
    np.testing.assert_array_equal(np.array(near[:300], np.float32), expected.distances)


def test_the_iterator_ends_with_the_last_vector(built):
    index, vectors = built
    odd = [found.ids for found in index.search_iter(vectors[9], 700, where="even == false")]
    assert [len(ids) for ids in odd] == [700, 700, 100]
    assert sorted(np.concatenate(odd)) == list(range(1, 3000, 2))
    assert list(index.search_iter(vectors[9], 10, where="even == true and even == false")) == []
    with pytest.raises(ValueError, match="batch=0"):
        index.search_iter(vectors[9], 0)
    with pytest.raises(ValueError, match="one query"):
        index.search_iter(vectors[:2])
    for options, words in (({"zoo": 1}, "zoo=: expected options"), ({"k": 1}, "k=: expected options")):
        with pytest.raises(TypeError, match=words):
            index.search_iter(vectors[9], 5, **options)
    with pytest.raises(ValueError, match="recall=2"):
        index.search_iter(vectors[9], 5, recall=2)


def test_a_missed_neighbour_comes_later_and_none_twice():
    rounds = {4: [0, 1, 3, 4], 8: [0, 1, 2, 4, 5, 6, 7, 8], 16: [*range(9), -1, -1, -1, -1, -1, -1, -1]}

    def search(k, choose):
        ids = np.array(rounds[k])
        new = choose(ids)  # the hits whose fields a search reads
        return SearchResult(ids, ids.astype(np.float32), {}, {"new": new})

    batches = [*iterate(search, 2)]
    assert all(found.fields["new"].all() for found in batches)
    assert [found.ids.tolist() for found in batches] == [[0, 1], [3, 4], [2, 5], [6, 7], [8]]


def test_neighbours_that_come_by_candidates_go_on_to_the_end(built):
    index, vectors = built
    found = list(index.search_iter(vectors[9], 50, candidates=120, nprobe=10**6))
    assert sorted(np.concatenate([batch.ids for batch in found])) == list(range(3000))
    assert found[0].stats["ranked"] == 120
    with pytest.raises(ValueError, match="candidates=49"):
        next(index.search_iter(vectors[9], 50, candidates=49))


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_the_largest_radius_holds_everything(tmp_path, metric):
    vectors = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    with ZoomIndex.build(tmp_path / "x", vectors, metric=metric, dram="3MiB") as index:
        found = index.range_search(vectors[:2], float(np.finfo(np.float32).max))
        assert np.diff(found.offsets).tolist() == [50, 50]
