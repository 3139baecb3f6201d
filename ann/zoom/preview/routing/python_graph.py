"""Walks over a graph of lists without the compiled core."""

import heapq
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["reach_lists", "walk_lists"]

_NONE = -1
_STEPS = 4  # at a time

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]
Links: TypeAlias = npt.NDArray[np.int32]


def walk_lists(
    *, queries: Floats, rows: npt.NDArray[np.uint16], links: Links, seeds: Links, sight: int, nearest: Ints
) -> None:
    """Fill `nearest`; see :meth:`memhier.ann.zoom.preview.routing.list_graph.ListGraph.walk`.

    Parameters
    ----------
    rows
        uint16 ``[lists, d]``: the bits of the centroids in half precision.
    """
    for query, found in zip(queries, nearest, strict=True):
        seen = _walk(query, rows.view(np.float16), links, seeds, sight)
        lists: list[int] = []
        for _, each in sorted(seen)[: len(found)]:
            following = each
            while following != _NONE:
                lists.append(following)
                last = int(links[following, -1])
                following = _NONE - 1 - last if last < _NONE else _NONE
        lists = lists[: len(found)]
        found[: len(lists)], found[len(lists) :] = lists, _NONE


def _walk(
    query: Floats, rows: npt.NDArray[np.float16], links: Links, seeds: Links, sight: int
) -> list[tuple[float, int]]:
    """Return the lists that a walk sees, each after its distance."""
    taken, seen, ahead = np.zeros(len(rows), np.bool_), list[tuple[float, int]](), list[tuple[float, int]]()
    nearest, left, fresh = (np.inf, 0), sight, seeds
    taken[seeds] = True
    while len(fresh) or (left > 0 and ahead):
        arrived, fresh, steps = fresh, np.empty(0, np.int32), list[int]()
        while len(steps) < _STEPS and left > 0 and ahead:
            key = heapq.heappop(ahead)
            steps.append(key[1])
            if key < nearest:
                nearest, left = key, sight
            left -= 1
        for each in steps:
            others = links[each]
            others = others[others >= 0]
            others = np.unique(others[~taken[others]])
            taken[others] = True
            fresh = np.append(fresh, others)
        away = np.square(query - rows[arrived].astype(np.float32)).sum(axis=1)
        for found in zip(away.tolist(), arrived.tolist(), strict=True):
            seen.append(found)
            heapq.heappush(ahead, found)
    return seen


def reach_lists(*, links: Links, reached: npt.NDArray[np.uint8]) -> None:
    """Mark in `reached`, uint8 ``[lists]``, all lists that the lists marked before lead to."""
    front = np.flatnonzero(reached)
    while len(front):
        others = links[front]
        following = np.concatenate([others[others >= 0], _NONE - 1 - others[others < _NONE]])
        front = np.unique(following[reached[following] == 0])
        reached[front] = 1
