"""The parts of the index on their own: source, space, layout, training."""

import faiss
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memhier import backend
from memhier.ann.zoom.preview.clusters import Assigner, apportion, train_centroids
from memhier.ann.zoom.preview.preview import train_preview
from memhier.ann.zoom.preview.routing.router import router_bytes_per_list
from memhier.ann.zoom.preview.space import core_dimension, fit_space
from memhier.ann.zoom.source import VectorSource, open_source
from memhier.ann.zoom.storage.layout import (
    IndexSizes,
    index_reader,
    lists_anew,
    plan_layout,
    read_contexts,
    scan_bytes,
)
from memhier.errors import BudgetError


def test_iterator_and_array_give_the_same_source(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(97, 5)).astype(np.float32)
    staged = open_source(iter([vectors[:1], vectors[1:1], vectors[1:50], vectors[50:]]), tmp_path)
    whole = open_source(vectors, tmp_path)
    assert (staged.count, staged.dimension, staged.dtype) == (97, 5, np.float32)
    for (start, block), (other_start, other) in zip(staged.blocks(), whole.blocks(), strict=True):
        assert start == other_start
        np.testing.assert_array_equal(block, other)
    np.testing.assert_array_equal(staged.take(np.array([0, 50, 96])), vectors[[0, 50, 96]])


def test_blocks_cover_a_long_source_once_and_in_order():
    vectors = np.arange(2_100_000 * 3, dtype=np.float32).reshape(-1, 3)
    starts, lengths = zip(*[(start, len(block)) for start, block in VectorSource(vectors).blocks()], strict=True)
    assert len(starts) > 1
    assert list(starts) == [0, *np.cumsum(lengths)[:-1]]
    assert sum(lengths) == len(vectors)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8", "float64"])
def test_non_contiguous_sources_are_read_right(dtype, tmp_path):
    wide = np.random.default_rng(1).integers(0, 100, (30, 8)).astype(dtype)
    for view in (wide[::2], wide[:, ::2], wide.T, np.asfortranarray(wide)):
        (_, block), *_ = open_source(view, tmp_path).blocks()
        assert block.flags.c_contiguous
        assert block.dtype == ("float32" if dtype == "float64" else dtype)
        np.testing.assert_array_equal(block, view)


@pytest.mark.parametrize(
    ("vectors", "error", "message"),
    [
        ([], ValueError, "two dimensions"),
        (iter([]), ValueError, "empty"),
        (np.ones((3, 0), np.float32), ValueError, "d of at least 1"),
        (np.ones(3, np.float32), ValueError, "two dimensions"),
        (np.full((2, 2), 2**24 + 1, np.int32), ValueError, "row 0 holds integers"),
        (np.ones((2, 2), np.complex64), TypeError, "complex64"),
        (np.array([[1, 2], [np.nan, 1]], np.float32), ValueError, "row 1"),
        (np.array([[1, 2], [3, 1], [np.inf, 0]], np.float16), ValueError, "row 2"),
        (iter([np.ones((3, 2), np.float32), np.array([[1, np.inf]], np.float32)]), ValueError, "row 3"),
        (np.array([[1, 2], [1, 1e300]]), ValueError, "row 1"),
        (iter([np.array([[1, 2], [1, 1e300]])]), ValueError, "row 1"),
        (iter([np.ones((3, 2), np.float32), np.ones((3, 3), np.float32)]), ValueError, "block 1"),
        (iter([np.ones((3, 2), np.float32), np.ones((3, 2), np.uint8)]), ValueError, "block 1"),
        (7, TypeError, "int"),
    ],
)
def test_bad_vectors_are_refused_by_name(vectors, error, message, tmp_path):
    with pytest.raises(error, match=message):
        open_source(vectors, tmp_path)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    metric=st.sampled_from(["l2", "ip", "cosine"]),
    dimension=st.sampled_from([1, 3, 97]),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    pad=st.integers(0, 5),
)
def test_nearest_in_the_preview_space_is_nearest_by_the_metric(seed, metric, dimension, scale, pad):
    random = np.random.default_rng(seed)
    vectors = (random.normal(size=(50, dimension)) * scale * random.uniform(0.1, 2, (50, 1))).astype(np.float32)
    query = (random.normal(size=(1, dimension)) * scale).astype(np.float32)
    space = fit_space(VectorSource(vectors), metric, core_dimension(metric, dimension) + pad)
    mapped, mapped_query = space.vectors(vectors), space.queries(query)
    assert np.isfinite(mapped).all()
    assert np.abs(mapped).max() <= 1.001
    if metric == "ip":
        preview = -2 * mapped.astype(np.float64) @ mapped_query[0]
    else:
        preview = np.square(mapped - mapped_query).sum(axis=1, dtype=np.float64)
    exact_vectors, exact_query = vectors.astype(np.float64), query.astype(np.float64)[0]
    if metric == "l2":
        exact = np.square(exact_vectors - exact_query).sum(axis=1)
    else:
        exact = -exact_vectors @ exact_query
        if metric == "cosine":
            exact /= np.linalg.norm(exact_vectors, axis=1)
    best = preview.argmin()
    spread = max(float(np.ptp(exact)), 1e-30)
    assert exact[best] <= exact.min() + 1e-3 * spread
    if metric == "ip":
        away = space.distances(preview[None].astype(np.float32), query)[0]
        np.testing.assert_allclose(away, exact, rtol=1e-4, atol=1e-4 * spread)
        assert space.remoteness(away[:1], query, 1e-5)[0] >= preview[0]


