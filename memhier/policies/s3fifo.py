"""S3-FIFO: Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023."""

from collections import OrderedDict
from collections.abc import Collection

from memhier.policies._base import EvictionPolicy

__all__ = ["S3FIFO"]

_USES_MAX = 3


class S3FIFOOrder:
    """The paper's Algorithm 1 over three queues: small, main, and the ghosts of keys that left small."""

    def __init__(self, capacity: int) -> None:
        self._small_target = max(1, capacity // 10)
        self._main_target = capacity - self._small_target
        # Each queue from oldest to newest; the values count the uses since a key entered its queue.
        self._small: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, key: object) -> bool:
        return key in self._small or key in self._main

    def touch(self, key: int) -> None:
        queue = self._small if key in self._small else self._main
        queue[key] = min(queue[key] + 1, _USES_MAX)

    def insert(self, key: int) -> None:
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def evict(self, count: int, held: Collection[int]) -> list[int]:
        victims: list[int] = []
        stuck = False  # what is left in the small queue is held: the paper has no such case, main takes its turns
        while len(victims) < count:
            small = len(self._small) >= self._small_target and not stuck
            if small or not self._evict_main(held, victims):
                stuck = not self._evict_small(held, victims)
        return victims

    def discard(self, key: int) -> None:
        del (self._small if key in self._small else self._main)[key]

    def _evict_small(self, held: Collection[int], victims: list[int]) -> bool:
        passed = 0  # held keys, which go round
        while passed < len(self._small):
            key, uses = self._small.popitem(last=False)
            if key in held:
                self._small[key] = uses
                passed += 1
            elif uses > 1:
                self._main[key] = 0
                if len(self._main) > self._main_target:
                    self._evict_main(held, victims)
            else:
                self._ghosts[key] = None
                if len(self._ghosts) > self._main_target:
                    self._ghosts.popitem(last=False)
                victims.append(key)
                return True
        return False

    def _evict_main(self, held: Collection[int], victims: list[int]) -> bool:
        passed = 0  # held keys in a row
        while passed < len(self._main):
            key, uses = self._main.popitem(last=False)
            if key in held:
                self._main[key] = uses
                passed += 1
            elif uses > 0:
                self._main[key] = uses - 1
                passed = 0
            else:
                victims.append(key)
                return True
        return False


class S3FIFO(EvictionPolicy):
    """A small queue lets most keys pass through quickly; those used again while in it move to the main queue.

    As in the paper: the small queue aims at a tenth of the capacity (one key at least), the main queue and the list of
    ghosts (keys that left the small queue, without their rows) at the rest; uses are counted to 3; a key leaving the
    small queue moves to main if it was used more than once; main reinserts a used key with one use less; a key found
    among the ghosts enters main. A key that may not leave goes to the young end of its queue when its turn comes.

    Parameters
    ----------
    capacity
        Keys that may be resident at once.

    Examples
    --------
    >>> from memhier.policies import S3FIFO
    >>> policy = S3FIFO(10)
    >>> policy.replay([1, 1, 1, *range(2, 12), 1]).tolist().count(True)
    3
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, "S3FIFOPolicy", S3FIFOOrder)
