"""An audit counts the recall of real queries as brute force does, and tunes the index where it falls short."""

import json
import multiprocessing
import os
import re
import shutil
import threading
import time
import warnings

import numpy as np
import pytest

from memhier.ann import ZoomIndex
from memhier.ann.interval import recall_interval
from memhier.ann.zoom.audit.record import AuditRecord
from memhier.ann.zoom.search.searcher import Searcher
from memhier.ann.zoom.storage.catalog import KIND
from memhier.benchmarks.exact import exact_neighbours
from memhier.errors import BudgetError, CorruptionError
from memhier.store.store import Store

pytestmark = pytest.mark.usefixtures("usual_priority")
PATIENCE = 600.0  # seconds, on a busy machine; pytest ends a test later


def audited(index):
    """Wait until no query waits, and return what the audit found."""
    until = time.monotonic() + PATIENCE
    while (found := index.stats()["audit"])["waiting"]:
        assert time.monotonic() < until, found
        time.sleep(0.005)
    return found


def drifted():
    """Return vectors of which nine in ten lie in tight clusters, queries for these, and queries for the others."""
    random = np.random.default_rng(0)
    centres, spread = random.normal(size=(200, 32)) * 4, np.repeat([1.5, 0.05], [3, 29])

    def tight(count):
        return (centres[random.integers(0, 200, count)] + random.normal(size=(count, 32)) * spread).astype(np.float32)

    wide = (random.normal(size=(2000, 32)) * 3).astype(np.float32)
    return np.vstack([tight(18000), wide]), tight(1000), (random.normal(size=(2000, 32)) * 3).astype(np.float32)


@pytest.fixture(scope="module")
def drift():
    return drifted()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, drift):
    """The path of an index that is tuned for the queries of the clusters."""
    path = tmp_path_factory.mktemp("audit") / "index"
    with ZoomIndex.build(path, drift[0], attributes={"half": np.arange(20000) % 2}, dram="4MiB") as index:
        index.tune(drift[1])
    return path


@pytest.fixture
def path(tuned, tmp_path):
    return shutil.copytree(tuned, tmp_path / "index")


def recalls(result, base, queries, k):
    """Return the recall of each query by brute force."""
    near = exact_neighbours(base, queries, k)[0]
    return np.mean([np.isin(ids, true) for ids, true in zip(result.ids, near, strict=True)], axis=1)


