"""The slot map in numpy, for machines without the compiled core: the same slots for the same calls.

Slot numbers follow from the order of the calls alone (the stack of free slots), never from where an index keeps a key,
so this one may keep its keys sorted where the compiled one hashes them.
"""

import threading
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["DirectSlots", "Ints", "SortedSlots"]

Ints = NDArray[np.int64]


def unique_in_order(keys: Ints) -> tuple[Ints, Ints]:
    """Return the distinct keys in the order they first appear, and the position of each key among them."""
    ordered, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    by_first = np.argsort(first)
    rank = np.empty_like(by_first)
    rank[by_first] = np.arange(len(by_first))
    return ordered[by_first], rank[inverse]


class _Index(Protocol):
    """Where the slots of keys are kept. Keys are given once each; those to add are absent, those to drop present."""

    def find(self, keys: Ints) -> Ints: ...
    def add(self, keys: Ints, slots: Ints) -> None: ...
    def drop(self, keys: Ints) -> None: ...


class _SortedIndex:
    """Sorted keys beside their slots. A change moves up to all of them, so changes belong in batches."""

    BYTES_PER_SLOT = 16

    def __init__(self, capacity: int) -> None:
        self._keys = np.empty(capacity, np.int64)
        self._slots = np.empty(capacity, np.int64)
        self._size = 0

    def grow(self, capacity: int) -> None:
        added = capacity - len(self._keys)
        self._keys, self._slots = np.pad(self._keys, (0, added)), np.pad(self._slots, (0, added))

    def find(self, keys: Ints) -> Ints:
        if self._size == 0:
            return np.full(len(keys), -1, np.int64)
        held = self._keys[: self._size]
        at = np.minimum(np.searchsorted(held, keys), self._size - 1)
        return np.where(held[at] == keys, self._slots[at], -1)

    def add(self, keys: Ints, slots: Ints) -> None:
        order = np.argsort(keys)
        at = np.searchsorted(self._keys[: self._size], keys[order])
        self._replace(
            np.insert(self._keys[: self._size], at, keys[order]),
            np.insert(self._slots[: self._size], at, slots[order]),
        )

    def drop(self, keys: Ints) -> None:
        kept = np.ones(self._size, np.bool_)
        kept[np.searchsorted(self._keys[: self._size], keys)] = False
        self._replace(self._keys[: self._size][kept], self._slots[: self._size][kept])

    def _replace(self, keys: Ints, slots: Ints) -> None:
        self._size = len(keys)
        self._keys[: self._size] = keys
        self._slots[: self._size] = slots


class _DirectIndex:
    """The slot of every possible key."""

    BYTES_PER_KEY = 4

    def __init__(self, key_space: int) -> None:
        self._slots = np.full(key_space, -1, np.int32)

    def find(self, keys: Ints) -> Ints:
        return self._slots[keys].astype(np.int64)

    def add(self, keys: Ints, slots: Ints) -> None:
        self._slots[keys] = slots

    def drop(self, keys: Ints) -> None:
        self._slots[keys] = -1


class _Slots:
    """The methods of the compiled classes, one for one."""

    def __init__(self, capacity: int, index: _Index) -> None:
        self._index = index
        self._key_of = np.zeros(capacity, np.int64)
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._free_count = capacity
        self._lock = threading.Lock()

    def size(self) -> int:
        with self._lock:
            return len(self._free) - self._free_count

    def reserve(self, batch: int) -> None:
        """Do nothing: working arrays of a batch are numpy's, and go when the call ends."""

    def reserved(self) -> int:
        return 0

    def find(self, *, keys: Ints, slots: Ints) -> None:
        with self._lock:
            slots[:] = self._index.find(keys)

    def insert(self, *, keys: Ints, slots: Ints) -> int:
        distinct, inverse = unique_in_order(keys)
        with self._lock:
            found = self._index.find(distinct)
            absent = found < 0
            needed = int(np.count_nonzero(absent))
            if needed > self._free_count:
                return needed
            rest = self._free_count - needed
            fresh = self._free[rest : self._free_count][::-1].astype(np.int64)
            self._free_count = rest
            self._key_of[fresh] = distinct[absent]
            self._index.add(distinct[absent], fresh)
            found[absent] = fresh
            slots[:] = found[inverse]
            return 0

    def erase(self, *, keys: Ints, slots: Ints) -> None:
        distinct, first = np.unique(keys, return_index=True)
        with self._lock:
            found = self._index.find(distinct)
            held = found >= 0
            slots[:] = -1
            slots[first[held]] = found[held]
            freed = slots[slots >= 0]
            self._index.drop(distinct[held])
            self._free[self._free_count : self._free_count + len(freed)] = freed
            self._free_count += len(freed)

    def unique(self, *, keys: Ints, inverse: Ints) -> Ints:
        distinct, inverse[:] = unique_in_order(keys)
        return distinct

    def unique_find(self, *, keys: Ints, inverse: Ints) -> tuple[Ints, Ints]:
        distinct, inverse[:] = unique_in_order(keys)
        with self._lock:
            return distinct, self._index.find(distinct)

    def keys_of(self, *, slots: Ints, keys: Ints) -> int:
        with self._lock:
            keys[:] = self._key_of[slots]
            empty = np.flatnonzero(self._index.find(keys) != slots)
        return int(empty[0]) if len(empty) else len(slots)

    def items(self) -> tuple[Ints, Ints]:
        with self._lock:
            held = np.ones(len(self._free), np.bool_)
            held[self._free[: self._free_count]] = False
            slots = np.flatnonzero(held)
            return self._key_of[slots], slots

    @staticmethod
    def _bytes(capacity: int) -> int:
        return capacity * (8 + 4)


class SortedSlots(_Slots):
    """Any int64 keys."""

    def __init__(self, capacity: int) -> None:
        self._sorted = _SortedIndex(capacity)
        super().__init__(capacity, self._sorted)

    def grow(self, capacity: int) -> None:
        """Make room for more keys; slots stay, and come out in the order of a map that had the room before."""
        with self._lock:
            before = len(self._key_of)
            self._sorted.grow(capacity)
            self._key_of = np.pad(self._key_of, (0, capacity - before))
            self._free = np.concatenate((np.arange(capacity - 1, before - 1, -1, dtype=np.int32), self._free))
            self._free_count += capacity - before

    @classmethod
    def bytes_for(cls, capacity: int, batch: int) -> int:
        """Return the bytes of DRAM for `capacity` slots and calls of `batch` keys."""
        return cls._bytes(capacity) + capacity * _SortedIndex.BYTES_PER_SLOT


class DirectSlots(_Slots):
    """Keys 0 to key_space - 1."""

    def __init__(self, capacity: int, key_space: int) -> None:
        super().__init__(capacity, _DirectIndex(key_space))

    @classmethod
    def bytes_for(cls, capacity: int, key_space: int, batch: int) -> int:
        """Return the bytes of DRAM for `capacity` slots of keys below `key_space`."""
        return cls._bytes(capacity) + key_space * _DirectIndex.BYTES_PER_KEY
