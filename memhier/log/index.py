"""The index of a log, in DRAM that follows the keys in use: the newest record of each key."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memhier import backend
from memhier.arguments import check_range
from memhier.cache.slots import SlotMap
from memhier.errors import BudgetError
from memhier.log.parts import ENTRY

__all__ = ["Live", "LogIndex", "offset_of", "place", "slot_of"]

Ints = NDArray[np.int64]
_BLOCK = 2**16
_OFFSET_BITS = 44
_FIRST_ROOM = 1024  # keys; room grows by a quarter
# While a map grows, its old table of hashes is held beside the new one.
_GROWTH_BYTES = 16


class Live(NamedTuple):
    """How many records, and bytes of records, are the newest of their key, by slot of the part table."""

    records: Ints
    sizes: Ints

    @property
    def bytes(self) -> int:
        """Bytes of these records, with their entries."""
        return int(self.sizes.sum() + self.records.sum() * ENTRY.itemsize)


class LogIndex:
    """Maps keys to places, and to lengths if records differ in length. Memory is taken as keys come.

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
    expected
        Keys to make room for at once.
    """

    def __init__(
        self, capacity: int, length: int | None, key_space: int | None = None, grows: bool = False, expected: int = 0
    ) -> None:
        self._grows = grows and _is_direct(capacity, key_space)
        self._capacity = capacity
        self._slots: SlotMap | _EveryKey
        if key_space is not None and _is_direct(capacity, key_space):
            self._slots = _EveryKey(key_space)
        else:
            self._slots = SlotMap(min(capacity, max(expected, _FIRST_ROOM)), batch=_BLOCK)
        # By slot, one more than the place; 0 for none: memory that was never written takes no room.
        self._places: Ints = np.zeros(self._slots.capacity, np.int64)
        self._length = length
        self._lengths: NDArray[np.uint32] = np.zeros(self._slots.capacity if length is None else 0, np.uint32)
        # Records that are the newest of their key, and their bytes, by slot of the part table.
        self._live: Ints = np.zeros(16, np.int64)
        self._live_bytes: Ints = np.zeros(16, np.int64)

    @staticmethod
    def bytes_for(capacity: int, key_space: int | None = None, at_once: bool = False) -> int:
        """Return the most DRAM for records of one length; less where `expected` is the whole capacity, `at_once`."""
        if key_space is not None and _is_direct(capacity, key_space):
            return 8 * key_space
        return _hashed_bytes(capacity) - (_GROWTH_BYTES * capacity if at_once else 0)

    def __len__(self) -> int:
        return int(self._live.sum())

    @property
    def capacity(self) -> int:
        """Most keys at a time."""
        return self._slots.capacity if isinstance(self._slots, _EveryKey) else self._capacity

    @property
    def memory_bytes(self) -> int:
        """DRAM held."""
        counts = self._live.nbytes + self._live_bytes.nbytes
        return self._slots.memory_bytes + self._places.nbytes + self._lengths.nbytes + counts

    def places(self, keys: Ints) -> Ints:
        """Return the place of each key, -1 for none."""
        if isinstance(self._slots, _EveryKey) and len(keys) and keys.view(np.uint64).max() < len(self._places):
            return self._places[keys] - 1  # a negative key is a large one here
        slots = self._slots.find(keys)
        # Slot -1 belongs to another key, so its place does not count.
        return np.where(slots >= 0, self._places[slots] - 1, -1)

    def locate(self, keys: Ints, handles: NDArray[np.int32]) -> tuple[NDArray[np.int32], Ints] | None:
        """Return the file of each key's record, from those of the slots, and its offset; None where a key has none."""
        if backend.core is not None and isinstance(self._slots, _EveryKey):
            files, offsets = np.empty(len(keys), np.int32), np.empty(len(keys), np.int64)
            there = backend.core.locate(keys=keys, places=self._places, handles=handles, files=files, offsets=offsets)
            return (files, offsets) if there else None
        places = self.places(keys)
        return None if (places < 0).any() else (handles[slot_of(places)], offset_of(places))

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
        if isinstance(self._slots, SlotMap) and len(keys) > self._slots.free:
            self._make_room(self._slots, len(np.unique(keys[self._slots.find(keys) < 0])))
        return self._slots.insert(keys)

    def point(self, slots: Ints, places: Ints, lengths: Ints) -> None:
        """Set the places of reserved slots; if a slot comes twice, its last place counts."""
        if self._length is None:
            # An empty record shares its place with the next one, so places do not tell which is the last.
            last = len(slots) - 1 - np.unique(slots[::-1], return_index=True)[1]
            slots, places, lengths = slots[last], places[last], lengths[last]
            self._count(slots, -1)
            self._places[slots], self._lengths[slots] = places + 1, lengths
            self._count(slots, 1)
            return
        old = self._places[slots] - 1
        self._places[slots] = places + 1
        last = self._places[slots] == places + 1
        self._add(old[last & (old >= 0)], self._length, -1)
        self._add(places[last], self._length, 1)

    def erase(self, keys: Ints) -> None:
        """Forget keys."""
        slots = self._slots.erase(keys)
        slots = slots[slots >= 0]
        self._count(slots, -1)
        self._places[slots] = 0

    def keys(self) -> Iterator[Ints]:
        """Yield all keys in blocks, in no particular order."""
        for start in range(0, len(self._places), _BLOCK):
            slots = np.flatnonzero(self._places[start : start + _BLOCK]) + start
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
        self._places = np.pad(self._places, (0, added))
        if self._length is None:
            self._lengths = np.pad(self._lengths, (0, added))
        self._slots = _EveryKey(self.capacity + added)

    def _make_room(self, slots: SlotMap, new: int) -> None:
        """Grow the map by a quarter at least, if it has no room for so many new keys."""
        if new <= slots.free:
            return
        needed = len(slots) + new
        if needed > self._capacity:
            raise BudgetError(
                f"keys: with them there would be more than capacity={self.capacity} distinct ones ({len(self)} are "
                "there now); delete keys first, or open the log with a larger capacity"
            )
        slots.grow(min(self._capacity, max(needed, slots.capacity + slots.capacity // 4)))
        added = slots.capacity - len(self._places)
        self._places = np.pad(self._places, (0, added))
        if self._length is None:
            self._lengths = np.pad(self._lengths, (0, added))

    def _count(self, slots: Ints, sign: int) -> None:
        """Count the records of distinct slots in (`sign` 1) or out (-1)."""
        used = slots[self._places[slots] > 0]
        lengths: Any = self._length if self._length is not None else self._lengths[used]
        self._add(self._places[used] - 1, lengths, sign)

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
    return key_space is not None and 8 * key_space < _hashed_bytes(capacity)


def _hashed_bytes(capacity: int) -> int:
    return SlotMap.bytes_for(capacity, batch=_BLOCK) + (8 + _GROWTH_BYTES) * capacity
