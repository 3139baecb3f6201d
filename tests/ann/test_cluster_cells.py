"""Cells, their shards, and the routing of queries to shards: without Ray."""

import numpy as np
import pytest

from memhier.ann.cluster.cells import Cells
from memhier.ann.cluster.routing import RECALLS, Routing, gaps

pytestmark = pytest.mark.filterwarnings("ignore:.*clustering")


def made(metric="l2", count=2000, dimension=6, cells=40, shards=4, seed=0):
    sample = np.random.default_rng(seed).normal(size=(count, dimension)).astype(np.float32)
    return Cells.train(sample, metric, cells, shards, seed), sample


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
@pytest.mark.parametrize(
    ("count", "cells", "shards"), [(2000, 40, 4), (2000, 40, 1), (3, 64, 8), (1, 5, 2), (500, 8, 8)]
)
def test_a_vector_belongs_to_the_shard_of_its_nearest_cell(metric, count, cells, shards):
    cells, sample = made(metric, count, cells=cells, shards=shards)
    assert cells.owners.min() >= 0
    assert cells.owners.max() < shards
    points = cells.vectors(sample)
    away = np.square(points[:, None].astype(np.float64) - cells.centroids[None]).sum(axis=2)
    owners = cells.owner(sample)
    rows = np.arange(len(sample))
    nearest = away.min(axis=1)
    of_owner = np.where(cells.owners[None] == owners[:, None], away, np.inf).min(axis=1)
    np.testing.assert_allclose(of_owner, nearest, rtol=1e-3, atol=1e-4)
    remote = cells.remoteness(sample)
    assert remote.shape == (len(sample), cells.shards)
    if metric != "ip":  # a query of inner products lies elsewhere than the same vector
        np.testing.assert_allclose(remote[rows, owners], remote.min(axis=1), rtol=1e-3, atol=1e-4)


def test_shards_are_of_like_size_and_equal_input_gives_equal_cells():
    cells, sample = made(count=8000, cells=256, shards=8)
    sizes = np.bincount(cells.owner(sample), minlength=8)
    assert sizes.max() <= 1.25 * sizes.mean()
    again, _ = made(count=8000, cells=256, shards=8)
    np.testing.assert_array_equal(cells.centroids, again.centroids)
    np.testing.assert_array_equal(cells.owners, again.owners)


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_distances_become_squares_in_the_space_of_the_cells(metric):
    cells, sample = made(metric)
    queries = np.random.default_rng(1).normal(size=(20, 6)).astype(np.float32) * 3
    vectors = sample[:20]
    product = (queries * vectors).sum(axis=1)
    distances = {
        "l2": np.square(queries - vectors).sum(axis=1), "ip": -product,
        "cosine": 1 - product / np.linalg.norm(queries, axis=1) / np.linalg.norm(vectors, axis=1),
    }[metric]  # fmt: skip
    expected = np.square(cells.queries(queries) - cells.vectors(vectors)).sum(axis=1)
    np.testing.assert_allclose(cells.squared(distances.astype(np.float32), queries), expected, rtol=1e-3, atol=1e-3)


def test_gaps_count_in_the_distance_of_the_kth_neighbour():
    remote = np.array([[1, 3, np.inf], [4, 4, 8]], np.float32)
    np.testing.assert_array_equal(gaps(remote, np.array([2, 4], np.float32)), [[0, 1, np.inf], [0, 0, 1]])
    np.testing.assert_array_equal(gaps(remote, np.array([np.inf, 0], np.float32)), [[0, 0, np.inf], [0, 0, np.inf]])


@pytest.mark.parametrize("k", [1, 10])
def test_the_limit_keeps_the_loss_of_new_queries(k):
    """Conformal risk control: the mean loss over fresh queries stays below the loss allowed."""
    random = np.random.default_rng(k)
    draw = lambda count: np.where(random.random((count, k)) < 0.6, 0, random.gamma(1, 1, (count, k))).astype(np.float32)  # noqa: E731
    losses = {recall: [] for recall in RECALLS}
    for _ in range(40):
        routing, fresh = Routing.measured({k: draw(500)}), draw(2000)
        for recall in RECALLS:
            losses[recall].append(float((fresh > routing.limit(k, recall)[0]).mean()))
    for recall, found in losses.items():
        assert np.mean(found) <= 1 - recall + 0.004


def test_limits_grow_with_the_recall_and_are_kept_as_json():
    routing = Routing.measured({k: np.random.default_rng(k).gamma(1, 1, (300, k)).astype(np.float32) for k in (1, 10)})
    for k in (1, 4, 10):
        found = [routing.limit(k, recall) for recall in (*RECALLS, 0.9995, 1.0)]
        limits = [limit for limit, _ in found]
        assert all(kept >= recall for (_, kept), recall in zip(found, (*RECALLS, 0.9995, 1.0), strict=True))
        assert limits == sorted(limits)
        assert limits[-1] == np.inf
        assert all(routing.limit(k, recall, any_k=True)[0] >= routing.limit(k, recall)[0] for recall in RECALLS)
    assert routing.limit(11, 0.5) == (np.inf, 1.0)
    assert Routing.from_json(routing.to_json()) == routing
    assert Routing({}, 0).limit(1, 0.5) == (np.inf, 1.0)


def test_a_limit_keeps_the_recall_of_the_highest_level_that_it_is_enough_for():
    routing = Routing({1: [(0.9, 0.0), (0.95, 0.0), (0.99, 0.5)], 10: [(0.9, 0.0), (0.95, 0.2), (0.99, 0.6)]}, 100)
    assert routing.limit(1, 0.9) == (0.0, 0.95)
    assert routing.limit(1, 0.97) == (0.5, 0.99)
    assert routing.limit(10, 0.9) == (0.0, 0.9)
    assert routing.limit(1, 0.92, any_k=True) == (0.2, 0.95)
    assert routing.limit(1, 0.999) == (np.inf, 1.0)
