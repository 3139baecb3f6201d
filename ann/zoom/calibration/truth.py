"""Exact neighbours of some queries, found while all vectors stream by."""

from typing import Any, TypeAlias

import faiss
import numpy as np
import numpy.typing as npt

__all__ = ["QUERIES", "NeighbourTruth"]

QUERIES = 1024  # which tell the loss of a declared recall to 1 in as many
_NEIGHBOURS = 100
_COPIES = 32  # of a vector that are recognised

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]


class NeighbourTruth:
    """The nearest vectors of each query by brute force.

    Parameters
    ----------
    queries
        float32 ``[q, d]`` in the preview's space.
    own
        int64 ``[q]``: the number of each query itself in :meth:`add`, -1 if it is no vector of the index. A query does
        not look for itself or a copy of itself: that would be too easy. It looks for its copies where they are so many
        that they hide all others.
    count
        Number of vectors to come.
    lengths
        For inner products: float32 ``[q]``, the length of the vector of each query, which is scaled to length one.
        Distances are then ``-2 <q, x>``.
    """

    def __init__(self, queries: Floats, own: Ints, count: int, lengths: Floats | None = None) -> None:
        self.queries: Floats
        self.own: Ints
        self.queries, self.own, self._lengths = queries, own, lengths
        self.count: int = count
        self.neighbours: int = max(0, min(_NEIGHBOURS, count - int((own >= 0).any())))
        self.distances: Floats = np.full((len(queries), self.neighbours), np.inf, np.float32)
        self.found: Ints = np.full((len(queries), self.neighbours), -1, np.int64)
        self.copies: Ints = np.zeros(len(queries), np.int64)  # of each query, itself not counted
        self.hidden: Flags = np.zeros(len(queries), np.bool_)  # whether the neighbours of a query are its copies
        self._are_copies: Flags = np.zeros(self.found.shape, np.bool_)
        self._are_zero: Flags = np.all(queries == 0, axis=1)
        # Far from the origin, float32 would lose the distance of near vectors in the squares of their coordinates.
        centred = lengths is None and len(queries) > 0
        self.centre: Floats = (queries.mean(axis=0) if centred else np.zeros(queries.shape[1])).astype(np.float32)
        self.norms: Floats = np.square(queries - self.centre).sum(axis=1)

    def of(self, rows: Ints) -> "NeighbourTruth":
        """Return the truth of some of the queries, after :meth:`finish`."""
        lengths = None if self._lengths is None else self._lengths[rows]
        some = NeighbourTruth(self.queries[rows], self.own[rows], self.count, lengths)
        some.distances, some.found, some.copies = self.distances[rows], self.found[rows], self.copies[rows]
        some.hidden = self.hidden[rows]
        some.neighbours = int((some.found >= 0).any(axis=0).sum())
        return some

    def vectors(self) -> Floats:
        """Return the vectors that play the queries, ``[q, d]``, with their lengths."""
        return self.queries if self._lengths is None else self.queries * self._lengths[:, None]

    def add(self, numbers: Ints, vectors: Floats) -> None:
        """Take in vectors float32 ``[n, d]`` under their numbers, int64 ``[n]``; they are moved in place."""
        if not len(vectors) or not self.neighbours:
            return
        keep = min(self.neighbours + _COPIES, len(vectors))
        if self._lengths is None:
            vectors -= self.centre
            near, place = faiss.knn(self.queries - self.centre, vectors, keep)
            alike = near <= 1e-6 * self.norms[:, None]
        else:
            products, place = faiss.knn(self.queries, vectors, keep, metric=faiss.METRIC_INNER_PRODUCT)
            near, own = -2 * products, self._lengths[:, None]
            away = np.einsum("ij,ij->i", vectors, vectors)[place] + np.square(own) + near * own
            alike = away <= 1e-6 * np.square(own)
        found = numbers[place]
        inside = (self.own >= 0)[:, None]
        copy = inside & alike
        itself = found == self.own[:, None]
        self.copies += (copy & ~itself).sum(axis=1)
        near[itself] = np.inf
        copy &= ~itself
        near, found = np.hstack([self.distances, near]), np.hstack([self.found, found])
        copy = np.hstack([self._are_copies, copy])
        order = np.lexsort((near, copy | np.isinf(near)), axis=1)[:, : self.neighbours]  # copies behind the others
        self.distances = np.take_along_axis(near, order, 1)
        self.found = np.take_along_axis(found, order, 1)
        self._are_copies = np.take_along_axis(copy, order, 1)

    def finish(self, position_of: npt.NDArray[Any] | None = None) -> None:
        """Turn numbers into positions where they differ, and drop entries without a neighbour; after all vectors."""
        self.hidden[:] = self._are_copies[:, :1].any(axis=1)
        self.distances[self._are_copies & ~self.hidden[:, None]] = np.inf
        # To a zero query everything is equally near by cosine and inner product: it has no neighbours to find.
        sound = np.isfinite(self.distances) & ~self._are_zero[:, None]
        if position_of is not None:
            self.found = position_of[self.found].astype(np.int64)
            self.own = np.where(self.own >= 0, position_of[self.own].astype(np.int64), -1)
        self.found = np.where(sound, self.found, -1)
        # Columns that no query fills do not count.
        self.neighbours = int(sound.any(axis=0).sum())
