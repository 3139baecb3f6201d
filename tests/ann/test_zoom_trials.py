"""Tuning by searches for the user's queries: the least effort that keeps each recall, and no less."""

import json
import shutil

import numpy as np
import pytest

from memhier.ann import ZoomIndex
from memhier.benchmarks.exact import exact_neighbours, recall_at_k
from memhier.benchmarks.workloads.search.ood import pictures_and_texts
from memhier.errors import CorruptionError
from memhier.store.store import Store

LEARNED = 512


@pytest.fixture(scope="module")
def unlike(tmp_path_factory):
    """Vectors, queries unlike them, and a tuned index of the vectors."""
    base, queries = pictures_and_texts(12_000, 2 * LEARNED, 48, 0.5, 3)
    path = tmp_path_factory.mktemp("trials") / "index"
    with ZoomIndex.build(path, base, metric="ip", dram="3MiB", attributes={"n": np.arange(len(base))}) as index:
        index.tune(queries[:LEARNED])
    return base, queries, path


def found(index, queries, **options):
    return index.search(queries, 10, **options)


@pytest.mark.long
@pytest.mark.parametrize("recall", [0.9, 0.95, 0.98])
def test_queries_of_a_kind_find_what_is_declared_and_hardly_more(unlike, recall):
    base, queries, path = unlike
    true = exact_neighbours(base, queries, 10, "ip")[1]
    with ZoomIndex.open(path) as index:
        result = found(index, queries, recall=recall)
        assert result.stats["calibrated"]
        share = recall_at_k(result.distances[:LEARNED], true[:LEARNED])
        assert recall <= share <= recall + 0.015
        assert abs(recall_at_k(result.distances[LEARNED:], true[LEARNED:]) - recall) < 0.02


def test_a_higher_recall_costs_no_less(unlike):
    _, queries, path = unlike
    with ZoomIndex.open(path) as index:
        costs = [found(index, queries, recall=recall).stats for recall in (0.5, 0.8, 0.9, 0.95, 0.99, 0.995)]
    for name in ("scanned", "page_requests"):
        of_name = [each[name] for each in costs]
        assert of_name == sorted(of_name)
        assert of_name[0] < of_name[-1]


@pytest.mark.parametrize("count", [64, 100])
def test_no_part_of_an_effort_exceeds_that_for_a_higher_recall(tmp_path, count):
    rng = np.random.default_rng(1)
    base = (rng.standard_normal((2000, 16)) * (rng.random(16) + 0.1)).astype("f4")
    with ZoomIndex.build(tmp_path / "index", base, dram="3MiB") as index:
        index.tune(rng.standard_normal((count, 16)).astype("f4"))
    with Store.open(tmp_path / "index", "zoom-index") as store:
        tried = json.loads(store.get("index") or "")["calibration"]["tried"]
    assert tried
    for steps in tried.values():
        parts = np.array([[part or 0 for part in effort] for _, effort, _ in steps])
        np.testing.assert_array_equal(parts, np.maximum.accumulate(parts))


def test_the_efforts_are_durable(unlike):
    _, queries, path = unlike
    with ZoomIndex.open(path, writable=True) as index:
        before = found(index, queries, recall=0.9)
        index.add(np.zeros((1, 48), np.float32), attributes={"n": [-1]})
        index.commit()
        index.remove([len(index) - 1])
        index.commit()
    with ZoomIndex.open(path) as index:
        again = found(index, queries, recall=0.9)
    # The radii of lists are computed anew from codes, which rounds them.
    assert again.stats["scanned"] == pytest.approx(before.stats["scanned"], rel=0.01)
    np.testing.assert_array_equal(again.ids, before.ids)


def test_searches_that_were_not_tried_keep_their_room(unlike):
    base, queries, path = unlike
    with ZoomIndex.open(path) as index:
        for options in ({"where": "n < 6000"}, {"radius": 0.0}, {}):
            k = 10 if options else 7
            result = index.search(queries, k, recall=0.9, **options)
            allowed = base[:6000] if "where" in options else base
            true = exact_neighbours(allowed, queries, k, "ip")[1]
            if "radius" in options:
                true = np.where(true <= 0.0, true, np.inf)
            assert recall_at_k(result.distances, true) >= 0.89


@pytest.mark.long
def test_vectors_that_wait_count_as_no_neighbours(tmp_path):
    base, queries = pictures_and_texts(6_000, 400, 32, 0.5, 4)
    path = tmp_path / "index"
    ZoomIndex.build(path, base, metric="ip", dram="3MiB").close()
    scanned = []
    for waiting in (False, True):
        with ZoomIndex.open(path, writable=True) as index:
            ids = index.add(queries[: 200 * waiting])  # nearer than all others
            index.tune(queries)
            index.remove(ids)
            scanned.append(found(index, queries, recall=0.9).stats["scanned"])
    assert scanned[0] == scanned[1]


def test_few_queries_declare_what_they_can_tell(tmp_path):
    base, queries = pictures_and_texts(6_000, 400, 32, 0.5, 5)
    with ZoomIndex.build(tmp_path / "index", base, metric="ip", dram="3MiB") as index:
        index.tune(queries[:64])
        for k in (1, 10, 100):
            assert index.search(queries, k, recall=0.97).stats["calibrated"]
            with_all = index.search(queries, k, recall=0.99)
            assert not with_all.stats["calibrated"]
            assert recall_at_k(with_all.distances, exact_neighbours(base, queries, k, "ip")[1]) >= 0.985


def test_efforts_tried_for_a_number_that_was_not_measured_are_refused(unlike, tmp_path):
    _, queries, path = unlike
    shutil.copytree(path, tmp_path / "index")
    with Store.open(tmp_path / "index", "zoom-index", writable=True) as store, store.begin() as tx:
        about = json.loads(store.get("index") or "")
        tried = about["calibration"]["tried"]
        tried["7"] = tried["10"][:1]
        tx.put("index", json.dumps(about).encode())
        tx.commit()
    with (
        pytest.raises(CorruptionError, match="other numbers of neighbours"),
        ZoomIndex.open(tmp_path / "index") as index,
    ):
        index.search(queries, 7)
