"""Analysis of a graph of lists: which lists no path from a seed nears with every step."""

import heapq
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.preview.routing.list_graph import ListGraph

__all__ = ["without_monotonic_path"]

Ints: TypeAlias = npt.NDArray[np.int64]


def without_monotonic_path(graph: ListGraph, targets: Ints) -> Ints:
    """Return those of the lists `targets` to which no path from a seed comes nearer with every step.

    A walk finds the others without turning back. In a graph of all links that the MRNG rule leaves, of any number to a
    list, every list has such a path (Fu et al., VLDB 2019, theorem 3). Lists that follow another of the same centroid
    have the path of that one.

    Parameters
    ----------
    targets
        int64 ``[t]``: numbers of lists.

    Notes
    -----
    The search goes on from the nearest list first, so it mostly ends after a few steps. Where there is no path it looks
    at all lists that steps of this kind reach.
    """
    return np.array([each for each in targets.tolist() if not _has_path(graph, each)], np.int64)


def _has_path(graph: ListGraph, target: int) -> bool:
    aim = graph.centroids[target].astype(np.float32)

    def away(lists: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        squared: npt.NDArray[np.float32] = np.square(graph.centroids[lists].astype(np.float32) - aim).sum(axis=1)
        return squared

    taken = np.zeros(len(graph.links), np.bool_)
    taken[graph.seeds] = True
    ahead = list(zip(away(graph.seeds).tolist(), graph.seeds.tolist(), strict=True))
    heapq.heapify(ahead)
    while ahead:
        apart, one = heapq.heappop(ahead)
        if apart == 0:
            return True
        others = graph.links[one]
        others = others[others >= 0]
        others = others[~taken[others]]
        near = away(others)
        for at, each in zip(near[near < apart].tolist(), others[near < apart].tolist(), strict=True):
            taken[each] = True
            heapq.heappush(ahead, (at, each))
    return False
