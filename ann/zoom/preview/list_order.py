"""The order of lists on SSD: a list follows one that is near, so that a search reads several lists at once.

The lists that a query scans lie around it. Where they lie in a row on SSD, one read takes them, and the end of one list
shares its last page with the next.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["list_order"]

_GROUP = 256  # lists of which each goes to the nearest that is left

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


def list_order(centroids: Floats) -> Ints:
    """Return the numbers of the centroids ``[lists, d]`` in an order in which neighbours are near, int64 ``[lists]``.

    The centroids are halved along a line between two far ones, over and over; in a group after each comes the nearest
    that is left. That takes ``O(lists * d * log(lists))``. The order does not depend on the number of threads.
    """
    waiting, order = [np.arange(len(centroids))], list[int]()
    while waiting:
        group = waiting.pop()
        last = centroids[order[-1] if order else 0]
        if len(group) <= _GROUP:
            order += _chain(centroids, group, last)
            continue
        some = centroids[group]
        far = some[_away(some, last).argmax()]
        along = np.einsum("ij,j->i", some, far - some[_away(some, far).argmax()])
        lined = group[np.argsort(along, kind="stable")]
        halves = [lined[: len(group) // 2], lined[len(group) // 2 :]]
        # The half that is nearer to the last list comes first.
        halves.sort(key=lambda half: float(_away(centroids[half], last).mean()), reverse=True)
        waiting += halves
    return np.array(order, np.int64)


def _chain(centroids: Floats, group: Ints, last: Floats) -> list[int]:
    """Return the members of a group: the nearest to `last`, then after each the nearest that is left."""
    some = centroids[group]
    norms = np.einsum("ij,ij->i", some, some)
    away = norms[:, None] + norms - 2 * np.einsum("ik,jk->ij", some, some)
    at, places = int(_away(some, last).argmin()), list[int]()
    for _ in range(len(group)):
        away[:, at] = np.inf
        places.append(at)
        at = int(away[at].argmin())
    return [int(each) for each in group[places]]


def _away(some: Floats, point: Floats) -> Floats:
    """Return the squared distances of `some` from a point."""
    away: Floats = np.square(some - point).sum(axis=1)
    return away