def test_overflowing_values_are_refused():
    with pytest.raises(ValueError, match="overflow"):
        fit_space(VectorSource(np.full((2, 4), 1e30, np.float32)), "l2", 4)


@settings(max_examples=100, deadline=None)
@given(
    count=st.sampled_from([1, 3, 97, 5000, 10**6, 10**8]),
    dimension=st.sampled_from([1, 3, 97, 128, 768, 4096]),
    metric=st.sampled_from(["l2", "ip", "cosine"]),
    coding=st.sampled_from(["rabitq", "pq"]),
    dram=st.integers(10**5, 10**10),
)
@example(count=10**6, dimension=1, metric="l2", coding="rabitq", dram=404_261)
def test_layout_keeps_the_budget_or_says_what_would(count, dimension, metric, coding, dram):
    sizes = count, dimension, metric, coding, 4 * dimension, 4, 600_000
    try:
        layout = plan_layout(IndexSizes(*sizes), dram)
    except BudgetError as error:
        enough = int(str(error).split("(")[1].split()[0])
        assert enough > dram
        layout = plan_layout(IndexSizes(*sizes), enough)
        dram = enough
    assert layout.memory_bytes <= dram
    assert layout.padded >= core_dimension(metric, dimension)
    assert 1 <= layout.lists <= count
    assert layout.searches >= 1
    if coding == "pq":
        assert layout.padded % layout.code_bytes == 0
        assert not layout.rotate
    else:
        assert 1 <= layout.code_bytes <= layout.padded


@pytest.mark.skipif(backend.core is None, reason="of the compiled core")
@pytest.mark.parametrize("count", [1, 4, 7])
@pytest.mark.parametrize("dimension", [1, 16, 63, 64, 65, 129, 200])
def test_a_query_is_turned_alike_alone_and_among_others(dimension, count):
    random = np.random.default_rng(dimension)
    vectors = random.normal(size=(count, dimension)).astype(np.float32)
    matrix = random.normal(size=(dimension, dimension)).astype(np.float32)
    turned, alone = np.full_like(vectors, np.nan), np.full_like(vectors[:1], np.nan)
    backend.core.turn_rows(vectors=vectors, matrix=matrix, out=turned)
    np.testing.assert_allclose(turned, vectors.astype(np.float64) @ matrix, rtol=1e-4, atol=1e-4)
    for vector, row in zip(vectors, turned, strict=True):
        backend.core.turn_rows(vectors=vector[None], matrix=matrix, out=alone)
        np.testing.assert_array_equal(alone[0], row)


@pytest.mark.parametrize("megabytes", [32, 40, 48, 64, 96, 128, 160, 256])
def test_eight_threads_search_at_a_time_from_32_mib_on(megabytes):
    dram = megabytes << 20
    reads = min(64, megabytes)  # in flight, of a search
    sizes = IndexSizes(100_000, 960, "l2", "rabitq", 3840, 4, 6750 * reads)  # of the compiled reader
    layout = plan_layout(sizes, dram)
    assert layout.searches >= read_contexts(dram) == 8
    assert layout.memory_bytes <= dram
    searches = layout.searches * scan_bytes(dram, layout.searches) + 8 * sizes.reader_bytes
    assert searches <= 0.08 * dram or layout.code_bytes == 480  # the longest leave room for larger ones


@pytest.mark.parametrize("megabytes", [1, 16, 17, 18, 19, 24, 31, 32, 33, 34, 36, 48, 64, 100, 1000])
def test_long_reads_of_codes_take_no_more_dram(megabytes):
    dram = megabytes << 20
    with index_reader(dram, 8) as usual, index_reader(dram, 8, on_ssd=True) as long:
        assert long.planned_bytes <= usual.planned_bytes


