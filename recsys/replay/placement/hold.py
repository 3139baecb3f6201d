"""Samples that a method wants in memory: exemplars chosen by herding or by how sure the model is of them."""

import numpy as np
from numpy.typing import NDArray

from memhier.recsys.replay.parts import Parts
from memhier.recsys.replay.streams import Purpose, stream

__all__ = ["hold"]

Ints = NDArray[np.int64]


def hold(parts: Parts, ids: Ints) -> int:
    """Bring stored samples into memory, in place of others of their groups; return how many came."""
    members, residents = parts.tiers.members, parts.tiers.residents
    wanted = np.flatnonzero(np.isin(members.ids, ids))
    missing = wanted[members.slots[wanted] < 0]
    # Slots that hold what they will hold, and none of what is wanted.
    free = np.flatnonzero((residents.planned >= 0) & (residents.planned == residents.visible))
    free = free[~np.isin(residents.planned[free], wanted)]
    free = stream(parts.settings.seed, Purpose.HOLD, parts.step).permutation(free)
    slots, positions = [], []
    groups = members.group_of(members.labels[residents.planned[free]])
    for group in np.unique(members.group_of(members.labels[missing])).tolist():
        coming = missing[members.group_of(members.labels[missing]) == group]
        leaving = free[groups == group][: len(coming)]
        slots.append(leaving)
        positions.append(coming[: len(leaving)])
    if not slots:
        return 0
    where, what = np.concatenate(slots), np.concatenate(positions)
    # What is wanted may be leaving another slot, with values that storage has to get before they are read.
    elsewhere = residents.shown_elsewhere(where, what)
    stale = np.concatenate([where, elsewhere])
    stale = stale[residents.refreshed[stale]]
    parts.write_back(residents.visible[stale], stale)
    columns = parts.settings.schema.empty(len(what))
    parts.storage.read(what, columns)
    parts.empty(elsewhere)
    residents.plan_swaps(where, what)
    parts.memory.write(where, columns, members.labels[what].astype(np.int64), members.ids[what])
    residents.show(where, what)
    return len(where)
