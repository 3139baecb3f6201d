"""Searches that want only vectors within a distance."""

import numpy as np
import pytest

from memhier.ann import ZoomIndex

METRICS = ("l2", "ip", "cosine")


@pytest.fixture(scope="module", params=METRICS)
def index(request, tmp_path_factory):
    """Return an index of each metric, some of whose vectors wait in DRAM."""
    rng = np.random.default_rng(3)
    vectors = rng.normal(size=(3000, 24)).astype(np.float32)
    path = tmp_path_factory.mktemp("radius") / "index"
    attributes = {"even": np.arange(3000) % 2 == 0}
    with ZoomIndex.build(path, vectors, metric=request.param, dram="4MiB", attributes=attributes, grow_to=4000) as made:
        made.add(rng.normal(size=(50, 24)).astype(np.float32), attributes={"even": np.arange(50) % 2 == 0})
        yield made


@pytest.mark.parametrize("recall", [0.9, 1.0])
@pytest.mark.parametrize("where", [None, "even == true"])
@pytest.mark.parametrize("rank", [0, 3, 9])
def test_a_distance_cuts_the_result_where_it_stands(index, recall, where, rank):
    """The vectors within a distance are those of the search without one, up to that distance."""
    queries = np.random.default_rng(4).normal(size=(17, 24)).astype(np.float32)
    plain = index.search(queries, 10, recall=1.0, where=where)
    radius = plain.distances[:, rank]
    found = index.search(queries, 10, recall=recall, where=where, radius=radius)
    assert (found.distances[found.ids >= 0] <= np.repeat(radius, (found.ids >= 0).sum(axis=1))).all()
    assert ((found.ids >= 0) == np.isfinite(found.distances)).all()
    if recall == 1:
        inside = plain.distances <= radius[:, None]
        np.testing.assert_array_equal(found.ids, np.where(inside, plain.ids, -1))
        np.testing.assert_array_equal(found.distances, np.where(inside, plain.distances, np.inf))
    else:
        wanted = (plain.distances <= radius[:, None]).sum()
        hits = sum(len(np.intersect1d(a[a >= 0], b)) for a, b in zip(found.ids, plain.ids, strict=True))
        assert hits >= (recall - 0.05) * wanted


def test_a_near_distance_saves_reads(index):
    """Vectors whose bounds exclude them are not read."""
    queries = np.random.default_rng(5).normal(size=(40, 24)).astype(np.float32)
    plain = index.search(queries, 10, recall=0.95)
    some = index.search(queries, 10, recall=0.95, radius=plain.distances[:, 0])
    assert some.stats["page_requests"] < plain.stats["page_requests"]
    np.testing.assert_array_equal(some.ids[:, 0], plain.ids[:, 0])


def test_one_distance_serves_all_queries_and_infinity_is_none(index):
    """A number stands for each query; infinity changes nothing."""
    queries = np.random.default_rng(6).normal(size=(5, 24)).astype(np.float32)
    plain = index.search(queries, 4, recall=0.99)
    same = index.search(queries, 4, recall=0.99, radius=np.inf)
    np.testing.assert_array_equal(plain.ids, same.ids)
    far = float(np.sort(plain.distances.ravel())[7])
    one, each = index.search(queries, 4, radius=far), index.search(queries, 4, radius=[far] * 5)
    np.testing.assert_array_equal(one.ids, each.ids)
    single = index.search(queries[0], 4, radius=far)
    np.testing.assert_array_equal(single.ids, one.ids[0])
    nothing = index.search(queries, 4, radius=float(plain.distances.min()) - 1)
    assert (nothing.ids == -1).all()
    assert np.isinf(nothing.distances).all()


@pytest.mark.parametrize(
    ("radius", "error"), [(np.nan, ValueError), ([1.0, 2.0], ValueError), ("near", TypeError), (True, TypeError)]
)
def test_other_values_are_refused(index, radius, error):
    """Errors name the argument."""
    with pytest.raises(error, match="radius"):
        index.search(np.zeros((3, 24), np.float32), 2, radius=radius)
