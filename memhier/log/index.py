"""The index of a log, in DRAM of fixed size: the newest record of each key."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import check_range
from memhier.cache.slots import SlotMap
from memhier.errors import BudgetError
from memhier.log.parts import ENTRY

__all__ = ["Live", "LogIndex", "offset_of", "place", "slot_of"]

Ints = NDArray[np.int64]
_BLOCK = 2**16
_OFFSET_BITS = 44


class Live(NamedTuple):
    """How many records, and bytes of records, are the newest of their key, by slot of the part table."""

    records: Ints
    sizes: Ints

    @property
    def bytes(self) -> int:
        """Bytes of these records, with their entries."""
        return int(self.sizes.sum() + self.records.sum() * ENTRY.itemsize)


class LogIndex:
    """Maps keys to places, and to lengths if records differ in length. All memory is taken at once.

    Parameters
    ----------
    capacity
        Most keys at a time.
    length
        Of every record; None keeps one per key.
    key_space
        Says that all keys are 0 to ``key_space - 1``. If that takes less, a place is kept for each possible key, 8
        bytes, and `capacity` is no limit.
    grows
        Whether a larger key doubles `key_space`.
    """

    def __init__(self, capacity: int, length: int | None, key_space: int | None = None, grows: bool = False) -> None:
        self._grows = grows and _is_direct(capacity, key_space)
        self._slots = _slots_for(capacity, key_space)
        self._places: Ints = np.full(self._slots.capacity, -1, np.int64)
        self._length = length
        self._lengths: NDArray[np.uint32] = np.zeros(self._slots.capacity if length is None else 0, np.uint32)
        # Records that are the newest of their key, and their bytes, by slot of the part table.
        self._live: Ints = np.zeros(16, np.int64)
        self._live_bytes: Ints = np.zeros(16, np.int64)

    @staticmethod
    def bytes_for(capacity: int, key_space: int | None = None) -> int:
        """Return the DRAM for records of one length."""
        if _is_direct(capacity, key_space):
            assert key_space is not None
            return 8 * key_space
        return SlotMap.bytes_for(capacity, batch=_BLOCK) + 8 * capacity

    def __len__(self) -> int:
        return int(self._live.sum())

    @property
    def capacity(self) -> int:
        """Most keys at a time."""
        return self._slots.capacity

    @property
    def memory_bytes(self) -> int:
        """DRAM held."""
        counts = self._live.nbytes + self._live_bytes.nbytes
        return self._slots.memory_bytes + self._places.nbytes + self._lengths.nbytes + counts

    def places(self, keys: Ints) -> Ints:
        """Return the place of each key, -1 for none."""
        slots = self._slots.find(keys)
        # Slot -1 belongs to another key, so its place does not count.
        return np.where(slots >= 0, self._places[slots], -1)

    def lengths(self, keys: Ints) -> Ints:
        """Return the length of each key's record; undefined for none."""
        if self._length is not None:
            return np.full(len(keys), self._length, np.int64)
        return self._lengths[self._slots.find(keys)].astype(np.int64)

    def reserve(self, keys: Ints) -> Ints:
        """Return a slot for each key; new slots have no place yet.

        Raises
        ------
        BudgetError
            When they do not all fit; nothing has changed then.
        """
        if self._grows and len(keys) and int(keys.max()) >= self.capacity:
            self._grow(int(keys.max()) + 1)
        try:
            return self._slots.insert(keys)
        except BudgetError:
            raise BudgetError(
                f"keys: with them there would be more than capacity={self.capacity} distinct ones ({len(self)} are "
                "there now); delete keys first, or open the log with a larger capacity"
            ) from None

    def point(self, slots: Ints, places: Ints, lengths: Ints) -> None:
        """Set the places of reserved slots; if a slot comes twice, its last place counts."""
        if self._length is None:
            # An empty record shares its place with the next one, so places do not tell which is the last.
            last = len(slots) - 1 - np.unique(slots[::-1], return_index=True)[1]
            slots, places, lengths = slots[last], places[last], lengths[last]
            self._count(slots, -1)
            self._places[slots], self._lengths[slots] = places, lengths
            self._count(slots, 1)
            return
        old = self._places[slots]
        self._places[slots] = places
        last = self._places[slots] == places
        self._add(old[last & (old >= 0)], self._length, -1)
        self._add(places[last], self._length, 1)

    def erase(self, keys: Ints) -> None:
        """Forget keys."""
        slots = self._slots.erase(keys)
        slots = slots[slots >= 0]
        self._count(slots, -1)
        self._places[slots] = -1

    def keys(self) -> Iterator[Ints]:
        """Yield all keys in blocks, in no particular order."""
        for start in range(0, self.capacity, _BLOCK):
            slots = np.flatnonzero(self._places[start : start + _BLOCK] >= 0) + start
            if len(slots):
                yield self._slots.keys_of(slots)

    def live(self, parts: int) -> Live:
        """Return the records that are the newest of their key, of so many slots of the part table."""
        found = np.zeros((2, parts), np.int64)
        for counts, kept in zip(found, (self._live, self._live_bytes), strict=True):
            known = kept[:parts]
            counts[: len(known)] = known
        return Live(found[0], found[1])

    def _grow(self, key_space: int) -> None:
        """Keep a place for more possible keys."""
        added = max(key_space, 2 * self.capacity) - self.capacity
        self._places = np.pad(self._places, (0, added), constant_values=-1)
        if self._length is None:
            self._lengths = np.pad(self._lengths, (0, added))
        self._slots = _EveryKey(self.capacity + added)

    def _count(self, slots: Ints, sign: int) -> None:
        """Count the records of distinct slots in (`sign` 1) or out (-1)."""
        used = slots[self._places[slots] >= 0]
        lengths: Any = self._length if self._length is not None else self._lengths[used]
        self._add(self._places[used], lengths, sign)

    def _add(self, places: Ints, lengths: Any, sign: int) -> None:
        counts = np.bincount(slot_of(places), minlength=len(self._live))
        grown = len(counts) - len(self._live)
        if grown:
            self._live, self._live_bytes = np.pad(self._live, (0, grown)), np.pad(self._live_bytes, (0, grown))
        self._live += sign * counts
        if isinstance(lengths, int):
            self._live_bytes += sign * lengths * counts
        else:
            self._live_bytes += sign * np.bincount(slot_of(places), lengths, len(counts)).astype(np.int64)


