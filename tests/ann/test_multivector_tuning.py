"""Recall of MultiVectorIndex for queries unlike its items, and for those that it is tuned for."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from memhier.ann import MultiVectorIndex
from memhier.ann.multivector.storage.catalog import KEY, KIND
from memhier.errors import ClosedError
from memhier.store.store import Store

spec = importlib.util.spec_from_file_location("multivector_data", Path(__file__).with_name("multivector_data.py"))
data = importlib.util.module_from_spec(spec)
spec.loader.exec_module(data)

COUNT, DIMENSION = 2200, 16


def unit(values):
    return (values / np.maximum(np.linalg.norm(values, axis=-1, keepdims=True), 1e-12)).astype(np.float32)


@pytest.fixture(scope="module")
def items():
    """Items in few of the dimensions mostly, as those of a model are."""
    spectrum = 0.8 ** np.arange(DIMENSION)
    return [unit(item * spectrum).astype(np.float16) for item in data.drawn_items(COUNT, DIMENSION, "float32")]


@pytest.fixture(scope="module")
def path(items, tmp_path_factory):
    path = tmp_path_factory.mktemp("tuning") / "index"
    MultiVectorIndex.build(path, items, dram="2500KiB", grow_to=COUNT + 200).close()
    return path


def copy_of(path, place):
    with MultiVectorIndex.open(path) as index:
        index.save_to(place)
    return place


def queries_of(items, kind, count, seed=3):
    random = np.random.default_rng([seed, count])
    own = [items[number].astype(np.float32)[:12] for number in random.choice(len(items), count)]
    vectors = int(kind.rpartition(" ")[2])
    normal = unit(random.normal(size=(count, vectors, DIMENSION)))
    if kind.startswith("gaussian"):
        return [*normal]
    if kind.startswith("negated"):
        return [-query[:vectors] for query in own]
    if kind.startswith("other axes"):
        return [np.ascontiguousarray(query[:vectors, ::-1]) for query in own]
    if kind.startswith("shifted"):
        return [unit(query[:vectors] + 0.7 * normal[0, 0]) for query in own]
    return [query[:vectors] for query in own]


def measured(index, items, queries, **options):
    """Return the mean share of the ten best that searches find, and all results."""
    tokens, starts = np.concatenate(items).astype(np.float32), np.cumsum([0, *map(len, items)])
    shares, results = [], []
    for query in queries:
        exact = np.maximum.reduceat(tokens @ query.T, starts[:-1], axis=0).sum(axis=1)
        kth = np.sort(exact)[-10]
        results.append(index.search(query, 10, **options))
        shares.append(np.mean(exact[results[-1].ids] >= kth - 1e-4 * abs(kth) - 1e-5))
    return np.mean(shares), results


@pytest.mark.parametrize(
    "kind",
    ["gaussian 1", "gaussian 4", "gaussian 24", "negated 2", "negated 12", "other axes 12", "shifted 8", "items 1"],
)
def test_queries_unlike_the_items_keep_the_recall(path, items, kind):
    with MultiVectorIndex.open(path) as index:
        for recall in (0.9, 0.99):
            share, results = measured(index, items, queries_of(items, kind, 25), recall=recall)
            assert share >= recall - 0.02, recall
            assert {each.stats["escalated"] for each in results} <= {"no", "exact"}


def test_a_search_says_that_it_compared_all_items(path, items):
    with MultiVectorIndex.open(path) as index:
        near, far = queries_of(items, "items 12", 12), queries_of(items, "gaussian 24", 12)
        assert sum(index.search(each, 10).stats["escalated"] == "exact" for each in near) <= 3
        assert all(index.search(each, 10).stats["escalated"] == "exact" for each in far)
        assert index.search(far[0], 10).ids.tolist() == index.search(far[0], 10, recall=1.0).ids.tolist()
        assert index.search(near[0], 10, recall=1.0).stats["escalated"] == "exact"


def test_tuned_for_its_queries_an_index_keeps_the_recall_with_fewer_reads(path, items, tmp_path):
    kind = "gaussian 24"
    asked = queries_of(items, kind, 40)
    with MultiVectorIndex.open(copy_of(path, tmp_path / "index"), writable=True) as index:
        before = [each.stats["pages"] for each in measured(index, items, asked, recall=0.9)[1]]
        few = queries_of(items, "items 1", 1)[0]
        effort = index.search(few, 10).stats
        new = index.add([items[0]])
        index.tune(queries_of(items, kind, 128, seed=4))
        share, results = measured(index, items, asked, recall=0.9)
        assert share >= 0.88
        assert np.mean([each.stats["pages"] for each in results]) < 0.5 * np.mean(before)
        assert {each.stats["escalated"] for each in results} <= {"no", "exact"}
        assert index.search(few, 10).stats | {"ranked": 0} == effort | {"ranked": 0}  # another class
        assert new.tolist() == [COUNT]
        index.remove(new)
    with MultiVectorIndex.open(tmp_path / "index") as index:  # durable; the addition was not
        assert len(index) == COUNT
        assert index.check() == []
        again = measured(index, items, asked, recall=0.9)[1]
        assert [each.ids.tolist() for each in again] == [each.ids.tolist() for each in results]
        assert [each.stats["pages"] for each in again] == [each.stats["pages"] for each in results]


@pytest.mark.slow
def test_an_index_open_for_reading_is_tuned_until_it_closes(path, items):
    asked = queries_of(items, "gaussian 24", 5)
    with MultiVectorIndex.open(path) as index:
        index.tune(queries_of(items, "gaussian 24", 128, seed=4))
        assert any(index.search(each, 10, recall=0.9).stats["escalated"] == "no" for each in asked)
    with MultiVectorIndex.open(path) as index:
        assert all(index.search(each, 10, recall=0.9).stats["escalated"] == "exact" for each in asked)


def test_tuning_refuses_too_few_queries_or_items(path, items, tmp_path):
    with MultiVectorIndex.open(path) as index:
        before = index.search(items[3], 10).stats
        mixed = [*queries_of(items, "gaussian 1", 100), *queries_of(items, "gaussian 24", 100)]
        for queries, error, words in (
            (mixed, ValueError, "at least 128"),
            ([], ValueError, "at least 128"),
            (np.ones((200, 3, 5)), ValueError, "dimension of the index"),
            ("words", TypeError, "list of such matrices"),
        ):
            with pytest.raises(error, match=words):
                index.tune(queries)
        assert index.search(items[3], 10).stats == before
    with pytest.raises(ClosedError):
        index.tune(mixed)
    with (
        MultiVectorIndex.build(tmp_path / "few", items[:5], dram="4MiB") as few,
        pytest.raises(ValueError, match="too few items on SSD"),
    ):
        few.tune(queries_of(items, "gaussian 4", 128))


def test_an_index_of_the_second_format_keeps_its_efforts(path, items, tmp_path):
    with Store.open(copy_of(path, tmp_path / "index"), kind=KIND, writable=True) as store, store.begin() as tx:
        about = json.loads(store.get(KEY))
        for learnt in about["calibration"]["learnt"]:
            del learnt["nearness"]
        tx.put(KEY, json.dumps(about | {"version": 2}).encode())
        tx.commit()
    asked = queries_of(items, "items 12", 10)
    with MultiVectorIndex.open(tmp_path / "index", writable=True) as index:
        assert index.stats()["calibrated"]
        assert measured(index, items, asked)[0] >= 0.97
        index.add([items[0]])
        index.commit()
    with MultiVectorIndex.open(tmp_path / "index") as index:
        assert len(index) == COUNT + 1
        assert measured(index, items, asked)[0] >= 0.97
