"""Placement of samples: the positions of storage, the slots of memory, and which position each slot holds.

A position holds one sample of storage; positions are 0 to size - 1, without holes. A position belongs to a group, from
which a swap takes its replacement: its class, or everything if swaps do not keep classes.

Decisions follow the `planned` positions of slots, reads see the `visible` ones; they differ while a swap is under way.
This keeps memory a uniform subset of storage: the visible samples are those that memory would hold without the swaps
that have not arrived. The proof is in `memhier.recsys.replay.placement.admit`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.recsys.replay.placement.keys import Keys
from memhier.recsys.replay.placement.sizes import GroupSlots, Sizes
from memhier.recsys.replay.storage.index import POSITIONS, SLOTS
from memhier.recsys.replay.streams import Purpose, Uniforms

__all__ = ["Decisions", "Group", "Members", "Placement"]

Ints = NDArray[np.int64]

DRAWS = 4
"""Random numbers set aside for each sample that comes."""
_FIRST_CAPACITY = 256
_LOOK = 256  # slots looked at together for a vacant one
_POSITIONS_PER_ROW, _SLOTS_PER_ROW = POSITIONS.per_row, SLOTS.per_row


class Group:
    """The positions of a group, in an order that only changes as members come and go."""

    def __init__(self) -> None:
        self.size: int = 0
        self._positions: Ints = np.empty(4, np.int64)

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
            grown = np.empty(max(size, len(self._positions) * 5 // 4), np.int64)
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

    def put(self, ranks: Ints | int, positions: Ints | int) -> None:
        """Put positions at ranks, growing to the last of them."""
        size = int(np.max(ranks, initial=-1)) + 1
        self.reserve(size)
        self._positions[ranks] = positions
        self.size = max(self.size, size)


class Members:
    """Labels, ids, times and groups of the stored samples, by position.

    Parameters
    ----------
    by_class
        Whether a group is a class.
    most
        Samples that there will be at most; None for no limit.
    at_once
        Whether to take the memory for them at once.
    beside
        ``"group"`` if groups are other numbers than labels, ``"key"`` if samples have keys, or None.
    weights
        Of groups, for :class:`Sizes`.
    """

    def __init__(
        self, by_class: bool, most: int | None = None, at_once: bool = False, *, beside: str | None = None,
        weights: Mapping[int, int] | None = None,
    ) -> None:  # fmt: skip
        self.by_class: bool = by_class
        self.size: int = 0
        self.most: int | None = most
        self.groups: dict[int, Group] = {}
        self.sizes: Sizes = Sizes(weights)
        self.keys: Keys | None = Keys() if beside == "key" else None
        self._apart = beside == "group"
        self._ids: Ints = np.zeros(0, np.int64)
        self._labels: NDArray[np.int32] = np.zeros(0, np.int32)
        self._own_groups: NDArray[np.int32] = np.zeros(0, np.int32)  # where they are no labels
        self._ranks: NDArray[np.int32] = np.zeros(0, np.int32)
        self._times: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._dirty: NDArray[np.bool_] = np.zeros(0, np.bool_)  # rows of the index to write
        self._first = most if at_once and most is not None else _FIRST_CAPACITY
        self._first_of_group = self._first if at_once and not by_class else 0
        self._allocate(self._first)

    @property
    def capacity(self) -> int:
        """Positions that there is room for."""
        return len(self._ids)

    @property
    def memory_bytes(self) -> int:
        """DRAM held."""
        arrays = (self._ids, self._labels, self._own_groups, self._ranks, self._times, self._dirty)
        own = sum(array.nbytes for array in arrays) + (0 if self.keys is None else self.keys.memory_bytes)
        return own + self.sizes.memory_bytes + sum(group.memory_bytes for group in self.groups.values())

    @property
    def ids(self) -> Ints:
        """int64 [size], in place."""
        return self._ids[: self.size]

    @property
    def labels(self) -> NDArray[np.int32]:
        """int32 [size], in place."""
        return self._labels[: self.size]

    def with_room(self) -> tuple[NDArray[np.int32], Ints]:
        """Return labels and ids, in place, with room for more: the same arrays until there is more room."""
        return self._labels, self._ids

    @property
    def _numbers(self) -> NDArray[np.int32]:
        """The numbers by which samples are grouped, with room for more."""
        return self._own_groups if self._apart else self._labels

    @property
    def numbers(self) -> NDArray[np.int32]:
        """int32 [size], in place: the numbers by which admission groups samples, labels but for groups of a field."""
        return self._numbers[: self.size]

    @property
    def times(self) -> NDArray[np.uint32]:
        """uint32 [size], in place: when samples came, in Unix seconds."""
        return self._times[: self.size]

    @property
    def ranks(self) -> NDArray[np.int32]:
        """int32 [size], in place: the rank of each position in its group."""
        return self._ranks[: self.size]

    def group_of(self, numbers: NDArray[np.integer]) -> Ints:
        """Return the groups of samples with these numbers."""
        return numbers.astype(np.int64) if self.by_class else np.zeros(len(numbers), np.int64)

    def groups_at(self, positions: Ints) -> Ints:
        """Return the groups of positions."""
        return self.group_of(self._numbers[positions])

    def group_at(self, position: int) -> int:
        """Return the group of a position."""
        return int(self._numbers[position]) if self.by_class else 0

    def extend(self, numbers: Ints, ids: Ints) -> int:
        """Add samples; return the position of the first."""
        first, count = self.size, len(numbers)
        if first + count > len(self._ids):
            doubled = 2 * len(self._ids) if self.most is None else min(2 * len(self._ids), self.most)
            self._allocate(max(first + count, doubled))
        self.size += count
        positions = np.arange(first, first + count)
        self._numbers[positions], self._ids[positions] = numbers, ids
        groups = self.group_of(numbers)
        for number in dict.fromkeys(groups.tolist()):
            of_group = positions[groups == number]
            rank = self._join(number, of_group)
            self._ranks[of_group] = np.arange(rank, rank + len(of_group))
        self._mark(positions)
        return first

    def replace(self, position: int, number: int, id: int) -> None:
        """Let a position hold another sample."""
        old = self.group_at(position)
        self._numbers[position], self._ids[position] = number, id
        new = self.group_at(position)
        if old != new:
            self._leave(position, old)
            self._ranks[position] = self._join(new, np.array([position]))
        self._mark(position)

    def replace_in_groups(self, positions: Ints, numbers: Ints, ids: Ints) -> None:
        """Let positions hold other samples of their groups; if one comes twice, its last sample counts."""
        self._numbers[positions], self._ids[positions] = numbers, ids
        self._mark(positions)

    def note(self, positions: Ints | int, labels: Any, times: Any) -> None:
        """Note the labels of the samples at positions, and when they came; numbers for one."""
        self._labels[positions], self._times[positions] = labels, times
        self._mark(positions)

    def note_times(self, positions: Ints, times: int) -> None:
        """Note when the samples at positions came."""
        self._times[positions] = times
        self._mark(positions)

    def replace_at_once(self, position: int, label: int, id: int, time: int) -> list[tuple[Any, Any, Any]]:
        """Return the changes that let a position hold another sample, where groups are no classes."""
        row = position // _POSITIONS_PER_ROW
        return [
            (self._labels, position, label), (self._ids, position, id), (self._times, position, time),
            (self._dirty, row, True),
        ]  # fmt: skip

    def move(self, position: int, old: int) -> None:
        """Let a position hold the sample at another one, which is to be removed."""
        self.replace(position, int(self._numbers[old]), int(self._ids[old]))
        self.note(np.array([position]), self._labels[old : old + 1], self._times[old : old + 1])
        if self.keys is not None:
            self.keys.put(position, self.keys.at(old))

    def remove_last(self) -> None:
        """Remove the sample at the last position."""
        position = self.size - 1
        self._leave(position, self.group_at(position))
        self._mark(position)
        self.size -= 1
        if self.keys is not None:
            self.keys.forget_order()

    def restore(self, entries: NDArray[np.void], by_class: bool) -> None:
        """Take over the index of a checkpoint, an entry for each sample."""
        self.by_class, self.size = by_class, 0
        size = len(entries)
        self._allocate(max(size, self._first))
        self.size = size
        self._ids[:size], self._labels[:size], self._ranks[:size] = (entries[name] for name in ("id", "label", "rank"))
        if "time" in (entries.dtype.names or ()):
            self._times[:size] = entries["time"]
            if self._apart:
                self._own_groups[:size] = entries["beside"]
            if self.keys is not None:
                self.keys.fill(entries["beside"].view(np.float32))
        for number, positions in self._grouped():
            self.groups[number] = self._new_group()
            self.groups[number].put(self._ranks[positions].astype(np.int64), positions)
            self.sizes.change(number, len(positions))

    def keep_classes(self) -> None:
        """Let every class be a group from now on."""
        self.by_class = True
        self.groups.clear()
        self.sizes = Sizes(self.sizes.weights)
        for number, positions in self._grouped():
            self._ranks[positions] = np.arange(len(positions))
            self._join(number, positions)
        self._mark(np.arange(self.size))

    def changed(self) -> Iterator[tuple[Ints, NDArray[np.uint8]]]:
        """Yield the keys and contents of the rows of the index that changed since the last call."""
        # Rows past the last are those of entries that have gone.
        rows = np.flatnonzero(self._dirty[: POSITIONS.rows(self.size)])
        self._dirty[:] = False
        columns: dict[str, NDArray[Any]] = {"id": self._ids, "label": self._labels}
        columns |= {"rank": self._ranks, "time": self._times}
        if self._apart:
            columns["beside"] = self._own_groups
        if self.keys is not None:
            columns["beside"] = self.keys.values.view(np.int32)
        return POSITIONS.pack(rows, self.size, columns)

    def _mark(self, positions: Ints | int) -> None:
        self._dirty[positions // _POSITIONS_PER_ROW] = True

    def _join(self, number: int, positions: Ints) -> int:
        """Append positions to a group, which may be new; return the rank of the first."""
        group = self.groups.get(number)
        if group is None:
            group = self.groups[number] = self._new_group()
        self.sizes.change(number, len(positions))
        return group.extend(positions)

    def _new_group(self) -> Group:
        group = Group()
        group.reserve(self._first_of_group)
        return group

    def _leave(self, position: int, number: int) -> None:
        """Take a position out of its group; the group's last takes its place."""
        group, rank = self.groups[number], int(self._ranks[position])
        self.sizes.change(number, -1)
        last = group.pop()
        if last != position:
            group.put(rank, last)
            self._ranks[last] = rank
            self._mark(last)
        if group.size == 0:
            del self.groups[number]

    def _grouped(self) -> Iterator[tuple[int, Ints]]:
        """Yield the groups of all positions, and the positions of each in rising order."""
        if self.size == 0:
            return
        groups = self.group_of(self.numbers)
        order = np.argsort(groups, kind="stable")
        numbers, starts = np.unique(groups[order], return_index=True)
        yield from zip(numbers.tolist(), np.split(order, starts[1:]), strict=True)

    def _allocate(self, capacity: int) -> None:
        self._ids = _grown(self._ids, self.size, capacity, 0)
        self._labels = _grown(self._labels, self.size, capacity, -1)
        if self._apart:
            self._own_groups = _grown(self._own_groups, self.size, capacity, 0)
        if self.keys is not None:
            self.keys.allocate(capacity)
        self._ranks = _grown(self._ranks, self.size, capacity, 0)
        self._times = _grown(self._times, self.size, capacity, 0)
        rows = POSITIONS.rows(capacity)
        if rows > len(self._dirty):
            self._dirty = _grown(self._dirty, len(self._dirty), rows, False)


