"""Vectors that were added go to the lists and codes that a build would give them."""

import numpy as np
import pytest

from memhier.ann import ZoomIndex
from memhier.ann.zoom.preview.blocks import codes_of
from memhier.ann.zoom.preview.routing import router
from memhier.ann.zoom.renewal.spill import code_vectors
from memhier.ann.zoom.source import VectorSource
from memhier.ann.zoom.storage import layout
from memhier.ann.zoom.storage.catalog import KIND, Description, load_preview
from memhier.store.store import Store


@pytest.mark.parametrize(("metric", "per_list", "graph"), [("l2", 200, False), ("cosine", 20, False), ("l2", 20, True)])
def test_each_goes_to_the_nearest_list_whatever_the_blocks(tmp_path, monkeypatch, metric, per_list, graph):
    random = np.random.default_rng(0)
    centres = 3 * random.normal(size=(30, 24))
    vectors = (centres[random.integers(0, 30, 3000)] + random.normal(size=(3000, 24))).astype(np.float32)
    monkeypatch.setattr(layout, "_VECTORS_PER_LIST", per_list)
    if graph:
        monkeypatch.setattr(router, "EXACT_LISTS", 0)
        monkeypatch.setattr(router, "_WALK_COST", 0)
        monkeypatch.setattr(router, "_STEP_COST", 0)
    ZoomIndex.build(tmp_path / "index", vectors[:2500], metric=metric, dram="8MiB", grow_to=4000).close()
    with Store.open(tmp_path / "index", kind=KIND) as store:
        about = Description.decode(store.get("index"), store.path)
        preview, space = load_preview(store, about), about.space
    source, ids = VectorSource(vectors[2500:]), np.arange(2500, 3000)
    made = [code_vectors(source, ids, preview, space, work_bytes) for work_bytes in (1, 200_000, 100 << 20)]
    turned = preview.turn(space.vectors(vectors[2500:]))
    away = np.square(turned[:, None] - preview.router.centroids.astype(np.float32)).sum(axis=2)
    for arrays, order in made:
        assert sorted(order.tolist()) == list(range(500))
        np.testing.assert_array_equal(arrays.ids, 2500 + order)
        lists = np.repeat(np.arange(preview.lists), np.diff(arrays.starts))
        near = away[order, lists] <= away[order].min(axis=1) * (1 + 1e-5) + 1e-6
        assert near.mean() >= (0.98 if graph else 1)
        codes, numbers, _ = preview.encode(turned[order], lists.astype(np.int32))
        found = codes_of(arrays.codes, np.arange(500), preview.book.dimensions)
        assert (found == codes).all(axis=1).mean() > 0.99  # products of matrices differ by their last bits
        assert (arrays.numbers == numbers).all(axis=0).mean() > 0.99
        residuals = turned[order] - preview.centroids_of(lists)
        decoded = preview.book.unit * preview.book.decode(codes, numbers)
        wrong = np.concatenate([residuals[:, : decoded.shape[1]] - decoded, residuals[:, decoded.shape[1] :]], axis=1)
        errors = preview.book.unit * preview.book.numbers_of(numbers)[2] * np.linalg.norm(residuals, axis=1)
        assert ((wrong * residuals).sum(axis=1) <= 3.01 * errors).all()  # for the queries nearest to each vector
