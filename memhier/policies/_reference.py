"""The cache in plain Python that every policy's order can drive: the definition, and the fallback without a compiler.

The compiled core does the same steps over arrays; the test suite holds the two together, victim by victim.
"""

import sys
from collections.abc import Collection
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Order", "Reference"]

# What CPython takes for one resident key, dicts, links and ghosts included, at most: 130 to 340 were measured, as full
# as the tables of its dicts are.
_KEY_BYTES = 340


class Order(Protocol):
    """The resident keys, in an order from which victims are taken."""

    def __len__(self) -> int: ...

    def __contains__(self, key: object) -> bool: ...

    def touch(self, key: int) -> None:
        """Record one more access of a resident key."""

    def insert(self, key: int) -> None:
        """Take in a key that is not resident; the caller has made room."""

    def evict(self, count: int, held: Collection[int]) -> list[int]:
        """Let `count` keys or more go, none of them among `held`; the caller knows that so many are free to go."""

    def discard(self, key: int) -> None:
        """Let a resident key go as if it had never been here."""


class Reference:
    """A cache of `capacity` keys over an order; arguments have been checked."""

    def __init__(self, capacity: int, order: Order) -> None:
        self._capacity = capacity
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order

    @property
    def memory_bytes(self) -> int:
        return sys.getsizeof(self) + _KEY_BYTES * len(self._order)

    def access(
        self, *, keys: npt.NDArray[np.int64], pinned: npt.NDArray[np.int64], hit: npt.NDArray[np.bool_]
    ) -> bytes | int:
        """Fill `hit` and return the victims as int64 bytes; or the capacity that would be enough, nothing changed."""
        order = self._order
        batch = keys.tolist()
        held = dict.fromkeys(batch)
        missing = sum(key not in order for key in held)
        held.update((key, None) for key in pinned.tolist() if key in order)
        if len(held) > self._capacity:
            return len(held)
        excess = len(order) + missing - self._capacity
        evicted = order.evict(excess, held.keys()) if excess > 0 else []
        for place, key in enumerate(batch):
            hit[place] = key in order
            if hit[place]:
                order.touch(key)
            else:
                order.insert(key)
        return np.array(evicted, np.int64).tobytes()

    def replay(self, *, keys: npt.NDArray[np.int64], hit: npt.NDArray[np.bool_]) -> None:
        order = self._order
        for place, key in enumerate(keys.tolist()):
            hit[place] = key in order
            if hit[place]:
                order.touch(key)
                continue
            if len(order) == self._capacity:
                order.evict(1, ())
            order.insert(key)

    def discard(self, keys: npt.NDArray[np.int64]) -> None:
        for key in keys.tolist():
            if key in self._order:
                self._order.discard(key)
