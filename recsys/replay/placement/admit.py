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
- A swap replaces the positions of k slots by k positions drawn from those outside memory (positions that leave are not
  among them); it chooses the slots without looking at their positions. As many injections lead to each as it leads to,
  (n - m)! / (n - m - k)!, so the uniform distribution stays; within classes the same holds of each class, whose slots
  stay its own.

This is about *planned* positions. A swap arrives later: the visible positions are those of the same chain without the
swaps that have not arrived, in which every step is one of the above. Admissions are visible at once, in both chains.
For this a slot that waits for a swap is not swapped again until it has arrived, even if an admission has taken it
meanwhile: else samples just admitted would be swapped out sooner than the rest.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from memhier.errors import BudgetError
from memhier.recsys.replay.placement.placement import Decisions, Placement
from memhier.recsys.replay.schema import Columns, Schema

__all__ = ["Admission", "Everything", "Reservoir", "Ring"]

Ints = NDArray[np.int64]
_NONE: Ints = np.empty(0, np.int64)


class Admission(Protocol):
    """Decides about samples as they come.

    Attributes
    ----------
    name
        A name of its own. A checkpoint holds only the rules of this library: give `CarouselBuffer.open` any other.
    by_class
        Whether swaps keep the classes of memory, or the groups of samples.
    by
        ``"label"``, or the field whose values it goes by.
    beside
        The number that storage notes of each sample: ``"group"`` of a field, ``"key"``, or None for none.
    weights
        Of groups: the tiers share out their room in proportion. None for equal shares.

    Examples
    --------
    A rule of your own, made from one of the library's:

    >>> import tempfile
    >>> import numpy as np
    >>> from memhier import BudgetError
    >>> from memhier.recsys.replay import CarouselBuffer, Reservoir
    >>> class Short(Reservoir):
    ...     name = "short"
    ...     def check(self, placement, count):
    ...         if placement.seen + count > 10:
    ...             raise BudgetError("a stream of at most 10 samples")
    >>> with CarouselBuffer(tempfile.mkdtemp() + "/b", memory=2, schema={"x": "int64"}, admit=Short()) as buffer:
    ...     buffer.add({"x": np.arange(11)})
    Traceback (most recent call last):
        ...
    memhier.errors.BudgetError: a stream of at most 10 samples
    """

    name: str
    by_class: bool
    by: str
    beside: str | None
    weights: Mapping[int, int] | None

    def check_schema(self, schema: Schema) -> None:
        """Raise ValueError for samples without the fields that it goes by."""

    def check_stored(self, placement: Placement) -> None:
        """Raise ValueError for stored samples that it could not have kept."""

    def check(self, placement: Placement, count: int) -> None:
        """Raise BudgetError if `count` more samples do not fit."""

    def values(self, labels: Ints, columns: Columns) -> NDArray[Any]:
        """Return the values by which it decides, [n, ...]: labels, or those of a field; raise for unfit ones."""

    def admit(self, placement: Placement, labels: Ints, ids: Ints, values: NDArray[Any]) -> Decisions:
        """Decide about samples by labels and ids, int64 [n] each, and values, and change the placement accordingly."""

    def encoded(self) -> dict[str, Any]:
        """Return its settings and its state for a checkpoint, for JSON."""


