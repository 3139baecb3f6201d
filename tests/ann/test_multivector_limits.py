"""Limits on the reads of a search for items, and the account of one search."""

import warnings

import numpy as np
import pytest

from memhier.ann import MultiVectorIndex
from memhier.errors import RecallWarning

DIMENSION, COUNT, WAITING = 24, 700, 3


@pytest.fixture(scope="module")
def items():
    random = np.random.default_rng(3)
    lengths = random.integers(1, 70, COUNT + WAITING)
    return [random.normal(size=(length, DIMENSION)).astype(np.float16) for length in lengths]


@pytest.fixture(scope="module", params=["int64", "str"])
def names(request):
    return np.arange(COUNT + WAITING) + 5 if request.param == "int64" else [f"i{n}" for n in range(COUNT + WAITING)]


@pytest.fixture(scope="module")
def index(tmp_path_factory, items, names):
    path = tmp_path_factory.mktemp("limits") / "index"
    attributes = {"even": np.arange(COUNT) % 2 == 0}
    options = {"attributes": attributes, "dram": "6MiB", "grow_to": COUNT + 50}
    with MultiVectorIndex.build(path, items[:COUNT], names[:COUNT], **options) as built:
        built.add(items[COUNT:], names[COUNT:], {"even": [True] * WAITING})
        yield built


def exact_scores(items, query):
    return np.array([(each.astype(np.float64) @ query.T).max(0).sum() for each in items])


@pytest.mark.parametrize("recall", [0.9, 0.99, 1.0])
def test_a_search_within_limits_ranks_what_it_read(index, items, names, recall):
    random = np.random.default_rng(4)
    for vectors in (1, 6):
        query = random.normal(size=(vectors, DIMENSION)).astype(np.float32)
        truth, free = exact_scores(items, query), index.search(query, 6, recall=recall)
        assert free.stats["stopped"] in ("bound", "all_read")
        assert free.stats["stopped_early"] == 0
        for limit in (1, 2, 7, 30, 10**9):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RecallWarning)
                found = index.search(query, 6, recall=recall, max_reads=limit)
            assert found.stats["pages"] <= limit
            there = [list(names).index(each) for each in found.ids.tolist() if each not in (-1, None)]
            np.testing.assert_allclose(found.scores[: len(there)], truth[there], rtol=1e-4, atol=1e-3)
            assert (np.diff(found.scores[: len(there)]) <= 0).all()
            if found.stats["stopped_early"]:
                assert found.stats["stopped"] == "max_reads"
                assert found.stats["recall"] == 0
            else:
                assert found.stats["recall"] == free.stats["recall"]
        assert found.ids.tolist() == free.ids.tolist()
        assert np.isfinite(found.scores).all()


def test_limits_hold_for_each_query_and_a_warning_comes_once(index, items):
    queries = [items[3][:4], np.random.default_rng(5).normal(size=(9, DIMENSION)), items[9][:1]]
    index = MultiVectorIndex.open(index.path)  # which has not warned yet
    with pytest.warns(RecallWarning, match=r"recall=0\.99 is not kept: max_reads=2 ended . of 3 queries early"):
        found = index.search(queries, 5, recall=0.99, max_reads=2)
    assert found.stats["pages"] <= 2 * len(queries)
    early = found.stats["stopped_early"]
    assert early >= 1
    assert found.stats["recall"] == pytest.approx((1 - early / 3) * 0.99)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecallWarning)
        index.search(queries, 5, recall=0.99, max_reads=2)
        index.search(queries, 5, max_reads=2)
    for number, query in enumerate(queries):
        assert found.ids[number].tolist() == index.search(query, 5, recall=0.99, max_reads=2).ids.tolist()
    index.close()


def test_after_the_deadline_only_items_in_dram_are_found(index, items, names):
    found = index.search([items[0], items[1]], 5, deadline_ms=1e-9)
    waiting = set(list(names)[COUNT:])
    assert all({each for each in row if each not in (-1, None)} == waiting for row in found.ids.tolist())
    assert (found.stats["stopped"], found.stats["stopped_early"], found.stats["reads"]) == ("deadline", 2, 0)
    free = index.search([items[0], items[1]], 5)
    for ms in (1e9, float("inf")):
        assert index.search([items[0], items[1]], 5, deadline_ms=ms).ids.tolist() == free.ids.tolist()


@pytest.mark.parametrize(
    "options", [{}, {"recall": 0.9, "where": "even"}, {"recall": 1.0}, {"recall": 1.0, "max_reads": 9}], ids=str
)
@pytest.mark.filterwarnings("ignore::memhier.errors.RecallWarning")
def test_an_account_tells_of_the_search(index, items, names, options):
    query = items[11][:5].astype(np.float32)
    truth, found, steps = (
        exact_scores(items, query),
        index.search(query, 4, **options),
        index.explain(query, 4, **options),
    )
    for name in ("probed", "candidates", "estimated", "ranked", "pages", "rounds", "stopped", "calibrated"):
        assert getattr(steps, name) == found.stats[name]
    assert steps.items == len(index) == COUNT + WAITING
    assert steps.kth == found.scores[-1]
    assert steps.exact == (found.stats["escalated"] == "exact")
    assert steps.exact >= (options.get("recall") == 1)
    records = {record.id: record for record in steps.records}
    assert len(records) == len(steps.records)
    for name, score in zip(found.ids.tolist(), found.scores.tolist(), strict=True):
        assert records[name].score == score
    compared = [record for record in steps.records if record.score is not None]
    for record in compared:
        assert record.score == pytest.approx(truth[list(names).index(record.id)], rel=1e-4, abs=1e-3)
    on_ssd = [record for record in steps.records if record.round is not None]
    assert all(record.score is not None and record.round <= steps.rounds for record in on_ssd)
    assert len(on_ssd) <= steps.ranked
    unread = [record.upper for record in steps.records if record.score is None and record.upper is not None]
    if steps.stopped == "bound":
        assert max(unread, default=-np.inf) < steps.kth
    plain = steps.to_dict()
    assert plain["records"][0]["id"] == steps.records[0].id
    assert str(steps).count("\n") == (3 if steps.calibrated else 4)


def test_wrong_limits_and_options_are_refused(index, items):
    for wrong in ({"max_reads": 0}, {"max_reads": 2.5}, {"deadline_ms": 0}, {"deadline_ms": "1"}):
        (name,) = wrong
        with pytest.raises((TypeError, ValueError), match=name):
            index.search(items[0], 3, **wrong)
        with pytest.raises((TypeError, ValueError), match=name):
            index.explain(items[0], 3, **wrong)
    with pytest.raises(TypeError, match="nprobe=: expected options"):
        index.explain(items[0], 3, nprobe=4)
    with pytest.raises(ValueError, match="query holds 2 queries: expected one"):
        index.explain([items[0], items[1]])
