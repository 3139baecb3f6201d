"""Least frequently used."""

from collections import OrderedDict
from collections.abc import Collection

from memhier.policies._base import EvictionPolicy

__all__ = ["LFU"]


class LFUOrder:
    """Keys by how often they were accessed since they came; equal ones from least to most recently used."""

    def __init__(self, capacity: int) -> None:
        self._count: dict[int, int] = {}
        self._keys_of: dict[int, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._count)

    def __contains__(self, key: object) -> bool:
        return key in self._count

    def touch(self, key: int) -> None:
        count = self._count[key]
        self.discard(key)
        self._put(key, count + 1)

    def insert(self, key: int) -> None:
        self._put(key, 1)

    def evict(self, count: int, held: Collection[int]) -> list[int]:
        victims: list[int] = []
        for uses in sorted(self._keys_of):
            for key in self._keys_of[uses]:
                if len(victims) == count:
                    break
                if key not in held:
                    victims.append(key)
            if len(victims) == count:
                break
        for key in victims:
            self.discard(key)
        return victims

    def discard(self, key: int) -> None:
        count = self._count.pop(key)
        keys = self._keys_of[count]
        del keys[key]
        if not keys:
            del self._keys_of[count]

    def _put(self, key: int, count: int) -> None:
        self._count[key] = count
        self._keys_of.setdefault(count, OrderedDict())[key] = None


class LFU(EvictionPolicy):
    """Evicts the key with the fewest accesses since it became resident; of several, the least recently used.

    Counts are exact and are forgotten when a key leaves. Every access counts, repeats within a batch too.

    Parameters
    ----------
    capacity
        Keys that may be resident at once.

    Examples
    --------
    >>> from memhier.policies import LFU
    >>> policy = LFU(2)
    >>> policy.replay([1, 1, 2, 3, 1]).tolist()
    [False, True, False, False, True]
    >>> policy.access([7]).evicted.tolist()
    [3]
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, "LFUPolicy", LFUOrder)
