"""Indexes whose budget leaves their codes on SSD: the same answers as with codes in DRAM."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from memhier.ann import ZoomIndex
from memhier.ann.zoom.calibration.calibration import Calibration
from memhier.ann.zoom.storage.catalog import KIND, Description
from memhier.benchmarks.generators import mixed
from memhier.errors import BudgetError, CorruptionError
from memhier.io.reader import Reader
from memhier.store.store import Store

_COUNT = 16_000
_AXES = 32


def _vectors(count: int, seed: int, dtype: str = "float32") -> np.ndarray:
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(120, _AXES))
    found = centres[random.integers(0, len(centres), count)] + 0.5 * random.normal(size=(count, _AXES))
    return (found * 20).astype(dtype) if dtype in ("int8", "uint8") else found.astype(dtype)


def _least(path: Path, vectors: np.ndarray, **options: Any) -> int:
    """Return the least budget that an index takes, from the words of the refusal."""
    with pytest.raises(BudgetError) as refused:
        ZoomIndex.build(path / "refused", vectors, dram=1, **options)
    found = re.search(r"\((\d+) bytes\)", str(refused.value))
    assert found
    return int(found[1])


def _build(path: Path, vectors: np.ndarray, more: float = 1.02, **options: Any) -> ZoomIndex:
    index = ZoomIndex.build(path / "index", vectors, dram=int(more * _least(path, vectors, **options)), **options)
    assert index.stats()["codes"] == "ssd"
    return index


def _exact(vectors: np.ndarray, queries: np.ndarray, k: int, metric: str = "l2") -> np.ndarray:
    rows, asked = vectors.astype(np.float64), queries.astype(np.float64)
    if metric == "cosine":
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    products = asked @ rows.T
    away = -products if metric != "l2" else (rows**2).sum(1) - 2 * products
    return np.argsort(away, axis=1, kind="stable")[:, :k]


def _overlap(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.mean([np.isin(some, other).mean() for some, other in zip(wanted, found, strict=True)]))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Any:
    attributes = {"n": np.arange(_COUNT), "tags": [[f"t{row % 7}", f"u{row % 50}"] for row in range(_COUNT)]}
    with _build(tmp_path_factory.mktemp("stored"), _vectors(_COUNT, 1), attributes=attributes) as made:
        yield made


def test_a_budget_below_that_of_codes_in_dram_is_kept(index: ZoomIndex) -> None:
    stats = index.stats()
    assert stats["planned_bytes"] <= stats["dram"]
    assert index.memory_bytes <= stats["dram"]
    index.search(_vectors(50, 2), 10, where="n >= 100", recall=0.99)
    assert index.memory_bytes <= stats["dram"]
    assert index.check() == []


@pytest.mark.parametrize(("recall", "least"), [(0.9, 0.88), (0.99, 0.98), (1.0, 1.0)])
def test_a_declared_recall_is_kept(index: ZoomIndex, recall: float, least: float) -> None:
    vectors, queries = _vectors(_COUNT, 1), _vectors(100, 3)
    result = index.search(queries, 10, recall=recall)
    assert _overlap(result.ids, _exact(vectors, queries, 10)) >= least
    near = np.linalg.norm(vectors[result.ids] - queries[:, None], axis=2) ** 2
    np.testing.assert_allclose(result.distances, near, rtol=1e-3)


def test_a_search_reads_pages_of_codes_and_counts_them(index: ZoomIndex) -> None:
    result = index.search(_vectors(1, 4), 10, recall=0.95)
    assert 0 < result.stats["page_requests"] < result.stats["pages"] < 100


@pytest.mark.parametrize(
    ("where", "holds"),
    [
        ("n < 40", lambda row: row < 40),
        ("tags contains 't3' and n >= 5000", lambda row: row % 7 == 3 and row >= 5000),
        ("tags contains 'u49'", lambda row: row % 50 == 49),
        ("n < 0", lambda row: False),
    ],
)
def test_filters_find_the_nearest_of_their_rows(index: ZoomIndex, where: str, holds: Any) -> None:
    queries, rows = _vectors(20, 5), np.array([row for row in range(_COUNT) if holds(row)], np.int64)
    found = index.search(queries, 10, where=where, recall=1.0).ids
    if not len(rows):
        assert (found == -1).all()
        return
    np.testing.assert_array_equal(found, rows[_exact(_vectors(_COUNT, 1)[rows], queries, 10)])


def test_id_lists_radius_and_fetch_agree_with_plain_ones(index: ZoomIndex) -> None:
    vectors, queries = _vectors(_COUNT, 1), _vectors(5, 6)
    allowed = np.arange(0, _COUNT, 9)
    found = index.search(queries, 10, allow=allowed, recall=1.0).ids
    np.testing.assert_array_equal(found, allowed[_exact(vectors[allowed], queries, 10)])
    near = np.sort(((vectors[None] - queries[:, None]) ** 2).sum(axis=2), axis=1)
    within = index.range_search(queries[:1], float(near[0, 25]) * 1.001, recall=1.0)
    assert len(within.ids) >= 26
    assert index.fetch([3, 9], ["n"])["n"].tolist() == [3, 9]
    assert 5 in index
    assert _COUNT not in index
    np.testing.assert_array_equal(np.sort(np.concatenate([*index.ids()])), np.arange(_COUNT))
    assert "list" in str(index.explain(queries[0], 10))


def test_long_reads_find_the_same(index: ZoomIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = _vectors(30, 6)
    with ZoomIndex.open(index.path, pool=False) as usual:
        found = [usual.search(query, 10, recall=0.99) for query in queries[:, None]]
    monkeypatch.setattr("memhier.ann.zoom.index.index_reader", lambda dram, searches, on_ssd: Reader(run_pages=32))
    with ZoomIndex.open(index.path, pool=False) as longer:
        again = [longer.search(query, 10, recall=0.99) for query in queries[:, None]]
    for some, other in zip(found, again, strict=True):
        np.testing.assert_array_equal(some.ids, other.ids)
        np.testing.assert_array_equal(some.distances, other.distances)
        assert some.stats["pages"] == other.stats["pages"]
        assert some.stats["reads"] >= other.stats["reads"]
    assert sum(each.stats["reads"] for each in found) > sum(each.stats["reads"] for each in again)


def test_threads_find_the_same(index: ZoomIndex) -> None:
    queries = _vectors(60, 7)
    wanted, found = index.search(queries, 10, recall=0.95).ids, {}

    def search(part: int) -> None:
        found[part] = index.search(queries[part::3], 10, recall=0.95).ids

    threads = [Thread(target=search, args=(part,)) for part in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for part in range(3):
        np.testing.assert_array_equal(found[part], wanted[part::3])


def test_a_query_finds_the_same_alone_and_among_others(index: ZoomIndex) -> None:
    queries = _vectors(40, 12)
    for options in ({"recall": 0.9}, {"recall": 0.99, "where": "n >= 3000"}):
        together = index.search(queries, 10, **options)
        for row in range(len(queries)):
            alone = index.search(queries[row : row + 1], 10, **options)
            np.testing.assert_array_equal(alone.ids[0], together.ids[row])
            np.testing.assert_array_equal(alone.distances[0], together.distances[row])


@pytest.mark.long
@pytest.mark.parametrize(("metric", "dtype"), [("ip", "float32"), ("cosine", "float16"), ("l2", "int8")])
def test_other_metrics_and_dtypes(tmp_path: Path, metric: str, dtype: str) -> None:
    vectors, queries = _vectors(_COUNT, 8, dtype), _vectors(30, 9, dtype)
    options = {} if metric == "l2" else {"metric": metric}
    with _build(tmp_path, vectors, ids=[f"name {row}" for row in range(_COUNT)], **options) as made:
        found = made.search(queries, 5, recall=1.0).ids
        wanted = _exact(vectors, queries, 5, metric)
        numbers = np.array([[int(name.split()[1]) for name in row] for row in found])
        assert _overlap(numbers, wanted) > 0.98  # rounding decides on ties
        assert _overlap(made.search(queries, 5, recall=0.9).ids, found) > 0.85


@pytest.mark.long
def test_an_index_with_codes_on_ssd_lives(tmp_path: Path) -> None:
    vectors, more = _vectors(_COUNT, 10), _vectors(2_000, 11)
    with _build(tmp_path, vectors, 1.12, grow_to=20_000) as made:
        ids = made.add(more)
        made.remove(np.arange(0, 6_000, 2))
        made.commit()
        made.update([1, 3], vectors=-vectors[[1, 3]])
        made.commit()
        held = np.concatenate([vectors, more])
        held[[1, 3]] *= -1
        alive = np.setdiff1d(np.arange(len(held)), np.arange(0, 6_000, 2))
        queries = _vectors(20, 12)
        wanted = alive[_exact(held[alive], queries, 10)]
        np.testing.assert_array_equal(made.search(queries, 10, recall=1.0).ids, wanted)
        assert ids[0] == _COUNT
        assert made.stats()["planned_bytes"] <= made.stats()["dram"]
    with ZoomIndex.open(tmp_path / "index", writable=True) as again:
        assert again.stats()["codes"] == "ssd"
        np.testing.assert_array_equal(again.search(queries, 10, recall=1.0).ids, wanted)
        again.compact()
        np.testing.assert_array_equal(again.search(queries, 10, recall=1.0).ids, wanted)
        again.tune(_vectors(200, 13))
        assert _overlap(again.search(queries, 10, recall=0.95).ids, wanted) > 0.9
        assert again.check() == []


def test_a_damaged_page_of_codes_is_refused(tmp_path: Path) -> None:
    _build(tmp_path, _vectors(_COUNT, 14)).close()
    (path,) = [each for each in (tmp_path / "index").rglob("*") if re.search(r"p0-lists", each.name)]
    raw = bytearray(path.read_bytes())
    for at in range(100, len(raw), 4096):
        raw[at] ^= 1
    path.write_bytes(raw)
    with ZoomIndex.open(tmp_path / "index") as made, pytest.raises(CorruptionError):
        made.search(_vectors(1, 15), 10)


def test_copies_of_one_vector_and_lists_of_all_lengths(tmp_path: Path) -> None:
    vectors = _vectors(_COUNT, 16)
    vectors[:9_000] = vectors[0]
    with _build(tmp_path, vectors) as made:
        result = made.search(vectors[:1], 50, recall=1.0)
        assert (result.distances == 0).all()
        assert (result.ids < 9_000).all()
        queries = vectors[12_000:12_020]
        assert _overlap(made.search(queries, 1, recall=1.0).ids, np.arange(12_000, 12_020)[:, None]) == 1.0


@pytest.mark.long
def test_a_lower_recall_reads_fewer_pages_of_codes_where_queries_differ_in_difficulty(tmp_path: Path) -> None:
    data = mixed(40_000, 64, 2)
    vectors, queries = np.concatenate(list(data.blocks())), data.queries(200)
    with _build(tmp_path, vectors) as index:
        assert index.stats()["codes"] == "ssd"
        wanted = _exact(vectors, queries, 10)
        pages = {}
        for recall in (0.9, 0.99):
            found = [index.search(query, 10, recall=recall) for query in queries]
            assert _overlap(np.stack([each.ids for each in found]), wanted) >= recall - 0.015
            pages[recall] = sum(each.stats["pages"] for each in found)
    assert pages[0.9] < 0.7 * pages[0.99]


@pytest.mark.parametrize("count", [False, True])
def test_borders_count_for_usual_searches_of_many_lists_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: bool
) -> None:
    monkeypatch.setattr("memhier.ann.zoom.calibration.calibrate._BORDER_LISTS", 1 if count else _COUNT)
    random = np.random.default_rng(0)
    vectors, queries, others = (
        (random.normal(size=(size, 32)) * np.exp(-np.arange(32) / 6)).astype(np.float32) for size in (_COUNT, 200, 100)
    )
    middles = (others[:50] + others[50:]) / 2
    wanted, between = _exact(vectors, queries, 10), _exact(vectors, middles, 10)
    with _build(tmp_path, vectors) as index:
        for recall in (0.9, 0.99):
            assert _overlap(index.search(queries, 10, recall=recall).ids, wanted) >= recall - 0.015
            assert _overlap(index.search(middles, 10, recall=recall).ids, between) >= recall - 0.025
    with Store.open(tmp_path / "index", kind=KIND) as store:
        raw = json.loads(store.get("index"))
        found = Description.decode(store.get("index"), store.path).calibration
    assert Calibration.from_json(json.loads(json.dumps(found.to_json()))) == found
    for steps in raw["calibration"]["efforts"].values():  # of an earlier version
        for _, values, _ in steps:
            del values[7:]
    raw["calibration"]["narrow"] = {"10": 1.0}
    earlier = Description.decode(json.dumps(raw).encode(), tmp_path).calibration
    assert earlier.effort(10, 0.9)[0] == replace(found.effort(10, 0.9)[0], border=0.0)
    effort, known = found.effort(10, 0.9)
    assert known
    assert 0 < effort.border < 10 if count else effort.border == 0
    assert found.filtered(10, 0.9, 10)[0].border == 0
    assert found.of_radius(effort, 0.9).border == 0
    assert found.effort(200, 0.9)[0].border == 0  # beyond those measured
    assert found.changed(_COUNT // 5).effort(10, 0.9)[0].border == 0


def test_least_budget_is_kept_as_vectors_come_up_to_grow_to(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((14_000, _AXES)).astype(np.float32)
    dram = _least(tmp_path, vectors[:10_000], grow_to=14_000)
    with ZoomIndex.build(tmp_path / "index", vectors[:10_000], dram=dram, grow_to=14_000) as index:
        for some in np.split(vectors[10_000:], 20):
            index.add(some)  # was refused from 11,600 vectors on
            index.commit()
            assert index.stats()["planned_bytes"] <= dram
        found = index.search(vectors[::700], 1, recall=1)
        np.testing.assert_array_equal(found.ids[:, 0], np.arange(0, 14_000, 700))


def test_tuning_keeps_the_budget(tmp_path: Path) -> None:
    vectors = _vectors(_COUNT, 1)
    with _build(tmp_path, vectors) as index:
        index.tune(_vectors(200, 2))
        assert index.stats()["planned_bytes"] <= index.stats()["dram"]


def test_any_thread_tunes(tmp_path: Path) -> None:
    with _build(tmp_path, _vectors(_COUNT, 1)) as index, ThreadPoolExecutor(1) as other:
        other.submit(index.tune, _vectors(64, 2)).result()
        efforts = index.stats()["calibrated_recall"], index.stats()["nprobe"], index.stats()["candidates"]
        index.tune(_vectors(64, 2))
        assert efforts == tuple(index.stats()[name] for name in ("calibrated_recall", "nprobe", "candidates"))


def test_an_index_that_was_tuned_is_not_made_anew_for_want_of_room(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((24_000, _AXES)).astype(np.float32)
    dram = _least(tmp_path, vectors[:16_000], grow_to=24_000)
    with ZoomIndex.build(tmp_path / "index", vectors[:16_000], dram=dram, grow_to=24_000) as index:
        index.tune(vectors[:200])
        for some in np.split(vectors[16_000:], 20):
            index.add(some)
            index.commit()
        assert index.stats()["trained_vectors"] == 16_000
