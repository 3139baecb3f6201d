"""Range searches, limits on reads, accounts and tuning of an index over shards, beside one index."""

import shutil
import warnings

import numpy as np
import pytest

pytest.importorskip("ray.util", reason="needs the extra ray; `make test-cluster` installs it")

from memhier.ann import ZoomIndex
from memhier.ann.cluster import ShardedIndex
from memhier.errors import RecallWarning, ShardLostError
from tests.cluster.data import COUNT, attributes_of, clustered, documents_of

pytestmark = pytest.mark.usefixtures("ray")


@pytest.fixture(scope="module")
def both(built, vectors, tmp_path_factory):
    """One index, and the same on three shards."""
    folder, ids = tmp_path_factory.mktemp("both"), np.arange(COUNT)
    shutil.copytree(built, folder / "sharded")
    given = {"attributes": attributes_of(ids), "documents": documents_of(ids), "dram": "12MiB", "grow_to": 2 * COUNT}
    with (
        ZoomIndex.build(folder / "one", vectors, **given) as one,
        ShardedIndex.open(folder / "sharded", writable=True) as sharded,
    ):
        yield one, sharded


@pytest.mark.parametrize("where", [None, "lang == 'en'", "n < 0"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.2])
def test_a_range_search_equals_that_of_one_index(both, where, share):
    one, sharded = both
    queries = clustered(12, 3)
    radius = float(np.quantile(one.search(queries, COUNT, recall=1.0).distances, share)) if share else 1e-3
    options = {"recall": 1.0, "where": where, "fields": ["n", "lang", "text"]}
    mine, theirs = sharded.range_search(queries, radius, **options), one.range_search(queries, radius, **options)
    for name in ("offsets", "ids", "distances"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
    assert repr(mine.rows()) == repr(theirs.rows())
    assert sharded.range_search(np.empty((0, 16)), radius).offsets.tolist() == [0]


def test_a_range_search_says_which_shards_are_lost(built, tmp_path):
    shutil.copytree(built, tmp_path / "sharded")
    with ShardedIndex.open(tmp_path / "sharded", patience=1.0) as index:
        shutil.rmtree(tmp_path / "sharded" / "shard-0002-0")
        index.simulate_fault(2)
        with pytest.raises(ShardLostError, match=r"\[2\].*partial"):
            index.range_search(clustered(3, 1), 50.0)
        assert index.range_search(clustered(3, 1), 50.0, partial=True).stats["lost_shards"] == [2]


@pytest.mark.parametrize("recall", [0.9, 1.0])
@pytest.mark.parametrize("pages", [1, 2, 3, 7, 10_000])
def test_no_query_reads_more_pages_than_it_may(both, recall, pages):
    """Each query alone, as the count of a batch is a sum; a warning says that the recall is not kept."""
    _, sharded = both
    whole = sharded.search(clustered(8, 4), 10, recall=recall)
    for query, expected in zip(clustered(8, 4), whole.ids, strict=True):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = sharded.search(query, 10, recall=recall, max_reads=pages)
        assert found.stats["page_requests"] <= pages
        assert (found.stats["recall"] < recall) == bool(warned)
        assert all(each.category is RecallWarning for each in warned)
        if pages == 10_000:
            assert found.ids.tolist() == expected.tolist()
            assert found.stats["recall"] == recall


def test_an_account_covers_the_shards_asked(both):
    _, sharded = both
    query = clustered(1, 5)[0]
    told = sharded.explain(query, 5, recall=0.95)
    found = sharded.search(query, 5, recall=0.95)
    assert [*told] == found.stats["asked_shards"]
    seen = {each.id for account in told.values() for each in account.records}
    assert {*found.ids.tolist()} <= seen


def test_tuning_keeps_the_recall_of_queries_of_another_kind(built, vectors, tmp_path):
    """Queries far from all vectors; the result is durable, and refused while changes wait."""
    shutil.copytree(built, tmp_path / "sharded")
    foreign = (np.random.default_rng(7).normal(size=(700, 16)) * 6).astype(np.float32)
    with ShardedIndex.open(tmp_path / "sharded", writable=True) as index:
        with pytest.raises(ValueError, match="at least 64"):
            index.tune(foreign[:63])
        index.remove([1])
        with pytest.raises(ValueError, match="commit"):
            index.tune(foreign)
        index.rollback()
        exact = index.search(foreign[400:], 10, recall=1.0)
        index.tune(foreign[:400])
    with ShardedIndex.open(tmp_path / "sharded") as index:
        found = index.search(foreign[400:], 10, recall=0.95)
    hits = np.mean([len({*a.tolist()} & {*b.tolist()}) / 10 for a, b in zip(exact.ids, found.ids, strict=True)])
    assert hits >= 0.95 - 0.02