@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(1, 4 * 10**6),
    before=st.sampled_from([1, 30, 12_000, 12_288, 12_289, 30_000]),
    padded=st.sampled_from([8, 128]),
    spare=st.integers(-1000, 10**7),
)
@example(count=2_000_000, before=12_288, padded=8, spare=10**6)
def test_lists_that_are_made_anew_take_no_more_than_there_is(count, before, padded, spare):
    def held(lists):
        return lists * (router_bytes_per_list(padded, lists) + 4)  # its radius

    lists = lists_anew(count, before, padded, 10**9, spare)
    assert 1 <= lists <= max(before, count // 100)
    assert held(lists) <= held(before) + max(0, spare)
    assert lists >= min(before, max(1, count // 100))


def test_more_dram_buys_longer_codes():
    sizes = IndexSizes(10**6, 128, "l2", "rabitq", 512, 4, 0)
    codes = [plan_layout(sizes, dram << 20).code_bytes for dram in (20, 40, 60, 120)]
    assert codes == sorted(codes)
    assert codes[0] < codes[-1]


@pytest.mark.parametrize("coding", ["rabitq", "pq"])
def test_training_does_not_depend_on_threads(coding):
    sample = np.random.default_rng(3).normal(size=(3000, 16)).astype(np.float32)
    threads = faiss.omp_get_max_threads()
    results = []
    try:
        for count in (1, 4):
            faiss.omp_set_num_threads(count)
            preview = train_preview(sample, 40, coding, 4, 9)
            turned = preview.turn(sample)
            lists = preview.assigner().assign(turned)
            codes, numbers, _ = preview.encode(turned, lists)
            results.append((bytes(preview.router.save()), lists.tobytes(), codes.tobytes(), numbers.tobytes()))
    finally:
        faiss.omp_set_num_threads(threads)
    assert results[0] == results[1]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any), st.integers(1, 20))
def test_lists_are_shared_out_exactly(sizes, lists):
    lists = min(lists, sum(sizes))
    shares = apportion(np.array(sizes), lists)
    assert shares.sum() == lists
    assert (shares >= 0).all()


@pytest.mark.parametrize("lists", [1, 3, 97, 520])
def test_centroids_are_as_many_as_asked_for_and_no_list_is_much_too_long(lists):
    random = np.random.default_rng(1)
    crowded = random.normal(size=(9000, 8)) * np.where(np.arange(9000) < 6000, 0.01, 3)[:, None]
    centroids = train_centroids(crowded.astype(np.float32), lists, 0)
    assert centroids.shape == (lists, 8)
    assert np.isfinite(centroids).all()
    sizes = np.bincount(Assigner(centroids, 0).assign(crowded.astype(np.float32)), minlength=lists)
    assert sizes.max() <= 6 * 9000 / lists


def test_more_centroids_than_vectors_repeat_them():
    vectors = np.arange(12, dtype=np.float32).reshape(3, 4)
    centroids = train_centroids(vectors, 3, 0)
    assert sorted(map(tuple, centroids)) == sorted(map(tuple, vectors))


def test_groups_of_centroids_find_nearly_always_the_nearest(monkeypatch):
    monkeypatch.setattr("memhier.ann.zoom.preview.clusters._EXACT_ASSIGN", 100)
    random = np.random.default_rng(2)
    centroids = random.normal(size=(900, 16)).astype(np.float32)
    vectors = (centroids[random.integers(0, 900, 2000)] + 0.3 * random.normal(size=(2000, 16))).astype(np.float32)
    exact = np.square(vectors[:, None] - centroids).sum(axis=2).argmin(axis=1)
    assert (Assigner(centroids, 0).assign(vectors) == exact).mean() > 0.97


def test_groups_without_centroids_hide_none(monkeypatch):
    monkeypatch.setattr("memhier.ann.zoom.preview.clusters._EXACT_ASSIGN", 100)
    random = np.random.default_rng(4)
    points = (random.normal(size=(3, 8)) * 20).astype(np.float32)
    centroids = np.repeat(points, 300, axis=0)  # as where most vectors are copies
    vectors = points[random.integers(0, 3, 1000)] + random.normal(size=(1000, 8)).astype(np.float32)
    near = np.square(vectors[:, None] - points).sum(axis=2).argmin(axis=1)
    assert (Assigner(centroids, 0).assign(vectors) // 300 == near).all()
