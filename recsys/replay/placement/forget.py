"""Samples that have to go: by request, from both tiers and from SSD, or because a tier shrinks."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.arrays import as_ints
from memhier.errors import CorruptionError
from memhier.recsys.replay.batch import Batch
from memhier.recsys.replay.parts import Parts
from memhier.recsys.replay.placement.memory import MemoryTier
from memhier.recsys.replay.placement.residents import Residents
from memhier.recsys.replay.placement.tiers import Decisions
from memhier.recsys.replay.state import commit
from memhier.recsys.replay.streams import Purpose, stream

__all__ = ["Where", "forget", "resize"]

Ints = NDArray[np.int64]
Where = Mapping[str, Any] | Callable[[Ints, Ints], NDArray[np.bool_]]

_MOVED = 1024


def forget(parts: Parts, where: Where) -> dict[str, int]:
    """Remove samples, commit, and make sure that their bytes are gone."""
    members = parts.tiers.members
    doomed = np.flatnonzero(_selected(parts, where))
    _check_movers(parts, doomed)
    shown = [parts.tiers.residents.slot_shown(position) for position in doomed.tolist()]
    _uncount(parts, doomed)
    parts.ahead.forget(doomed)
    remove(parts, doomed)
    commit(parts, {})
    # Also where nothing was found: what storage had dropped before may still have its bytes in a log.
    parts.storage.compact_fully()
    _verify(parts)
    assert len(parts.storage.samples) == members.size
    return {"samples": len(doomed), "memory_samples": sum(slot >= 0 for slot in shown)}


def _selected(parts: Parts, where: Where) -> NDArray[np.bool_]:
    members = parts.tiers.members
    ids, labels = members.ids.copy(), members.labels.astype(np.int64)
    if callable(where):
        chosen = np.asarray(where(ids, labels))
        if chosen.dtype != np.bool_ or chosen.shape != ids.shape:
            raise ValueError(f"where: expected a function that returns bool [{len(ids)}], got {chosen.dtype} "
                             f"{list(chosen.shape)}")  # fmt: skip
        return chosen
    if not isinstance(where, Mapping) or not where or set(where) - {"id", "label"}:
        raise ValueError(f"where={where!r}: expected a dict of 'id', 'label' or both, or a function of ids and labels")
    chosen = np.ones(len(ids), np.bool_)
    for name, values in (("id", ids), ("label", labels)):
        if name in where:
            chosen &= np.isin(values, as_ints(f"where[{name!r}]", where[name]).reshape(-1))
    return chosen


def _uncount(parts: Parts, doomed: Ints) -> None:
    """Let the stream be one in which the samples never came.

    Of what storage has dropped before, the share that would be forgotten now is estimated, class by class, as that of
    what it holds.
    """
    tiers, members = parts.tiers, parts.tiers.members
    if 0 < len(doomed) < members.size and tiers.limit is not None and tiers.seen > members.size:
        # A reservoir with room to spare would keep every sample to come, and no longer be a uniform sample. One that
        # has forgotten everything is as it was in the beginning.
        tiers.limit = members.size - len(doomed)
    for label in np.unique(members.labels[doomed]).tolist():
        gone = int(np.count_nonzero(members.labels[doomed] == label))
        there = int(np.count_nonzero(members.labels == label))
        seen = tiers.seen_of.get(label, there)
        lost = round(seen * gone / there)
        tiers.seen -= lost
        tiers.seen_of[label] = seen - lost
    tiers.seen = max(tiers.seen, members.size - len(doomed))


def _movers(parts: Parts, doomed: Ints) -> Ints:
    """Return the positions whose samples take the places of those that go."""
    size = parts.tiers.members.size
    return np.setdiff1d(np.arange(size - len(doomed), size), doomed)


def _check_movers(parts: Parts, doomed: Ints) -> None:
    """Make sure, before anything changes, that what has to move can be read."""
    movers = _movers(parts, doomed)
    failure: CorruptionError | None = None
    damaged: list[int] = []
    for start in range(0, len(movers), _MOVED):
        some = movers[start : start + _MOVED]
        try:
            parts.storage.raw(some)
        except CorruptionError as error:
            failure = failure or error
            damaged += [int(position) for position in some if not _is_readable(parts, position)]
    if failure is not None:
        ids = parts.tiers.members.ids[damaged].tolist()
        failure.add_note(f"nothing has changed; the damaged samples of ids {ids} would have to move: forget them first")
        raise failure


def _is_readable(parts: Parts, position: np.int64) -> bool:
    try:
        parts.storage.raw(np.array([position]))
    except CorruptionError:
        return False
    return True


def remove(parts: Parts, doomed: Ints) -> None:
    """Take samples out of both tiers; the last positions take the places of those that go."""
    tiers, members, residents = parts.tiers, parts.tiers.members, parts.tiers.residents
    parts.carousel.settle()
    parts.ahead.replaced(doomed)
    decisions = Decisions(0)
    for position in doomed.tolist():
        slot = residents.slot_shown(position)
        tiers.leave_memory(decisions, position)
        if slot >= 0:
            parts.memory.clear(np.array([slot]))
        for swap in parts.carousel.under_way:
            _blank(swap.columns, swap.positions == position)
            swap.positions[swap.positions == position] = -1
            swap.late.pop(position, None)
    size = members.size - len(doomed)
    holes, movers = doomed[doomed < size], _movers(parts, doomed)
    for start in range(0, len(holes), _MOVED):
        _move(parts, holes[start : start + _MOVED], movers[start : start + _MOVED])
    parts.storage.delete(np.arange(size, members.size))
    kept, before = members.table.rows(size), members.table.rows(members.size)
    for _ in range(len(doomed)):
        members.remove_last()
    parts.storage.drop_index_rows(members.table.keys(kept, before))


def _blank(columns: dict[str, NDArray[Any]], which: NDArray[np.bool_]) -> None:
    for values in columns.values():
        values[which] = 0


def _move(parts: Parts, positions: Ints, old: Ints) -> None:
    """Let samples have other positions, whose samples are gone."""
    members, residents = parts.tiers.members, parts.tiers.residents
    parts.storage.put_raw(positions, parts.storage.raw(old))
    for position, mover in zip(positions.tolist(), old.tolist(), strict=True):
        label, id = int(members.labels[mover]), int(members.ids[mover])
        members.replace(position, label, id)
        residents.renamed(position, mover)
        if parts.policy is not None:
            parts.policy.renamed(position, mover)
        parts.ahead.renamed(position, mover)
        for swap in parts.carousel.under_way:
            swap.positions[swap.positions == mover] = position
            if mover in swap.late:
                swap.late[position] = swap.late.pop(mover)


def _verify(parts: Parts) -> None:
    """Make sure that SSD holds no bytes but those of samples that are there."""
    for log in parts.storage.logs:
        dead = int(log.stats()["dead_bytes"])
        if dead:
            raise CorruptionError(
                f"{parts.storage.store.path}: {dead} bytes of forgotten or replaced samples could not be removed, "
                "because something beside them is damaged; check() says what"
            )
    store = parts.storage.store
    named = {info.path.name for info in store.segments().values()}
    left = sorted(file.name for file in (store.path / "segments").iterdir() if file.name not in named)
    if left:
        raise CorruptionError(f"{store.path}: {left[0]} is still there: it could not be removed, or somebody reads it")


def resize(parts: Parts, slots: int | None, limit: int | None) -> None:
    """Give the tiers other sizes."""
    tiers = parts.tiers
    if limit is not None:
        if limit > tiers.members.size and tiers.seen > tiers.members.size and parts.admission.name != "ring":
            raise ValueError(
                f"storage={limit} samples: {tiers.seen} came and {tiers.members.size} were kept; the others are gone, "
                "so that a larger uniform sample cannot be had"
            )
        if limit < tiers.members.size:
            random = stream(parts.settings.seed, Purpose.RESIZE, tiers.arrivals)
            doomed = np.sort(random.permutation(tiers.members.size)[limit:])
            _check_movers(parts, doomed)
            remove(parts, doomed)
        tiers.limit = limit
    if slots is not None and slots != tiers.residents.slots:
        _resize_memory(parts, slots)
    parts.keep_within()


def _resize_memory(parts: Parts, slots: int) -> None:
    """Move memory to another slab; where it shrinks, slots drawn at random go."""
    tiers, old = parts.tiers, parts.tiers.residents
    parts.carousel.settle()
    random = stream(parts.settings.seed, Purpose.RESIZE, tiers.arrivals)
    keep = np.sort(_kept_slots(parts, slots, random))
    residents = Residents(slots, tiers.members)
    memory = MemoryTier.make(parts.settings.schema, slots)
    stale = np.flatnonzero(old.refreshed)
    parts.write_back(old.visible[stale], stale)
    for slot in np.setdiff1d(np.arange(old.slots), keep).tolist():
        old.plan(slot, -1)
    number = np.full(old.slots, -1, np.int64)
    number[keep] = np.arange(len(keep))
    batch = Batch.empty(parts.settings.schema, len(keep))
    parts.memory.read(keep, batch)
    memory.write(np.arange(len(keep)), batch.data, batch.labels, batch.ids)
    planned, visible, swapped = (np.full(slots, -1, np.int64) for _ in range(3))
    planned[: len(keep)], visible[: len(keep)] = old.planned[keep], old.visible[keep]
    swapped[: len(keep)] = old.swapped[keep]
    order = np.concatenate([np.flatnonzero(visible >= 0), np.flatnonzero(visible < 0)])
    residents.restore(planned, visible, swapped, order, int(np.count_nonzero(visible >= 0)))
    for swap in parts.carousel.under_way:
        there = number[swap.slots] >= 0
        swap.columns = {name: values[there] for name, values in swap.columns.items()}
        swap.slots, swap.positions = number[swap.slots[there]], swap.positions[there]
    # Slots that were never used need no row: storage may be smaller than an index of all.
    parts.storage.drop_index_rows(old.table.keys(0, old.table.rows(old.slots)))
    used = (planned >= 0) | (visible >= 0) | (swapped >= 0) | (order != np.arange(slots))
    residents.table.mark(np.flatnonzero(used))
    tiers.residents = residents
    tiers.recount_vacant()
    parts.memory.slab.close()
    parts.memory = memory


def _kept_slots(parts: Parts, slots: int, random: np.random.Generator) -> Ints:
    """Return the slots that stay: all, or as many as are wanted, of the largest classes the fewest."""
    residents = parts.tiers.residents
    if slots >= residents.slots:
        return np.arange(residents.slots)
    used = random.permutation(np.flatnonzero((residents.planned >= 0) | (residents.visible >= 0)))
    if parts.admission.by_class and len(used) > slots:
        holder = np.where(residents.planned[used] >= 0, residents.planned[used], residents.visible[used])
        labels = parts.tiers.members.labels[holder]
        # The rank of each within its class: those of low rank stay, so that classes give way evenly.
        order = np.argsort(labels, kind="stable")
        starts = np.searchsorted(labels[order], labels[order])
        ranks = np.empty(len(used), np.int64)
        ranks[order] = np.arange(len(used)) - starts
        used = used[np.argsort(ranks, kind="stable")]
    return used[:slots]
