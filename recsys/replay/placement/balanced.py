"""Balanced admission: every class, task or cluster has its share of both tiers, or its quota."""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import check_int, check_range
from memhier.recsys.replay.placement.placement import Decisions, Placement
from memhier.recsys.replay.schema import Columns, Schema

__all__ = ["Balanced", "ClassBalanced"]

Ints = NDArray[np.int64]

_VACANT = -1  # any vacant slot


class Balanced:
    """Both tiers give every group of samples its share, and hold a uniform sample of each group.

    A group that has fewer samples than its share has all of them. When a new group comes, the largest give way, one
    sample at a time, drawn at random (greedy balancing, GDumb, ECCV 2020; within a group a reservoir, CBRS, ICML 2020).
    If memory has fewer slots than there are groups, swaps bring in groups that are not there, each equally likely.

    Parameters
    ----------
    by
        ``"label"``, or a field of one integer, 0 to 2**31 - 1, such as a task or a cluster that the caller names. A
        sample stays in the group in which it came. Swaps keep groups, so `same_class` is to be left open for a field.
    quotas
        The most samples of a group in storage: an int for each one, or a dict from every group that may come to its
        own. Where storage or memory holds fewer in all, groups share them in proportion to their quotas. None for
        equal shares without a limit.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys.replay import Balanced, CarouselBuffer
    >>> admit = Balanced(by="task", quotas={0: 60, 1: 30, 2: 10})
    >>> path = tempfile.mkdtemp() + "/buffer"
    >>> with CarouselBuffer(path, memory=20, schema={"x": "int64", "task": "int16"}, admit=admit) as buffer:
    ...     _ = buffer.add({"x": np.arange(900), "task": np.repeat([0, 1, 2], 300).astype("int16")})
    ...     len(buffer.stored_ids()), np.bincount(buffer.sample(20)["task"]).tolist()
    (100, [12, 6, 2])
    """

    name = "balanced"
    by_class = True

    def __init__(self, by: str = "label", quotas: int | Mapping[int, int] | None = None) -> None:
        self.by: str = by
        self.quotas: int | Mapping[int, int] | None = quotas
        if isinstance(quotas, Mapping):
            self.quotas = {check_int("quotas", group, 0, 2**31 - 1): check_int(f"quotas[{group}]", most, 1, 2**40)
                           for group, most in quotas.items()}  # fmt: skip
        elif quotas is not None:
            self.quotas = check_int("quotas", quotas, 1, 2**40)
        self.beside: str | None = None if by == "label" else "group"
        self.weights: Mapping[int, int] | None = self.quotas if isinstance(self.quotas, dict) else None

    def check_schema(self, schema: Schema) -> None:
        """See :class:`Admission`."""
        field = schema.fields.get(self.by)
        if self.by != "label" and (field is None or np.dtype(field.dtype).kind not in "iu" or field.shape != ()):
            raise ValueError(f"admit=Balanced({self.by!r}): expected 'label', or a field of one integer each, of "
                             f"{schema}")  # fmt: skip

    def check_stored(self, placement: Placement) -> None:
        """See :class:`Admission`."""
        sizes = placement.members.sizes
        self.check_groups("admit", np.fromiter(sizes, np.int64))
        for group, size in sizes.items():
            if size > self.quota(group):
                raise ValueError(f"admit: storage has {size} samples of group {group}, beyond its quota of "
                                 f"{self.quota(group)}; expected one at least as large")  # fmt: skip

    def check(self, placement: Placement, count: int) -> None:
        """See :class:`Admission`."""
        return

    def values(self, labels: Ints, columns: Columns) -> NDArray[Any]:
        """See :class:`Admission`."""
        if self.by == "label":
            self.check_groups("labels", labels)
            return labels
        name, groups = f"batch[{self.by!r}]", columns[self.by]
        check_range(name, groups, 2**31, "a group, 0 to 2**31 - 1")
        self.check_groups(name, groups)
        return groups.astype(np.int64)

    def check_groups(self, name: str, groups: NDArray[np.integer]) -> None:
        """Raise ValueError for groups without a quota, where groups have their own."""
        if self.weights is not None and (unknown := {*groups.tolist()} - {*self.weights}):
            raise ValueError(f"{name}: group {min(unknown)} has no quota; quotas={dict(self.weights)}")

    def encoded(self) -> dict[str, Any]:
        """See :class:`Admission`."""
        quotas: Any = [*self.weights.items()] if self.weights is not None else self.quotas
        return {"by": self.by, "beside": self.beside, "quotas": quotas}

    @classmethod
    def decoded(cls, there: Mapping[str, Any]) -> Self:
        """Return the admission of a checkpoint."""
        quotas = there.get("quotas")
        return cls(there.get("by", "label"), dict(quotas) if isinstance(quotas, list) else quotas)

    def quota(self, group: int) -> float:
        """Return the most samples of a group in storage."""
        if self.weights is not None:
            return self.weights[group]
        return self.quotas if isinstance(self.quotas, int) else np.inf

    def admit(self, placement: Placement, labels: Ints, ids: Ints, values: NDArray[Any]) -> Decisions:
        """See :class:`Admission`."""
        decisions = Decisions(len(values))
        uniforms = placement.draws(len(values)).tolist()
        numbers = values.tolist()
        appended = self._appended(placement, numbers)
        if appended:
            self._append(placement, decisions, uniforms, slice(appended), values, ids)
        samples: list[int] = []
        positions: list[int] = []

        def replace() -> None:
            some = np.array(samples, np.int64)
            placement.replace(decisions, some, np.array(positions, np.int64), values[some], ids[some])
            samples.clear()
            positions.clear()

        groups, sizes = placement.members.groups, placement.members.sizes
        for sample in range(appended, len(numbers)):
            number = numbers[sample]
            size, seen = sizes.get(number, 0), placement.seen_of.get(number, 0) + 1
            if size < seen - 1 or size >= self.quota(number) or not self._has_room(placement, number):
                # The group has its share: its samples stay a reservoir of those that came.
                placement.count_label(number)
                rank = int(uniforms[sample][0] * seen)
                if rank < size:
                    samples.append(sample)
                    positions.append(groups[number].positions.item(rank))
                continue
            if samples:
                replace()
            if placement.room_for(1):
                self._append(placement, decisions, uniforms, slice(sample, sample + 1), values, ids)
            else:
                placement.count_label(number)
                self._displace(placement, decisions, sample, number, int(ids[sample]), uniforms[sample])
        if samples:
            replace()
        return decisions

    def _appended(self, placement: Placement, numbers: list[int]) -> int:
        """Return how many samples, from the first on, storage takes without giving up others."""
        room = placement.room_for(len(numbers))
        if self.quotas is None:
            return room
        sizes: dict[int, int] = {}
        for sample, number in enumerate(numbers[:room]):
            size = sizes.get(number, placement.members.sizes.get(number, 0))
            if size >= self.quota(number) or (number not in sizes and placement.seen_of.get(number, 0) > size):
                return sample
            sizes[number] = size + 1
        return room

    def _has_room(self, placement: Placement, number: int) -> bool:
        """Whether storage has room for one more of a group, or another group more than its share."""
        sizes = placement.members.sizes
        return placement.room_for(1) > 0 or sizes.load(sizes.largest()) >= sizes.load(number, 1)

    def _append(
        self, placement: Placement, decisions: Decisions, uniforms: list[list[float]], samples: slice, values: Ints,
        ids: Ints,
    ) -> None:  # fmt: skip
        """Add samples to storage, and each to memory if its group has a place there."""
        numbers = values[samples].tolist()
        sizes = {number: placement.members.sizes.get(number, 0) for number in numbers}
        placement.count_labels(values[samples])
        placement.extend(decisions, samples, values[samples], ids[samples])
        for sample, number in enumerate(numbers, samples.start or 0):
            slot = self._slot(placement, number, sizes[number], uniforms[sample][2:])
            self._put(placement, decisions, sample, slot)
            sizes[number] += 1

    def _displace(
        self, placement: Placement, decisions: Decisions, sample: int, number: int, id: int, uniforms: list[float]
    ) -> None:
        """Let a sample of a group that has less than its share take the place of one of the largest group."""
        size = placement.members.sizes.get(number, 0)
        largest = placement.members.groups[placement.members.sizes.largest()]
        position = int(largest.positions[int(uniforms[1] * largest.size)])
        placement.displace(decisions, sample, position, number, id)
        self._put(placement, decisions, sample, self._slot(placement, number, size, uniforms[2:]))

    def _put(self, placement: Placement, decisions: Decisions, sample: int, slot: int | None) -> None:
        if slot == _VACANT:
            placement.put_in_vacant(decisions, (sample,))
        elif slot is not None:
            placement.put(decisions, (sample,), (slot,))
        else:
            placement.leave_outside(decisions, (sample,))

    def _slot(self, placement: Placement, number: int, size: int, uniforms: list[float]) -> int | None:
        """Return the slot of a sample that storage took besides the `size` samples that it has of the group."""
        of_group = placement.of_group
        count = of_group.get(number, 0)
        complete = count == size
        if complete and placement.has_vacant():
            return _VACANT
        largest = of_group.largest()
        if complete and largest >= 0 and of_group.load(largest) >= of_group.load(number, 1):
            return placement.slot_of_group(largest, int(uniforms[0] * of_group[largest]))
        rank = int(uniforms[1] * (size + 1))
        return placement.slot_of_group(number, rank) if rank < count else None


class ClassBalanced(Balanced):
    """Both tiers give every class the same share, and hold a uniform sample of each class: `Balanced` by labels.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys.replay import CarouselBuffer, ClassBalanced
    >>> path = tempfile.mkdtemp() + "/buffer"
    >>> with CarouselBuffer(path, memory=4, storage=4, schema={"x": "int64"}, admit=ClassBalanced()) as buffer:
    ...     _ = buffer.add({"x": np.arange(100)}, labels=[0] * 98 + [1] * 2)
    ...     sorted(buffer.sample(4).labels.tolist())
    [0, 0, 1, 1]
    """

    name = "class_balanced"

    def __init__(self) -> None:
        super().__init__()

    def encoded(self) -> dict[str, Any]:
        """See :class:`Admission`."""
        return {}
