"""The inner product where norms vary, the recommender's case: the declared recall, at the reads of equal norms."""

from dataclasses import replace

import numpy as np
import pytest

from memhier.ann import ZoomIndex
from memhier.benchmarks.exact import exact_neighbours, id_recall
from memhier.benchmarks.workloads.search.sets import LOGS, log_factors, made_factors

# At k = 100 more candidates may be needed than are kept.
pytestmark = pytest.mark.filterwarnings("ignore:calibration found")

TOLERANCE = 0.02  # of a mean over hundreds of queries, calibrated on as many
RECALLS = (0.9, 0.95, 0.99)
DRAM = "1MiB"


def answers(folder, factors, **options):
    """Return the recall and the pages a query of each declared recall, users asking."""
    true = exact_neighbours(factors.items, factors.users, 10, "ip")[0]
    measured = []
    with ZoomIndex.build(folder, factors.items, metric="ip", **{"dram": DRAM} | options) as index:
        for declared in RECALLS:
            found = index.search(factors.users, 10, recall=declared)
            assert found.stats["calibrated"]
            measured.append((id_recall(found.ids, true), found.stats["page_requests"] / len(factors.users)))
    return np.array(measured)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "sigma"), [("clusters", 1.0), ("spectrum", 1.5)])
def test_norms_that_vary_cost_neither_recall_nor_reads(tmp_path, kind, sigma):
    factors = made_factors(kind, 3000, 300, sigma, 0)
    varied = answers(tmp_path / "varied", factors)
    level = answers(tmp_path / "level", factors.normalised())
    assert (varied[:, 0] >= np.array(RECALLS) - TOLERANCE).all()
    assert (level[:, 0] >= np.array(RECALLS) - TOLERANCE).all()
    assert (varied[:, 1] <= 1.5 * level[:, 1]).all()


@pytest.mark.long
@pytest.mark.parametrize("name", LOGS[1:])
def test_users_of_a_real_log_find_their_items(tmp_path, name):
    try:
        factors = log_factors(name)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    factors = replace(factors, users=factors.users[::15])
    assert (answers(tmp_path / "index", factors)[:, 0] >= np.array(RECALLS) - TOLERANCE).all()


@pytest.fixture(scope="module")
def asked_items(tmp_path_factory):
    """Items of twenty kinds, each with a colour, as an index, and users who want one kind."""
    random = np.random.default_rng(6)
    kind = random.integers(0, 20, 3000)
    centres = random.normal(size=(20, 24))
    items = centres[kind] + 0.3 * random.normal(size=(3000, 24))
    items *= random.lognormal(0, 0.7, (3000, 1))
    users = centres[np.arange(200) % 20] + 0.3 * random.normal(size=(200, 24))
    items, users, colour = items.astype(np.float32), users.astype(np.float32), random.random(3000)
    path, attributes = tmp_path_factory.mktemp("asked") / "index", {"kind": kind, "colour": colour}
    with ZoomIndex.build(path, items, metric="ip", dram="2MiB", attributes=attributes) as index:
        yield index, items, users, kind, colour


@pytest.mark.parametrize("where", ["colour < 0.5", "colour < 0.02", "kind != 3", "kind < 10"])
def test_a_filter_keeps_the_recall_of_inner_products(asked_items, where):
    index, items, users, kind, colour = asked_items
    left = np.flatnonzero(eval(where, {"kind": kind, "colour": colour}))
    true = left[exact_neighbours(items[left], users, 10, "ip")[0]]
    for recall in (0.9, 0.95, 0.99):
        assert id_recall(index.search(users, 10, recall=recall, where=where).ids, true) >= recall - TOLERANCE


@pytest.mark.parametrize("kind", ["away", "between", "noise"])
def test_users_unlike_the_items_keep_the_recall(asked_items, kind):
    index, items, users, _, _ = asked_items
    asked = {
        "away": -users,
        "between": users + users[::-1],
        "noise": np.random.default_rng(7).normal(size=users.shape).astype(np.float32),
    }[kind]
    true = exact_neighbours(items, asked, 10, "ip")[0]
    for recall in (0.9, 0.95, 0.99):
        assert id_recall(index.search(asked, 10, recall=recall).ids, true) >= recall - TOLERANCE


@pytest.mark.long
def test_product_quantised_codes_find_what_they_declare(tmp_path):
    factors = made_factors("clusters", 3000, 200, 1.0, 1)
    true = exact_neighbours(factors.items, factors.users, 10, "ip")[0]
    with ZoomIndex.build(tmp_path / "index", factors.items, metric="ip", preview="pq", dram=DRAM) as index:
        found = index.search(factors.users, 10, recall=0.9)
        assert id_recall(found.ids, true) >= 0.9 - TOLERANCE
        every = index.search(factors.users, 10, candidates=3000, nprobe=10**6)
        assert id_recall(every.ids, true) == 1


def test_vectors_that_are_added_are_found_and_longer_ones_refused(tmp_path):
    factors = made_factors("clusters", 3200, 200, 1.0, 2)
    true, near = exact_neighbours(factors.items, factors.users, 10, "ip")
    last = np.argsort(np.linalg.norm(factors.items, axis=1))[:-1][-200::2]  # but the longest of all
    first = np.setdiff1d(np.arange(3200), last)
    with ZoomIndex.build(
        tmp_path / "index", factors.items[first], ids=first, metric="ip", dram="2MiB", grow_to=4000
    ) as index:
        index.add(factors.items[last], ids=last)
        index.commit()
        found = index.search(factors.users, 10, recall=0.95)
        assert id_recall(found.ids, true) >= 0.95 - TOLERANCE
        whole = index.range_search(factors.users[0], float(near[0, -1]), recall=1.0)
        assert set(true[0]) <= set(whole.ids.tolist())
        with pytest.raises(ValueError, match="row 1 has a norm"):
            index.add(factors.items[first][:2] * np.float32([[1], [1e6]]))


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6])
def test_the_length_of_a_query_changes_no_answer(tmp_path, scale):
    factors = made_factors("clusters", 1000, 50, 1.0, 4)
    with ZoomIndex.build(tmp_path / "index", factors.items, metric="ip") as index:
        plain = index.search(factors.users, 10)
        scaled = index.search(factors.users.astype(np.float64) * scale, 10)
    np.testing.assert_array_equal(scaled.ids, plain.ids)
    np.testing.assert_allclose(scaled.distances, plain.distances * scale, rtol=1e-4)
