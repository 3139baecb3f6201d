"""Cells: small regions of the vectors' space, each owned by one shard, and the remoteness of shards from a query.

A shard owns cells that lie near each other, so few shards hold the neighbours of a query. Every shard may matter to it,
but one whose nearest cell lies far beyond the nearest cell of all matters little. How far that is counts in the
distance of the query's own k-th neighbour, which the nearest shard tells; see `memhier.ann.cluster.routing`.
"""

from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import faiss
import numpy as np
import numpy.typing as npt

from memhier.ann.threads import one_thread
from memhier.ann.zoom.preview.space import Metric

__all__ = ["SAMPLE_OF_CELL", "Cells"]

SAMPLE_OF_CELL = 64  # vectors that train a cell
_ROUNDS = 10
_SLACK = 1.1  # of a shard, times the mean
_BLOCK = 4096

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cells:
    """Centroids of cells in a space of squared Euclidean distances, and the shard that owns each.

    Attributes
    ----------
    metric
        Of the index. For ``cosine`` the space is that of unit vectors. For ``ip`` an added coordinate gives all
        vectors the norm `reach`, and queries are scaled to that norm, so that a nearer vector has a larger product
        (Bachrach et al., RecSys 2014).
    centroids
        float32 ``[m, d]``, or ``[m, d + 1]`` for ``ip``.
    owners
        int64 ``[m]``.
    reach
        The largest norm in the training sample, for ``ip``.
    """

    metric: Metric
    centroids: Floats
    owners: Ints
    reach: float = 1.0

    @classmethod
    def train(cls, sample: npt.NDArray[Any], metric: Metric, cells: int, shards: int, seed: int) -> Self:
        """Return cells for vectors like those of a sample ``[n, d]``, dealt to shards of nearly the same size."""
        values = sample.astype(np.float32)
        reach = max(float(np.linalg.norm(values, axis=1).max(initial=0)), 1e-30)
        bare = cls(metric, np.empty((0, 0), np.float32), np.empty(0, np.int64), reach)
        points = bare.vectors(values)
        cells = max(1, min(cells, len(points)))
        with one_thread():  # results do not depend on the number of threads
            means = _means(points, cells, seed)
            _, nearest = _nearest(points, means)
        sizes = np.bincount(nearest[:, 0], minlength=cells).astype(np.float64)
        return cls(metric, means, _dealt(means, sizes, shards, seed), reach)

    @property
    def shards(self) -> int:
        """The number of shards."""
        return int(self.owners.max(initial=0)) + 1

    def vectors(self, block: npt.NDArray[Any]) -> Floats:
        """Map vectors ``[n, d]`` into the space of the centroids."""
        values = block.astype(np.float32)
        if self.metric == "l2":
            return values
        norms = np.linalg.norm(values, axis=1)
        if self.metric == "cosine":
            return np.asarray(values / np.where(norms > 0, norms, 1)[:, None], np.float32)
        rest = np.sqrt(np.maximum(self.reach**2 - norms.astype(np.float64) ** 2, 0)).astype(np.float32)
        return np.hstack([values, rest[:, None]])

    def queries(self, block: Floats) -> Floats:
        """Map queries ``[q, d]`` into the space of the centroids."""
        if self.metric != "ip":
            return self.vectors(block)
        norms = np.linalg.norm(block, axis=1)
        scaled = block * (self.reach / np.where(norms > 0, norms, 1))[:, None]
        return np.hstack([scaled, np.zeros((len(block), 1), np.float32)])

    def owner(self, block: npt.NDArray[Any]) -> Ints:
        """Return the shard of each vector ``[n]``: the owner of its nearest cell."""
        found = np.empty(len(block), np.int64)
        with one_thread():
            for start in range(0, len(block), _BLOCK):
                part = slice(start, start + _BLOCK)
                found[part] = self.owners[_nearest(self.vectors(block[part]), self.centroids)[1][:, 0]]
        return found

    def remoteness(self, queries: Floats) -> Floats:
        """Return the squared distance of the nearest cell of each shard, ``[q, shards]``; infinity without one."""
        found = np.full((len(queries), self.shards), np.inf, np.float32)
        with one_thread():
            away = faiss.pairwise_distances(self.queries(queries), self.centroids)
        for shard in range(self.shards):
            mine = self.owners == shard
            if mine.any():
                found[:, shard] = away[:, mine].min(axis=1)
        return found

    def squared(self, distances: Floats, queries: Floats) -> Floats:
        """Return squared distances in the space of the centroids for distances ``[q]`` of the metric."""
        if self.metric == "l2":
            return distances
        if self.metric == "cosine":
            return 2 * distances
        norms = np.linalg.norm(queries, axis=1)
        with np.errstate(invalid="ignore"):
            squares = 2 * self.reach**2 + 2 * self.reach * distances / np.where(norms > 0, norms, 1)
        return np.asarray(np.maximum(squares, 0), np.float32)


def _means(points: Floats, cells: int, seed: int) -> Floats:
    means = faiss.Kmeans(
        points.shape[1], cells, niter=_ROUNDS, seed=seed, min_points_per_centroid=1,
        max_points_per_centroid=4 * SAMPLE_OF_CELL,
    )  # fmt: skip
    means.train(points)
    return np.asarray(means.centroids, np.float32)


def _nearest(points: Floats, centroids: Floats) -> tuple[Floats, Ints]:
    near: tuple[Floats, Ints] = faiss.knn(points, centroids, 1)
    return near


def _dealt(means: Floats, sizes: npt.NDArray[np.float64], shards: int, seed: int) -> Ints:
    """Return the shard of each cell: cells near each other together, no shard above a tenth beyond the mean.

    Cells choose the nearest shard that has room, those first that lose most by another.
    """
    if shards == 1 or shards >= len(means):
        return np.arange(len(means), dtype=np.int64) % shards
    with one_thread():
        hubs = faiss.Kmeans(means.shape[1], shards, niter=_ROUNDS, seed=seed, min_points_per_centroid=1)
        hubs.train(means, weights=np.maximum(sizes, 1e-3).astype(np.float32))
        centres = np.asarray(hubs.centroids, np.float32)
        room = _SLACK * sizes.sum() / shards
        for _ in range(_ROUNDS):
            away = faiss.pairwise_distances(means, centres)
            two = np.partition(away, 1, axis=1)
            owners, load = np.empty(len(means), np.int64), np.zeros(shards)
            for cell in np.argsort(two[:, 0] - two[:, 1], kind="stable").tolist():
                order = np.argsort(away[cell], kind="stable")
                fits = order[load[order] + sizes[cell] <= room]
                owners[cell] = fits[0] if len(fits) else load.argmin()
                load[owners[cell]] += sizes[cell]
            for shard in range(shards):
                mine = owners == shard
                if mine.any():
                    centres[shard] = np.average(means[mine], axis=0, weights=np.maximum(sizes[mine], 1e-3))
    return owners