@pytest.mark.parametrize("chance", [0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("count", [1, 7, 60, 1000])
@pytest.mark.parametrize("kind", ["coins", "tenths", "clumps"])
def test_intervals_hold_the_mean_as_often_as_they_say(chance, count, kind):
    random, trials = np.random.default_rng([count, int(100 * chance)]), 400
    if kind == "coins":
        values = random.random((trials, count)) < chance
    elif kind == "tenths":
        values = random.binomial(10, chance, (trials, count)) / 10
    else:  # a query finds nearly all or hardly any
        values = np.where(random.random((trials, count)) < chance, random.beta(50, 1, (trials, count)) ** 0.02, 0.0)
    mean = chance if kind != "clumps" else chance * 50 / 50.02
    ends = np.array([recall_interval(float(each), count) for each in values.mean(axis=1)])
    held = (ends[:, 0] <= mean + 1e-9) & (mean - 1e-9 <= ends[:, 1])
    assert held.mean() >= 0.95
    assert (ends[:, 0] <= values.mean(axis=1) + 1e-9).all()
    assert (values.mean(axis=1) <= ends[:, 1] + 1e-9).all()


def test_intervals_shrink_to_the_mean():
    assert recall_interval(0.9, 0) == (0.0, 1.0)
    widths = [high - low for low, high in (recall_interval(0.97, 10**power) for power in range(8))]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 0.001
    low, high = recall_interval(1.0, 10)
    assert (low, high) == (pytest.approx(0.025**0.1), 1.0)


def test_without_a_share_nothing_is_audited(path, drift):
    with ZoomIndex.open(path) as index:
        index.search(drift[2][:10], 5)
        assert index.stats()["audit"] is None
        held = index.memory_bytes
    with ZoomIndex.open(path, audit=0.5) as index:
        assert held < index.memory_bytes <= index.stats()["planned_bytes"] <= 4 << 20
    assert not any(each.name == "memhier-audit" for each in threading.enumerate())


@pytest.mark.parametrize("share", [-0.1, 1.1, np.nan])
def test_a_share_is_between_0_and_1(path, share):
    with pytest.raises(ValueError, match="audit"):
        ZoomIndex.open(path, audit=share)
    with pytest.raises(TypeError, match="audit"):
        ZoomIndex.open(path, audit="all")
    ZoomIndex.open(path, writable=True).close()  # nothing stayed open


def test_an_audit_has_its_place_in_the_budget(tmp_path):
    base = np.random.default_rng(1).normal(size=(40, 2000)).astype(np.float32)
    ZoomIndex.build(tmp_path / "index", base, dram="2MiB").close()
    with pytest.raises(BudgetError, match="audit: its queries take at least"):
        ZoomIndex.open(tmp_path / "index", audit=1)
    ZoomIndex.build(tmp_path / "pq", base[:, :32], preview="pq").close()
    with pytest.raises(ValueError, match="an exact search needs bounds"):
        ZoomIndex.open(tmp_path / "pq", audit=1)


def test_an_index_that_the_audit_has_tuned_beside_searches_keeps_its_budget(tmp_path):
    random = np.random.default_rng(0)
    base = (random.normal(size=(4000, 24)) + random.integers(0, 7, 4000)[:, None]).astype(np.float16)
    with pytest.raises(BudgetError) as refused:
        ZoomIndex.build(tmp_path / "refused", base, dram="64KiB", grow_to=6000)
    dram = int(1.35 * int(re.search(r"\((\d+) bytes\)", str(refused.value))[1]))
    ZoomIndex.build(tmp_path / "index", base, dram=dram, grow_to=6000).close()
    until = time.monotonic() + PATIENCE
    with ZoomIndex.open(tmp_path / "index", audit=1) as index:
        while not (found := index.stats()["audit"])["retuned"]:
            assert time.monotonic() < until, found
            index.search(random.normal(size=(2, 24)).astype(np.float32), 10, recall=0.9)
            time.sleep(0.002)
        assert index.memory_bytes <= index.stats()["planned_bytes"] <= dram


def test_every_query_is_counted_as_brute_force_counts_it(path, drift):
    base, _, queries = drift
    want = {}
    with ZoomIndex.open(path, audit=1) as index:
        for start, declared, k in ((0, 0.7, 10), (40, 0.99, 10), (80, 0.9, 1), (90, 0.9, 30), (110, None, 10)):
            some = queries[start : start + 11]
            result = index.search(some, k, recall=declared)
            audited(index)
            key = declared or 0.99, {30: 100}.get(k, k)
            want.setdefault(key, []).extend(recalls(result, base, some, k))
        even = index.search(queries[:10], 10, recall=0.9, where="half = 0")
        found = audited(index)
    sums = {(each["declared"], each["k"]): each for each in found["levels"] if not each["filtered"]}
    assert sums.keys() == want.keys()
    for key, values in want.items():
        assert sums[key]["queries"] == len(values)
        assert sums[key]["recall"] == pytest.approx(np.mean(values))
        assert sums[key]["low"] <= sums[key]["recall"] <= sums[key]["high"]
    (level,) = [each for each in found["levels"] if each["filtered"]]
    even.ids[:] //= 2
    assert (level["queries"], level["recall"]) == (10, pytest.approx(recalls(even, base[::2], queries[:10], 10).mean()))
    assert found["searched"] == found["chosen"] == found["audited"] == 65
    assert found["dropped"] == found["failed"] == found["retuned"] == 0


def test_searches_with_limits_are_not_audited(path, drift):
    query = drift[2][:1]
    with ZoomIndex.open(path, audit=1) as index:
        for options in (
            {"recall": 1.0}, {"nprobe": 3}, {"candidates": 20}, {"max_reads": 2}, {"deadline_ms": 1e4}, {"radius": 9.0},
            {"allow": [1, 2]}, {"deny": [1]},
        ):  # fmt: skip
            index.search(query, 5, **options)
        next(index.search_iter(query[0], 3))
        index.explain(query[0])
        assert audited(index)["searched"] == 0
        index.search(np.empty((0, 32)), 5)
        assert audited(index)["searched"] == 0
        index.search(query, 5)
        assert audited(index)["audited"] == 1


def test_the_queries_chosen_depend_on_their_number_alone(path, drift):
    def chosen(sizes):
        counts = []
        with ZoomIndex.open(path, audit=0.2) as index:
            start = 0
            for size in sizes:
                index.search(drift[2][start : start + size], 3, recall=0.5)
                start += size
                counts.append(index.stats()["audit"]["chosen"])
        return counts

    one = chosen([1] * 60)
    assert chosen([20] * 3) == [one[19], one[39], one[59]]
    assert 3 <= one[-1] <= 25


def test_a_queue_that_is_full_drops_queries(path, drift):
    with ZoomIndex.open(path, audit=1) as index:
        planned = index.stats()["planned_bytes"]
        for _ in range(3):
            index.search(drift[2], 10, recall=0.5)
        found = index.stats()["audit"]
        assert found["dropped"] > 0
        assert index.memory_bytes <= planned
        found = audited(index)
        assert found["audited"] + found["dropped"] == found["chosen"] == 6000


@pytest.mark.long
def test_drifted_queries_find_what_is_declared_again(path, drift, tmp_path):
    base, _, queries = drift
    reference = shutil.copytree(path, tmp_path / "tuned")
    learned, judged = queries[:1000], queries[1000:]
    with ZoomIndex.open(reference) as index:
        before = index.search(judged, 10)
        index.tune(learned)
        by_hand = index.search(judged, 10)
        effort = {name: index.stats()[name] for name in ("nprobe", "candidates", "calibrated_recall")}
    assert recalls(before, base, judged, 10).mean() < 0.97
    with ZoomIndex.open(path, audit=1, writable=True) as index:
        for start in range(0, 1000, 25):
            index.search(learned[start : start + 25], 10)
            found = audited(index)
        assert found["retuned"] >= 2
        assert not found["failure"]
        after = index.search(judged, 10)
        assert recalls(after, base, judged, 10).mean() >= 0.985
        assert after.stats["page_requests"] <= by_hand.stats["page_requests"] + by_hand.stats["hot_pages"]
        assert {name: index.stats()[name] for name in effort} == effort
    with ZoomIndex.open(path) as index:  # durable
        again = index.search(judged, 10)
        assert again.stats["page_requests"] == after.stats["page_requests"]


@pytest.mark.long
def test_queries_that_find_more_than_declared_read_less_again(path, drift):
    base, easy, hard = drift
    with ZoomIndex.open(path, writable=True) as index:
        index.tune(hard[:1000])
        before = index.search(easy, 10, recall=0.9)
    assert recalls(before, base, easy, 10).mean() > 0.95
    with ZoomIndex.open(path, audit=1, writable=True) as index:
        for start in [*range(0, 1000, 50), 0]:
            assert index.stats()["audit"]["retuned"] == 0
            index.search(easy[start : start + 50], 10, recall=0.9)
            found = audited(index)
            if found["retuned"]:
                break
        assert (found["retuned"], found["failure"]) == (1, "")
        after = index.search(easy, 10, recall=0.9)
        assert recalls(after, base, easy, 10).mean() >= 0.88
        assert after.stats["page_requests"] < before.stats["page_requests"] + before.stats["hot_pages"]


def test_counts_go_on_when_the_index_is_opened_again(path, drift):
    with ZoomIndex.open(path, audit=1, writable=True) as index:
        index.search(drift[2][:20], 10, recall=0.9)
        first = audited(index)
    with ZoomIndex.open(path, audit=1) as index:  # a reader: what it counts is gone with it
        assert audited(index) == first
        index.search(drift[2][20:30], 10, recall=0.9)
        assert audited(index)["audited"] == 30
    with ZoomIndex.open(path, audit=1, writable=True) as index:
        assert audited(index) == first
        index.search(drift[2][20:30], 10, recall=0.9)
        second = audited(index)
        assert second["audited"] == 30
        index.remove([3])
        index.commit(compact=False)
        assert audited(index) == second
    with ZoomIndex.open(path, audit=1, writable=True) as index:
        assert audited(index) == second
        index.tune(drift[1])  # of another calibration, which no query has tried
    with ZoomIndex.open(path, audit=1) as index:
        assert index.stats()["audit"]["levels"] == []
        assert audited(index)["audited"] == 30


def test_a_damaged_record_is_refused(path):
    with Store.open(path, kind=KIND, writable=True) as store, store.begin() as tx:
        tx.put("audit", b'{"searched": -1}')
        tx.commit()
    ZoomIndex.open(path).close()
    with pytest.raises(CorruptionError, match="audit"):
        ZoomIndex.open(path, audit=1)


def test_changes_beside_searches_are_no_misses(path, drift):
    queries, random = drift[2], np.random.default_rng(3)
    with ZoomIndex.open(path, audit=1, writable=True) as index:
        for turn in range(30):
            near = queries[turn : turn + 1] + random.normal(size=(3, 32)).astype(np.float32) * 0.01
            index.search(queries[turn : turn + 1], 3, recall=0.999)
            ids = index.add(near)  # nearer than all that were found
            index.search(queries[turn : turn + 1], 3, recall=0.999)
            index.remove(ids)
            if turn % 10 == 9:
                index.search(queries[turn : turn + 1], 3, recall=0.999)
                index.commit(compact=False)
        found = audited(index)
        assert found["audited"] + found["dropped"] == found["chosen"] == 63
        index.search(queries[:20], 3, recall=0.999)
        found = audited(index)
        assert found["audited"] >= 20
        assert all(each["recall"] > 0.95 for each in found["levels"])
        assert not found["failed"]


def test_eight_threads_search_beside_the_audit(path, drift):
    queries = drift[2]
    with ZoomIndex.open(path) as index:
        want = index.search(queries[:160], 10, recall=0.9).ids
    found = np.empty_like(want)
    with ZoomIndex.open(path, audit=0.5) as index:

        def search(first):
            for row in range(first, 160, 8):
                found[row] = index.search(queries[row], 10, recall=0.9).ids

        threads = [threading.Thread(target=search, args=(first,)) for first in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        counts = audited(index)
    np.testing.assert_array_equal(found, want)
    assert counts["searched"] == 160
    assert counts["audited"] + counts["dropped"] == counts["chosen"]
    assert not counts["failed"]


def test_close_ends_an_audit_under_way(path, drift):
    for writable in (False, True):
        index = ZoomIndex.open(path, audit=1, writable=writable)
        index.search(drift[2][:200], 10)
        index.close()
        index.close()
        assert not any(each.name == "memhier-audit" for each in threading.enumerate())
    index = ZoomIndex.open(path, audit=1)
    index.search(drift[2][:20], 10)
    del index  # and the end of an index that nothing closed
    until = time.monotonic() + PATIENCE
    while any(each.name == "memhier-audit" for each in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_damaged_page_is_a_failure_and_no_crash(path, drift, monkeypatch):
    query, exactly = drift[2][:1], Searcher.nearest_exactly
    file = max(path.glob("segments/*"), key=lambda each: each.stat().st_size)
    sound = file.read_bytes()

    def damaged(*arguments):
        raw = bytearray(sound)
        raw[::4096] = bytes(each ^ 1 for each in raw[::4096])
        file.write_bytes(raw)
        try:
            return exactly(*arguments)
        finally:
            file.write_bytes(sound)

    with ZoomIndex.open(path, audit=1, pool=False) as index:
        want = index.search(query, 3).ids
        audited(index)
        with monkeypatch.context() as patch:
            patch.setattr(Searcher, "nearest_exactly", damaged)
            index.search(query, 3)
            found = audited(index)
        assert (found["failed"], found["audited"]) == (1, 1)
        assert "CorruptionError" in found["failure"]
        with pytest.warns(UserWarning, match="the audit of this index failed"):
            np.testing.assert_array_equal(index.search(query, 3).ids, want)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            index.search(query, 3)  # said once
        assert audited(index)["audited"] == 3


@pytest.mark.long
def test_a_prepared_commit_and_a_renewal_go_before_tuning(path, drift):
    base, _, queries = drift
    with ZoomIndex.open(path, audit=1, writable=True) as index:
        index.add(base[:1])
        index.prepare(1)
        for start in range(0, 200, 50):
            index.search(queries[start : start + 50], 10)
            found = audited(index)
        assert (found["retuned"], found["failure"]) == (0, "")
        index.publish()
        for start in range(200, 300, 50):
            index.search(queries[start : start + 50], 10)
            found = audited(index)
        assert found["retuned"] == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_searches_without_the_audit(path, drift):
    with ZoomIndex.open(path, audit=1, writable=True) as index:
        index.search(drift[2][:50], 10)

        def search():
            index.search(drift[2][:5], 10)
            assert index.stats()["audit"]["searched"] == 50
            index.close()

        child = multiprocessing.get_context("fork").Process(target=search)
        child.start()
        child.join()
        assert child.exitcode == 0
        assert audited(index)["audited"] == 50


@pytest.mark.parametrize("before", [1000, 20_000])
def test_a_change_of_queries_shows_however_long_the_audit_has_run(before):
    random, record = np.random.default_rng(0), AuditRecord()
    for _ in range(before):
        record.note(0.95, 10, random.binomial(10, 0.99) / 10, filtered=False)
    assert not record.short
    loaded = AuditRecord.load(record.encode(), None, lambda efforts: efforts, "here")
    for recalled in (record, loaded):
        for _ in range(1000):
            recalled.note(0.95, 10, random.binomial(10, 0.85) / 10, filtered=False)
        assert recalled.short
        (level,) = recalled.levels()
        assert level["queries"] <= 2000
        assert 0.85 < level["recall"] < 0.95


def test_a_long_record_of_an_earlier_version_shows_a_change():
    values = json.loads(AuditRecord().encode()) | {"levels": [[0.95, 10, False, 60_000, 57_000.0, 59_400.0]]}
    record = AuditRecord.load(json.dumps(values).encode(), None, lambda efforts: efforts, "here")
    assert record.levels()[0]["recall"] == pytest.approx(0.99)
    record.note(0.95, 10, 0.9, filtered=False)
    (level,) = record.levels()
    assert (level["queries"], level["declared"]) == (1001, pytest.approx(0.95))
    assert level["recall"] == pytest.approx((1000 * 0.99 + 0.9) / 1001)
