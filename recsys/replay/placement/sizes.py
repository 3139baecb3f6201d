"""The sizes of groups, and the slots of each, kept so that class-balanced admission looks at no other group."""

import heapq
from array import array
from bisect import bisect_left, insort
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

__all__ = ["GroupSlots", "Sizes"]

_SPARE = 64  # entries of a heap beyond two for each group


class Sizes(dict[int, int]):
    """The size of each group by its number; `change` is the only writer.

    A heap holds for every group an entry that is at least as large as its load. So the largest load is found without
    a look at the others: an entry that is too large is set right as it comes up, one that is too small has a larger one
    beside it and goes.

    Parameters
    ----------
    weights
        Of the groups: the load of a group is its size over its weight. None for weights of 1.
    """

    def __init__(self, weights: Mapping[int, int] | None = None) -> None:
        super().__init__()
        self.weights: Mapping[int, int] | None = weights
        self._heap: list[tuple[float, int]] = []

    @property
    def memory_bytes(self) -> int:
        """DRAM held by the heap."""
        return 72 * len(self._heap)

    def load(self, number: int, more: int = 0) -> float:
        """Return the size of a group, were it larger by `more`, over its weight."""
        size = self.get(number, 0) + more
        return size if self.weights is None else size / self.weights.get(number, 1)

    def weights_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the weights of groups."""
        if self.weights is None:
            return np.ones(len(numbers), np.int64)
        return np.array([self.weights.get(number, 1) for number in numbers.tolist()], np.int64)

    def change(self, number: int, by: int) -> None:
        """Let a group grow or shrink."""
        size = self.get(number, 0) + by
        if size == 0:
            self.pop(number, None)
            return
        self[number] = size
        if by > 0:
            heapq.heappush(self._heap, (-self.load(number), number))
            if len(self._heap) > 2 * len(self) + _SPARE:
                self._heap = [(-self.load(number), number) for number in self]
                heapq.heapify(self._heap)

    def largest(self) -> int:
        """Return the group of the largest load, of several the lowest number; -1 of none."""
        heap = self._heap
        while heap:
            load, number = heap[0]
            there = self.load(number)
            if there == -load:
                return number
            if 0 < there < -load:
                heapq.heapreplace(heap, (-there, number))
            else:
                heapq.heappop(heap)
        return -1


class GroupSlots:
    """The slots of each group, in rising order.

    Parameters
    ----------
    slots, groups
        int64 [n]: slots in use in rising order, and the group of each.
    """

    def __init__(self, slots: NDArray[np.int64], groups: NDArray[np.int64]) -> None:
        self._slots: dict[int, array[int]] = {}
        order = np.argsort(groups, kind="stable")
        numbers, starts = np.unique(groups[order], return_index=True)
        parts = np.split(slots[order].astype(np.int32), starts[1:]) if len(numbers) else []
        for number, part in zip(numbers.tolist(), parts, strict=True):
            self._slots[number] = array("i", part.tobytes())

    @property
    def memory_bytes(self) -> int:
        """DRAM held by the slots."""
        return sum(80 + slots.itemsize * len(slots) for slots in self._slots.values())

    def at(self, number: int, rank: int) -> int:
        """Return the slot of a rank among those of a group."""
        return self._slots[number][rank]

    def add(self, number: int, slot: int) -> None:
        """Note that a slot is of a group now."""
        insort(self._slots.setdefault(number, array("i")), slot)

    def remove(self, number: int, slot: int) -> None:
        """Note that a slot is of a group no more."""
        slots = self._slots[number]
        del slots[bisect_left(slots, slot)]
        if not slots:
            del self._slots[number]
