"""Least recently used."""

from collections import OrderedDict
from collections.abc import Collection
from itertools import islice

from memhier.policies._base import EvictionPolicy

__all__ = ["LRU"]


class LRUOrder:
    """Keys from least to most recently used."""

    def __init__(self, capacity: int) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def touch(self, key: int) -> None:
        self._order.move_to_end(key)

    def insert(self, key: int) -> None:
        self._order[key] = None

    def evict(self, count: int, held: Collection[int]) -> list[int]:
        victims = list(islice((key for key in self._order if key not in held), count))
        for key in victims:
            del self._order[key]
        return victims

    def discard(self, key: int) -> None:
        del self._order[key]


class LRU(EvictionPolicy):
    """Evicts the key whose last access lies farthest back.

    Parameters
    ----------
    capacity
        Keys that may be resident at once.

    Examples
    --------
    >>> from memhier.policies import LRU
    >>> policy = LRU(2)
    >>> policy.replay([1, 2, 1, 3, 2]).tolist()
    [False, False, True, False, False]
    >>> policy.access([7]).evicted.tolist()
    [3]
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, "LRUPolicy", LRUOrder)
