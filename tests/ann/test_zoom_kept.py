"""A declared recall is kept for queries and filters that calibration did not see, or the search says that it is not."""

import itertools
import json
import warnings

import numpy as np
import pytest
from click.testing import CliRunner

from memhier.ann import ZoomIndex
from memhier.ann.zoom.calibration.calibration import RECALLS
from memhier.benchmarks.exact import exact_neighbours, recall_at_k
from memhier.benchmarks.workloads.search.recall import main
from memhier.errors import RecallWarning

COUNT, DIMENSION, K = 8000, 24, 10
SLACK = 0.01  # of a mean over some hundred queries


@pytest.fixture(scope="module")
def points():
    """Twenty tight clusters, and which of them each vector is of."""
    random = np.random.default_rng(0)
    member = random.integers(0, 20, COUNT)
    centres = 3 * random.normal(size=(20, DIMENSION))
    return (centres[member] + 0.3 * random.normal(size=(COUNT, DIMENSION))).astype(np.float32), member


@pytest.fixture(scope="module")
def index(tmp_path_factory, points):
    vectors, member = points
    attributes = {"price": np.random.default_rng(1).random(COUNT), "member": member}
    path = tmp_path_factory.mktemp("kept") / "index"
    with ZoomIndex.build(path, vectors, dram="3MiB", attributes=attributes) as built:
        yield built


