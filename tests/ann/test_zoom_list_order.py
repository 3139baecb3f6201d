"""The order of lists: each once, near lists in a row."""

import numpy as np
import pytest

from memhier.ann.zoom.preview.list_order import list_order
from memhier.ann.zoom.preview.preview import train_preview


@pytest.mark.parametrize("lists", [1, 2, 255, 256, 257, 1000, 2049])
def test_every_list_has_one_place(lists: int) -> None:
    random = np.random.default_rng(lists)
    centroids = random.normal(size=(lists, 5)).astype(np.float32)
    assert sorted(list_order(centroids)) == [*range(lists)]
    assert sorted(list_order(np.zeros((lists, 3), np.float32))) == [*range(lists)]
    assert sorted(list_order(centroids[random.integers(0, lists, lists)])) == [*range(lists)]


@pytest.mark.parametrize("lists", [300, 3000])
def test_points_of_a_line_keep_together(lists: int) -> None:
    line = np.random.default_rng(0).permutation(lists)
    centroids = np.stack([line, 2 * line], axis=1).astype(np.float32)
    steps = np.abs(np.diff(line[list_order(centroids)]))
    assert np.mean(steps == 1) > 0.98


@pytest.mark.parametrize("axes", [8, 64])
def test_a_list_follows_one_of_the_nearest(axes: int) -> None:
    centroids = np.random.default_rng(1).normal(size=(2000, axes)).astype(np.float32)
    order = list_order(centroids)
    following = np.empty(len(order) - 1)
    for place in range(len(following)):
        away = np.square(centroids - centroids[order[place]]).sum(axis=1)
        following[place] = np.count_nonzero(away < away[order[place + 1]])
    assert np.median(following) < 0.02 * len(order)  # in any order, half of the lists are nearer


@pytest.mark.parametrize("inner", [False, True])
def test_lists_of_a_query_lie_together(inner: bool) -> None:
    random = np.random.default_rng(3)
    centres = 3 * random.normal(size=(40, 16))
    vectors = (centres[random.integers(0, 40, 12_000)] + random.normal(size=(12_000, 16))).astype(np.float32)
    vectors[:, -2:] = 0
    preview = train_preview(vectors, 700, "rabitq", 2, 0, inner=inner)
    probes = preview.route(preview.turn(vectors[:200]), 30)
    runs = 1 + np.count_nonzero(np.diff(np.sort(probes, axis=1)) > 1, axis=1)
    assert runs.mean() < 12  # in any order there are nearly 29
