"""Which samples storage holds: one position each, 0 to size - 1, without holes.

A position belongs to a group, from which a swap takes its replacement: its class, or everything where swaps do not keep
classes. Groups list their positions, so that one can be drawn at random from any.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from memhier.recsys.replay.storage.index import POSITIONS, IndexTable, Kind

__all__ = ["Group", "Members"]

Ints = NDArray[np.int64]

_FIRST_CAPACITY = 256


class Group:
    """The positions of a group, in an order that only changes where members come and go."""

    def __init__(self) -> None:
        self.size = 0
        self._positions: Ints = np.empty(16, np.int64)

    @property
    def positions(self) -> Ints:
        """int64 [size], in place."""
        return self._positions[: self.size]

    @property
    def memory_bytes(self) -> int:
        """DRAM held."""
        return self._positions.nbytes

    def reserve(self, size: int) -> None:
        """Make room."""
        if size > len(self._positions):
            grown = np.empty(max(size, 2 * len(self._positions)), np.int64)
            grown[: self.size] = self.positions
            self._positions = grown

    def extend(self, positions: Ints) -> int:
        """Append positions and return the rank of the first."""
        first = self.size
        self.reserve(first + len(positions))
        self._positions[first : first + len(positions)] = positions
        self.size += len(positions)
        return first

    def pop(self) -> int:
        """Remove the last one."""
        self.size -= 1
        return int(self._positions[self.size])

    def set_at(self, ranks: Ints, positions: Ints) -> None:
        """Put positions at ranks, growing to the last of them."""
        size = int(ranks.max()) + 1 if len(ranks) else 0
        self.reserve(size)
        self._positions[ranks] = positions
        self.size = max(self.size, size)


class Members:
    """Labels, ids and groups of the stored samples, by position.

    Parameters
    ----------
    by_class
        Whether a group is a class.
    """

    def __init__(self, by_class: bool) -> None:
        self.by_class = by_class
        self.size = 0
        self.groups: dict[int, Group] = {}
        self.table = IndexTable(POSITIONS, Kind.POSITIONS)
        self._allocate(_FIRST_CAPACITY)

    def _allocate(self, capacity: int) -> None:
        size = self.size
        for name, empty in (("_ids", 0), ("_labels", -1), ("_ranks", 0), ("_slots", -1)):
            array = np.full(capacity, empty, np.int64 if name == "_ids" else np.int32)
            array[:size] = getattr(self, name)[:size] if size else 0
            setattr(self, name, array)
        self.table.reserve(capacity)

    _ids: Ints
    _labels: NDArray[np.int32]
    _ranks: NDArray[np.int32]
    _slots: NDArray[np.int32]

    @property
    def memory_bytes(self) -> int:
        """DRAM held."""
        own = self._ids.nbytes + self._labels.nbytes + self._ranks.nbytes + self._slots.nbytes + self.table.memory_bytes
        return own + sum(group.memory_bytes for group in self.groups.values())

    @property
    def ids(self) -> Ints:
        """int64 [size], in place."""
        return self._ids[: self.size]

    @property
    def labels(self) -> NDArray[np.int32]:
        """int32 [size], in place."""
        return self._labels[: self.size]

    @property
    def slots(self) -> NDArray[np.int32]:
        """int32 [size], in place: where in memory each is or is about to be; -1 for none."""
        return self._slots[: self.size]

    def group_of(self, labels: NDArray[np.integer]) -> Ints:
        """Return the groups of samples with these labels."""
        return labels.astype(np.int64) if self.by_class else np.zeros(len(labels), np.int64)

    def group(self, number: int) -> Group:
        """Return a group, an empty one where there is none."""
        if number not in self.groups:
            self.groups[number] = Group()
        return self.groups[number]

    def extend(self, labels: Ints, ids: Ints) -> int:
        """Add samples; return the position of the first."""
        first, count = self.size, len(labels)
        if first + count > len(self._ids):
            self._allocate(max(first + count, 2 * len(self._ids)))
        self.size += count
        positions = np.arange(first, first + count)
        self._labels[positions], self._ids[positions], self._slots[positions] = labels, ids, -1
        groups = self.group_of(labels)
        for number in dict.fromkeys(groups.tolist()):
            of_group = positions[groups == number]
            rank = self.group(number).extend(of_group)
            self._ranks[of_group] = np.arange(rank, rank + len(of_group))
        self.table.mark(positions)
        return first

    def replace(self, position: int, label: int, id: int) -> None:
        """Let a position hold another sample."""
        old, new = self.group_of(np.array([self._labels[position], label])).tolist()
        self._labels[position], self._ids[position] = label, id
        if old != new:
            self._leave(position, old)
            self._ranks[position] = self.group(new).extend(np.array([position]))
        self.table.mark(position)

    def remove_last(self) -> None:
        """Remove the sample at the last position."""
        position = self.size - 1
        self._leave(position, int(self.group_of(self._labels[position : position + 1])[0]))
        self._slots[position] = -1
        self.table.mark(position)
        self.size -= 1

    def _leave(self, position: int, number: int) -> None:
        """Take a position out of its group; the group's last takes its place."""
        group, rank = self.groups[number], int(self._ranks[position])
        last = group.pop()
        if last != position:
            group.positions[rank] = last
            self._ranks[last] = rank
            self.table.mark(last)
        if group.size == 0:
            del self.groups[number]

    # What the index on SSD says of it.

    def changed(self) -> Iterator[tuple[Ints, NDArray[np.uint8]]]:
        """Yield the rows of the index that changed since the last call, with their keys, and forget that they did."""
        return self.table.changed(self.size, {"id": self._ids, "label": self._labels, "rank": self._ranks})

    def restore(self, size: int, rows: NDArray[np.uint8]) -> None:
        """Take over the index of so many samples, its rows in order."""
        entries = self.table.unpack(rows, size)
        self._allocate(max(size, _FIRST_CAPACITY))
        self.size = size
        self._ids[:size], self._labels[:size] = entries["id"], entries["label"]
        self._ranks[:size] = entries["rank"]
        if size == 0:
            return
        for number, positions in self._grouped():
            self.group(number).set_at(self._ranks[positions].astype(np.int64), positions)

    def keep_classes(self) -> None:
        """Let every class be a group from now on."""
        self.by_class = True
        self.groups.clear()
        if self.size == 0:
            return
        for number, positions in self._grouped():
            self._ranks[positions] = np.arange(len(positions))
            self.group(number).extend(positions)
        self.table.mark(np.arange(self.size))

    def _grouped(self) -> Iterator[tuple[int, Ints]]:
        """Yield the groups of all positions, and the positions of each in rising order."""
        groups = self.group_of(self.labels)
        order = np.argsort(groups, kind="stable")
        numbers, starts = np.unique(groups[order], return_index=True)
        yield from zip(numbers.tolist(), np.split(order, starts[1:]), strict=True)
