"""What can be known of a whole trace: each access's next one, Belady's hits, LRU stack distances.

The compiled core does the same over compact arrays; these are the definitions, and the fallback.
"""

from bisect import bisect_left
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from memhier import backend

__all__ = ["NEVER", "StackDistances", "belady_hits", "next_uses"]

Keys = npt.NDArray[np.int64]

NEVER = 2**32 - 1
"""Stands for the next access of a key that is not accessed again."""


def next_uses(keys: Keys) -> npt.NDArray[np.uint32]:
    """Return, for every access, the place in the trace of the next access to its key, uint32 [n], or :data:`NEVER`.

    Raises
    ------
    ValueError
        When the trace has 2**32 - 1 accesses or more.
    """
    if len(keys) >= NEVER:
        raise ValueError(f"a trace of {len(keys)} accesses: expected fewer than {NEVER}; sample it")
    following = np.full(len(keys), NEVER, np.uint32)
    if backend.core is not None:
        backend.core.next_uses(keys=np.ascontiguousarray(keys), next=following)
        return following
    order = np.argsort(keys, kind="stable")
    same = keys[order[:-1]] == keys[order[1:]]
    following[order[:-1][same]] = order[1:][same]
    return following


def belady_hits(following: npt.NDArray[np.uint32], capacity: int) -> npt.NDArray[np.bool_]:
    """Return which accesses hit a cache of `capacity` keys under Belady's rule with the whole trace known, bool [n].

    Parameters
    ----------
    following
        What :func:`next_uses` returned. A resident key is known by the place of its next access, so that running many
        capacities needs the keys only once.
    """
    hit = np.zeros(len(following), np.bool_)
    if backend.core is not None:
        backend.core.belady_hits(next=following, capacity=capacity, hit=hit)
        return hit
    farthest: list[int] = []  # heap of negated next places of the residents, those that have passed at its far end
    resident = spent = 0  # spent: residents that are never accessed again
    for place, later in enumerate(following.tolist()):
        if hit[place]:
            pass
        elif resident < capacity:
            resident += 1
        elif spent:
            spent -= 1
        else:
            hit[-heappop(farthest)] = False
        if later == NEVER:
            spent += 1
        else:
            hit[later] = True
            heappush(farthest, -later)
    return hit


class StackDistances:
    """LRU stack distances (Mattson, Gecsei, Slutz, Traiger, IBM Systems Journal 9(2), 1970) of a trace that streams by.

    The distance of an access is the number of distinct keys since its key's last one, itself included: the capacity
    from which on an LRU cache hits. Memory follows the number of distinct keys.
    """

    def __init__(self) -> None:
        self._native = None if backend.core is None else backend.core.StackDistances()
        self._last: dict[int, int] = {}
        self._times: list[int] = []  # the last accesses of all keys, in order
        self._now = 0

    def access(self, keys: Keys) -> Keys:
        """Return the distance of each access, int64 [n]; 0 for a key's first."""
        distance = np.zeros(len(keys), np.int64)
        if self._native is not None:
            self._native.access(keys=np.ascontiguousarray(keys), distance=distance)
            return distance
        for place, key in enumerate(keys.tolist()):
            if key in self._last:
                rank = bisect_left(self._times, self._last[key])
                distance[place] = len(self._times) - rank
                del self._times[rank]
            self._last[key] = self._now
            self._times.append(self._now)
            self._now += 1
        return distance
