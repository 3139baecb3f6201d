"""The graph over centroids: every list within reach, copies, walks like a plain comparison, and broken links."""

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier import CorruptionError, backend
from memhier.ann.zoom.preview.routing import router
from memhier.ann.zoom.preview.routing.linking import link_lists
from memhier.ann.zoom.preview.routing.list_graph import DEGREE, NONE, ListGraph
from memhier.ann.zoom.preview.routing.monotonic import without_monotonic_path
from memhier.ann.zoom.preview.routing.router import Router


@pytest.fixture(params=["native", "python"])
def core(request, monkeypatch):
    """Both cores, by turns."""
    if request.param == "python":
        monkeypatch.setattr(backend, "core", None)
    elif backend.core is None:
        pytest.skip("needs the compiled core")


@pytest.fixture
def walking(monkeypatch):
    """Let lists be found by walks, however few there are and however many are wanted."""
    for name in ("EXACT_LISTS", "_WALK_COST", "_STEP_COST"):
        monkeypatch.setattr(router, name, 0)


def made_of(centroids, degree=DEGREE):
    halves = np.asarray(centroids).astype(np.float16)
    return ListGraph(halves, link_lists(halves, degree))


def clustered(lists, dimension, seed=0):
    random = np.random.default_rng(seed)
    centres = 2 * random.normal(size=(1 + lists // 50, dimension))
    return centres[random.integers(len(centres), size=lists)] + random.normal(size=(lists, dimension))


def nearest(centroids, queries):
    return np.square(queries[:, None].astype(np.float32) - centroids.astype(np.float32)).sum(axis=2)


@settings(max_examples=40, deadline=None)
@given(
    lists=st.integers(1, 400),
    dimension=st.sampled_from([1, 2, 7, 33]),
    kind=st.sampled_from(["noise", "apart", "copies", "one", "line"]),
    degree=st.sampled_from([2, 5, DEGREE]),
    seed=st.integers(0, 99),
)
def test_every_list_is_within_reach(lists, dimension, kind, degree, seed):
    random = np.random.default_rng(seed)
    centroids = random.normal(size=(lists, dimension))
    if kind == "apart":  # no near list of one group is one of another
        centroids = 0.01 * centroids + 100 * random.normal(size=(9, dimension))[random.integers(9, size=lists)]
    elif kind == "copies":
        centroids = centroids[random.integers(1 + lists // 5, size=lists)]
    elif kind == "one":
        centroids[:] = 3
    elif kind == "line":
        centroids = np.cumsum(np.abs(centroids), axis=0)
    graph = made_of(centroids, degree)
    assert graph.reached().all()
    assert ListGraph.fault(graph.centroids, graph.links) is None
    seen = graph.walk(graph.centroids[:3].astype(np.float32), lists, 2 * lists)
    assert (np.sort(seen, axis=1) == np.arange(lists)).all()
    away = nearest(graph.centroids, graph.centroids[:3])
    np.testing.assert_allclose(np.take_along_axis(away, seen, 1), np.sort(away, axis=1), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("core", "walking")
@pytest.mark.parametrize(("lists", "wanted"), [(1, 1), (2, 1), (3, 2), (900, 1), (900, 64), (900, 500)])
def test_walks_find_the_nearest_lists(lists, wanted):
    centroids = clustered(lists, 24).astype(np.float32)
    made = Router.build(centroids)
    queries = (centroids[:40] + 0.3 * np.random.default_rng(1).normal(size=(min(lists, 40), 24))).astype(np.float32)
    found = made.route(queries, wanted, in_order=True)
    away = nearest(made.centroids, queries)
    exact = np.argsort(away, axis=1, kind="stable")[:, :wanted]
    recall = np.mean([len(np.intersect1d(*pair)) / wanted for pair in zip(found, exact, strict=True)])
    assert recall >= 0.99
    ordered = np.take_along_axis(away, found, 1)
    assert (np.diff(ordered, axis=1) >= -1e-3).all()
    assert all(len(set(row)) == wanted for row in found.tolist())


@pytest.mark.usefixtures("core", "walking")
def test_walks_towards_far_queries_find_lists_of_one_norm():
    """As of inner products: all centroids have one norm, and the queries lie far beyond them."""
    centroids = clustered(1200, 20)
    norms = np.linalg.norm(centroids, axis=1)
    lifted = np.column_stack([centroids, np.sqrt(norms.max() ** 2 - norms**2)]).astype(np.float32)
    queries = np.column_stack([clustered(50, 20, 1), np.zeros(50)]).astype(np.float32)
    made = Router.build(lifted)
    away = nearest(made.centroids, 4 * queries)
    found = made.route(4 * queries, 60, in_order=True)
    exact = np.argsort(away, axis=1, kind="stable")[:, :60]
    assert np.mean([len(np.intersect1d(*pair)) / 60 for pair in zip(found, exact, strict=True)]) >= 0.98


@pytest.mark.skipif(backend.core is None, reason="needs the compiled core")
@pytest.mark.parametrize("dimension", [1, 3, 16, 40])
def test_the_two_cores_walk_alike(monkeypatch, dimension):
    random = np.random.default_rng(dimension)
    graph = made_of(random.integers(-9, 10, (1500, dimension)))  # distances that are exact, ties, and copies
    queries = random.integers(-9, 10, (30, dimension)).astype(np.float32)
    native = [graph.walk(queries, wanted, sight) for wanted, sight in ((1, 1), (7, 9), (200, 100), (1600, 900))]
    reached = graph.reached()
    monkeypatch.setattr(backend, "core", None)
    python = [graph.walk(queries, wanted, sight) for wanted, sight in ((1, 1), (7, 9), (200, 100), (1600, 900))]
    for one, other in zip(native, python, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(graph.reached(), reached)


@pytest.mark.skipif(backend.core is None, reason="needs the compiled core")
def test_the_two_cores_link_alike(monkeypatch):
    halves = np.random.default_rng(0).integers(-9, 10, (300, 6)).astype(np.float16)
    native = link_lists(halves)
    monkeypatch.setattr(backend, "core", None)
    np.testing.assert_array_equal(link_lists(halves), native)


def test_links_do_not_depend_on_threads():
    halves, threads = clustered(3000, 16).astype(np.float16), faiss.omp_get_max_threads()
    try:
        faiss.omp_set_num_threads(1)
        alone = link_lists(halves)
        faiss.omp_set_num_threads(4)
        np.testing.assert_array_equal(link_lists(halves), alone)
    finally:
        faiss.omp_set_num_threads(threads)


@pytest.mark.usefixtures("core")
def test_copies_follow_one_another_by_number():
    centroids = clustered(500, 8)
    copies = np.arange(3, 500, 2)
    centroids[copies] = centroids[3]
    graph = made_of(centroids)
    found = graph.walk(graph.centroids[3:4].astype(np.float32), 300, 300)[0]
    assert found[: len(copies)].tolist() == copies.tolist()
    assert graph.walk(graph.centroids[3:4].astype(np.float32), 5, 5)[0].tolist() == copies[:5].tolist()


@pytest.mark.usefixtures("core")
def test_where_a_walk_finds_fewer_lists_none_stands():
    graph = made_of(clustered(400, 8))
    found = graph.walk(graph.centroids[:2].astype(np.float32), 400, 1)
    assert ((found >= 0).sum(axis=1) < 400).all()
    assert (found[:, -1] == NONE).all()


def test_nearly_all_lists_have_a_monotonic_path():
    graph = made_of(clustered(3000, 16))
    targets = np.arange(0, 3000, 10)
    missed = without_monotonic_path(graph, targets)
    assert set(missed) <= set(targets)
    assert len(missed) <= 0.05 * len(targets)
    links = graph.links.copy()
    links[links == 2990] = NONE  # nothing leads there
    assert 2990 in without_monotonic_path(ListGraph(graph.centroids, np.sort(links, axis=1)[:, ::-1]), targets)


@pytest.mark.usefixtures("core", "walking")
@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ((0, 0), 500, "beyond the lists"),
        ((7, 3), -2, "beyond the lists"),
        ((7, -1), -502, "beyond the lists"),
        ((7, -1), -2, "do not follow one another"),
        ((7, -1), -12, "no copy"),
        ((480, 0), 3, "from a copy"),
        ((3, 2), 480, "to or from a copy"),
        (slice(None), NONE, "no list"),
    ],
)
def test_broken_links_are_refused(place, value, words):
    centroids = clustered(500, 8)
    centroids[480] = centroids[5]
    made = Router.build(centroids.astype(np.float32))
    raw = made.save()
    links = raw[: 4 * 500 * DEGREE].view(np.int32).reshape(500, DEGREE)
    links[place] = value
    with pytest.raises(CorruptionError, match=r"router is broken: .*(?:" + words + "|out of reach)"):
        Router.load(raw, 500, 8, "index")


@pytest.mark.usefixtures("walking")
def test_a_router_is_read_back(monkeypatch):
    made = Router.build(clustered(300, 9).astype(np.float32))
    again = Router.load(made.save(), 300, 9, "index")
    assert again.memory_bytes == made.memory_bytes <= 300 * router.router_bytes_per_list(9, 300)
    assert bytes(again.save()) == bytes(made.save())
    monkeypatch.setattr(router, "EXACT_LISTS", 300)
    with pytest.raises(CorruptionError, match="cannot be read"):
        Router.load(made.save(), 300, 9, "index")


@pytest.mark.parametrize("graph", [False, True])
def test_routers_of_earlier_versions_are_read(monkeypatch, graph):
    centroids = clustered(200, 12).astype(np.float32)
    kind = faiss.ScalarQuantizer.QT_fp16
    old = faiss.IndexHNSWSQ(12, kind, 16) if graph else faiss.IndexScalarQuantizer(12, kind)
    old.train(centroids)
    old.add(centroids)
    monkeypatch.setattr(router, "EXACT_LISTS", 0 if graph else 200)
    found = Router.load(faiss.serialize_index(old), 200, 12, "index")
    np.testing.assert_array_equal(found.centroids, centroids.astype(np.float16))
    assert bytes(found.save()) == bytes(Router.build(centroids).save())
    with pytest.raises(CorruptionError, match="not one of 201 centroids"):
        Router.load(faiss.serialize_index(old), 201, 12, "index")
    with pytest.raises(CorruptionError):
        Router.load(faiss.serialize_index(faiss.IndexFlatL2(12)), 200, 12, "index")
