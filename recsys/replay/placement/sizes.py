"""The sizes of groups, and the slots of each, kept so that class-balanced admission looks at no other group."""

import heapq
from array import array
from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

__all__ = ["GroupSlots", "Sizes"]

_SPARE = 64  # entries of a heap beyond two for each group


class Sizes(dict[int, int]):
    """The size of each group by its number; `change` is the only writer.

    A heap holds for every group an entry that is at least as large as its size. So the largest group is found without
    a look at the others: an entry that is too large is set right as it comes up, one that is too small has a larger one
    beside it and goes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, int]] = []

    @property
    def memory_bytes(self) -> int:
        """DRAM held by the heap."""
        return 72 * len(self._heap)

    def change(self, number: int, by: int) -> None:
        """Let a group grow or shrink."""
        size = self.get(number, 0) + by
        if size == 0:
            self.pop(number, None)
            return
        self[number] = size
        if by > 0:
            heapq.heappush(self._heap, (-size, number))
            if len(self._heap) > 2 * len(self) + _SPARE:
                self._heap = [(-size, number) for number, size in self.items()]
                heapq.heapify(self._heap)

    def largest(self) -> int:
        """Return the group of most members, of several the lowest number; -1 of none."""
        heap = self._heap
        while heap:
            size, number = heap[0]
            there = self.get(number, 0)
            if there == -size:
                return number
            if 0 < there < -size:
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
