"""Recall of MultiVectorIndex where a filter or removals leave items far from the query alone, and where items drift."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from memhier.ann import MultiVectorIndex
from memhier.ann.multivector.storage.catalog import KEY, KIND
from memhier.store.store import Store

spec = importlib.util.spec_from_file_location("multivector_data", Path(__file__).with_name("multivector_data.py"))
data = importlib.util.module_from_spec(spec)
spec.loader.exec_module(data)

COUNT, DIMENSION = 2500, 16  # of each place; a search looks at all of fewer items than 2,048


def drawn(place, length, random):
    """Return vectors of one of two places, each of 30 topics."""
    centres = np.random.default_rng(place).normal(size=(30, DIMENSION)) + 4 * np.eye(DIMENSION)[place]
    return (centres[random.integers(30, size=length)] + 0.4 * random.normal(size=(length, DIMENSION))).astype("f4")


@pytest.fixture(scope="module")
def items():
    random = np.random.default_rng(0)
    return [drawn(place, random.integers(1, 9), random) for place in (0, 1) for _ in range(COUNT)]


@pytest.fixture(scope="module")
def path(items, tmp_path_factory):
    path, places = tmp_path_factory.mktemp("far") / "index", np.repeat([0, 1], COUNT)
    MultiVectorIndex.build(path, items, attributes={"place": places}, dram="5MiB").close()
    return path


@pytest.fixture
def copied(path, tmp_path):
    with MultiVectorIndex.open(path) as index:
        index.save_to(tmp_path / "index")
    return tmp_path / "index"


def share_found(index, items, alive, k, recall, where=None):
    """Return the mean share of the best items that queries near the first place find."""
    random, shares = np.random.default_rng(7), []
    for number in range(12):
        query = drawn(0, (1, 3, 12)[number % 3], random)
        names, best = data.best_of(query, [items[name] for name in alive], k, alive)
        found = index.search(query, k, recall=recall, where=where)
        assert np.isin(found.ids, [*alive, -1]).all()
        shares.append(float((found.scores >= best[-1] - 1e-4 * abs(best[-1])).sum() / len(names)))
    return np.mean(shares)


@pytest.mark.parametrize("k", [1, 10, 100])
def test_a_filter_that_leaves_far_items_alone_keeps_the_recall(path, items, k):
    with MultiVectorIndex.open(path) as index:
        for recall in (0.9, 0.99):
            assert share_found(index, items, range(COUNT, 2 * COUNT), k, recall, "place == 1") >= recall - 0.01


def test_removed_items_near_the_query_take_no_place_of_others(copied, items):
    with MultiVectorIndex.open(copied, writable=True) as index:
        index.remove(where="place == 0")
        assert share_found(index, items, range(COUNT, 2 * COUNT), 10, 0.99) >= 0.98
        index.commit(compact=False)  # the parts are joined, and the lists stay without items
        assert share_found(index, items, range(COUNT, 2 * COUNT), 10, 0.99) >= 0.98
    with MultiVectorIndex.open(copied) as index:
        assert share_found(index, items, range(COUNT, 2 * COUNT), 10, 0.99) >= 0.98


def test_a_few_items_left_near_the_query_are_found_with_the_far_ones(copied, items):
    with MultiVectorIndex.open(copied, writable=True) as index:
        index.remove(range(5, COUNT))
        assert share_found(index, items, [*range(5), *range(COUNT, 2 * COUNT)], 10, 0.99) >= 0.98


def test_a_filter_that_leaves_near_items_compares_few(path, items):
    random = np.random.default_rng(8)
    with MultiVectorIndex.open(path) as index:
        found = [index.search(drawn(0, 12, random), 10, where="place == 0") for _ in range(12)]
    assert sum(each.stats["escalated"] == "exact" for each in found) <= 2


def test_an_index_of_the_third_format_compares_all_under_a_filter(copied, items):
    with Store.open(copied, kind=KIND, writable=True) as store, store.begin() as tx:
        about = json.loads(store.get(KEY))
        for learnt in about["calibration"]["learnt"]:
            del learnt["listed"]
        tx.put(KEY, json.dumps(about | {"version": 3}).encode())
        tx.commit()
    with MultiVectorIndex.open(copied, writable=True) as index:
        far, query = range(COUNT, 2 * COUNT), drawn(0, 12, np.random.default_rng(1))
        assert share_found(index, items, far, 10, 0.99, "place == 1") >= 0.98
        assert index.search(query, 10).stats["escalated"] == "no"
        assert index.search(query, 10, where="place == 0").stats["escalated"] == "exact"
        index.compact()
        assert index.search(query, 10, where="place == 0").stats["escalated"] == "no"


def test_items_that_drift_to_one_side_of_their_lists_are_found(tmp_path):
    random, shares = np.random.default_rng(2), []
    shift = np.eye(DIMENSION, dtype="f4")[0]
    items = [drawn(0, random.integers(1, 20), random) for _ in range(2400)]
    drifted = [item + shift for item in (drawn(0, random.integers(1, 20), random) for _ in range(600))]
    with MultiVectorIndex.build(tmp_path / "index", items, dram="5MiB", grow_to=4000) as index:
        index.add(drifted)
        index.commit(compact=False)
        for _ in range(12):
            query = drawn(0, 12, random) + shift
            best = data.best_of(query, items + drifted, 100)[0]
            shares.append(len(np.intersect1d(index.search(query, 100, recall=0.99).ids, best)) / 100)
    assert np.mean(shares) >= 0.98
