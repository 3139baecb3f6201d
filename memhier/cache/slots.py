"""Which slot of a slab holds which key: a batched map from int64 keys to the numbers 0 to capacity - 1."""

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from memhier import backend
from memhier.arguments import as_ints, check_array, check_int, check_range
from memhier.cache import python_slots
from memhier.errors import BudgetError

if TYPE_CHECKING:
    from memhier_native._core import DirectSlots, HashSlots

    _Core: TypeAlias = HashSlots | DirectSlots | python_slots.SortedSlots | python_slots.DirectSlots

__all__ = ["SlotMap"]

CAPACITY_MAX = 2**31 - 1  # slots are held as int32
_KEY_SPACE_MAX = 2**63 - 1
_INT64 = np.dtype(np.int64)

Ints = NDArray[np.int64]


class SlotMap:
    """A map from int64 keys to slots, worked a batch at a time.

    Any int64 is a key like any other, -1 and both extremes included. Which slot a key gets depends only on the order of
    the calls: new slots come out in rising order from 0, then the slot freed last is used first.

    Every call takes a lock and leaves the interpreter free while it works, so threads may share a map; their calls
    run one after the other. Arrays handed in must not be written meanwhile. After a fork the child has its own copy,
    usable unless another thread was inside a call at that moment. The hash is fixed: keys made to collide are
    served correctly, but slowly.

    Parameters
    ----------
    capacity
        How many keys the map can hold, 1 to 2**31 - 1. All memory for them is taken at once.
    key_space
        Where all keys are known to be 0 to ``key_space - 1``: keeps the slot of each possible key in an array, 4 bytes
        each, which is faster than hashing, and smaller where ``key_space`` is below 4 times the capacity. None
        takes any key.
    batch
        Keys in the largest batch for :meth:`unique`, :meth:`unique_find` and an :meth:`insert` of more keys than slots
        are free: their working memory is taken at once. A larger batch enlarges it, and it stays.

    Raises
    ------
    TypeError, ValueError
        For an argument that is no integer, or out of range.

    Examples
    --------
    >>> from memhier import SlotMap
    >>> slots = SlotMap(4)
    >>> slots.insert([70, -1, 70, 9]).tolist()
    [0, 1, 0, 2]
    >>> slots.erase([-1, 5]).tolist()
    [1, -1]
    >>> keys, inverse, places = slots.unique_find([9, 5, 9, 70])
    >>> keys.tolist(), inverse.tolist(), places.tolist()
    ([9, 5, 70], [0, 1, 0, 2], [2, -1, 0])
    """

    def __init__(self, capacity: int, *, key_space: int | None = None, batch: int = 0) -> None:
        self._capacity, self._key_space, batch = _check_sizes(capacity, key_space, batch)
        self._core: _Core = _core_class(self._key_space)(*_core_sizes(self._capacity, self._key_space))
        self._core.reserve(batch)

    @property
    def capacity(self) -> int:
        """How many keys the map can hold."""
        return self._capacity

    @property
    def key_space(self) -> int | None:
        """The number of possible keys, or None when any int64 may come."""
        return self._key_space

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes: for the keys, and for the largest batch so far."""
        return _bytes_for(type(self._core), self._capacity, self._key_space, self._core.reserved())

    @staticmethod
    def bytes_for(capacity: int, *, key_space: int | None = None, batch: int = 0) -> int:
        """Return the `memory_bytes` that a map of these arguments will have.

        With the compiled core 28.1 bytes per slot (12.1 and 4 per possible key where `key_space` is given), and 40
        per key of the largest batch.

        Examples
        --------
        >>> from memhier import SlotMap
        >>> SlotMap.bytes_for(1000, key_space=5000) <= 12.2 * 1000 + 4 * 5000
        True
        """
        capacity, key_space, batch = _check_sizes(capacity, key_space, batch)
        return _bytes_for(_core_class(key_space), capacity, key_space, batch)

    def __len__(self) -> int:
        return self._core.size()

    @property
    def free(self) -> int:
        """How many more keys fit."""
        return self._capacity - len(self)

    def grow(self, capacity: int) -> None:
        """Make room for more keys, in a map made without `key_space`.

        Slots stay, and those to come are the ones of a map that had the room before. While it runs, the old table of
        hashes is held beside the new one: 16 bytes for each slot that there was.

        Parameters
        ----------
        capacity
            How many keys the map can hold from now on, at least as many as before.

        Raises
        ------
        TypeError, ValueError
            For less room, and for a map with a key space.

        Examples
        --------
        >>> from memhier import SlotMap
        >>> slots = SlotMap(1)
        >>> slots.insert([7]).tolist()
        [0]
        >>> slots.grow(3)
        >>> slots.insert([9, 7, 8]).tolist()
        [1, 0, 2]
        """
        capacity = check_int("capacity", capacity, self._capacity, CAPACITY_MAX, "slots")
        if self._key_space is not None:
            raise ValueError(f"key_space={self._key_space}: such a map does not grow; make it without one")
        core: Any = self._core  # direct maps have no such call
        core.grow(capacity=capacity)
        self._capacity = capacity

    def find(self, keys: Any, out: Ints | None = None) -> Ints:
        """Return the slot of each key.

        Parameters
        ----------
        keys
            Integers, any shape.
        out
            int64, C-contiguous, of the shape of `keys`: filled instead of allocating.

        Returns
        -------
        numpy.ndarray
            int64, of the shape of `keys`; -1 where a key is absent.

        Raises
        ------
        TypeError, ValueError
            For keys that are no integers, or outside int64 or the key space; for an unfit `out`.
        """
        flat, slots = self._as_keys(keys, out)
        self._core.find(keys=flat, slots=slots.reshape(-1))
        return slots

    def insert(self, keys: Any) -> Ints:
        """Return the slot of each key, giving one to each key that has none.

        A key that comes twice in the batch gets one slot.

        Parameters
        ----------
        keys
            Integers, any shape.

        Returns
        -------
        numpy.ndarray
            int64, of the shape of `keys`.

        Raises
        ------
        BudgetError
            When the new keys outnumber the free slots. Nothing has changed then.
        TypeError, ValueError
            As in :meth:`find`.
        """
        flat, slots = self._as_keys(keys)
        needed = self._core.insert(keys=flat, slots=slots.reshape(-1))
        if needed:
            free = self.free
            raise BudgetError(
                f"keys: {needed} of them are new, but {free} of {self._capacity} slots are free; erase "
                f"{needed - free} keys first, or make the map with capacity={self._capacity + needed - free}"
            )
        return slots

    def erase(self, keys: Any) -> Ints:
        """Remove keys, freeing their slots.

        Parameters
        ----------
        keys
            Integers, any shape.

        Returns
        -------
        numpy.ndarray
            int64, of the shape of `keys`: the slot each key had; -1 where it was absent, or came earlier in the batch.

        Raises
        ------
        TypeError, ValueError
            As in :meth:`find`.
        """
        flat, slots = self._as_keys(keys)
        self._core.erase(keys=flat, slots=slots.reshape(-1))
        return slots

    def unique(self, keys: Any) -> tuple[Ints, Ints]:
        """Return the distinct keys of a batch in the order they first appear; the map itself plays no part.

        Parameters
        ----------
        keys
            Integers, any shape.

        Returns
        -------
        unique : numpy.ndarray
            int64 ``[distinct]``.
        inverse : numpy.ndarray
            int64, of the shape of `keys`, with ``unique[inverse] == keys``.

        Raises
        ------
        TypeError, ValueError
            As in :meth:`find`.
        """
        flat, inverse = self._as_keys(keys)
        return self._core.unique(keys=flat, inverse=inverse.reshape(-1)), inverse

    def unique_find(self, keys: Any) -> tuple[Ints, Ints, Ints]:
        """Return :meth:`unique` of a batch and the slots of its distinct keys, in one go.

        Parameters
        ----------
        keys
            Integers, any shape.

        Returns
        -------
        unique : numpy.ndarray
            int64 ``[distinct]``, in the order of first appearance.
        inverse : numpy.ndarray
            int64, of the shape of `keys`, with ``unique[inverse] == keys``.
        slots : numpy.ndarray
            int64 ``[distinct]``; -1 where a key is absent.

        Raises
        ------
        TypeError, ValueError
            As in :meth:`find`.
        """
        flat, inverse = self._as_keys(keys)
        unique, slots = self._core.unique_find(keys=flat, inverse=inverse.reshape(-1))
        return unique, inverse, slots

    def keys_of(self, slots: Any) -> Ints:
        """Return the key in each slot.

        Parameters
        ----------
        slots
            Integers, any shape.

        Returns
        -------
        numpy.ndarray
            int64, of the shape of `slots`.

        Raises
        ------
        TypeError, ValueError
            For a slot that is no integer, out of range, or free.
        """
        index = as_ints("slots", slots)
        check_range("slots", index, self._capacity, f"a slot, 0 to {self._capacity - 1}")
        keys = np.empty(index.shape, np.int64)
        flat = index.reshape(-1)
        empty = self._core.keys_of(slots=flat, keys=keys.reshape(-1))
        if empty < len(flat):
            raise ValueError(f"slots[{empty}]={flat[empty]}: expected a slot that holds a key, but it is free")
        return keys

    def items(self) -> tuple[Ints, Ints]:
        """Return every key and its slot, two int64 arrays ``[len]``, by rising slot."""
        return self._core.items()

    def _as_keys(self, keys: Any, out: Ints | None = None) -> tuple[Ints, Ints]:
        """Return the keys of a batch, flat, and `out` or a new array of their shape."""
        ready = type(keys) is np.ndarray and keys.dtype == _INT64 and keys.flags.c_contiguous and keys.flags.aligned
        array: Ints = keys if ready else as_ints("keys", keys)
        if array.size > CAPACITY_MAX:
            raise ValueError(f"keys: expected at most {CAPACITY_MAX} in one batch, got {array.size}")
        # A negative key is a large one here.
        if self._key_space is not None and array.size and array.view(np.uint64).max() >= self._key_space:
            check_range("keys", array, self._key_space, f"0 to {self._key_space - 1}, as key_space says")
        flat = array.reshape(-1)
        if out is None:
            return flat, np.empty(array.shape, np.int64)
        check_array("out", out, np.int64, array.shape)
        return flat.copy() if np.may_share_memory(out, flat) else flat, out


def _core_class(key_space: int | None) -> Any:
    if backend.core is None:
        return python_slots.SortedSlots if key_space is None else python_slots.DirectSlots
    return backend.core.HashSlots if key_space is None else backend.core.DirectSlots


def _bytes_for(core_class: Any, capacity: int, key_space: int | None, batch: int) -> int:
    return int(core_class.bytes_for(*_core_sizes(capacity, key_space), batch))


def _core_sizes(capacity: int, key_space: int | None) -> tuple[int, ...]:
    return (capacity,) if key_space is None else (capacity, key_space)


def _check_sizes(capacity: int, key_space: int | None, batch: int) -> tuple[int, int | None, int]:
    capacity = check_int("capacity", capacity, 1, CAPACITY_MAX, "slots")
    if key_space is not None:
        key_space = check_int("key_space", key_space, 1, _KEY_SPACE_MAX, "possible keys, or None for any int64")
    return capacity, key_space, check_int("batch", batch, 0, CAPACITY_MAX, "keys")
