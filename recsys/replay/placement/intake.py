"""Samples that come in, and batches that are drawn."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.arrays import as_ints, check_range
from memhier.recsys.replay.parts import Parts
from memhier.recsys.replay.schema import Columns, as_array
from memhier.recsys.replay.streams import Uniforms

__all__ = ["as_labels", "distinct", "refresh", "take_in"]

Ints = NDArray[np.int64]


def as_labels(parts: Parts, labels: Any, count: int) -> Ints:
    """Return labels as integers, -1 where there are none; the first samples decide whether there are."""
    settings, members = parts.settings, parts.tiers.members
    decided = settings.same_class is None and members.size > 0
    if labels is None:
        if members.by_class or parts.admission.by_class:
            raise ValueError("labels: this buffer keeps classes, so every sample needs a label")
        if decided and members.labels[0] >= 0:
            raise ValueError("labels: the samples before had some, so every sample needs a label; or same_class=False")
        return np.full(count, -1, np.int64)
    marks = as_ints("labels", as_array("labels", labels))
    if marks.shape != (count,):
        raise ValueError(f"labels: expected shape [{count}], got {list(marks.shape)}")
    check_range("labels", marks, 2**31, "a label, 0 to 2**31 - 1")
    if decided and members.labels[0] < 0:
        raise ValueError("labels: the samples before had none; give labels to all samples, or same_class=False")
    return marks


def take_in(parts: Parts, columns: Columns, labels: Ints, ids: Ints) -> Ints:
    """Add samples and return the slots of those that are in memory now, -1 for others."""
    decisions = parts.admission.admit(parts.tiers, labels, ids)
    left = np.array([*decisions.leaving.items()], np.int64).reshape(-1, 2)
    parts.write_back(left[:, 0], left[:, 1])
    kept = _lasting(decisions.positions)
    if len(kept):
        if parts.tiers.limit is not None:
            parts.ahead.replaced(decisions.positions[kept])
        some = columns if len(kept) == len(labels) else {name: values[kept] for name, values in columns.items()}
        parts.storage.append(decisions.positions[kept], some)
    slots: Ints = np.full(len(labels), -1, np.int64)
    if decisions.writes:
        pairs = np.array([*decisions.writes.items()], np.int64)
        taken = pairs[:, 1]
        shown = parts.storage.round_trip({name: values[taken] for name, values in columns.items()})
        parts.memory.write(pairs[:, 0], shown, labels[taken], ids[taken])
        slots[taken] = pairs[:, 0]
    for position, sample in decisions.late.items():
        one = {name: values[sample : sample + 1] for name, values in columns.items()}
        parts.arrive_late(position, parts.storage.round_trip(one))
    return slots


def _lasting(positions: Ints) -> Ints:
    """Return which samples storage keeps: those with a position that no later one of them takes."""
    taken = np.unique(positions[::-1], return_index=True)
    last = len(positions) - 1 - taken[1][taken[0] >= 0]
    return np.sort(last)


def refresh(parts: Parts, slots: Ints, ids: Ints, values: Columns) -> None:
    """Give samples that are still where they were new values of mutable fields."""
    residents, memory = parts.tiers.residents, parts.memory
    there = slots < residents.slots
    there[there] = (residents.visible[slots[there]] >= 0) & (memory.ids[slots[there]] == ids[there])
    stored = parts.storage.round_trip_side({name: value[there] for name, value in values.items()})
    with parts.together():
        memory.write(slots[there], stored)
        residents.refreshed[slots[there]] = True


def distinct(draws: Uniforms, n: int, count: int) -> Ints:
    """Draw distinct numbers below `count`, every set of n equally likely."""
    if n == 0:
        return np.empty(0, np.int64)
    if 2 * n > count:
        return np.argpartition(draws.take(count), n - 1)[:n]
    drawn: Ints = (draws.take(n) * count).astype(np.int64)
    if len(set(drawn.tolist())) == n:
        return drawn
    # What is drawn a second time is drawn anew. By symmetry no set of n is favoured.
    while True:
        again: NDArray[np.bool_] = np.ones(n, np.bool_)
        again[np.unique(drawn, return_index=True)[1]] = False
        if not again.any():
            return drawn
        drawn[again] = (draws.take(int(again.sum())) * count).astype(np.int64)