class Reservoir:
    """Storage is a uniform sample of the stream, memory a uniform sample of storage.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys.replay import CarouselBuffer, Reservoir
    >>> path = tempfile.mkdtemp() + "/buffer"
    >>> with CarouselBuffer(path, memory=2, storage=4, schema={"x": "int64"}, admit=Reservoir()) as buffer:
    ...     _ = buffer.add({"x": np.arange(100)})
    ...     len(buffer.stored_ids()), len(buffer)
    (4, 2)
    """

    name = "reservoir"
    by_class = False
    by = "label"
    beside: str | None = None
    weights: Mapping[int, int] | None = None

    def check_schema(self, schema: Schema) -> None:
        """See :class:`Admission`."""
        return

    def check_stored(self, placement: Placement) -> None:
        """See :class:`Admission`."""
        return

    def check(self, placement: Placement, count: int) -> None:
        """See :class:`Admission`."""
        return

    def values(self, labels: Ints, columns: Columns) -> NDArray[Any]:
        """See :class:`Admission`."""
        return labels

    def encoded(self) -> dict[str, Any]:
        """See :class:`Admission`."""
        return {}

    def admit(self, placement: Placement, labels: Ints, ids: Ints, values: NDArray[Any]) -> Decisions:
        """See :class:`Admission`."""
        decisions = Decisions(len(labels))
        before = placement.seen
        placement.count_labels(labels)
        uniforms = placement.draws(len(labels))
        appended = placement.room_for(len(labels))
        if appended:
            self._append(placement, decisions, uniforms[:appended], labels[:appended], ids[:appended])
        if appended < len(labels):
            samples, positions = self._replaced(placement, uniforms, before, appended)
            if len(samples):
                placement.replace(decisions, samples, positions, labels[samples], ids[samples])
        return decisions

    def _replaced(
        self, placement: Placement, uniforms: NDArray[np.float64], before: int, first: int
    ) -> tuple[Ints, Ints]:
        """Return the samples from `first` on that replace others, in order, and the positions that they take."""
        if first == len(uniforms) - 1:  # numpy takes longer for one
            target = int(uniforms[first, 0] * (before + first + 1))
            return (np.array([first]), np.array([target])) if target < placement.members.size else (_NONE, _NONE)
        came = np.arange(before + first + 1, before + len(uniforms) + 1)
        targets = (uniforms[first:, 0] * came).astype(np.int64)
        kept = (targets < placement.members.size).nonzero()[0]
        return kept + first, targets[kept]

    def _append(
        self, placement: Placement, decisions: Decisions, uniforms: NDArray[np.float64], labels: Ints, ids: Ints
    ) -> None:
        """Add samples to storage, and each to memory with the probability that keeps it uniform."""
        size, slots, count = placement.members.size, len(placement.planned), len(labels)
        # While memory holds everything, a sample takes a vacant slot.
        complete = placement.planned_count == size
        filled = min(count, slots - placement.planned_count) if complete else 0
        used = placement.planned_count + filled
        targets = (uniforms[filled:, 1] * np.arange(size + filled + 1, size + count + 1)).astype(np.int64)
        placement.extend(decisions, slice(count), labels, ids)
        placement.put_in_vacant(decisions, range(filled))
        samples = np.flatnonzero(targets < used)
        taken = targets[samples]
        if used < slots:
            taken = np.flatnonzero(placement.planned >= 0)[taken]
        last = filled
        for sample, slot in zip((samples + filled).tolist(), taken.tolist(), strict=True):
            placement.leave_outside(decisions, range(last, sample))
            placement.put(decisions, (sample,), (slot,))
            last = sample + 1
        placement.leave_outside(decisions, range(last, count))


class Ring(Reservoir):
    """Storage keeps the newest, memory a uniform sample of them. After `forget`, not strictly the oldest goes first.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys.replay import CarouselBuffer, Ring
    >>> path = tempfile.mkdtemp() + "/buffer"
    >>> with CarouselBuffer(path, memory=2, storage=4, schema={"x": "int64"}, admit=Ring()) as buffer:
    ...     _ = buffer.add({"x": np.arange(100)})
    ...     sorted(buffer.stored_ids().tolist())
    [96, 97, 98, 99]
    """

    name = "ring"

    def _replaced(
        self, placement: Placement, uniforms: NDArray[np.float64], before: int, first: int
    ) -> tuple[Ints, Ints]:
        rest = np.arange(first, len(uniforms))
        return rest, placement.next_oldest(len(rest))


class Everything(Reservoir):
    """Storage keeps all, and refuses samples that it has no room for; memory is a uniform sample of it.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys.replay import CarouselBuffer, Everything
    >>> path = tempfile.mkdtemp() + "/buffer"
    >>> with CarouselBuffer(path, memory=2, storage=4, schema={"x": "int64"}, admit=Everything()) as buffer:
    ...     buffer.add({"x": np.arange(5)})
    Traceback (most recent call last):
        ...
    memhier.errors.BudgetError: storage=4 samples: 0 are there and 5 more do not fit; ...
    """

    name = "everything"

    def check(self, placement: Placement, count: int) -> None:
        """See :class:`Admission`."""
        if placement.limit is not None and placement.size + count > placement.limit:
            raise BudgetError(
                f"storage={placement.limit} samples: {placement.size} are there and {count} more do not fit; use a "
                "larger storage, or admit='reservoir' to keep a sample of the stream"
            )
