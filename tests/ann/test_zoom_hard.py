"""Data and uses that broke the index once, or would have."""

import os
import signal
import threading
import time
import tracemalloc
from dataclasses import replace

import faiss
import numpy as np
import pytest

from memhier import CorruptionError, Store, backend
from memhier.ann import ZoomIndex
from memhier.ann.zoom.calibration import calibrate
from memhier.ann.zoom.construction import build
from memhier.ann.zoom.preview import clusters
from memhier.ann.zoom.preview.routing import router
from memhier.ann.zoom.preview.routing.router import Router
from memhier.ann.zoom.search.search import Search
from memhier.ann.zoom.storage.fullview import workspace_bytes
from memhier.ann.zoom.storage.layout import scan_bytes
from memhier.benchmarks.exact import exact_neighbours, recall_at_k


def measured_recall(path, vectors, queries, metric="l2", **options):
    true = exact_neighbours(vectors, queries, 10, metric)[1]
    with ZoomIndex.build(path, vectors, metric=metric, **options) as index:
        return recall_at_k(index.search(queries, 10).distances, true), index.stats()["calibrated_recall"]


def text_like(count, dimension, clusters, seed=0):
    """Clusters around a few shared directions, on the unit sphere, as text vectors are."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(clusters, dimension)) * random.uniform(0.2, 2, (clusters, 1))
    vectors = centres[random.integers(0, clusters, count)] + 0.3 * random.normal(size=(count, dimension))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_zero_vectors_do_not_crowd_out_neighbours_by_cosine(tmp_path):
    random = np.random.default_rng(0)
    vectors = random.normal(size=(4000, 32)).astype(np.float32)
    vectors[::50] = 0
    queries = random.normal(size=(100, 32)).astype(np.float32)
    assert measured_recall(tmp_path / "index", vectors, queries, "cosine", dram="4MiB")[0] >= 0.95


@pytest.mark.parametrize("copies", [1, 12, 20])
def test_copies_of_the_queries_do_not_flatter_calibration(tmp_path, copies):
    distinct = np.random.default_rng(1).normal(size=(500, 24)).astype(np.float32)
    queries = np.random.default_rng(2).normal(size=(100, 24)).astype(np.float32)
    vectors = np.repeat(distinct, copies, axis=0)
    assert measured_recall(tmp_path / "index", vectors, queries, dram="4MiB")[0] >= 0.95


@pytest.mark.parametrize(("built", "axes"), [(8, 40), (30, 40), (100, 300)])
def test_recall_1_is_exact_after_a_build_of_fewer_vectors_than_axes(tmp_path, built, axes):
    random = np.random.default_rng(built)
    vectors = random.normal(size=(built + 300, axes)).astype(np.float32)
    queries = random.normal(size=(60, axes)).astype(np.float32)
    with ZoomIndex.build(tmp_path / "index", vectors[:built], dram="8MiB", grow_to=400) as index:
        index.add(vectors[built:])
        index.commit(compact=False)
        found = index.search(queries, 5, recall=1.0)
        assert recall_at_k(found.distances, exact_neighbours(vectors, queries, 5)[1]) == 1


@pytest.mark.parametrize("dram", ["8MiB", "1MiB"])
@pytest.mark.parametrize("added", [30, 180])
def test_vectors_added_outside_the_span_of_others_do_not_crowd_out_neighbours(tmp_path, dram, added):
    random = np.random.default_rng(added)
    built = random.normal(size=(2000, 10)) @ random.normal(size=(10, 64))
    vectors = np.concatenate([built, random.normal(size=(added, 64)) * 10**0.5]).astype(np.float32)
    queries = (random.normal(size=(50, 64)) * 10**0.5).astype(np.float32)
    with ZoomIndex.build(tmp_path / "index", vectors[:2000], dram=dram, grow_to=2200) as index:
        index.add(vectors[2000:])
        index.commit(compact=False)
        for recall in (0.9, 0.99):
            found = index.search(queries, 5, recall=recall)
            assert recall_at_k(found.distances, exact_neighbours(vectors, queries, 5)[1]) >= recall - 0.02


def walk_only(monkeypatch):
    """Let lists be found by walking a graph, however few there are and however many are wanted."""
    monkeypatch.setattr(router, "EXACT_LISTS", 0)
    monkeypatch.setattr(router, "_WALK_COST", 0)
    monkeypatch.setattr(router, "_STEP_COST", 0)


@pytest.mark.parametrize("dimension", [16, 256])
def test_a_graph_of_centroids_reaches_every_list(monkeypatch, dimension):
    centroids = text_like(700, dimension, 12)
    walk_only(monkeypatch)
    graph = Router.build(centroids)
    assert graph.memory_bytes > graph.centroids.nbytes  # it holds links
    seen = set()
    for nprobe in (1, 30, 699):
        probes = graph.route(centroids, nprobe)
        for row in probes:
            lists = row[row >= 0]
            assert len(set(lists)) == len(lists)
            seen |= set(lists)
    assert seen == set(range(700))
    exact = np.argsort(np.square(centroids[:, None] - centroids[None]).sum(axis=2), axis=1)[:, :30]
    probes = graph.route(centroids, 30)
    found = [len(set(row) & set(best)) for row, best in zip(probes, exact, strict=True)]
    assert np.mean(found) >= 0.95 * 30


def test_copies_of_one_centroid_are_all_found(monkeypatch):
    centroids = text_like(300, 16, 12)
    copies = np.arange(40, 300, 3)
    centroids[copies] = centroids[40]  # more than a list has links
    walk_only(monkeypatch)
    graph = Router.build(centroids)
    probes = graph.route(centroids, 40)
    away = np.square(centroids[:, None] - centroids[None]).sum(axis=2)
    exact = np.argsort(away, axis=1, kind="stable")[:, :40]
    assert probes.shape == (300, 40)
    assert all(len(set(row)) == 40 for row in probes)
    # Of lists that are equally far any may be probed.
    reached = np.take_along_axis(away, probes, 1) <= np.take_along_axis(away, exact, 1)[:, -1:] * (1 + 1e-3) + 1e-6
    assert reached.mean() > 0.99


@pytest.mark.skipif(backend.core is None, reason="needs the compiled core")
@pytest.mark.parametrize(("lists", "nprobe"), [(100, 11), (5000, 71), (9000, 3000), (8193, 8192)])
def test_where_many_lists_are_wanted_of_a_graph_all_are_compared(monkeypatch, lists, nprobe):
    random = np.random.default_rng(lists)
    centroids = random.integers(-2, 3, (lists, 3)).astype(np.float32)  # copies, and distances that are exact
    monkeypatch.setattr(router, "EXACT_LISTS", 0)
    made = Router.build(centroids)
    assert made.memory_bytes > made.centroids.nbytes  # it holds links
    queries = random.integers(-2, 3, (5, 3)).astype(np.float32)
    away = np.square(queries[:, None] - centroids).sum(axis=2)
    nearest = np.lexsort((np.broadcast_to(np.arange(lists), away.shape), away), axis=1)[:, :nprobe]
    np.testing.assert_array_equal(made.route(queries, nprobe), nearest)


def test_the_index_works_over_a_graph(tmp_path, monkeypatch):
    walk_only(monkeypatch)
    monkeypatch.setattr(clusters, "_FLAT_LISTS", 0)
    vectors = text_like(6000, 48, 30)
    queries = text_like(6000, 48, 30)[:100] + np.float32(0.02)
    found, calibrated = measured_recall(tmp_path / "index", vectors, queries, "cosine", dram="4MiB")
    assert calibrated >= 0.98
    assert found >= 0.95


def test_a_missed_target_is_said(tmp_path, monkeypatch):
    # Of noise in many dimensions codes of less than a bit an axis tell too little of so few candidates.
    monkeypatch.setattr(calibrate, "_LIMITS_OF_K", (1,))
    vectors = np.random.default_rng(0).normal(size=(3000, 256)).astype(np.float32)
    with pytest.warns(UserWarning, match=r"short of 0\.99.*more dram than '350KiB'"):
        ZoomIndex.build(tmp_path / "index", vectors, dram="350KiB").close()


def test_searching_allocates_no_more_than_was_counted(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(3000, 1536)).astype(np.float32)
    with ZoomIndex.build(tmp_path / "index", vectors, dram="6MiB") as index:
        index.search(vectors[:1], 10)
        reserve = workspace_bytes(4 * 1536) + scan_bytes(6 << 20, index.stats()["searches"])
        planned = index.stats()["planned_bytes"]
        for queries, k in ((vectors[:1], 100), (vectors[:300], 10), (vectors[:1], 1000)):
            tracemalloc.start()
            result = index.search(queries, k)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            # The result, and what a large k asks for beyond the default, come on top of the reserve.
            own = result.ids.nbytes + result.distances.nbytes + 64 * max(0, 4 * k - 512)
            assert peak <= reserve + own + (256 << 10)
        assert index.memory_bytes <= planned <= 6 << 20


@pytest.mark.parametrize("dimension", [1, 3, 16, 17, 97, 128])
@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_routes_are_the_nearest_however_many_queries_go_together(dimension, count):
    random = np.random.default_rng(dimension)
    centroids = random.standard_normal((97, dimension)).astype(np.float32)
    router = Router.build(centroids)
    queries = random.standard_normal((count, dimension)).astype(np.float32)
    away = np.square(queries[:, None].astype(np.float64) - router.centroids.astype(np.float64)).sum(axis=2)
    probes = router.route(queries, 11)
    ordered = np.take_along_axis(away, probes, 1)
    assert np.allclose(ordered, np.sort(away, axis=1)[:, :11], rtol=1e-5)
    assert all(len(set(row)) == 11 for row in probes.tolist())
    for query, row in zip(queries, probes, strict=True):
        assert np.array_equal(router.route(query[None], 11)[0], row), "one alone and one of many"


@pytest.mark.parametrize("copies", [0, 50, 300])
def test_a_walk_passes_lists_of_one_centroid_in_the_middle_of_all(monkeypatch, copies):
    """As of vectors that are zero: they link to each other alone, and would be all that a walk has in sight."""
    walk_only(monkeypatch)
    random = np.random.default_rng(0)
    centroids = 1.5 * random.normal(size=(100, 64))[random.integers(0, 100, 4000)] + random.normal(size=(4000, 64))
    queries = (centroids[:200] + 0.5 * random.normal(size=(200, 64))).astype(np.float32)
    centroids[random.choice(4000, copies, replace=False)] = 0
    whole = Router.build(centroids.astype(np.float32))
    away = np.square(queries[:, None] - whole.centroids.astype(np.float32)).sum(axis=2)
    for probed in (1, 8, 32):
        found = np.take_along_axis(away, whole.route(queries, probed), 1)
        assert (found <= np.sort(away, axis=1)[:, probed - 1 : probed] * 1.0001).mean() > 0.98


def exit_code_of(child):
    """Wait for a child, and end one that hangs."""
    deadline = time.monotonic() + 800
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended[0] == child, "the child hangs"
    return os.waitstatus_to_exitcode(ended[1])


@pytest.mark.parametrize("queries", [1, 300])
def test_a_child_of_a_process_that_used_many_threads_can_route(queries):
    centroids = text_like(300, 16, 12)
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(4)
    try:
        whole = Router.build(centroids)
        expected = whole.route(centroids, 5)  # wakes the threads
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if np.array_equal(whole.route(centroids[:queries], 5), expected[:queries]) else 2
            finally:
                os._exit(code)
        assert exit_code_of(child) == 0
    finally:
        faiss.omp_set_num_threads(threads)


def test_a_child_can_search_however_many_threads_of_its_parent_did(tmp_path, monkeypatch):
    vectors = np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)
    under_way, go_on, whole = threading.Semaphore(0), threading.Event(), Search.nearest

    def waiting(*arguments):
        if threading.current_thread() is not threading.main_thread():
            under_way.release()
            go_on.wait()
        return whole(*arguments)

    monkeypatch.setattr(Search, "nearest", waiting)
    with ZoomIndex.build(tmp_path / "index", vectors, dram="2MiB") as index:
        at_a_time = index.stats()["searches"]
        threads = [threading.Thread(target=index.search, args=(vectors[0], 1)) for _ in range(at_a_time)]
        try:
            for thread in threads:
                thread.start()
            assert all(under_way.acquire(timeout=800) for _ in threads)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    code = 0 if index.search(vectors[7], 1).ids.tolist() == [7] else 2
                finally:
                    os._exit(code)
            assert exit_code_of(child) == 0
        finally:
            go_on.set()
            for thread in threads:
                thread.join()


def test_stats_are_those_of_the_call_whatever_runs_beside(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(3000, 64)).astype(np.float32)
    ZoomIndex.build(tmp_path / "index", vectors, dram="3MiB").close()
    with ZoomIndex.open(tmp_path / "index", pool=False) as index:  # reads depend on the pages held
        expected = [index.search(query, 10).stats for query in vectors[:40]]
        wrong = []

        def work():
            for query, stats in zip(vectors, expected, strict=False):
                if index.search(query, 10).stats != stats:
                    wrong.append(stats)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_queries_out_of_range_are_refused(tmp_path, metric):
    vectors = np.random.default_rng(0).normal(size=(200, 8)).astype(np.float32) * np.float32(1e-5)
    with ZoomIndex.build(tmp_path / "index", vectors, metric=metric) as index:
        for size in (1e37, 3e38):
            with pytest.raises(ValueError, match="row 1 is too large"):
                index.search(np.stack([vectors[0], np.full(8, size, np.float32)]), 3)
        with pytest.raises(ValueError, match="NaN or infinity"):
            index.search(np.full(8, 1e300), 3)


@pytest.mark.parametrize("options", [{}, {"nprobe": 3, "candidates": 40}], ids=str)
def test_a_refused_query_has_the_number_of_the_caller(tmp_path, options):
    vectors = np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)
    queries = vectors[:300].copy()
    queries[257] = 3e38
    filters = np.array([None, "number < 200", "number >= 100"], object)
    with ZoomIndex.build(tmp_path / "index", vectors, dram="4MiB", attributes={"number": np.arange(300)}) as index:
        for where in (None, "number < 200", [*filters[np.arange(300) % 3]], [*filters[np.arange(300) // 100]]):
            with pytest.raises(ValueError, match="row 257 is too large"):
                index.search(queries, 3, where=where, **options)
        with pytest.raises(ValueError, match="row 257 is too large"):
            index.range_search(queries, 1.0)


@pytest.mark.parametrize("scale", [1e-20, 1e-40])
def test_vectors_that_underflow_are_refused(tmp_path, scale):
    vectors = (np.random.default_rng(0).normal(size=(50, 4)) * scale).astype(np.float32)
    with pytest.raises(ValueError, match="underflow"):
        ZoomIndex.build(tmp_path / "index", vectors)
    assert os.listdir(tmp_path) == []


def test_small_half_precision_vectors_are_scaled_in_single_precision(tmp_path):
    vectors = (np.random.default_rng(0).normal(size=(300, 8)) * 1e-6).astype(np.float16)
    with ZoomIndex.build(tmp_path / "index", vectors) as index:
        assert index.search(vectors[:5], 1, candidates=300, nprobe=300).distances.max() == 0


def test_foreign_byte_order_is_read_right(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(100, 4))
    for number, dtype in enumerate((">f4", ">f8", ">f2")):
        with ZoomIndex.build(tmp_path / str(number), vectors.astype(dtype)) as index:
            assert index.search(vectors[3], 1).ids[0] == 3


def test_relative_paths_outlive_a_change_of_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def wandering():
        yield np.ones((5, 3), np.float32)
        os.chdir(tmp_path / "elsewhere")
        yield np.zeros((5, 3), np.float32)

    with ZoomIndex.build("index", wandering()) as index:
        assert index.check() == []
    assert os.listdir(tmp_path / "elsewhere") == []
    assert (tmp_path / "index").is_dir()


@pytest.mark.parametrize(
    ("seed", "error"), [(None, TypeError), (1.5, TypeError), (-1, ValueError), (2**40, ValueError)]
)
def test_bad_seeds_are_named(tmp_path, seed, error):
    with pytest.raises(error, match="seed"):
        ZoomIndex.build(tmp_path / "index", np.ones((5, 2)), seed=seed)
    assert os.listdir(tmp_path) == []


def test_the_largest_seed_builds(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(1000, 4)).astype(np.float32)
    with ZoomIndex.build(tmp_path / "index", vectors, dram="4MiB", seed=2**31 - 2) as index:
        assert index.search(vectors[3], 1).ids[0] == 3


@pytest.mark.filterwarnings("ignore:calibration found")
def test_codes_that_became_shorter_are_read_back(tmp_path, monkeypatch):
    """The size of a code follows from the data: where all axes vary alike, a fifth byte is of no use."""
    planned = build.plan_layout
    monkeypatch.setattr(build, "plan_layout", lambda *sizes, **more: replace(planned(*sizes, **more), code_bytes=5))
    random = np.random.default_rng(0)
    first = (random.normal(size=(1500, 16)) * np.where(np.arange(16) < 8, 1, 1e-3)).astype(np.float32)
    second = random.normal(size=(1500, 16)).astype(np.float32)
    with ZoomIndex.build(tmp_path / "index", first, dram="4MiB", grow_to=4000) as index:
        assert index.stats()["code_bytes"] == 5
        index.remove(np.arange(1500))
        index.add(second)
        index.commit()
        index.compact()
        expected = index.search(second[:50], 5, recall=1)
    with ZoomIndex.open(tmp_path / "index") as index:
        assert index.stats()["code_bytes"] == 4
        np.testing.assert_array_equal(index.search(second[:50], 5, recall=1).ids, expected.ids)


def test_a_recall_of_one_keeps_what_any_search_finds(tmp_path):
    """Along axes in which no vector differed at build codes say nothing, and do not know that they do not."""
    vectors = np.zeros((300, 16), np.float32)
    vectors[:, :8] = np.random.default_rng(0).normal(size=(300, 8))
    far = np.zeros(16, np.float32)
    far[15] = 20
    with ZoomIndex.build(tmp_path / "index", vectors, dram="4MiB") as index:
        (name,) = index.add(far)
        index.commit(compact=False)
        found = index.search(far, 301, recall=1)
        assert (found.ids[0], found.distances[0]) == (name, 0)
        assert sorted(found.ids) == list(range(301))
        assert (np.diff(found.distances) >= 0).all()


def test_a_filter_that_goes_with_the_vectors_keeps_the_recall(tmp_path):
    random = np.random.default_rng(0)
    vectors = random.normal(size=(6000, 16)).astype(np.float32)
    vectors[3000:] += 30
    chosen = (np.arange(6000) >= 3000) | (random.random(6000) < 0.005)  # half of all, but few near the queries
    queries = random.normal(size=(200, 16)).astype(np.float32)
    true = exact_neighbours(vectors[chosen], queries, 3)[1]
    with ZoomIndex.build(tmp_path / "index", vectors, dram="4MiB", attributes={"chosen": chosen}) as index:
        found = index.search(queries, 3, recall=0.95, where="chosen")
        assert recall_at_k(found.distances, true) >= 0.95  # they lie in more lists than calibration knows of
        assert found.stats["scanned"] < 200 * 1500
        assert not found.stats["calibrated"]
        assert index.search(queries, 3, recall=0.95, where="chosen or not chosen").stats["calibrated"]


def test_nothing_is_learned_from_an_index_without_vectors_on_ssd(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)
    with ZoomIndex.build(tmp_path / "index", vectors, dram="4MiB") as index:
        index.remove(np.arange(300))
        with pytest.raises(ValueError, match="no vector of the index is on SSD"):
            index.tune(vectors)
        index.compact()
        with pytest.raises(ValueError, match="no vector of the index is on SSD"):
            index.tune(vectors)
        index.add(vectors)
        index.commit(compact=False)
        index.tune(vectors)
        assert index.search(vectors[:5], 3, recall=0.9).stats["calibrated"]


@pytest.mark.parametrize("strings", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_without_numbers_behind_right_checksums_are_named(tmp_path, strings, value):
    """No call writes them; another program may have. Without the row the index can be made anew."""
    vectors = np.random.default_rng(0).normal(size=(600, 8)).astype(np.float32)
    ids = [f"name {row}" for row in range(600)] if strings else list(range(1000, 1600))
    ZoomIndex.build(tmp_path / "index", vectors, ids=ids, dram="4MiB").close()
    with Store.open(tmp_path / "index", "zoom-index", writable=True) as store, store.begin() as tx:
        segment = store.read_segment("p0-rows").view(np.float32)  # whole pages
        rows = segment[: 600 * 8].reshape(600, 8)
        (at,) = np.flatnonzero((rows == vectors[17]).all(axis=1))
        rows[at, 3] = value
        tx.segment("p0-rows").append(segment)
        tx.commit()
    with ZoomIndex.open(tmp_path / "index", writable=True) as index:
        with pytest.raises(CorruptionError, match=f"id {ids[17]!r} .*NaN or infinity.*remove or update"):
            index.compact()
        index.remove([ids[17]])
        index.compact()
        assert index.check() == []
        assert len(index) == 599
        assert index.search(vectors[5], 1).ids[0] == ids[5]


@pytest.mark.parametrize("store", [1, None, "path"])
def test_an_index_is_made_of_a_store(store):
    with pytest.raises(TypeError, match=r"store=.*expected a Store; ZoomIndex\.open"):
        ZoomIndex(store)
