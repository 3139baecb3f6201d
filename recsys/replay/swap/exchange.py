"""The step boundary: swaps that are due arrive, then those of the step are decided."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.arrays import as_ints, check_range
from memhier.errors import CorruptionError
from memhier.recsys.replay.batch import Batch
from memhier.recsys.replay.parts import Parts
from memhier.recsys.replay.schema import Columns, Schema, check_values
from memhier.recsys.replay.streams import Purpose, stream
from memhier.recsys.replay.swap.carousel import Swap
from memhier.recsys.replay.swap.policies import GateSwap, Pool, Used
from memhier.recsys.replay.swap.ratio import swaps

__all__ = ["arrive", "as_update", "as_used", "checked_scores", "decide", "end_step"]

Ints = NDArray[np.int64]

_REFILLS = 256  # vacant slots that one step fills


def as_used(parts: Parts, batch: Any) -> tuple[Ints, Ints]:
    """Return the slots and ids of a batch, or say what is wrong with it."""
    if isinstance(batch, Batch):
        # One that was drawn ahead cannot be drawn anew: what memory has no slot for any more has left it.
        if not parts.ahead.asked and batch.slots.max(initial=-1) >= parts.tiers.residents.slots:
            raise ValueError(f"batch: was drawn when memory had more than its {parts.tiers.residents.slots} slots; "
                             "draw another after resize")  # fmt: skip
        return batch.slots, batch.ids
    slots = as_ints("batch", batch)
    if slots.ndim != 1:
        raise ValueError(f"batch: expected a Batch, or slots of shape [n], got shape {list(slots.shape)}")
    check_range("batch", slots, parts.tiers.residents.slots, "a slot of memory")
    return slots, parts.memory.ids[slots]


def as_update(schema: Schema, update: Mapping[str, Any] | None, count: int) -> Columns:
    """Return new values of mutable fields, or say what is wrong with them."""
    values: Columns = {}
    if update is not None and not isinstance(update, Mapping):
        raise TypeError(f"update: expected a dict from mutable fields to their values, got {type(update).__name__}")
    for name, value in (update or {}).items():
        if name not in schema.mutable:
            raise ValueError(f"update: {name!r} is no mutable field; those are {schema.mutable}")
        values[name] = check_values(name, schema.fields[name], value)
        if len(values[name]) != count:
            raise ValueError(f"update[{name!r}]: expected {count} values as in the batch, got {len(values[name])}")
    return values


def checked_scores(parts: Parts, scores: Any, slots: Ints, ids: Ints) -> NDArray[Any] | None:
    """Return the scores of a batch as its policy takes them, or say what is wrong with them."""
    policy = parts.policy
    assert policy is not None
    checked = policy.check_scores(scores, len(slots))
    if isinstance(policy, GateSwap) and checked is not None:
        residents, memory = parts.tiers.residents, parts.memory
        there = slots < residents.slots
        # Scores are those of a sample: one that another has taken the place of is not judged by them.
        there[there] = (residents.visible[slots[there]] >= 0) & (memory.ids[slots[there]] == ids[there])
        policy.check_labels(checked, memory.labels[slots[there]])
    return checked


def end_step(parts: Parts, slots: Ints, ids: Ints, scores: NDArray[Any] | None) -> None:
    """Let swaps arrive that are due, and decide on those of this step."""
    before = parts.carousel.stall_s
    try:
        try:
            arrive(parts)
        finally:
            if parts.policy is not None:
                decide(parts, slots, ids, scores)
        if parts.settings.delay == 0:
            arrive(parts)
    finally:
        parts.step += 1
        parts.ahead.end_step()
        now = time.perf_counter()
        if parts.policy is not None:
            parts.policy.ratio.stalled(parts.carousel.stall_s - before, now - parts.last_boundary)
        parts.last_boundary = now


def decide(parts: Parts, slots: Ints, ids: Ints, scores: NDArray[Any] | None) -> None:
    """Choose what leaves and what comes in, and begin to read it.

    Parameters
    ----------
    slots, ids
        int64 [n]: those of the batch that was used.
    scores
        As the policy checked them.
    """
    policy, residents, members = parts.policy, parts.tiers.residents, parts.tiers.members
    assert policy is not None
    known = slots < residents.slots
    if not known.all():
        slots, ids, scores = slots[known], ids[known], None if scores is None else scores[known]
    if len(set(slots.tolist())) < len(slots):
        distinct = np.sort(np.unique(slots, return_index=True)[1])
        slots, ids, scores = slots[distinct], ids[distinct], None if scores is None else scores[distinct]
    swapped = residents.swapped[slots]
    # A slot whose swap has not arrived yet, or only now, was not used with what is in it.
    free = (swapped < 0) | (swapped + parts.settings.delay < parts.step)
    free &= residents.planned[slots] >= 0
    if scores is not None:
        # Scores are those of a sample: one that another has taken the place of is not judged by them.
        free &= parts.memory.ids[slots] == ids
        scores = scores[free]
    slots, swapped = slots[free], swapped[free]
    labels = members.labels[residents.planned[slots]].astype(np.int64)
    groups = members.group_of(labels)
    random = stream(parts.settings.seed, Purpose.SWAP, parts.step)
    count = swaps(policy.ratio, len(slots))
    chosen = policy.victims(Used(groups, labels, swapped, scores), count, random)
    leaving, entering = _incoming(parts, slots[chosen], _mixed(parts, groups[chosen], random), random)
    with parts.together():
        residents.plan_swaps(leaving, entering)
        filled, filling = _refills(parts, random)
        leaving, entering = np.concatenate([leaving, filled]), np.concatenate([entering, filling])
        if len(leaving):
            residents.note_swaps(leaving, parts.step)
            parts.carousel.issue(parts.step, leaving, entering)


def _mixed(parts: Parts, groups: Ints, random: np.random.Generator) -> Ints:
    """Return the groups that come in for these: others, where memory has fewer slots than there are classes.

    Those in memory are then any of all classes, equally likely, as slots and classes are chosen without looking.
    """
    residents, there = parts.tiers.residents, parts.tiers.members.groups
    if not parts.admission.by_class or parts.settings.same_class or len(there) <= residents.slots:
        return groups
    outside = np.array(sorted(number for number in there if not residents.of_group.get(number)), np.int64)
    count = min(len(outside), len(groups))
    entering = groups.copy()
    entering[random.permutation(len(groups))[:count]] = random.permutation(outside)[:count]
    return entering


def _incoming(parts: Parts, slots: Ints, groups: Ints, random: np.random.Generator) -> tuple[Ints, Ints]:
    """Return which of the slots get which positions: all of them, where their groups have enough."""
    assert parts.policy is not None
    of_groups: dict[int, list[int]] = {}
    for index, group in enumerate(groups.tolist()):
        of_groups.setdefault(group, []).append(index)
    entering = np.full(len(slots), -1, np.int64)
    for group, of_group in of_groups.items():
        pool = Pool(parts.tiers.members, parts.tiers.residents, group)
        drawn = parts.policy.incoming(pool, min(len(of_group), len(pool)), random)
        entering[of_group[: len(drawn)]] = drawn
    there = entering >= 0
    return slots[there], entering[there]


def _refills(parts: Parts, random: np.random.Generator) -> tuple[Ints, Ints]:
    """Plan samples for slots that have become vacant, and return which go where."""
    tiers = parts.tiers
    none = np.empty(0, np.int64)
    outside = tiers.members.size - tiers.residents.planned_count
    if not tiers.has_vacant() or outside == 0:
        return none, none
    slots = tiers.residents.vacant()[:_REFILLS]
    filled: list[tuple[int, int]] = []
    for slot in slots.tolist():
        every = (Pool(tiers.members, tiers.residents, group) for group in sorted(tiers.members.groups))
        pools = [pool for pool in every if len(pool)]
        if not pools:
            break
        if parts.admission.by_class:
            pool = min(pools, key=lambda pool: tiers.residents.of_group.get(pool.group, 0))
        else:
            shares = np.cumsum([len(pool) for pool in pools])
            pool = pools[int(np.searchsorted(shares, random.integers(shares[-1]), "right"))]
        position = int(pool.draw(1, random)[0])
        tiers.residents.plan(slot, position)
        filled.append((slot, position))
    pairs = np.array(filled, np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def arrive(parts: Parts) -> None:
    """Put swaps in place that are due.

    Raises
    ------
    OSError, CorruptionError
        When samples could not be read. What they were to replace stays in memory; everything else has arrived.
    """
    failure: BaseException | None = None
    while (swap := parts.carousel.due(parts.step - parts.settings.delay)) is not None:
        assert swap.read is not None
        wanted = _still_planned(parts, swap)
        readable: NDArray[np.bool_] = wanted
        if swap.read.exception() is not None:
            readable, failure = _read_one_by_one(parts, swap, wanted)
        with parts.together():
            for index in np.flatnonzero(wanted & ~readable).tolist():
                _stay(parts, int(swap.slots[index]))
            _install(parts, swap, np.flatnonzero(wanted & readable))
            parts.carousel.arrived()
    if failure is not None:
        parts.errors += 1
        raise failure


def _still_planned(parts: Parts, swap: Swap) -> NDArray[np.bool_]:
    """Return which samples of a swap nothing has come before."""
    residents = parts.tiers.residents
    there: NDArray[np.bool_] = residents.planned[swap.slots] == swap.positions
    there &= (residents.visible[swap.slots] != swap.positions) & (swap.positions >= 0)
    return there


def _install(parts: Parts, swap: Swap, index: Ints) -> None:
    residents, members = parts.tiers.residents, parts.tiers.members
    slots, positions = swap.slots[index], swap.positions[index]
    elsewhere = residents.shown_elsewhere(slots, positions)
    stale = np.concatenate([slots, elsewhere])
    stale = stale[residents.refreshed[stale]]
    parts.write_back(residents.visible[stale], stale)
    parts.empty(elsewhere)
    for position, newer in swap.late.items():
        for name, values in newer.items():
            swap.columns[name][swap.positions == position] = values
    # Nearly always all of it, which then needs no copy of its own.
    whole = len(index) == len(swap.slots)
    columns = swap.columns if whole else {name: values[index] for name, values in swap.columns.items()}
    parts.memory.write(slots, columns, members.labels[positions].astype(np.int64), members.ids[positions])
    residents.show(slots, positions)
    parts.carousel.swapped += len(slots)


def _read_one_by_one(
    parts: Parts, swap: Swap, wanted: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], BaseException | None]:
    """Read what can be read of a swap; return what that is, and the first failure."""
    readable = np.zeros(len(wanted), np.bool_)
    failure: BaseException | None = None
    for index in np.flatnonzero(wanted).tolist():
        one = slice(index, index + 1)
        try:
            parts.storage.read(swap.positions[one], {name: values[one] for name, values in swap.columns.items()})
            readable[index] = True
        except (CorruptionError, OSError) as error:
            if failure is None:
                id = int(parts.tiers.members.ids[swap.positions[index]])
                error.add_note(f"the sample of id {id} could not be swapped in; forget({{'id': {id}}}) removes it")
                failure = error
    return readable, failure


def _stay(parts: Parts, slot: int) -> None:
    """Keep in a slot what is visible there."""
    residents = parts.tiers.residents
    shown = int(residents.visible[slot])
    parts.tiers.vacate(slot)
    if shown >= 0 and parts.tiers.members.slots[shown] < 0:
        residents.plan(slot, shown)
