"""Which shards a query asks beyond the nearest, for a declared recall.

The gap of a shard is the squared distance of its nearest cell beyond the nearest cell of all, in squared distances of
the k-th neighbour that the nearest shard found. Queries ask the shards whose gap is at most a limit. The limit is
measured on held-out vectors, compared with all shards: their neighbours in shards beyond the limit are lost. It is the
least one whose mean loss, by conformal risk control (Angelopoulos et al., ICLR 2024), stays below the loss allowed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.cluster.cells import Cells

__all__ = ["MOST_NEIGHBOURS", "NEIGHBOURS", "RECALLS", "Routing", "gaps"]

NEIGHBOURS = (1, 10, 100)
MOST_NEIGHBOURS = max(NEIGHBOURS) + 1
"""The neighbours of a query that a measurement needs, with the query itself."""
RECALLS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.96, 0.97, 0.975, 0.98, 0.985, 0.99, 0.995, 0.998)

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


def gaps(remoteness: Floats, kth: Floats) -> Floats:
    """Return the gap of each shard, ``[q, shards]``.

    Parameters
    ----------
    remoteness
        The squared distance of the nearest cell of each shard, ``[q, shards]``.
    kth
        The squared distance of the k-th neighbour found in the nearest shard, ``[q]``; infinity where it has fewer.
    """
    nearest = remoteness.min(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = (remoteness - nearest) / kth[:, None]
    # All shards with a cell matter where neighbours are missing, and as many as are equally near where kth is 0.
    found = np.where(np.isnan(found), 0, found)
    return np.where(np.isinf(remoteness), np.inf, np.maximum(found, 0)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Routing:
    """The limit on the gap of a shard, by k and by recall.

    Attributes
    ----------
    limits
        By k, then by ascending recall: the recall, and the limit.
    queries
        The held-out vectors that were measured.
    """

    limits: dict[int, list[tuple[float, float]]]
    queries: int

    @classmethod
    def measured(cls, needs: dict[int, Floats]) -> Self:
        """Return the limits for the gaps that the neighbours of held-out queries need, ``[q, k]`` by k."""
        limits: dict[int, list[tuple[float, float]]] = {}
        count = 0
        for k, of_k in needs.items():
            count = len(of_k)
            ascending = np.sort(of_k, axis=None)
            limits[k] = [(recall, _limit(ascending, count, 1 - recall)) for recall in RECALLS]
        return cls(limits, count)

    @classmethod
    def of_answers(
        cls, answers: Sequence[tuple[npt.NDArray[Any], Floats]], cells: Cells, queries: Floats,
        own: npt.NDArray[Any] | None,
    ) -> Self:  # fmt: skip
        """Return the limits that the true neighbours of queries ``[q, d]`` need.

        Parameters
        ----------
        answers
            Of each shard, the ids and distances of the nearest of each query, ``[q, MOST_NEIGHBOURS]``.
        own
            The ids of queries that are vectors of the index, which are no neighbours of themselves.
        """
        ids, distances = (np.hstack(each) for each in zip(*answers, strict=True))
        if own is not None:
            distances[ids == own[:, None]] = np.inf
        shard = np.repeat(np.arange(len(answers)), MOST_NEIGHBOURS)[None]
        remoteness = cells.remoteness(queries)
        nearest = remoteness.argmin(axis=1)[:, None]
        order = np.argsort(distances, axis=1, kind="stable")
        inside = np.sort(np.where(shard == nearest, distances, np.inf), axis=1)
        needs: dict[int, Floats] = {}
        for k in NEIGHBOURS:
            needed = gaps(remoteness, cells.squared(inside[:, k - 1], queries))
            owner = shard[0, order[:, :k]]
            there = np.isfinite(np.take_along_axis(distances, order[:, :k], 1))
            needs[k] = np.where(there, np.take_along_axis(needed, owner, 1), 0)
        return cls.measured(needs)

    def limit(self, k: int, recall: float, *, any_k: bool = False) -> tuple[float, float]:
        """Return the limit for a recall of `k` neighbours, and the recall that it keeps, which may be higher.

        With `any_k` it is the largest of the limits for `k` neighbours and for more.
        """
        if recall >= 1 or k > max(self.limits, default=0):
            return np.inf, 1.0
        known = min(each for each in self.limits if each >= k)
        chosen = [of_k for each, of_k in self.limits.items() if each == known or (any_k and each > known)]
        limit = max(next((limit for level, limit in of_k if level >= recall - 1e-9), np.inf) for of_k in chosen)
        if np.isinf(limit):
            return np.inf, 1.0
        return limit, min(max(level for level, enough in of_k if enough <= limit) for of_k in chosen)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        limits = {str(k): [(recall, limit) for recall, limit in of_k] for k, of_k in self.limits.items()}
        return {"limits": limits, "queries": self.queries}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return the routing from the values of :meth:`to_json`."""
        limits = {int(k): [(float(a), float(b)) for a, b in of_k] for k, of_k in values["limits"].items()}
        return cls(limits, int(values["queries"]))


def _limit(ascending: Floats, queries: int, loss: float) -> float:
    """Return the least limit that keeps the loss, of the gaps that neighbours need in ascending order."""
    allowed = (loss * (queries + 1) - 1) / queries if queries else -1.0  # of the mean loss measured
    if allowed < 0 or not len(ascending):
        return float("inf")
    beyond = int(np.floor(allowed * len(ascending)))
    return float(ascending[max(len(ascending) - 1 - beyond, 0)])
