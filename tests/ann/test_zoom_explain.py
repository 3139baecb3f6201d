"""The records of an explanation against brute force: bounds, decisions and reads of each candidate."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from memhier.ann import CandidateRecord, Explanation, ZoomIndex

COUNT = 3000


def points(dimension: int, dtype: str = "float32", seed: int = 0) -> npt.NDArray[Any]:
    random = np.random.default_rng(seed)
    centres = random.normal(size=(30, dimension)) * 20 + 60
    made = centres[random.integers(0, 30, COUNT)] + random.normal(size=(COUNT, dimension)) * 8
    return made.clip(0, 120).astype(dtype)


def exact(vectors: npt.NDArray[Any], query: npt.NDArray[Any], metric: str) -> npt.NDArray[np.float64]:
    rows, asked = vectors.astype(np.float64), query.astype(np.float64)
    if metric == "l2":
        return np.square(rows - asked).sum(axis=1)
    if metric == "ip":
        return -(rows @ asked)
    return 1 - rows @ asked / (np.linalg.norm(rows, axis=1) * np.linalg.norm(asked))


def read_of(told: Explanation) -> list[CandidateRecord]:
    return [record for record in told.records if record.round is not None]


def check(told: Explanation, index: ZoomIndex, query: npt.NDArray[Any], k: int, options: dict[str, Any]) -> None:
    """Assert all that an explanation promises where it has a record of every code."""
    found = index.search(query, k, **options)
    ids = [record.id for record in told.records]
    assert len(set(ids)) == len(ids)
    names = list(dict.fromkeys(ids))
    away = dict(zip(names, exact(index.reconstruct(names), query, index.metric), strict=True)) if names else {}
    scale = max(1.0, *map(abs, away.values()))  # cosine distances round as values near one do
    # Each vector found has a record.
    told_of = {record.id: record.distance for record in told.records}
    for name, distance in zip(found.ids.tolist(), found.distances.tolist(), strict=True):
        assert name in (-1, None) or told_of[name] == pytest.approx(distance, abs=1e-6 * scale)
    # A record has a distance where the vector was read, or waits in DRAM, and it is exact.
    for record in told.records:
        assert (record.distance is not None) == (record.round is not None or record.list is None)
        if record.distance is not None:
            assert record.distance == pytest.approx(away[record.id], abs=1e-5 * scale)
        if record.lower is not None and record.estimate is not None:
            assert record.lower <= record.estimate
            assert not told.last_eps or record.lower <= away[record.id] + 1e-5 * scale  # of eight standard errors
    coded = [record for record in told.records if record.estimate is not None]
    keys = [(-np.inf if record.lower is None else record.lower) for record in coded]
    assert keys == sorted(keys)
    assert Counter(record.list for record in coded) == {number: count for number, count in told.scans if count}
    assert len(told.scans) == told.probed
    # Pages and rounds are those of the search.
    reads = found.stats["page_requests"] + found.stats["hot_pages"]
    assert (told.pages + told.hot_pages, told.ranked) == (reads, found.stats["ranked"])
    rounds = {record.round for record in read_of(told)}
    # The last round of a search that goes on by wider bounds may bring nothing that was not read before.
    assert rounds | ({told.rounds} if told.last_eps else set()) == set(range(1, told.rounds + 1))
    decided_by_bounds(told, k)


def decided_by_bounds(told: Explanation, k: int) -> None:
    """Assert that the k-th distance so far decided about each read, and that all on a page were read with it."""
    stored = [record for record in told.records if record.page is not None]
    last = told.rounds if told.last_eps is None else told.rounds - 1
    if told.eps is None or told.last_eps is not None:
        return
    assert sum(record.admitted for record in stored) == told.candidates
    for number in range(1, last + 1):
        before = sorted(record.distance for record in read_of(told) if record.round < number)
        kth = before[k - 1] if len(before) >= k else np.inf
        most = min(kth, np.inf if told.threshold is None else told.threshold)
        pages = {record.page for record in read_of(told) if record.round == number}
        for page in pages:
            lower = [record.lower for record in stored if record.page == page and record.admitted]
            assert min(-np.inf if each is None else each for each in lower) <= most
    if told.stopped == "bound":
        kth = sorted(record.distance for record in read_of(told))[k - 1]
        assert all(record.lower > kth for record in stored if record.admitted and record.round is None)


@pytest.fixture(scope="module", params=["l2", "ip", "cosine"])
def metric(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# Rows of 100 bytes share pages, rows of 1,200 straddle them, rows of 8,000 are wider.
@pytest.fixture(scope="module", params=[(25, "float32"), (300, "float32"), (96, "uint8"), (2000, "float32")])
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, metric: str
) -> Iterator[tuple[ZoomIndex, npt.NDArray[Any]]]:
    vectors = points(*request.param)
    path = tmp_path_factory.mktemp("explain") / "index"
    with ZoomIndex.build(
        path, vectors, metric=metric, dram="8MiB", attributes={"third": np.arange(COUNT) % 3}
    ) as index:
        yield index, vectors


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{}, {"recall": 0.5}, {"recall": 1.0}, {"nprobe": 3}, {"candidates": 60, "nprobe": 9}, {"where": "third == 1"}],
    ids=str,
)
def test_every_decision_is_told(built, options):
    index, vectors = built
    for query in (vectors[7], vectors[1:3].mean(axis=0), np.ones(index.dimension)):
        told = index.explain(query, 6, **options)
        check(told, index, np.asarray(query, np.float32), 6, options)
        assert told.kth == index.search(query, 6, **options).distances[-1]


@pytest.mark.filterwarnings("ignore::memhier.errors.RecallWarning")
def test_limits_leave_admitted_candidates_unread(built):
    index, vectors = built
    told = index.explain(vectors[:2].mean(axis=0), 60, max_reads=3)
    check(told, index, vectors[:2].mean(axis=0), 60, {"max_reads": 3})
    assert told.stopped == "max_reads"
    assert any(record.admitted and record.round is None for record in told.records)


def test_bounds_refuse_vectors_that_are_not_near(tmp_path):
    vectors = points(32)
    with ZoomIndex.build(tmp_path / "index", vectors, dram="4MiB") as index:
        told = index.explain(vectors[3], 5, recall=0.9)
        refused = [record for record in told.records if not record.admitted]
        assert len(refused) == len(told.records) - told.candidates > 100
        assert all(record.lower > told.threshold for record in refused if record.lower is not None)
        assert {record.page for record in refused if record.round is not None} <= {
            record.page for record in told.records if record.admitted
        }


@pytest.mark.parametrize("kind", ["int64", "str"])
def test_added_removed_and_waiting_vectors_are_told(tmp_path, kind):
    vectors = points(24)

    def names(rows: npt.NDArray[Any]) -> Any:
        return rows + 5 if kind == "int64" else [f"é{row}" for row in rows]

    rows = np.arange(COUNT)
    with ZoomIndex.build(
        tmp_path / "index", vectors[:2000], ids=names(rows[:2000]), dram="4MiB", grow_to=COUNT
    ) as index:
        index.add(vectors[2000:2900], names(rows[2000:2900]))
        index.commit()
        index.remove(names(rows[:1500:7]))
        index.add(vectors[2900:], names(rows[2900:]))
        for row in (3, 2500, 2950):
            told = index.explain(vectors[row], 9)
            check(told, index, vectors[row], 9, {})
            known = {record.id: record for record in told.records}
            wanted = known[names(rows[row : row + 1])[0]]
            assert wanted.distance == 0
            assert (wanted.list is None) == (row >= 2900)
            assert not known.keys() & set(names(rows[:1500:7]))


def test_an_index_of_the_paper_form_has_no_bounds(tmp_path):
    vectors = points(32)
    with ZoomIndex.build(tmp_path / "index", vectors, dram="3MiB", preview="pq") as index:
        told = index.explain(vectors[3], 5, candidates=40, nprobe=8)
        assert all(record.lower is None for record in told.records)
        check(told, index, vectors[3], 5, {"candidates": 40, "nprobe": 8})
        assert sum(record.admitted for record in told.records) == len(read_of(told)) == 40


def test_few_and_no_vectors(tmp_path):
    with ZoomIndex.build(tmp_path / "none", np.empty((0, 8), np.float32), dram="4MiB", grow_to=100) as index:
        assert index.explain(np.ones(8)).records == []
        index.add(np.eye(8, dtype=np.float32)[:3])
        told = index.explain(np.ones(8), 5)
        assert [(record.id, record.list, record.distance) for record in told.records] == [
            (0, None, 7), (1, None, 7), (2, None, 7)
        ]  # fmt: skip
        assert (told.kth, told.scans) == (None, [])
        index.commit()
        assert [record.round for record in index.explain(np.ones(8), 5).records] == [1, 1, 1]


def test_records_have_a_limit_and_hold_every_vector_found(tmp_path):
    random = np.random.default_rng(0)
    vectors = random.normal(size=(12_000, 8)).astype(np.float32)
    with ZoomIndex.build(tmp_path / "index", vectors, dram="8MiB") as index:
        for k in (10, 3000):
            told = index.explain(vectors[5], k, recall=1.0)
            assert told.scanned >= 12_000
            most = max(4096, 2 * k)
            assert most <= len(told.records) <= most + k
            lower = [record.lower for record in told.records[:most]]
            assert lower == sorted(lower)
            found = set(index.search(vectors[5], k, recall=1.0).ids.tolist())
            assert found <= {record.id for record in told.records if record.round is not None}


def test_an_explanation_changes_no_search_and_counts_pages_in_dram(tmp_path):
    vectors = points(32)
    with ZoomIndex.build(tmp_path / "index", vectors, dram="4MiB") as index:
        index.tune(vectors[:400] + np.float32(0.5))
        check(index.explain(vectors[0], 7), index, vectors[0], 7, {})
        before = index.search(vectors[:50], 7)
        index.explain(vectors[0], 7)
        after = index.search(vectors[:50], 7)
        np.testing.assert_array_equal(before.ids, after.ids)
        assert before.stats == after.stats
