"""Options of a search, and its account of itself: filters, limits, efforts, explanations, copies."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from memhier.ann import ZoomIndex

COUNT, DIMENSION = 4000, 32


@pytest.fixture(scope="module")
def vectors():
    random = np.random.default_rng(0)
    centres = random.normal(size=(60, DIMENSION)) * 3
    points = centres[random.integers(0, 60, COUNT)] + random.normal(size=(COUNT, DIMENSION))
    return points.astype(np.float32)


@pytest.fixture(scope="module")
def index(tmp_path_factory, vectors):
    attributes = {"number": np.arange(COUNT), "third": np.arange(COUNT) % 3}
    path = tmp_path_factory.mktemp("options") / "index"
    with ZoomIndex.build(path, vectors, dram="4MiB", attributes=attributes, ids=np.arange(COUNT) + 10) as built:
        yield built


@pytest.fixture(scope="module")
def queries(vectors):
    return vectors[::40] + np.float32(0.3)


def nearest(vectors, queries, rows, k):
    """Ids of the nearest of some rows by brute force."""
    away = np.square(queries[:, None].astype(np.float64) - vectors[rows]).sum(axis=2)
    return rows[np.argsort(away, axis=1, kind="stable")[:, :k]] + 10


@pytest.mark.parametrize(
    ("where", "keeps"),
    [
        ("number < 2000", lambda rows: rows < 2000),
        ("third == 1", lambda rows: rows % 3 == 1),
        ("number < 40", lambda rows: rows < 40),
        ("third == 2 and number >= 3900", lambda rows: (rows % 3 == 2) & (rows >= 3900)),
    ],
)
def test_a_filter_keeps_recall_and_finds_nothing_else(index, vectors, queries, where, keeps):
    rows = np.flatnonzero(keeps(np.arange(COUNT)))
    expected = nearest(vectors, queries, rows, 10)
    found = index.search(queries, 10, where=where, recall=0.95)
    assert keeps(found.ids - 10).all()
    hits = np.mean([len(set(some) & set(best)) for some, best in zip(found.ids, expected, strict=True)]) / 10
    assert hits >= 0.95 - 0.02
    np.testing.assert_array_equal(index.search(queries, 10, where=where, recall=1).ids, expected)
    everything = index.search(queries, 10, where=where, candidates=COUNT, nprobe=COUNT)
    np.testing.assert_array_equal(everything.ids, expected)


def test_a_filter_that_leaves_fewer_than_asked_for_fills_up_with_nothing(index, queries):
    found = index.search(queries[:5], 10, where="number < 3")
    assert (np.sort(found.ids[:, :3], axis=1) == [10, 11, 12]).all()
    assert (found.ids[:, 3:] == -1).all()
    assert np.isinf(found.distances[:, 3:]).all()
    none = index.search(queries[:5], 10, where="number < 0")
    assert (none.ids == -1).all()
    assert none.stats["ranked"] == none.stats["reads"] == 0


def test_a_filter_scans_only_what_it_leaves(index, queries):
    scanned = [index.search(queries, 10, where=f"number < {most}", recall=1).stats["scanned"] for most in (4000, 400)]
    assert scanned[0] == len(queries) * 4000
    assert scanned[1] == len(queries) * 400


@pytest.mark.parametrize("where", [None, "third == 1"])
def test_no_more_pages_than_allowed_and_the_best_of_them(index, queries, where):
    free = index.search(queries, 10, where=where)
    assert free.stats["stopped_early"] == 0
    last = np.full(free.distances.shape, np.inf)
    for most in (1, 2, 4, 1000):
        found = index.search(queries, 10, where=where, max_reads=most)
        assert found.stats["page_requests"] <= most * len(queries)
        assert (found.distances <= last).all()
        last = found.distances
        if most == 1:
            assert found.stats["stopped_early"] > 0
            assert index.search(queries[0], 10, where=where, max_reads=1).stats["pages"] <= 1
    np.testing.assert_array_equal(found.ids, free.ids)


def test_a_deadline_leaves_what_was_ranked_until_then(index, queries):
    found = index.search(queries, 10, candidates=2000, nprobe=10**6, deadline_ms=1e-6)
    assert found.stats["rounds"] == 1
    assert found.stats["stopped_early"] == len(queries)
    assert found.stats["stopped"] == "deadline"
    late = index.search(queries, 10, deadline_ms=1e9)
    np.testing.assert_array_equal(late.ids, index.search(queries, 10).ids)


def test_efforts_mean_what_they_say(index, queries):
    for candidates in (10, 25, 400):
        stats = index.search(queries, 10, candidates=candidates, nprobe=40).stats
        assert stats["ranked"] == stats["candidates"] == candidates * len(queries)
        assert stats["calibrated"] is False
    for nprobe in (1, 7, 40):
        stats = index.search(queries, 1, nprobe=nprobe).stats
        assert stats["probed"] == min(nprobe, index.stats()["lists"]) * len(queries)
    recalls = [index.search(queries, 10, recall=recall).stats for recall in (0.5, 0.9, 0.99)]
    assert [stats["calibrated"] for stats in recalls] == [True, True, True]
    assert recalls[0]["ranked"] <= recalls[1]["ranked"] <= recalls[2]["ranked"]
    assert recalls[0]["scanned"] <= recalls[1]["scanned"] <= recalls[2]["scanned"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"recall": 0}, ValueError, "recall=0"),
        ({"recall": 1.01}, ValueError, "recall=1.01"),
        ({"recall": "all"}, TypeError, "recall='all'"),
        ({"recall": 0.9, "nprobe": 3}, ValueError, "not both"),
        ({"recall": 0.9, "candidates": 30}, ValueError, "not both"),
        ({"max_reads": 0}, ValueError, "max_reads=0"),
        ({"max_reads": 1.5}, TypeError, "max_reads=1.5"),
        ({"deadline_ms": 0}, ValueError, "deadline_ms=0"),
        ({"deadline_ms": float("nan")}, ValueError, "deadline_ms=nan"),
        ({"where": "number <"}, ValueError, "number <"),
        ({"where": "size < 3"}, ValueError, "size"),
        ({"where": "number == 'three'"}, TypeError, "number"),
    ],
)
def test_bad_options_are_named(index, queries, options, error, message):
    with pytest.raises(error, match=message):
        index.search(queries, 10, **options)


def test_an_explanation_tells_what_the_search_did(index, queries):
    stats = index.search(queries[3], 7, recall=0.9).stats
    told = index.explain(queries[3], 7, recall=0.9)
    plain = {name: getattr(told, name) for name in told.__dataclass_fields__}
    assert told.to_dict() == plain | {"records": [asdict(record) for record in told.records]}
    assert json.loads(json.dumps(told.to_dict())) == told.to_dict() | {"scans": [list(scan) for scan in told.scans]}
    for name in ("probed", "scanned", "candidates", "ranked", "rounds", "hot_pages", "stopped"):
        assert getattr(told, name) == stats[name]
    assert told.pages == stats["page_requests"]
    assert (told.vectors, told.lists) == (COUNT, index.stats()["lists"])
    assert told.calibrated
    assert f"{told.ranked} were ranked exactly" in str(told)
    assert "not known" not in str(told)
    assert "the pages allowed by max_reads were read" in str(index.explain(queries[3], 7, max_reads=1))
    assert "every candidate had been read" in str(index.explain(queries[3], 7, candidates=20))
    with pytest.raises(ValueError, match="one query"):
        index.explain(queries[:2])


def test_an_explanation_of_a_filter_tells_of_all_lists_that_were_looked_at(index, queries):
    told = index.explain(queries[3], 7, where="number < 40", recall=0.9)
    assert told.probed <= told.routed <= told.lists
    assert index.explain(queries[3], 7, recall=0.9).probed < index.stats()["lists"]
    assert told.routed == index.stats()["lists"]  # where few rows are left all are looked at
    assert told.scanned == 40


def test_vectors_come_back_as_they_were_given(index, vectors):
    ids = np.array([10, 4009, 77, 77, 1000])
    np.testing.assert_array_equal(index.reconstruct(ids), vectors[ids - 10])
    assert index.reconstruct([]).shape == (0, DIMENSION)
    with pytest.raises(KeyError, match="ids holds 9, which"):
        index.reconstruct([10, 9])


@pytest.mark.parametrize("dtype", ["float16", "int8", "uint8"])
def test_vectors_come_back_in_their_own_dtype(tmp_path, dtype):
    given = np.random.default_rng(1).integers(0, 100, (300, 7)).astype(dtype)
    with ZoomIndex.build(tmp_path / "index", given, dram="4MiB") as small:
        rows = np.random.default_rng(2).permutation(300)
        found = small.reconstruct(rows)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, given[rows])


def test_a_copy_answers_as_the_index_it_was_made_of(index, queries, tmp_path):
    index.save_to(tmp_path / "copy")
    with ZoomIndex.open(tmp_path / "copy", verify="open") as copy:
        assert copy.check() == []
        for options in ({}, {"where": "third == 0"}):
            expected, found = index.search(queries, 10, **options), copy.search(queries, 10, **options)
            np.testing.assert_array_equal(found.ids, expected.ids)
            np.testing.assert_array_equal(found.distances, expected.distances)
    with pytest.raises(FileExistsError):
        index.save_to(tmp_path / "copy")


def test_stats_add_up(index, queries):
    before = index.stats()
    result = index.search(queries, 10)
    after = index.stats()
    for name in ("reads", "pages"):
        assert after[name] - before[name] == result.stats[name]
    assert after["vectors"] == COUNT
    assert after["vector_bytes"] == COUNT * DIMENSION * 4
    assert after["file_bytes"] >= after["vector_bytes"]
    assert after["calibrated_recall"] >= 0.99
    assert result.stats["bytes"] == 4096 * result.stats["pages"]
    assert result.stats["pages"] <= result.stats["page_requests"]
