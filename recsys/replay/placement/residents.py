"""Which positions of storage lie in which slots of memory, now and once the swaps under way have arrived.

Decisions are made on what will be (`planned`), reads see what is (`visible`). That keeps memory a uniform subset of
storage while swaps are under way: what is visible is what memory would be without the swaps that have not arrived.
The proof is in `memhier.recsys.replay.placement.admit`.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from memhier.recsys.replay.placement.members import Members
from memhier.recsys.replay.storage.index import SLOTS, IndexTable, Kind

__all__ = ["Residents"]

Ints = NDArray[np.int64]


class Residents:
    """Slots and the positions in them.

    Attributes
    ----------
    planned, visible
        int64 [slots]: the position that will be, or is, in a slot; -1 for none.
    swapped
        int64 [slots]: the step in which a slot was last swapped, -1 before; admissions leave it as it is.
    refreshed
        bool [slots]: whether mutable fields were changed since storage had them.
    """

    def __init__(self, slots: int, members: Members) -> None:
        self.members = members
        self.planned: Ints = np.full(slots, -1, np.int64)
        self.visible: Ints = np.full(slots, -1, np.int64)
        self.swapped: Ints = np.full(slots, -1, np.int64)
        self.refreshed: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self._order: Ints = np.arange(slots)  # the slots in use first
        self._rank: Ints = np.arange(slots)
        self.count = 0  # visible samples
        self.planned_count = 0
        self.of_group: dict[int, int] = {}  # planned samples of each group
        self._leaving: dict[int, int] = {}  # from positions that are visible, but not planned there, to their slots
        self.table = IndexTable(SLOTS, Kind.SLOTS)
        self.table.reserve(slots)

    @property
    def slots(self) -> int:
        """How many there are."""
        return len(self.planned)

    @property
    def memory_bytes(self) -> int:
        """DRAM held."""
        arrays = (self.planned, self.visible, self.swapped, self.refreshed, self._order, self._rank)
        return sum(array.nbytes for array in arrays) + self.table.memory_bytes

    def occupied(self) -> Ints:
        """Return the slots that hold a sample, in place."""
        return self._order[: self.count]

    def vacant(self) -> Ints:
        """Return the slots for which nothing is planned, in rising order."""
        return np.flatnonzero(self.planned < 0)

    def slots_of_group(self, number: int) -> Ints:
        """Return the slots for which a sample of a group is planned, in rising order."""
        used = np.flatnonzero(self.planned >= 0)
        of_group: Ints = used[self._groups(self.planned[used]) == number]
        return of_group

    def plan(self, slot: int, position: int) -> None:
        """Decide what will be in a slot; -1 for nothing."""
        old = int(self.planned[slot])
        if old >= 0:
            self.members.slots[old] = -1
            self._count(old, -1)
        self.planned[slot] = position
        self.table.mark(slot)
        shown = int(self.visible[slot])
        if shown >= 0 and shown != position:
            self._leaving[shown] = slot
        elif shown >= 0:
            self._leaving.pop(shown, None)
        if position >= 0:
            self.members.slots[position] = slot
            self._count(position, 1)

    def plan_swaps(self, slots: Ints, positions: Ints) -> None:
        """Decide what will be in distinct slots, each of which has a position planned and visible."""
        old = self.planned[slots]
        for number, change in ((old, -1), (positions, 1)):
            for group in self._groups(number).tolist():
                self.of_group[group] = self.of_group.get(group, 0) + change
        self.members.slots[old] = -1
        self.planned[slots] = positions
        self.table.mark(slots)
        self.members.slots[positions] = slots
        self._leaving.update(zip(self.visible[slots].tolist(), slots.tolist(), strict=True))

    def note_swaps(self, slots: Ints, step: int) -> None:
        """Say that slots are swapped in a step."""
        self.swapped[slots] = step
        self.table.mark(slots)

    def show(self, slots: Ints, positions: Ints) -> None:
        """Say what is in distinct slots now."""
        for position in self.visible[slots].tolist():
            self._leaving.pop(position, None)
        self.visible[slots] = positions
        self.table.mark(slots)
        self.refreshed[slots] = False
        for slot in slots[self._rank[slots] >= self.count].tolist():
            self._move(slot, self.count)
            self.count += 1

    def hide(self, slot: int) -> None:
        """Say that nothing is in a slot any more."""
        if self.visible[slot] >= 0:
            self._leaving.pop(int(self.visible[slot]), None)
            self.visible[slot] = -1
            self.table.mark(slot)
            self.refreshed[slot] = False
            self.count -= 1
            self._move(slot, self.count)

    def slot_shown(self, position: int) -> int:
        """Return the slot in which a position is visible, -1 for none."""
        slot = int(self.members.slots[position])
        return slot if slot >= 0 and self.visible[slot] == position else self._leaving.get(position, -1)

    def shown_elsewhere(self, slots: Ints, positions: Ints) -> Ints:
        """Return the slots besides these that still show what is about to be shown in these.

        A slot keeps what is leaving it where the swap that was to replace it brings nothing after all.
        """
        if not self._leaving:
            return np.empty(0, np.int64)
        leaving = {self._leaving.get(position, -1) for position in positions.tolist()}
        return np.array(sorted(leaving - {-1, *slots.tolist()}), np.int64)

    def renamed(self, position: int, old: int) -> None:
        """Say that the sample at position `old` has moved to another."""
        planned, shown = int(self.members.slots[old]), self.slot_shown(old)
        self.members.slots[position], self.members.slots[old] = planned, -1
        if planned >= 0:
            self.planned[planned] = position
            self.table.mark(planned)
        if shown >= 0:
            self.visible[shown] = position
            self.table.mark(shown)
        if old in self._leaving:
            self._leaving[position] = self._leaving.pop(old)

    def regroup(self, position: int, old_group: int, new_group: int) -> None:
        """Count a planned sample for another group."""
        if self.members.slots[position] >= 0:
            self.of_group[old_group] -= 1
            self.of_group[new_group] = self.of_group.get(new_group, 0) + 1

    def is_complete(self, group: int) -> bool:
        """Whether all of a group is or will be in memory."""
        there = self.members.groups.get(group)
        return there is None or self.of_group.get(group, 0) == there.size

    def restore(self, planned: Ints, visible: Ints, swapped: Ints, order: Ints, count: int) -> None:
        """Take over what a checkpoint says."""
        self.planned[:], self.visible[:], self.swapped[:] = planned, visible, swapped
        self._order[:] = order
        self._rank[order] = np.arange(len(order))
        self.count = count
        leaving = np.flatnonzero((visible >= 0) & (visible != planned))
        self._leaving = dict(zip(visible[leaving].tolist(), leaving.tolist(), strict=True))
        used = np.flatnonzero(planned >= 0)
        self.members.slots[planned[used]] = used
        self.planned_count = len(used)
        groups, counts = np.unique(self._groups(planned[used]), return_counts=True)
        self.of_group = dict(zip(groups.tolist(), counts.tolist(), strict=True))

    @property
    def order(self) -> Ints:
        """int64 [slots]: the slots, those in use first, in place."""
        return self._order

    def _groups(self, positions: Ints) -> Ints:
        return self.members.group_of(self.members.labels[positions])

    def _count(self, position: int, change: int) -> None:
        group = int(self._groups(np.array([position]))[0])
        self.of_group[group] = self.of_group.get(group, 0) + change
        self.planned_count += change

    def _move(self, slot: int, rank: int) -> None:
        other, old = int(self._order[rank]), int(self._rank[slot])
        self._order[rank], self._order[old] = slot, other
        self._rank[slot], self._rank[other] = rank, old
        self.table.mark(rank)
        self.table.mark(old)

    # What the index on SSD says of it.

    def changed(self) -> Iterator[tuple[Ints, NDArray[np.uint8]]]:
        """Yield the rows of the index that changed since the last call, with their keys, and forget that they did."""
        columns = {"planned": self.planned, "visible": self.visible, "swapped": self.swapped, "order": self._order}
        return self.table.changed(self.slots, columns)
