"""How many lists to probe and how many candidates to read, measured on vectors of the index itself.

Sampled vectors play the queries; each must find its nearest neighbours other than itself. Everything is read off the
preview: a neighbour is found when its code ranks among the candidates, so calibration reads nothing from SSD.
"""

from dataclasses import dataclass
from typing import TypeAlias

import faiss
import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.preview import Preview

__all__ = ["TARGET", "Calibration", "NeighbourTruth", "calibrate"]

NEIGHBOURS = 10
TARGET = 0.99
_QUERIES = 256
_LEAST_GAIN = 0.002  # of recall, for probing twice as many lists
_CANDIDATES = (10, 15, 20, 30, 40, 60, 80, 100, 150, 200, 300, 400, 600, 800)
_COPIES = 32  # of a vector that are recognised as such

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Default search effort.

    Attributes
    ----------
    nprobe
        Lists probed.
    candidates
        Full vectors read for k = 10; more in proportion for larger k.
    recall
        The recall@10 that these gave on the sampled vectors.
    """

    nprobe: int
    candidates: int
    recall: float


class NeighbourTruth:
    """Exact neighbours of sampled vectors, gathered while the source streams by.

    Parameters
    ----------
    count
        Number of vectors in the index.
    seed
        Chooses the sampled vectors.
    """

    def __init__(self, count: int, seed: int) -> None:
        chosen = np.random.default_rng([seed, 1]).permutation(count)[:_QUERIES]  # drawn apart from training's
        self.rows: Ints = np.sort(chosen).astype(np.int64)
        self.neighbours = min(NEIGHBOURS, count - 1)
        self._distances = np.full((len(self.rows), self.neighbours), np.inf, np.float32)
        self._found = np.full((len(self.rows), self.neighbours), -1, np.int64)
        self.queries: Floats = np.empty((0, 0), np.float32)

    def add(self, start: int, vectors: Floats) -> None:
        """Take in the vectors of rows `start` onwards, in the preview's space; `queries` must be set before."""
        keep = min(self.neighbours + _COPIES, len(vectors))
        near, found = faiss.knn(self.queries, vectors, keep)
        found += start
        # Neither itself nor a copy of itself is what a query looks for: finding those would be too easy.
        copy = near <= 1e-6 * np.einsum("ij,ij->i", self.queries, self.queries)[:, None]
        near[copy | (found == self.rows[:, None])] = np.inf
        near, found = np.hstack([self._distances, near]), np.hstack([self._found, found])
        order = np.argsort(near, axis=1, kind="stable")[:, : self.neighbours]
        self._distances = np.take_along_axis(near, order, 1)
        self._found = np.take_along_axis(found, order, 1)

    def positions(self, position_of_row: Ints) -> tuple[Ints, Ints]:
        """Return where neighbours ``[q, 10]`` and queries ``[q]`` stand in list order; -1 where there are fewer."""
        # To a zero query everything is equally near by cosine and inner product: it has no neighbours to find.
        sound = np.isfinite(self._distances) & (self.queries != 0).any(axis=1, keepdims=True)
        neighbours = np.where(sound, position_of_row[self._found], -1)
        return neighbours, position_of_row[self.rows]


def calibrate(preview: Preview, truth: NeighbourTruth, position_of_row: Ints) -> Calibration:
    """Return the least effort that reaches recall 0.99 on the sampled vectors, or comes as near as these codes can."""
    neighbours, own = truth.positions(position_of_row)
    if (neighbours < 0).all():  # nothing but copies of one vector
        return Calibration(1, NEIGHBOURS, 1.0)
    nprobe = min(4, preview.lists)
    ranks = _ranks(preview, truth.queries, neighbours, own, nprobe)
    # Half of the loss that the target allows may come from lists left out, half from candidates not read.
    while _found(ranks) < (1 + TARGET) / 2 and nprobe < preview.lists:
        wider = min(2 * nprobe, preview.lists)
        wider_ranks = _ranks(preview, truth.queries, neighbours, own, wider)
        if _found(wider_ranks) - _found(ranks) < _LEAST_GAIN:
            break  # what is missing now is lost to short codes, not to lists left out
        nprobe, ranks = wider, wider_ranks
    for candidates in _CANDIDATES:
        recall = float((ranks < candidates).mean())
        best = Calibration(nprobe, candidates, recall)
        if recall >= TARGET:
            break
    return best


def _found(ranks: Ints) -> float:
    return float((ranks < _CANDIDATES[-1]).mean())


def _ranks(preview: Preview, queries: Floats, neighbours: Ints, own: Ints, nprobe: int) -> Ints:
    """Return the ranks of all true neighbours among the candidates, int64 ``[r]``, the query itself not counted."""
    most = _CANDIDATES[-1]
    positions, _ = preview.search(queries, nprobe, most + 1)
    is_own = positions == own[:, None]
    ranks = np.full(neighbours.shape, most)
    for column in range(neighbours.shape[1]):
        match = (positions == neighbours[:, [column]]) & ~is_own
        rank = match.argmax(axis=1)
        before = np.cumsum(is_own, axis=1)[np.arange(len(rank)), rank]
        ranks[:, column] = np.where(match.any(axis=1), rank - before, most)
    return ranks[neighbours >= 0]
