"""Searches under filters keep the recall declared, of data whose codes or lists serve far rows badly."""

import json

import numpy as np
import pytest

from memhier.ann import ZoomIndex
from memhier.ann.zoom.storage.catalog import KIND
from memhier.store.store import Store

QUERIES = 300


def shortfall(found, away, k, declared):
    """Return by how much recall falls short of the one declared, beyond two of its standard errors."""
    kth = np.partition(away, k - 1, axis=1)[:, k - 1 : k]
    hits = (np.take_along_axis(away, found.ids, 1) <= kth + 1e-5 * np.abs(kth)).mean(axis=1)
    return declared - hits.mean() - 2 * max(hits.std(), 0.01) / np.sqrt(len(hits))


def squared_distances(queries, vectors):
    return np.square(queries).sum(1)[:, None] - 2 * queries @ vectors.T + np.square(vectors).sum(1)


def low_rank(random, count, rank=12, dimension=96):
    axes = np.random.default_rng(1).normal(size=(rank, dimension))
    near = random.normal(size=(count, rank)) @ axes + 0.05 * random.normal(size=(count, dimension))
    return near.astype(np.float32)


def test_lists_far_from_a_query_are_scanned_where_all_near_rows_are_denied(tmp_path):
    points = low_rank(np.random.default_rng(0), 8000 + QUERIES)
    queries, vectors = np.split(points, [QUERIES])
    away = squared_distances(queries, vectors)
    near = np.argpartition(away, 100, axis=1)[:, :100]
    np.put_along_axis(away, near, np.inf, 1)
    with ZoomIndex.build(tmp_path / "index", vectors, dram="512KiB") as index:
        found = index.search(queries, 1, recall=0.9, deny=list(near))
    assert shortfall(found, away, 1, 0.9) <= 0


def test_products_with_vectors_of_heavy_lengths_keep_the_recall(tmp_path):
    random = np.random.default_rng(9)
    points = random.normal(size=(7000, 48)) * random.lognormal(0, 0.8, (7000, 1))
    queries, vectors = np.split(points.astype(np.float32), [1000])
    price = random.random(len(vectors))
    away = np.where(price < 0.5, -queries @ vectors.T, np.inf)
    with ZoomIndex.build(tmp_path / "i", vectors, metric="ip", attributes={"price": price}, dram="420KiB") as index:
        found = index.search(queries, 1, recall=0.99, where="price < 0.5")
    assert shortfall(found, away, 1, 0.99) <= 0


@pytest.fixture
def made(tmp_path):
    """Queries, vectors, prices, and a function that changes the calibration of their index and opens it."""
    points = low_rank(np.random.default_rng(2), 5100)
    queries, vectors = np.split(points, [100])
    price = np.random.default_rng(2).random(5000)
    ZoomIndex.build(tmp_path / "index", vectors, attributes={"price": price}, dram="512KiB").close()

    def change(calibrated):
        with Store.open(tmp_path / "index", kind=KIND, writable=True) as store, store.begin() as tx:
            about = json.loads(store.get("index") or "")
            calibrated(about["calibration"])
            tx.put("index", json.dumps(about).encode())
            tx.commit()
        return ZoomIndex.open(tmp_path / "index")

    return queries, np.where(price < 0.7, squared_distances(queries, vectors), np.inf), change


def test_an_index_of_before_lists_were_measured_searches_under_filters(made):
    queries, away, change = made
    with change(lambda calibration: calibration.pop("clear")) as index:
        found = index.search(queries, 10, recall=0.9, where="price < 0.7")
    assert shortfall(found, away, 10, 0.9) <= 0


def test_rows_left_are_compared_where_calibration_cannot_reach_the_recall(made):
    queries, away, change = made
    with change(lambda calibration: calibration["reached"].update({"10": 0.95})) as index:
        usual, found = (index.search(queries, 10, recall=recall, where="price < 0.7") for recall in (0.9, 0.99))
    assert usual.stats["escalated"] == "no"
    assert found.stats["escalated"] == "exact"
    assert (found.ids == np.argsort(away, axis=1)[:, :10]).all()


@pytest.mark.parametrize(("measured", "all_compared"), [(0.945, True), (0.955, True), (0.97, False)])
def test_few_rows_are_all_compared_only_where_bounds_lose_too_much(made, measured, all_compared):
    queries, away, change = made
    few = np.flatnonzero(np.isfinite(away[0]))[:200]
    away = np.where(np.isin(np.arange(away.shape[1]), few), away, np.inf)
    with change(lambda measures: measures.update(reached=dict.fromkeys(measures["reached"], measured))) as index:
        found = index.search(queries, 10, recall=0.95, allow=few)
    assert shortfall(found, away, 10, 0.95) <= 0
    every = len(few) * len(queries)
    assert found.stats["candidates"] == every if all_compared else found.stats["candidates"] < every / 5
