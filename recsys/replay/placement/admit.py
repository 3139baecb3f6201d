"""Admission: which samples storage keeps, and which of them enter memory as they come.

Storage is a sample of the stream, memory a sample of storage; both are uniform, or uniform within every class.
Reservoir sampling is Vitter's algorithm R (ACM TOMS 1985).

Why memory stays uniform while swaps are under way. Let n be the positions of storage and m the slots of memory, and
suppose that the map from slots to positions is equally likely to be any injection, whatever happened to which slot
when.

- Each injection has probability (n - m)! / n!. A new position takes a slot drawn from all with probability m / (n + 1).
  Injections that use it then have m / (n + 1) * 1 / m * (n + 1 - m) * (n - m)! / n! = (n + 1 - m)! / (n + 1)! each (the
  slot held one of n + 1 - m positions), those that do not (1 - m / (n + 1)) * (n - m)! / n!, which is the same.
- A position that takes another sample keeps its slot. Which positions these are depends on the stream alone.
- A swap replaces what k slots hold by k positions drawn from those outside memory (what leaves is not among them), the
  slots chosen without looking at what is in them. As many injections lead to each as it leads to, (n - m)! /
  (n - m - k)!, so the uniform distribution stays; within classes the same holds of each class, whose slots stay its
  own.

This is about what is *planned*. A swap arrives later: what is visible is what the same chain has without the swaps that
have not arrived, in which every step is one of the above. Admissions are visible at once, in both chains. For this a
slot that is waiting for a swap is not swapped again until it has arrived, even where an admission has taken it
meanwhile: else what was just admitted would be swapped out sooner than the rest.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memhier.errors import BudgetError
from memhier.recsys.replay.placement.tiers import Decisions, Tiers

__all__ = ["Admission", "ClassBalanced", "Everything", "Reservoir", "Ring", "admission"]

Ints = NDArray[np.int64]


class Admission(Protocol):
    """Decides about samples as they come.

    Attributes
    ----------
    name
        As `admission` takes it.
    by_class
        Whether it needs labels.
    """

    name: str
    by_class: bool

    def check(self, tiers: Tiers, count: int) -> None:
        """Raise BudgetError when so many more samples do not fit."""

    def admit(self, tiers: Tiers, labels: Ints, ids: Ints) -> Decisions:
        """Decide about samples, [n], and change the state of the tiers accordingly."""


class Reservoir:
    """Storage is a uniform sample of everything that came, memory a uniform sample of storage."""

    name = "reservoir"
    by_class = False

    def check(self, tiers: Tiers, count: int) -> None:
        return

    def admit(self, tiers: Tiers, labels: Ints, ids: Ints) -> Decisions:
        decisions = Decisions(len(labels))
        before = tiers.seen
        uniforms = tiers.draws(labels)
        appended = len(labels) if tiers.limit is None else min(len(labels), max(0, tiers.limit - tiers.members.size))
        self._append(tiers, decisions, uniforms[:appended], labels[:appended], ids[:appended])
        rest = np.arange(appended, len(labels))
        for sample, position in self._replaced(tiers, uniforms, before, rest):
            tiers.replace(decisions, sample, position, int(labels[sample]), int(ids[sample]))
        tiers.count_labels(labels)
        return decisions

    def _replaced(self, tiers: Tiers, uniforms: NDArray[np.float64], before: int, rest: Ints) -> list[tuple[int, int]]:
        """Return which of the samples that find storage full take which positions, in order."""
        targets = (uniforms[rest, 0] * (before + rest + 1)).astype(np.int64)
        kept = targets < tiers.members.size
        return list(zip(rest[kept].tolist(), targets[kept].tolist(), strict=True))

    def _append(
        self, tiers: Tiers, decisions: Decisions, uniforms: NDArray[np.float64], labels: Ints, ids: Ints
    ) -> None:
        """Add samples to storage, and each to memory with the probability that keeps it uniform."""
        residents, size = tiers.residents, tiers.members.size
        first = tiers.members.extend(labels, ids)
        decisions.positions[: len(labels)] = np.arange(first, first + len(labels))
        # While memory holds everything, a sample takes a vacant slot.
        complete = residents.planned_count == size
        filled = min(len(labels), residents.slots - residents.planned_count) if complete else 0
        for sample in range(filled):
            tiers.put(decisions, sample, tiers.first_vacant())
        used = residents.planned_count
        targets = (uniforms[filled:, 1] * np.arange(size + filled + 1, size + len(labels) + 1)).astype(np.int64)
        slots = None if used == residents.slots else np.flatnonzero(residents.planned >= 0)
        for sample in np.flatnonzero(targets < used).tolist():
            target = int(targets[sample])
            tiers.put(decisions, sample + filled, target if slots is None else int(slots[target]))


class Ring(Reservoir):
    """Storage keeps the newest, memory a uniform sample of them. After `forget`, not strictly the oldest goes first."""

    name = "ring"

    def _replaced(self, tiers: Tiers, uniforms: NDArray[np.float64], before: int, rest: Ints) -> list[tuple[int, int]]:
        size = tiers.members.size
        positions = (tiers.oldest % max(1, size) + np.arange(len(rest))) % max(1, size)
        tiers.oldest = int(tiers.oldest + len(rest)) % max(1, size)
        return list(zip(rest.tolist(), positions.tolist(), strict=True))


class Everything(Reservoir):
    """Storage keeps all, and refuses what it has no room for; memory is a uniform sample of it."""

    name = "everything"

    def check(self, tiers: Tiers, count: int) -> None:
        if tiers.limit is not None and tiers.members.size + count > tiers.limit:
            raise BudgetError(
                f"storage={tiers.limit} samples: {tiers.members.size} are there and {count} more do not fit; use a "
                "larger storage, or admit='reservoir' to keep a sample of the stream"
            )


class ClassBalanced:
    """Both tiers give every class the same share, and hold a uniform sample of each class.

    A class that has fewer samples than its share has all of them. When a new class comes, the largest give way, one
    sample at a time, drawn at random (greedy balancing, GDumb, ECCV 2020; within a class a reservoir, CBRS, ICML 2020).
    Where memory has no slot for every class, swaps bring in classes that are not there, each equally likely.
    """

    name = "class_balanced"
    by_class = True

    def check(self, tiers: Tiers, count: int) -> None:
        return

    def admit(self, tiers: Tiers, labels: Ints, ids: Ints) -> Decisions:
        decisions = Decisions(len(labels))
        uniforms = tiers.draws(labels).tolist()
        for sample, (label, id) in enumerate(zip(labels.tolist(), ids.tolist(), strict=True)):
            tiers.seen_of[label] = tiers.seen_of.get(label, 0) + 1
            self._admit_one(tiers, decisions, sample, label, id, uniforms[sample])
        return decisions

    def _admit_one(
        self, tiers: Tiers, decisions: Decisions, sample: int, label: int, id: int, uniforms: list[float]
    ) -> None:
        members, seen = tiers.members, tiers.seen_of[label]
        group = members.groups.get(label)
        size = 0 if group is None else group.size
        complete = tiers.residents.is_complete(label)
        if tiers.limit is None or members.size < tiers.limit:
            decisions.positions[sample] = members.extend(np.array([label]), np.array([id]))
        else:
            largest = _largest({number: there.size for number, there in members.groups.items()})
            if size < seen - 1 or members.groups[largest].size <= size:
                # The class has its share: its samples stay a reservoir of those that came.
                rank = int(uniforms[0] * seen)
                if group is not None and rank < size:
                    tiers.replace(decisions, sample, int(group.positions[rank]), label, id)
                return
            position = int(members.groups[largest].positions[int(uniforms[1] * members.groups[largest].size)])
            decisions.positions[decisions.positions == position] = -1
            tiers.leave_memory(decisions, position)
            members.replace(position, label, id)
            decisions.positions[sample] = position
        self._enter_memory(tiers, decisions, sample, label, size, complete, uniforms[2:])

    def _enter_memory(
        self, tiers: Tiers, decisions: Decisions, sample: int, label: int, size: int, complete: bool,
        uniforms: list[float],
    ) -> None:  # fmt: skip
        """Decide about a sample that storage took besides the `size` that it has of the class."""
        residents = tiers.residents
        count = residents.of_group.get(label, 0)
        if complete and tiers.has_vacant():
            tiers.put(decisions, sample, tiers.first_vacant())
            return
        largest = _largest(residents.of_group)
        if complete and residents.of_group.get(largest, 0) > count:
            slots = residents.slots_of_group(largest)
            tiers.put(decisions, sample, int(slots[int(uniforms[0] * len(slots))]))
            return
        rank = int(uniforms[1] * (size + 1))
        if rank < count:
            tiers.put(decisions, sample, int(residents.slots_of_group(label)[rank]))


def _largest(sizes: dict[int, int]) -> int:
    """Return the group of most members, of several the lowest number; -1 of none."""
    return min(sizes, key=lambda number: (-sizes[number], number), default=-1)


_ADMISSIONS: dict[str, type[Reservoir] | type[ClassBalanced]] = {
    kind.name: kind for kind in (Reservoir, ClassBalanced, Ring, Everything)
}


def admission(admit: str | Admission) -> Admission:
    """Return the admission of a name: ``"reservoir"``, ``"class_balanced"``, ``"ring"`` or ``"everything"``.

    Raises
    ------
    ValueError
        For any other name.
    TypeError
        For a class.
    """
    if isinstance(admit, type):
        raise TypeError(f"admit={admit.__name__}: expected an admission, such as {admit.__name__}(), not its class")
    if not isinstance(admit, str):
        return admit
    if admit not in _ADMISSIONS:
        raise ValueError(f"admit={admit!r}: expected one of {', '.join(map(repr, _ADMISSIONS))}")
    return _ADMISSIONS[admit]()