def place(slot: int, offsets: Ints) -> Ints:
    """Return the slot of a part and offsets in it as one number each, never negative."""
    return offsets + (slot << _OFFSET_BITS)


def slot_of(places: Ints) -> Ints:
    """Return the slots of the parts of places."""
    return places >> _OFFSET_BITS


def offset_of(places: Ints) -> Ints:
    """Return the offsets of places in their parts."""
    return places & ((1 << _OFFSET_BITS) - 1)


class _EveryKey:
    """A map in which each possible key has a slot: its own number."""

    memory_bytes = 0

    def __init__(self, key_space: int) -> None:
        self.capacity = key_space

    def find(self, keys: Ints) -> Ints:
        return np.where((keys >= 0) & (keys < self.capacity), keys, -1)

    def insert(self, keys: Ints) -> Ints:
        # A negative key is a large one here.
        if len(keys) and keys.view(np.uint64).max() >= self.capacity:
            check_range("keys", keys, self.capacity, f"0 to {self.capacity - 1}, as key_space says")
        return keys

    def erase(self, keys: Ints) -> Ints:
        # As in a real map, a key that comes twice is erased once.
        return self.find(np.unique(keys))

    def keys_of(self, slots: Ints) -> Ints:
        return slots


def _is_direct(capacity: int, key_space: int | None) -> bool:
    return key_space is not None and 8 * key_space < SlotMap.bytes_for(capacity, batch=_BLOCK) + 8 * capacity


def _slots_for(capacity: int, key_space: int | None) -> "SlotMap | _EveryKey":
    if _is_direct(capacity, key_space):
        assert key_space is not None
        return _EveryKey(key_space)
    return SlotMap(capacity, batch=_BLOCK)
