"""An audit of an index of items counts the recall as a comparison with all tokens does, and tunes the index."""

import threading
import time
import warnings

import numpy as np
import pytest

from memhier.ann import MultiVectorIndex
from memhier.errors import BudgetError

pytestmark = pytest.mark.usefixtures("usual_priority")
PATIENCE = 600.0  # seconds, on a busy machine; pytest ends a test later
DIMENSION, COUNT = 16, 900


def audited(index):
    """Wait until no query waits, and return the findings of the audit."""
    until = time.monotonic() + PATIENCE
    while (found := index.stats()["audit"])["waiting"]:
        assert time.monotonic() < until, found
        time.sleep(0.005)
    return found


def make(count, seed, vectors=6):
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(9).normal(size=(60, DIMENSION)) * 2
    lengths = random.integers(1, 2 * vectors, count)
    return [(centres[random.integers(60, size=n)] + random.normal(size=(n, DIMENSION))).astype("f4") for n in lengths]


@pytest.fixture(scope="module")
def items():
    return make(COUNT, 1)


@pytest.fixture
def path(tmp_path, items):
    half = {"half": np.arange(COUNT) % 2}
    MultiVectorIndex.build(tmp_path / "index", items, attributes=half, dram="6MiB", grow_to=2 * COUNT).close()
    return tmp_path / "index"


def recall_of(result, items, queries, chosen=None):
    """Return the mean share of the true best found."""
    found = []
    for ids, query in zip(result.ids, queries, strict=True):
        scores = np.array([(each.astype(np.float64) @ query.T).max(0).sum() for each in items])
        if chosen is not None:
            scores[~chosen] = -np.inf
        found.append(len(np.intersect1d(np.argsort(-scores)[: len(ids)], ids)) / len(ids))
    return float(np.mean(found))


def test_an_audit_counts_the_recall(path, items):
    queries = make(40, 2)
    with MultiVectorIndex.open(path, audit=1.0) as index:
        assert index.stats()["memory_bytes"] <= index.stats()["planned_bytes"] <= index.stats()["dram"]
        result = index.search(queries, 5, recall=0.8)
        filtered = index.search(queries[:9], 5, recall=0.8, where="half == 1")
        index.search(queries[:3], 5, recall=1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            index.search(queries[:3], 5, max_reads=2)
        index.search(queries[:3], 5, allow=[1, 2, 3])
        index.explain(queries[0], 5)
        found = audited(index)
    assert (found["searched"], found["audited"], found["failed"], found["dropped"]) == (49, 49, 0, 0)
    plain, under_filter = sorted(found["levels"], key=lambda level: level["filtered"])
    assert plain["recall"] == pytest.approx(recall_of(result, items, queries))
    assert under_filter["recall"] == pytest.approx(recall_of(filtered, items, queries[:9], np.arange(COUNT) % 2 == 1))
    assert plain["low"] <= plain["recall"] <= plain["high"]
    assert plain["declared"] == 0.8
    assert not any(each.name == "memhier-audit" for each in threading.enumerate())


def test_results_are_those_without_an_audit(path):
    queries = make(20, 3)
    with MultiVectorIndex.open(path) as plain, MultiVectorIndex.open(path, audit=0.5) as index:
        assert plain.stats()["audit"] is None
        assert np.array_equal(plain.search(queries, 4).ids, index.search(queries, 4).ids)
        assert audited(index)["chosen"] in range(1, 20)


def test_a_change_drops_what_waits_and_the_record_stays(path):
    with MultiVectorIndex.open(path, writable=True, audit=1.0) as index:
        index.search(make(10, 4), 5, recall=0.9)
        before = audited(index)
        index.search(make(10, 5), 5, recall=0.9)
        index.add(make(3, 6), attributes={"half": [0, 0, 0]})
        found = audited(index)
        assert found["audited"] + found["dropped"] == 20
        assert found["audited"] >= before["audited"] == 10
        index.commit()
        index.search(make(5, 7), 5, recall=0.9)
        last = audited(index)
    with MultiVectorIndex.open(path, audit=1.0) as index:
        again = index.stats()["audit"]
        assert {**again, "share": 0, "waiting": 0} == {**last, "share": 0, "waiting": 0}
    assert MultiVectorIndex.open(path).check() == []


@pytest.mark.long
@pytest.mark.parametrize("writable", [False, True])
def test_an_index_is_tuned_for_queries_that_find_more_than_declared(path, items, writable):
    queries, declared = make(1150, 8, vectors=3), 0.8
    with MultiVectorIndex.open(path, writable=writable, audit=1.0) as index:
        for start in range(0, len(queries), 50):
            index.search(queries[start : start + 50], 10, recall=declared)
            found = audited(index)
            if found["retuned"]:
                break
        assert found["failure"] == ""
        assert found["retuned"] == 1
        assert sum(level["queries"] for level in found["levels"]) < found["audited"]  # those of the new efforts
        after = index.search(queries[:20], 10, recall=declared)
        assert recall_of(after, items, queries[:20]) >= declared - 0.02
        last = audited(index)
    with MultiVectorIndex.open(path, audit=1.0) as index:
        again = index.stats()["audit"]
        assert again["retuned"] == int(writable)
        assert again["levels"] == (last["levels"] if writable else [])  # noted of the efforts that the index has


def test_wrong_shares_and_budgets_without_room_are_refused(path, items, tmp_path):
    for wrong in (-0.1, 1.5, "half"):
        with pytest.raises((TypeError, ValueError), match="audit"):
            MultiVectorIndex.open(path, audit=wrong)
    MultiVectorIndex.build(tmp_path / "tight", items, dram="820KiB").close()
    with pytest.raises(BudgetError, match="audit: its queries take at least"):
        MultiVectorIndex.open(tmp_path / "tight", audit=0.1)


@pytest.mark.parametrize("seed", [2, 2**31 - 2])
def test_queries_are_drawn_by_any_seed(tmp_path, seed):
    items = make(40, 1)
    MultiVectorIndex.build(tmp_path / "index", items, dram="6MiB", grow_to=2 * COUNT, seed=seed).close()
    with MultiVectorIndex.open(tmp_path / "index", audit=0.5) as index:
        index.search(make(30, 2), 3)
        found = audited(index)
    assert found["searched"] == 30
    assert 5 < found["audited"] < 25