class Decisions:
    """The places of the samples of one `add`.

    Attributes
    ----------
    positions
        int64 [n]: the position in storage of each; -1 for a sample that storage does not keep.
    writes
        From a slot of memory to the sample that goes there now.
    late
        From a position to the sample that it holds now, for a swap that is bringing its earlier sample.
    leaving
        From a position to the slot which it loses and which has mutable fields that storage does not have yet.
    """

    def __init__(self, count: int) -> None:
        self.positions: Ints = np.empty(count, np.int64)
        self.positions.fill(-1)  # np.full takes three times as long
        self.writes: dict[int, int] = {}
        self.late: dict[int, int] = {}
        self.leaving: dict[int, int] = {}

    def lasting(self) -> Ints:
        """Return the samples that storage keeps: those whose position no later one takes."""
        kept = (self.positions >= 0).nonzero()[0]
        if len(kept) < 2 or len(set(self.positions[kept].tolist())) == len(kept):
            return kept
        taken = np.unique(self.positions[::-1], return_index=True)
        last = len(self.positions) - 1 - taken[1][taken[0] >= 0]
        return np.sort(last)


class Placement:
    """Members of storage and residents of memory. The only writer of both.

    Parameters
    ----------
    seed
        Of admission.
    slots
        Of memory.
    limit
        Most samples in storage; None for no limit.
    by_class
        Whether a group is a class.
    at_once
        Whether to take the memory for so many samples of storage at once.
    beside, weights
        As of `Members`.

    Attributes
    ----------
    members
        The samples of storage; for others to read.
    planned, visible
        int64 [slots]: the position that will be, or is, in a slot; -1 for none.
    swapped
        int64 [slots]: the step of the last swap of a slot, -1 before; admissions leave it as it is.
    refreshed
        bool [slots]: whether mutable fields changed since storage got them.
    order
        int64 [slots]: the slots, those in use first.
    count, planned_count
        Visible and planned samples.
    of_group
        Planned samples of each group; for others to read.
    arrivals
        Samples that ever came.
    seen
        Those of them that storage is a sample of: forgotten ones do not count.
    seen_of
        The same for each label, or for each group of a field.
    entered
        Told in turn of each position that joins a group, and of the position of the group whose slot it took, -1 for
        none; None for nobody to tell.
    """

    def __init__(
        self, seed: int, slots: int, limit: int | None, by_class: bool, at_once: bool = False, *,
        beside: str | None = None, weights: Mapping[int, int] | None = None,
    ) -> None:  # fmt: skip
        self.members: Members = Members(by_class, limit, at_once, beside=beside, weights=weights)
        self.limit: Any = limit
        self.arrivals: int = 0
        self.seen: int = 0
        self.seen_of: dict[int, int] = {}
        self.entered: Callable[[int, int], None] | None = None
        self._oldest = 0  # the position that a ring replaces next
        self._uniforms = Uniforms(seed, Purpose.ADMIT)
        self._slot_of: NDArray[np.int32] = np.full(self.members.capacity, -1, np.int32)
        self._empty_slots(slots)

    def _empty_slots(self, slots: int) -> None:
        self.planned: Ints = np.full(slots, -1, np.int64)
        self.visible: Ints = np.full(slots, -1, np.int64)
        self.swapped: Ints = np.full(slots, -1, np.int64)
        self.refreshed: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self.order: Ints = np.arange(slots)
        self._rank: Ints = np.arange(slots)
        self.count: int = 0
        self.planned_count: int = 0
        self.of_group: Sizes = Sizes(self.members.sizes.weights)
        self._group_slots: GroupSlots | None = None  # once an admission asks for them
        self._leaving: dict[int, int] = {}  # from positions that are visible, but not planned there, to their slots
        self._dirty: NDArray[np.bool_] = np.zeros(SLOTS.rows(slots), np.bool_)  # rows of the index to write
        self._first_vacant = 0  # no slot before it is vacant
        self._arrays: Any = None  # of a step of the compiled core

    @property
    def size(self) -> int:
        """Samples in storage."""
        return self.members.size

    @property
    def slots(self) -> int:
        """Slots of memory."""
        return len(self.planned)

    @property
    def slot_of(self) -> NDArray[np.int32]:
        """int32 [size], in place: the slot for which each position is planned; -1 for none."""
        return self._slot_of[: self.members.size]

    @property
    def memory_bytes(self) -> int:
        """DRAM held."""
        arrays = (self.planned, self.visible, self.swapped, self.refreshed, self.order, self._rank, self._dirty)
        own = self._slot_of.nbytes + self.of_group.memory_bytes + sum(array.nbytes for array in arrays)
        return self.members.memory_bytes + own + (self._group_slots.memory_bytes if self._group_slots else 0)

    def arrays(self, core: Any) -> Any:
        """Return the arrays that a step of the compiled core changes, until others take their place."""
        if self._arrays is None:
            labels, ids = self.members.with_room()
            self._arrays = core.PlacementArrays(
                planned=self.planned, visible=self.visible, swapped=self.swapped, slot_of=self._slot_of, labels=labels,
                ids=ids, dirty=self._dirty, per_row=_SLOTS_PER_ROW, leaving=self._leaving,
            )  # fmt: skip
        return self._arrays

    def labels_and_ids(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the labels and ids at positions, int64 [n] each."""
        return self.members.labels[positions].astype(np.int64), self.members.ids[positions]

    def labels_and_groups(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the labels and groups at positions, int64 [n] each."""
        return self.members.labels[positions].astype(np.int64), self.members.groups_at(positions)

    def occupied(self) -> Ints:
        """Return the slots that hold a sample, in place."""
        return self.order[: self.count]

    def vacant(self) -> Ints:
        """Return the slots for which nothing is planned, in rising order."""
        return np.flatnonzero(self.planned < 0)

    def has_vacant(self) -> bool:
        """Whether there is a slot for which nothing is planned."""
        return self.planned_count < len(self.planned)

    def room_for(self, count: int) -> int:
        """Return how many of `count` samples storage takes without giving up others."""
        return count if self.limit is None else min(count, max(0, self.limit - self.members.size))

    def slot_of_group(self, number: int, rank: int) -> int:
        """Return the slot of a rank among those for which a sample of a group is planned, in rising order."""
        if self._group_slots is None:
            used = np.flatnonzero(self.planned >= 0)
            self._group_slots = GroupSlots(used, self.members.groups_at(self.planned[used]))
        return self._group_slots.at(number, rank)

    def slot_shown(self, position: int) -> int:
        """Return the slot in which a position is visible, -1 for none."""
        slot = int(self._slot_of[position])
        return slot if slot >= 0 and self.visible[slot] == position else self._leaving.get(position, -1)

    def shown_elsewhere(self, slots: Ints, positions: Ints) -> Ints:
        """Return the other slots that still show positions about to be shown in these slots.

        A slot keeps the sample that was to leave it if its swap comes to nothing.
        """
        numbers = positions.tolist()
        if self._leaving.keys().isdisjoint(numbers):
            return np.empty(0, np.int64)
        leaving = {self._leaving.get(position, -1) for position in numbers}
        return np.array(sorted(leaving - {-1, *slots.tolist()}), np.int64)

    # Admission.

    def draws(self, count: int) -> NDArray[np.float64]:
        """Count samples as seen and return the random numbers that are theirs, [count, DRAWS]."""
        uniforms = self._uniforms.at(DRAWS * self.arrivals, DRAWS * count).reshape(-1, DRAWS)
        self.arrivals += count
        self.seen += count
        return uniforms

    def count_labels(self, labels: Ints) -> None:
        """Count samples as seen, by label."""
        for label in labels.tolist():
            self.count_label(label)

    def count_label(self, label: int) -> None:
        """Count a sample as seen, by label."""
        self.seen_of[label] = self.seen_of.get(label, 0) + 1

    def extend(self, decisions: Decisions, samples: slice, labels: Ints, ids: Ints) -> None:
        """Give samples new positions."""
        first = self.members.extend(labels, ids)
        if self.members.capacity > len(self._slot_of):
            self._slot_of, self._arrays = _grown(self._slot_of, first, self.members.capacity, -1), None
        self._slot_of[first : self.members.size] = -1
        decisions.positions[samples] = np.arange(first, self.members.size)

    def replace(self, decisions: Decisions, samples: Ints, positions: Ints, labels: Ints, ids: Ints) -> None:
        """Let samples take positions, one after the other; if one is in memory, its sample is there, too."""
        if len(samples) == 1 or (self.members.by_class and (self.members.groups_at(positions) != labels).any()):
            numbers = (samples.tolist(), positions.tolist(), labels.tolist(), ids.tolist())
            for sample, position, label, id in zip(*numbers, strict=True):
                self._replace(decisions, sample, position, label, id)
            return
        self.members.replace_in_groups(positions, labels, ids)
        decisions.positions[samples] = positions
        planned = self._slot_of[positions]
        if not self._leaving and not decisions.leaving:
            some = planned >= 0
            samples, positions, planned = samples[some], positions[some], planned[some]
        for sample, position, slot in zip(samples.tolist(), positions.tolist(), planned.tolist(), strict=True):
            self._show_replaced(decisions, sample, position, slot)

    def _replace(self, decisions: Decisions, sample: int, position: int, label: int, id: int) -> None:
        """Let a sample take a position."""
        old, planned = self.members.group_at(position), int(self._slot_of[position])
        self.members.replace(position, label, id)
        new = self.members.group_at(position)
        if old != new and planned >= 0:
            self._count(old, planned, -1)
            self._count(new, planned, 1)
        if old != new and self.entered is not None:
            self.entered(position, -1)
        decisions.positions[sample] = position
        self._show_replaced(decisions, sample, position, planned)

    def _show_replaced(self, decisions: Decisions, sample: int, position: int, planned: int) -> None:
        """Let memory get a sample that has taken a position."""
        shown = self.slot_shown(position)
        decisions.leaving.pop(position, None)
        if shown >= 0:
            decisions.writes[shown] = sample
            self.refreshed[shown] = False
        if planned >= 0 and planned != shown:
            decisions.late[position] = sample

    def note(self, decisions: Decisions, labels: Ints, times: Ints | int) -> None:
        """Note the labels of samples that storage keeps, and when they came: each one's Unix time, or one for all."""
        if len(labels) == 1:  # numpy takes longer for one
            position = int(decisions.positions[0])
            if position >= 0:
                self.members.note(position, labels[0], times if isinstance(times, int) else times[0])
            return
        kept = (decisions.positions >= 0).nonzero()[0]
        if len(kept):
            moments = times if isinstance(times, int) else times[kept]
            self.members.note(decisions.positions[kept], labels[kept], moments)

    def count_at_once(self, label: int) -> tuple[float, list[tuple[Any, Any, Any]]]:
        """Return the number that decides about one sample in a full storage, and the changes that count it."""
        own, count = vars(self), self.seen_of.get(label, 0)
        uniform = float(self._uniforms.at(DRAWS * self.arrivals, 1)[0])
        return uniform, [
            (own, "arrivals", self.arrivals + 1), (own, "seen", self.seen + 1), (self.seen_of, label, count + 1),
        ]  # fmt: skip

    def is_outside(self, position: int) -> bool:
        """Whether a position is in no slot, and comes into none."""
        return bool(self._slot_of[position] < 0) and position not in self._leaving

    def displace(self, decisions: Decisions, sample: int, position: int, label: int, id: int) -> None:
        """Let a sample take a position, which leaves memory."""
        decisions.positions[decisions.positions == position] = -1
        shown = self.leave_memory(position)
        decisions.writes.pop(shown, None)
        decisions.late.pop(position, None)
        decisions.leaving.pop(position, None)
        self.members.replace(position, label, id)
        decisions.positions[sample] = position

    def next_oldest(self, count: int) -> Ints:
        """Return the next positions that a ring replaces."""
        size = max(1, self.members.size)
        positions = (self._oldest % size + np.arange(count)) % size
        self._oldest = int(self._oldest + count) % size
        return positions

    def put(self, decisions: Decisions, samples: Iterable[int], slots: Iterable[int]) -> None:
        """Let samples that storage holds take slots at once, one after the other."""
        for sample, slot in zip(samples, slots, strict=True):
            position, old = int(decisions.positions[sample]), int(self.planned[slot])
            if self.refreshed[slot]:
                decisions.leaving[int(self.visible[slot])] = slot
            self.plan(slot, position)
            if self.entered is not None:
                peers = old >= 0 and self.members.group_at(old) == self.members.group_at(position)
                self.entered(position, old if peers else -1)
            self.show(np.array([slot]), np.array([position]))
            decisions.writes[slot] = sample

    def leave_outside(self, decisions: Decisions, samples: Iterable[int]) -> None:
        """Let samples that storage holds be in no slot."""
        if self.entered is not None:
            for sample in samples:
                self.entered(int(decisions.positions[sample]), -1)

    def put_in_vacant(self, decisions: Decisions, samples: Iterable[int]) -> None:
        """Let samples take vacant slots; there must be enough."""
        for sample in samples:
            self.put(decisions, (sample,), (self._vacant_slot(),))

    def _vacant_slot(self) -> int:
        while not (some := self.planned[self._first_vacant : self._first_vacant + _LOOK] < 0).any():
            self._first_vacant += _LOOK
        self._first_vacant += int(some.argmax())
        return self._first_vacant

    # Slots.

    def plan(self, slot: int, position: int) -> None:
        """Decide the next position of a slot; -1 for none."""
        old = int(self.planned[slot])
        if old >= 0:
            self._slot_of[old] = -1
            self._count(self.members.group_at(old), slot, -1)
        self.planned[slot] = position
        self._mark(slot)
        shown = int(self.visible[slot])
        if shown >= 0 and shown != position:
            self._leaving[shown] = slot
        elif shown >= 0:
            self._leaving.pop(shown, None)
        if position >= 0:
            self._slot_of[position] = slot
            self._count(self.members.group_at(position), slot, 1)
        else:
            self._first_vacant = min(self._first_vacant, slot)

    def plan_swaps(self, slots: Ints, positions: Ints) -> None:
        """Decide the next positions of distinct slots, each of which has a position planned and visible."""
        old = self.planned[slots]
        if self.members.by_class:
            leaving, coming = self.members.groups_at(old), self.members.groups_at(positions)
            for index in np.flatnonzero(leaving != coming).tolist():
                self._count(int(leaving[index]), int(slots[index]), -1)
                self._count(int(coming[index]), int(slots[index]), 1)
        self._slot_of[old] = -1
        self.planned[slots] = positions
        self._slot_of[positions] = slots
        self._leaving.update(zip(self.visible[slots].tolist(), slots.tolist(), strict=True))
        self._mark(slots)

    def note_swaps(self, slots: Ints, step: int) -> None:
        """Note the step in which slots are swapped."""
        self.swapped[slots] = step
        self._mark(slots)

    def show(self, slots: Ints, positions: Ints) -> None:
        """Note the positions that distinct slots hold now."""
        for position in self.visible[slots].tolist():
            self._leaving.pop(position, None)
        self.visible[slots] = positions
        self.refreshed[slots] = False
        if self.count < len(self.visible):
            for slot in slots[self._rank[slots] >= self.count].tolist():
                self._move(slot, self.count)
                self.count += 1
        self._mark(slots)

    def hide(self, slots: Ints) -> None:
        """Note that slots hold nothing any more."""
        slots = slots[self.visible[slots] >= 0]
        self._mark(slots)
        for slot in slots.tolist():
            self._leaving.pop(int(self.visible[slot]), None)
            self.visible[slot] = -1
            self.refreshed[slot] = False
            self.count -= 1
            self._move(slot, self.count)

    def keep_shown(self, slot: int) -> None:
        """Let a slot keep its visible sample, if no other slot is to have that; nothing else comes."""
        shown = int(self.visible[slot])
        self.plan(slot, -1)
        if shown >= 0 and self._slot_of[shown] < 0:
            self.plan(slot, shown)

    def drop_unreadable(self, slot: int) -> None:
        """Note that the sample of a slot could not be read: the slot shows nothing, and awaits only another sample."""
        position = int(self.visible[slot])
        self.hide(np.array([slot]))
        if self.planned[slot] == position:
            self.plan(slot, -1)

    def note_refreshed(self, slots: Ints, refreshed: bool) -> None:
        """Note whether slots have mutable fields that storage does not have yet."""
        self.refreshed[slots] = refreshed

    # Removal.

    def leave_memory(self, position: int) -> int:
        """Take a position out of memory; return the slot that showed it, -1 for none."""
        slot, shown = int(self._slot_of[position]), self.slot_shown(position)
        if shown >= 0:
            self.hide(np.array([shown]))
        if slot >= 0:
            # A swap that was bringing it comes to nothing.
            self.keep_shown(slot)
        return shown

    def uncount(self, doomed: Ints) -> None:
        """Let the stream be one in which the samples at some positions never came.

        Storage may have dropped others of the stream that would be forgotten now. Their number is an estimate: in each
        class the dropped samples have the same share of them as the stored ones.
        """
        labels = self.members.numbers
        if 0 < len(doomed) < self.size and self.limit is not None and self.seen > self.size >= self.limit:
            # A reservoir with room to spare would keep every sample to come, and be no uniform sample any more. One
            # that has forgotten everything is as it was in the beginning.
            self.limit = self.size - len(doomed)
        for label in np.unique(labels[doomed]).tolist():
            gone = int(np.count_nonzero(labels[doomed] == label))
            there = int(np.count_nonzero(labels == label))
            seen = self.seen_of.get(label, there)
            lost = round(seen * gone / there)
            self.seen -= lost
            self.seen_of[label] = seen - lost
        self.seen = max(self.seen, self.size - len(doomed))

    def movers(self, doomed: Ints) -> Ints:
        """Return the positions whose samples take the places of those that go."""
        return np.setdiff1d(np.arange(self.size - len(doomed), self.size), doomed)

    def move(self, position: int, old: int) -> None:
        """Give the sample at `old` a position whose sample is gone."""
        self.members.move(position, old)
        planned, shown = int(self._slot_of[old]), self.slot_shown(old)
        self._slot_of[position], self._slot_of[old] = planned, -1
        if planned >= 0:
            self.planned[planned] = position
            self._mark(planned)
        if shown >= 0:
            self.visible[shown] = position
            self._mark(shown)
        if old in self._leaving:
            self._leaving[position] = self._leaving.pop(old)

    def remove_last(self, count: int) -> Ints:
        """Remove the samples at the last positions; return the keys of the rows that the index no longer needs."""
        before = POSITIONS.rows(self.size)
        for _ in range(count):
            self._slot_of[self.size - 1] = -1
            self.members.remove_last()
        return POSITIONS.keys(POSITIONS.rows(self.size), before)

    # Sizes.

    def set_limit(self, limit: int) -> None:
        """Change how many samples storage may hold."""
        self.limit = self.members.most = limit

    def slots_kept(self, slots: int, by_class: bool, random: np.random.Generator) -> Ints:
        """Return the slots that stay in a memory of another size, in rising order.

        All stay, or as many as there is room for, drawn at random; `by_class`, large classes give way first.
        """
        if slots >= self.slots:
            return np.arange(self.slots)
        used = random.permutation(np.flatnonzero((self.planned >= 0) | (self.visible >= 0)))
        if by_class and len(used) > slots:
            holder = np.where(self.planned[used] >= 0, self.planned[used], self.visible[used])
            groups = self.members.groups_at(holder)
            # The rank of each within its group: those of low rank stay, so that groups give way evenly.
            order = np.argsort(groups, kind="stable")
            starts = np.searchsorted(groups[order], groups[order])
            ranks = np.empty(len(used), np.float64)
            ranks[order] = np.arange(len(used)) - starts
            used = used[np.argsort(ranks / self.of_group.weights_of(groups), kind="stable")]
        return np.sort(used[:slots])

    def resize_memory(self, slots: int, keep: Ints) -> Ints:
        """Change the number of slots; return the new number of each old slot, -1 for one that is gone.

        Parameters
        ----------
        slots
            How many there are from now on.
        keep
            int64 [k]: the old slots that stay, in rising order, as slots 0 to k - 1.
        """
        number = np.full(self.slots, -1, np.int64)
        number[keep] = np.arange(len(keep))
        for slot in np.flatnonzero(number < 0).tolist():
            self.plan(slot, -1)
        planned, visible, swapped = (np.full(slots, -1, np.int64) for _ in range(3))
        planned[: len(keep)], visible[: len(keep)] = self.planned[keep], self.visible[keep]
        swapped[: len(keep)] = self.swapped[keep]
        order = np.concatenate([np.flatnonzero(visible >= 0), np.flatnonzero(visible < 0)])
        self._empty_slots(slots)
        self._restore_slots(planned, visible, swapped, order)
        # Slots that were never used need no row: storage may be smaller than an index of all.
        self._mark(np.flatnonzero((planned >= 0) | (visible >= 0) | (swapped >= 0) | (order != np.arange(slots))))
        return number

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        """Return the counters, for JSON."""
        return {
            "limit": self.limit, "arrivals": self.arrivals, "seen": self.seen, "oldest": self._oldest,
            "seen_of": [[label, count] for label, count in self.seen_of.items()],
        }  # fmt: skip

    def changed(self) -> Iterator[tuple[Ints, NDArray[np.uint8]]]:
        """Yield the keys and contents of the rows of the index that changed since the last call."""
        rows = np.flatnonzero(self._dirty)
        self._dirty[:] = False
        columns = {"planned": self.planned, "visible": self.visible, "swapped": self.swapped, "order": self.order}
        return chain(self.members.changed(), SLOTS.pack(rows, self.slots, columns))

    def restore_members(self, entries: NDArray[np.void], by_class: bool) -> None:
        """Take over the samples of a checkpoint."""
        self.members.restore(entries, by_class)
        self._slot_of, self._arrays = np.full(self.members.capacity, -1, np.int32), None

    def keep_classes(self) -> None:
        """Let every class be a group from now on; before `restore_slots`."""
        self.members.keep_classes()

    def restore_slots(self, entries: NDArray[np.void], state: Mapping[str, Any]) -> None:
        """Take over the slots of a checkpoint, an entry for each, and the counters."""
        planned, visible, swapped, order = (
            entries[name].astype(np.int64) for name in ("planned", "visible", "swapped", "order")
        )
        self._restore_slots(planned, visible, swapped, order)
        self.limit, self.arrivals, self.seen = state["limit"], state["arrivals"], state["seen"]
        self._oldest, self.seen_of = state["oldest"], dict(state["seen_of"])

    def _restore_slots(self, planned: Ints, visible: Ints, swapped: Ints, order: Ints) -> None:
        self.planned[:], self.visible[:], self.swapped[:], self.order[:] = planned, visible, swapped, order
        self._rank[order] = np.arange(len(order))
        self.count = int(np.count_nonzero(visible >= 0))
        leaving = np.flatnonzero((visible >= 0) & (visible != planned))
        self._leaving, self._arrays = dict(zip(visible[leaving].tolist(), leaving.tolist(), strict=True)), None
        used = np.flatnonzero(planned >= 0)
        self._slot_of[planned[used]] = used
        self.planned_count = len(used)
        self.of_group, self._group_slots = Sizes(self.members.sizes.weights), None
        for group, size in Counter(self.members.groups_at(planned[used]).tolist()).items():
            self.of_group.change(group, size)

    def _count(self, group: int, slot: int, change: int) -> None:
        """Note that a slot is of a group, or no more."""
        self.of_group.change(group, change)
        self.planned_count += change
        if self._group_slots is not None and change > 0:
            self._group_slots.add(group, slot)
        elif self._group_slots is not None:
            self._group_slots.remove(group, slot)

    def _move(self, slot: int, rank: int) -> None:
        """Give a slot a rank in the order; the slot of that rank gets its own."""
        other, old = int(self.order[rank]), int(self._rank[slot])
        self.order[rank], self.order[old] = slot, other
        self._rank[slot], self._rank[other] = rank, old
        self._mark(rank)
        self._mark(old)

    def _mark(self, slots: Ints | int) -> None:
        self._dirty[slots // _SLOTS_PER_ROW] = True


def _grown(array: NDArray[Any], size: int, capacity: int, empty: int) -> NDArray[Any]:
    """Return a longer copy of the first elements of an array."""
    grown = np.full(capacity, empty, array.dtype)
    grown[:size] = array[:size]
    return grown