@pytest.fixture(scope="module")
def queries(points):
    """Near the vectors, and in the order of their clusters."""
    vectors, member = points
    chosen = np.argsort(member, kind="stable")[:: COUNT // 200]
    random = np.random.default_rng(2)
    return vectors[chosen] + 0.1 * random.normal(size=(len(chosen), DIMENSION)).astype(np.float32), member[chosen]


@pytest.mark.parametrize("kind", ["own", "not own", "another", "price"])
def test_a_filter_keeps_the_recall_whether_it_goes_with_the_vectors_or_not(index, points, queries, kind):
    vectors, member = points
    price = np.random.default_rng(1).random(COUNT)
    hits, groups = 0.0, 0
    for own in (range(0, 20, 3)) if kind != "price" else (0,):
        asked = queries[0] if kind == "price" else queries[0][queries[1] == own]
        left, where = {
            "own": (member == own, f"member == {own}"),
            "not own": (member != own, f"member != {own}"),
            "another": (member == (own + 7) % 20, f"member == {(own + 7) % 20}"),
            "price": (price < 0.5, "price < 0.5"),
        }[kind]
        true = exact_neighbours(vectors[left], asked, K)[1]
        hits += recall_at_k(index.search(asked, K, recall=0.95, where=where).distances, true)
        groups += 1
    assert hits / groups >= 0.95 - SLACK


@pytest.mark.parametrize("most", [0.2, 0.02, 0.0005])
def test_where_few_rows_are_left_all_of_them_are_looked_at(index, points, queries, most):
    left = np.random.default_rng(1).random(COUNT) < most
    found = index.search(queries[0], K, recall=0.95, where=f"price < {most}")
    assert found.stats["scanned"] == left.sum() * len(queries[0])
    true = exact_neighbours(points[0][left], queries[0], min(K, int(left.sum())))[1]
    assert recall_at_k(found.distances[:, : true.shape[1]], true) >= 0.99


@pytest.mark.parametrize("kind", ["between", "beyond", "noise"])
def test_foreign_queries_keep_the_recall_as_built(index, points, queries, kind):
    random = np.random.default_rng(3)
    asked, mean = queries[0], points[0].mean(axis=0)
    far = {
        "between": (asked + random.permutation(asked)) / 2,
        "beyond": mean + 2 * (asked - mean),
        "noise": mean + 3 * random.normal(size=asked.shape),
    }[kind].astype(np.float32)
    true = exact_neighbours(points[0], far, K)[1]
    for recall in (0.8, 0.95, 0.99):
        assert recall_at_k(index.search(far, K, recall=recall).distances, true) >= recall - SLACK


def test_more_recall_never_costs_less(index, queries):
    far = ((queries[0] + queries[0][::-1]) / 2).astype(np.float32)
    for k in (1, 10, 100):
        efforts = [index.explain(far[0], k, recall=recall).eps for recall in RECALLS[:-1]]
        assert efforts == sorted(efforts)
        for asked in (queries[0], far):
            stats = [index.search(asked, k, recall=recall).stats for recall in RECALLS[:-1:2]]
            assert all(each["calibrated"] for each in stats)
            for name in ("scanned", "page_requests"):
                costs = [each[name] for each in stats]
                assert all(more >= 0.995 * less for less, more in itertools.pairwise(costs)), name


def test_a_query_finds_the_same_alone_and_beside_others(index, queries):
    far = np.vstack([queries[0][:40], (queries[0][:40] + queries[0][::-1][:40]) / 2]).astype(np.float32)
    for where in (None, "member != 3"):
        together = index.search(far, K, recall=0.95, where=where)
        alone = [index.search(query, K, recall=0.95, where=where) for query in far]
        np.testing.assert_array_equal(together.ids, [each.ids for each in alone])
        assert together.stats["scanned"] == sum(each.stats["scanned"] for each in alone)


def test_limits_that_cost_recall_are_said_once_in_every_process(tmp_path, points, queries):
    vectors, asked = points[0][:3000], queries[0][:50]
    path = tmp_path / "index"
    ZoomIndex.build(path, vectors, dram="3MiB").close()
    for _ in range(2):
        with ZoomIndex.open(path) as opened:
            with pytest.warns(RecallWarning, match=r"recall=0\.95 is not kept: max_reads=1 ended \d+ of 50") as said:
                stats = opened.search(asked, K, recall=0.95, max_reads=1).stats
            assert [each.filename for each in said] == [__file__]
            assert stats["recall"] < 0.95
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert opened.search(asked, K, recall=0.95, max_reads=1).stats["recall"] == stats["recall"]
                assert opened.search(asked, K, recall=0.95, max_reads=1000).stats["recall"] == 0.95
                assert opened.search(asked, K, max_reads=1).stats["recall"] < 0.99  # nothing was asked for
                assert "recall" not in opened.search(asked, K, nprobe=3).stats


@pytest.mark.parametrize("way", ["explain", "iterate"])
def test_a_recall_that_is_not_kept_is_said_of_the_line_that_asked(tmp_path, points, queries, way):
    options = {"recall": 0.95, "max_reads": 1}
    with ZoomIndex.build(tmp_path / "index", points[0][:3000], dram="3MiB") as opened:
        ways = {
            "explain": lambda: opened.explain(queries[0][0], 100, **options),
            "iterate": lambda: next(opened.search_iter(queries[0][0], 100, **options)),
        }
        with pytest.warns(RecallWarning) as said:
            ways[way]()
        assert [each.filename for each in said] == [__file__]


def test_codes_without_bounds_say_the_recall_that_can_be_had(tmp_path, points, queries):
    path = tmp_path / "index"
    vectors = points[0][:300]
    ZoomIndex.build(path, vectors, preview="pq", dram="3MiB").close()
    words = r"recall=0\.998 is not kept: about .*preview='pq'"
    with ZoomIndex.open(path) as opened, pytest.warns(RecallWarning, match=words):
        assert opened.search(queries[0], K, recall=0.998).stats["recall"] < 0.998


def test_a_recall_beyond_what_was_calibrated_is_kept_by_looking_further(tmp_path, points, queries):
    with ZoomIndex.build(tmp_path / "index", points[0][:600], dram="3MiB") as small:
        true = exact_neighbours(points[0][:600], queries[0], 200)[1]
        for recall, k, escalated in ((0.9, 10, "no"), (0.995, 10, "wider"), (0.9, 200, "wider"), (1.0, 10, "exact")):
            found = small.search(queries[0], k, recall=recall)
            assert (found.stats["escalated"], found.stats["recall"]) == (escalated, recall)
            assert found.stats["calibrated"] == (escalated == "no")
            assert recall_at_k(found.distances, true[:, :k]) >= recall - SLACK


@pytest.mark.long
def test_many_neighbours_by_short_codes_have_no_ceiling(tmp_path):
    random = np.random.default_rng(5)
    vectors = random.normal(size=(6000, 256)).astype(np.float32)  # none near: a hundred neighbours among thousands
    asked = random.normal(size=(40, 256)).astype(np.float32)
    true = exact_neighbours(vectors, asked, 100)[1]
    with ZoomIndex.build(tmp_path / "index", vectors, dram=vectors.nbytes // 10) as index:
        found = [index.search(asked, 100, recall=recall) for recall in (0.9, 0.97)]
        recalls = [recall_at_k(each.distances, true) for each in found]
        assert recalls[0] >= 0.9 - SLACK
        assert recalls[1] >= 0.97 - SLACK
        assert index.memory_bytes <= vectors.nbytes // 10


def test_the_filters_workload_prints_what_it_found(tmp_path):
    out = tmp_path / "out.json"
    options = ["--workload", "search-filters", "--data", "clusters", "--count", "900", "--queries", "40"]
    options += ["--json", str(out)]
    result = CliRunner(env={"COLUMNS": "140"}).invoke(main, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["results"]
    kinds = {"price" if row["filter"].endswith("% left") else row["filter"] for row in rows}
    assert kinds == {"price", "own label", "not own label", "another label"}
    assert all(row["recall"] >= 0.94 and row["filter"] in result.output for row in rows)
