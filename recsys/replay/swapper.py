"""Swaps: a thread reads the samples that come into memory, the boundary between steps puts them in place."""

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier import backend
from memhier.errors import CorruptionError
from memhier.io.reader import PendingRead
from memhier.recsys.replay.ahead import BatchQueue
from memhier.recsys.replay.batch import Batch
from memhier.recsys.replay.placement.memory import Memory, most_blocks
from memhier.recsys.replay.placement.placement import Decisions, Placement
from memhier.recsys.replay.policies import DeckSwap, FixedRatio, GateSwap, Pool, RandomSwap, Used, swaps
from memhier.recsys.replay.schema import Columns
from memhier.recsys.replay.settings import BufferSettings
from memhier.recsys.replay.storage.index import SLOTS
from memhier.recsys.replay.storage.storage import Storage
from memhier.recsys.replay.streams import Purpose, Streams, stream

__all__ = ["Swap", "Swapper"]

Ints = NDArray[np.int64]

_Scored = tuple[Ints, NDArray[Any]]  # ids of samples, and their scores
_NONE: Ints = np.empty(0, np.int64)
_REFILLS = 256  # vacant slots that one step fills
_MOVED = 256  # samples that move to another memory together


@dataclass(slots=True)
class Swap:
    """The samples that a step brings in.

    Attributes
    ----------
    step
        In which it was decided.
    slots, positions
        int64 [k]: the slot of each position; -1 for a position that comes no more.
    columns
        Of the samples, to be read; none if they are read as they arrive.
    room
        The arrays that they lie in, which may be larger.
    read
        Ends once they were read; None if they are read as they arrive.
    late
        From a position to columns [1] that it has got since.
    """

    step: int
    slots: Ints
    positions: Ints
    columns: Columns
    room: Columns
    read: "PendingRead | Future[None] | None" = None
    late: dict[int, Columns] = field(default_factory=dict)


class Swapper:
    """Moves samples between storage and memory. The only writer of memory.

    Parameters
    ----------
    settings, storage, placement, memory, ahead
        Of the buffer.

    Attributes
    ----------
    step
        How many steps have ended.
    under_way
        Swaps that have not arrived, the oldest first.
    swapped, errors
        Samples that arrived, and samples of memory or swaps that could not be read.
    stalls, stall_s
        Swaps that a step waited for, and seconds it waited.
    read_s
        Seconds that the thread has spent reading and decoding.
    at_odds
        Whether a change of both memory and placement began and did not end: an error leaves it True for good.
    """

    def __init__(
        self, settings: BufferSettings, storage: Storage, placement: Placement, memory: Memory, ahead: BatchQueue
    ) -> None:
        self._settings = settings
        self._schema = settings.held
        self._storage = storage
        self._placement = placement
        self._memory = memory
        self._ahead = ahead
        if isinstance(settings.policy, DeckSwap):
            placement.entered = self._entered
        self._thread: ThreadPoolExecutor | None = None
        self._is_one_plain_field = len(self._schema.columns) == 1 and not self._schema.mutable
        self._random = Streams(settings.seed, Purpose.SWAP)
        self._spare: list[Columns] = []
        self._pid = os.getpid()
        self._last_boundary = time.perf_counter()
        self.step: int = 0
        self.under_way: deque[Swap] = deque()
        self.swapped: int = 0
        self.errors: int = 0
        self.stalls: int = 0
        self.stall_s: float = 0.0
        self.read_s: float = 0.0
        self.at_odds: bool = False

    @property
    def memory_bytes(self) -> int:
        """DRAM held by the samples read, and by arrays to be filled again."""
        return sum(map(_bytes, self._spare)) + sum(_bytes(swap.room) for swap in self.under_way)

    def stats(self) -> dict[str, Any]:
        """Return plain numbers."""
        return {
            "swapped": self.swapped,
            "under_way": sum(len(swap.slots) for swap in self.under_way),
            "stalls": self.stalls,
            "stall_s": self.stall_s,
            "read_s": self.read_s,
            "errors": self.errors,
        }

    def close(self) -> None:
        """Stop the thread."""
        if self._thread is not None and self._pid == os.getpid():
            self._thread.shutdown(wait=True, cancel_futures=True)
        self.under_way.clear()

    def _entered(self, position: int, replaced: int) -> None:
        """Let the deck know of a position that has joined a group."""
        assert isinstance(self._settings.policy, DeckSwap)
        pool = Pool(self._placement, self._placement.members.group_at(position))
        self._settings.policy.entered(pool, position, replaced)

    # Samples that are added, changed or held.

    def take_in(self, decisions: Decisions, columns: Columns, labels: Ints, ids: Ints) -> Ints:
        """Write samples that were admitted to storage and memory; return the slot of each, -1 for none."""
        if decisions.leaving:
            self._write_back(*np.array([*decisions.leaving.items()], np.int64).T)
        kept = decisions.lasting()
        if len(kept):
            positions = decisions.positions[kept]
            if self._placement.limit is not None:
                self._ahead.replaced(positions)
            if len(kept) == len(labels) <= self._storage.together:
                self._storage.append(positions, columns)
            else:
                for some in self._pieces(len(kept)):
                    self._storage.append(positions[some], _chosen(columns, kept[some]))
        slots: Ints = np.empty(len(labels), np.int64)
        slots.fill(-1)
        if decisions.writes:
            where, taken = np.array([*decisions.writes.items()], np.int64).T
            # Which samples leave if blocks are too few depends on all that come.
            for some in self._pieces(len(taken)) if self._memory.blocks is None else [slice(None)]:
                back = self._storage.round_trip(_chosen(columns, taken[some]))
                stays = self._put(where[some], back, labels[taken[some]], ids[taken[some]])
                slots[taken[some][stays]] = where[some][stays]
        for position, sample in decisions.late.items():
            # A copy: the caller may use its arrays again before the swap arrives.
            self._arrive_late(position, self._storage.round_trip(_chosen(columns, [sample])))
        return slots

    def _pieces(self, count: int) -> list[slice]:
        """Return the parts of so many samples that are copied together, so that a large call takes no more memory."""
        together = self._storage.together
        return [slice(start, start + together) for start in range(0, count, together)]

    def _put(self, slots: Ints, columns: Columns, labels: Ints, ids: Ints) -> NDArray[np.bool_]:
        """Write samples into slots that are said to show them; return which have stayed, bool [n].

        If the blocks of memory are too few, samples drawn from all of memory leave it, these among them.
        """
        kept = np.ones(len(slots), np.bool_)
        if self._memory.blocks is None:
            self._memory.write(slots, columns, labels, ids)
            return kept
        needed = self._memory.blocks_for(columns)
        excess = int(needed.sum()) - int(self._memory.blocks_at(slots).sum()) - self._free_blocks()
        if excess > 0:
            index_of = {slot: index for index, slot in enumerate(slots.tolist())}
            number = self.step + self._placement.arrivals
            for slot in (
                stream(self._settings.seed, Purpose.FIT, number).permutation(self._placement.occupied()).tolist()
            ):
                if excess <= 0:
                    break
                index = index_of.get(slot, -1)
                if index >= 0:
                    kept[index] = False
                    excess -= int(needed[index])
                else:
                    excess -= int(self._memory.blocks_at(np.array([slot]))[0])
                self._evict(slot)
        if kept.all():
            self._memory.write(slots, columns, labels, ids)
        else:
            self._memory.write(slots[kept], _chosen(columns, kept), labels[kept], ids[kept])
        return kept

    def _evict(self, slot: int) -> None:
        """Take the sample that a slot shows out of memory; a swap that was bringing another still does."""
        placement, position = self._placement, int(self._placement.visible[slot])
        where = np.array([slot])
        if placement.refreshed[slot]:
            self._write_back(np.array([position]), where)
        if placement.planned[slot] == position:
            placement.leave_memory(position)
        else:
            placement.hide(where)
        self._memory.clear(where)

    def _free_blocks(self) -> int:
        """Return how many blocks of memory are free, once those of slots that show nothing are."""
        blocks = self._memory.blocks
        assert blocks is not None
        hidden = np.flatnonzero(self._placement.visible < 0)
        hidden = hidden[self._memory.blocks_at(hidden) > 0]
        if len(hidden):
            self._memory.clear(hidden)
        return blocks.free_count

    def _refilled(self) -> int:
        """Return how many vacant slots a step may fill."""
        if self._memory.blocks is None:
            return _REFILLS
        free = self._free_blocks()
        placement = self._placement
        mean = (self._memory.blocks.count - free) / max(1, placement.count)
        # One of the longest samples fits beside those that are on their way.
        coming = np.count_nonzero((placement.planned >= 0) & (placement.visible < 0))
        return min(_REFILLS, max(0, int((free - most_blocks(self._schema)) / max(1.0, mean)) - int(coming)))

    def refresh(self, slots: Ints, ids: Ints, values: Columns) -> None:
        """Give samples that are still in their slots new values of mutable fields."""
        there = self._still_there(slots, ids)
        stored = self._storage.round_trip_side(_chosen(values, there))
        self.at_odds = True
        self._memory.write(slots[there], stored)
        self._placement.note_refreshed(slots[there], True)
        self.at_odds = False

    def write_back(self) -> None:
        """Give storage all mutable fields that only memory has."""
        stale = np.flatnonzero(self._placement.refreshed)
        if len(stale):
            self._write_back(self._placement.visible[stale], stale)
            self._placement.note_refreshed(stale, False)

    def _write_back(self, positions: Ints, slots: Ints) -> None:
        """Give storage the mutable fields of samples that leave memory.

        Swaps that are under way and bring them back have read them before.
        """
        for some in self._pieces(len(slots)):
            columns = {name: self._memory.views[name][slots[some]] for name in self._schema.mutable}
            self._storage.append_side(positions[some], columns)
            for index, position in enumerate(positions[some].tolist()):
                self._arrive_late(position, _chosen(columns, slice(index, index + 1)))

    def _arrive_late(self, position: int, columns: Columns) -> None:
        """Let a swap that is bringing a position bring these values of it."""
        for swap in self.under_way:
            if swap.read is not None and (swap.positions == position).any():
                swap.late[position] = swap.late.get(position, {}) | columns

    def _still_there(self, slots: Ints, ids: Ints) -> NDArray[np.bool_]:
        """Return which slots still show the samples of these ids."""
        placement, there = self._placement, slots < self._placement.slots
        there[there] = (placement.visible[slots[there]] >= 0) & (self._memory.ids[slots[there]] == ids[there])
        return there

    def hold(self, ids: Ints) -> int:
        """Bring stored samples into memory, in place of others of their groups; return how many came."""
        placement, members = self._placement, self._placement.members
        wanted = np.flatnonzero(np.isin(members.ids, ids))
        missing = wanted[placement.slot_of[wanted] < 0]
        # Slots whose sample stays, and is not wanted.
        free = np.flatnonzero((placement.planned >= 0) & (placement.planned == placement.visible))
        free = free[~np.isin(placement.planned[free], wanted)]
        free = stream(self._settings.seed, Purpose.HOLD, self.step).permutation(free)
        groups, missing_groups = members.groups_at(placement.planned[free]), members.groups_at(missing)
        slots, positions = [], []
        for group in np.unique(missing_groups).tolist():
            coming = missing[missing_groups == group]
            leaving = free[groups == group][: len(coming)]
            slots.append(leaving)
            positions.append(coming[: len(leaving)])
        if not slots:
            return 0
        where, which = np.concatenate(slots), np.concatenate(positions)
        # A wanted sample may be leaving another slot, with values that storage has to get before they are read.
        elsewhere = self._take_back(where, which)
        columns = self._schema.empty(len(which))
        self._storage.read(which, columns)
        if len(elsewhere):
            self._empty(elsewhere)
        self.at_odds = True
        placement.plan_swaps(where, which)
        placement.show(where, which)
        kept = self._put(where, columns, *placement.labels_and_ids(which))
        self.at_odds = False
        return int(np.count_nonzero(kept))

    def _take_back(self, slots: Ints, positions: Ints) -> Ints:
        """Write back the samples that slots lose to positions; return the other slots that show these."""
        elsewhere = self._placement.shown_elsewhere(slots, positions)
        if not self._schema.mutable:
            return elsewhere
        stale = np.concatenate([slots, elsewhere])
        stale = stale[self._placement.refreshed[stale]]
        if len(stale):
            self._write_back(self._placement.visible[stale], stale)
        return elsewhere

    def _empty(self, slots: Ints) -> None:
        """Show nothing in slots any more, and overwrite the samples."""
        self._memory.clear(slots)
        self._placement.hide(slots)

    # The end of a step.

    def checked_scores(self, scores: Any, slots: Ints, ids: Ints) -> NDArray[Any] | None:
        """Return the scores of a batch as the policy takes them; raise for others."""
        policy = self._settings.policy
        if policy is None:
            return None
        checked = policy.check_scores(scores, len(slots))
        if isinstance(policy, GateSwap) and checked is not None:
            # Scores are those of a sample: they do not judge one that has taken its place.
            policy.check_labels(checked, self._memory.labels[slots[self._still_there(slots, ids)]])
        return checked

    def end_step(self, slots: Ints, ids: Ints, scores: NDArray[Any] | None) -> None:
        """Let swaps arrive that are due, and decide on those of this step.

        Parameters
        ----------
        slots, ids
            int64 [n]: those of the batch that was used.
        scores
            As `checked_scores` returned them.
        """
        policy, before = self._settings.policy, self.stall_s
        try:
            try:
                self._arrive()
            finally:
                if policy is not None:
                    self._decide(slots, ids, scores)
            if self._settings.delay == 0:
                self._arrive()
        finally:
            self.step += 1
            if self._ahead.asked:
                self._ahead.end_step()
            now = time.perf_counter()
            if policy is not None:
                policy.ratio.stalled(self.stall_s - before, now - self._last_boundary)
            self._last_boundary = now

    def end_step_at_once(self, slots: Ints) -> bool:
        """End a step as `end_step` does, its changes in one call of the core, between which no interrupt comes.

        Returns
        -------
        bool
            Whether it has; if not, nothing has changed but the count of waits. It does the usual: one random swap
            arrives, whole, in a memory that is full, and another begins whose samples lie in files.
        """
        core, step = backend.core, self.step
        due = [swap for swap in self.under_way if swap.step <= step - self._settings.delay]
        if core is None or len(due) > 1 or not self._is_simple():
            return False
        after: dict[str, Any] = {"step": step + 1}
        if due and not self._has_landed(due[0], after):
            return False
        begun = self._begun(*self._chosen_swaps(slots, None, self._random.at(step)))
        if begun is None:
            return False
        after["under_way"] = deque([*islice(self.under_way, len(due), None), begun])
        if due and len(self._spare) < self._most_spare:
            after["_spare"] = [*self._spare, due[0].room]
        return core.end_step(
            placement=self._placement.arrays(core),
            memory=self._memory.arrays(core),
            coming=_as_coming(core, due[0]) if due else None,
            next=_as_coming(core, begun),
            step=step, owner=self, after=after,
        )  # fmt: skip

    def _is_simple(self) -> bool:
        """Whether nothing but samples of one plain field move, at random."""
        policy, placement = self._settings.policy, self._placement
        return (
            type(policy) is RandomSwap
            and type(policy.ratio) is FixedRatio
            and self._settings.delay > 0
            and not self._ahead.asked
            and self._is_one_plain_field
            and not placement.members.by_class
            and placement.count == placement.planned_count == placement.slots
        )

    def _has_landed(self, swap: Swap, after: dict[str, Any]) -> bool:
        """Wait until a swap was read; return whether it was, and add the numbers that it changes."""
        if not isinstance(swap.read, PendingRead) or swap.late:
            return False
        if self._awaited(swap.read) is not None:
            return False
        after["read_s"], after["swapped"] = self.read_s + swap.read.seconds, self.swapped + len(swap.slots)
        return True

    def _begun(self, slots: Ints, positions: Ints) -> Swap | None:
        """Begin to read a swap; None if that takes more than to read files."""
        if not len(slots) or self._storage.has_staged(positions) or len(slots) > self._readable():
            return None
        swap = self._set_out(self.step, slots, positions, flushes=False)
        if swap.read is None:
            self._spare.append(swap.room)
            return None
        return swap

    def _set_out(self, step: int, slots: Ints, positions: Ints, flushes: bool) -> Swap:
        """Return a swap that the reader has begun to read, if it can."""
        room = self._room(len(slots))
        whole = len(next(iter(room.values()))) == len(slots)
        swap = Swap(step, slots, positions, room if whole else _chosen(room, slice(len(slots))), room)
        swap.read = self._storage.begin_read(positions, swap.columns, flushes)
        return swap

    def _decide(self, slots: Ints, ids: Ints, scores: NDArray[Any] | None) -> None:
        """Choose the samples that leave and those that come in, and begin to read these."""
        placement = self._placement
        random = self._random.at(self.step)
        scored = None if scores is None else (ids, scores)
        leaving, entering = self._chosen_swaps(slots, scored, random)
        self.at_odds = True
        placement.plan_swaps(leaving, entering)
        if placement.planned_count < min(len(placement.planned), placement.members.size):
            filled, filling = self._refills(random)
            leaving, entering = np.concatenate([leaving, filled]), np.concatenate([entering, filling])
        if len(leaving):
            placement.note_swaps(leaving, self.step)
            self._issue(self.step, leaving, entering)
        self.at_odds = False

    def _chosen_swaps(self, slots: Ints, scored: _Scored | None, random: np.random.Generator) -> tuple[Ints, Ints]:
        """Choose the samples that leave and those that come in; return the slots and the positions."""
        policy, placement = self._settings.policy, self._placement
        assert policy is not None
        if self._ahead.asked:  # else the batch was drawn from the slots that there are
            known = slots < len(placement.planned)
            slots, scored = slots[known], _some(scored, known)
        if len(set(slots.tolist())) < len(slots):
            distinct = np.sort(np.unique(slots, return_index=True)[1])
            slots, scored = slots[distinct], _some(scored, distinct)
        # A slot whose swap has not arrived yet, or only now, was not used with the sample that is in it.
        free = placement.swapped[slots] < max(0, self.step - self._settings.delay)
        if placement.has_vacant():
            free &= placement.planned[slots] >= 0
        if scored is not None:
            # Scores are those of a sample: they do not judge one that has taken its place.
            free &= self._memory.ids[slots] == scored[0]
        slots = slots[free]
        count = swaps(policy.ratio, len(slots))
        if type(policy) is RandomSwap and not placement.members.by_class:  # which looks at no sample
            leaving = slots[random.permutation(len(slots))[:count]]
            entering = Pool(placement, 0).draw(count, random) if count else _NONE
            return leaving[: len(entering)], entering
        labels, groups = placement.labels_and_groups(placement.planned[slots])
        scores = None if scored is None else scored[1][free]
        chosen = policy.victims(Used(groups, labels, placement.swapped[slots], scores), count, random)
        return self._incoming(slots[chosen], self._mixed(groups[chosen], random), random)

    def _mixed(self, groups: Ints, random: np.random.Generator) -> Ints:
        """Return the groups that come in for these: others, if memory has fewer slots than there are classes.

        Those in memory are then any of all classes, equally likely, as slots and classes are chosen without looking.
        """
        settings, there = self._settings, self._placement.members.groups
        if not settings.admission.by_class or settings.same_class or len(there) <= self._placement.slots:
            return groups
        inside = self._placement.of_group
        outside = np.array(sorted(number for number in there if not inside.get(number)), np.int64)
        count = min(len(outside), len(groups))
        entering = groups.copy()
        entering[random.permutation(len(groups))[:count]] = random.permutation(outside)[:count]
        return entering

    def _incoming(self, slots: Ints, groups: Ints, random: np.random.Generator) -> tuple[Ints, Ints]:
        """Return which of the slots get which positions: all of them, if their groups have enough."""
        assert self._settings.policy is not None
        of_groups: dict[int, list[int]] = {}
        for index, group in enumerate(groups.tolist()):
            of_groups.setdefault(group, []).append(index)
        entering = np.full(len(slots), -1, np.int64)
        for group, of_group in of_groups.items():
            pool = Pool(self._placement, group)
            drawn = self._settings.policy.incoming(pool, min(len(of_group), len(pool)), random)
            if len(drawn) == len(slots):  # of the one group that there is
                return slots, np.asarray(drawn, np.int64)
            entering[of_group[: len(drawn)]] = drawn
        there = entering >= 0
        return slots[there], entering[there]

    def _refills(self, random: np.random.Generator) -> tuple[Ints, Ints]:
        """Plan samples for vacant slots; return these slots and the positions planned."""
        placement, members = self._placement, self._placement.members
        filled: list[tuple[int, int]] = []
        for slot in placement.vacant()[: self._refilled()].tolist():
            every = (Pool(placement, group) for group in sorted(members.groups))
            pools = [pool for pool in every if len(pool)]
            if not pools:
                break
            if self._settings.admission.by_class:
                pool = min(pools, key=lambda pool: placement.of_group.load(pool.group))
            else:
                shares = np.cumsum([len(pool) for pool in pools])
                pool = pools[int(np.searchsorted(shares, random.integers(shares[-1]), "right"))]
            position = int(pool.draw(1, random)[0])
            placement.plan(slot, position)
            filled.append((slot, position))
        pairs = np.array(filled, np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def _issue(self, step: int, slots: Ints, positions: Ints) -> None:
        """Begin to read; a swap that memory has no room for beside others is read as it arrives."""
        self._storage.settle(positions)
        if len(slots) > self._readable():
            self.under_way.append(Swap(step, slots, positions, {}, {}))
            return
        swap = self._set_out(step, slots, positions, flushes=True)
        if swap.read is None:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "carousel")
            swap.read = self._thread.submit(self._read, swap)
        self.under_way.append(swap)

    def _readable(self) -> int:
        """Return how many samples may be read beside those that are, at least none."""
        most = self._storage.buffers.ahead
        if most is None:
            return 2**62
        return max(0, most - sum(_bytes(swap.room) for swap in self.under_way)) // self._schema.sample_bytes

    def _room(self, count: int) -> Columns:
        """Return columns for `count` samples to be read into."""
        for index, columns in enumerate(self._spare):
            if len(next(iter(columns.values()))) >= count:
                return self._spare.pop(index)
        self._spare.clear()  # they are too small
        return self._schema.empty(count)

    def _read(self, swap: Swap) -> None:
        start = time.perf_counter()
        self._storage.read_settled(swap.positions, swap.columns)
        self.read_s += time.perf_counter() - start

    # Arrivals.

    def _arrive(self) -> None:
        """Put swaps in place that are due.

        A swap stays under way until it has arrived: after an interrupt, the next step finds it again.

        Raises
        ------
        OSError, CorruptionError
            If samples could not be read. The samples that they were to replace stay; all others have arrived.
        """
        failure: BaseException | None = None
        while self.under_way and self.under_way[0].step <= self.step - self._settings.delay:
            if self.under_way[0].read is None:
                self._read_part()
            swap = self.under_way[0]
            failure = self._put_in_place(swap) or failure
            self.under_way.popleft()
            if len(self._spare) < self._most_spare:
                self._spare.append(swap.room)
            self.at_odds = False
        if failure is not None:
            self.errors += 1
            raise failure

    @property
    def _most_spare(self) -> int:
        return 2 if self._storage.buffers.ahead is None else 1

    def _read_part(self) -> None:
        """Read the first of the next swap's samples, as many as there is room for; the rest is a swap of its own."""
        swap = self.under_way.popleft()
        count = max(1, min(self._readable(), len(swap.slots)))
        if count < len(swap.slots):
            self.under_way.appendleft(Swap(swap.step, swap.slots[count:], swap.positions[count:], {}, {}))
        there = np.flatnonzero(swap.positions[:count] >= 0)
        slots, positions = swap.slots[there], swap.positions[there]
        self._storage.settle(positions)
        room = self._room(count)
        read: Future[None] = Future()
        part = Swap(swap.step, slots, positions, _chosen(room, slice(len(slots))), room, read)
        self.under_way.appendleft(part)
        try:
            self._read(part)
        except BaseException as error:
            read.set_exception(error)
        else:
            read.set_result(None)

    def _put_in_place(self, swap: Swap) -> BaseException | None:
        """Put a swap in place that was read, as far as it could be; return the first failure."""
        error, failure = self._outcome(swap), None
        # Samples that nothing has come before.
        wanted: NDArray[np.bool_] = self._placement.planned[swap.slots] == swap.positions
        wanted &= (self._placement.visible[swap.slots] != swap.positions) & (swap.positions >= 0)
        self.at_odds = True
        if error is not None:
            readable, failure = self._read_one_by_one(swap, wanted)
            for slot in swap.slots[wanted & ~readable].tolist():
                self._placement.keep_shown(slot)
            wanted &= readable
        self._install(swap, wanted.nonzero()[0])
        return failure

    def _outcome(self, swap: Swap) -> BaseException | None:
        """Wait until a swap was read; return the error of the read."""
        assert swap.read is not None
        error = self._awaited(swap.read)
        if isinstance(swap.read, PendingRead):
            self.read_s += swap.read.seconds
        return error

    def _awaited(self, read: "PendingRead | Future[None]") -> BaseException | None:
        """Wait until a read has ended, and count that; return its error."""
        ready, start = read.done(), time.perf_counter()
        error = read.exception()
        if not ready:
            self.stalls += 1
            self.stall_s += time.perf_counter() - start
        return error

    def _install(self, swap: Swap, index: Ints) -> None:
        slots, positions = swap.slots[index], swap.positions[index]
        elsewhere = self._take_back(slots, positions)
        if len(elsewhere):
            self._empty(elsewhere)
        for position, newer in swap.late.items():
            for name, values in newer.items():
                swap.columns[name][swap.positions == position] = values
        # A whole swap, the usual case, needs no copy.
        columns = swap.columns if len(index) == len(swap.slots) else _chosen(swap.columns, index)
        self._placement.show(slots, positions)
        self._put(slots, columns, *self._placement.labels_and_ids(positions))
        self.swapped += len(slots)

    def _read_one_by_one(self, swap: Swap, wanted: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], BaseException | None]:
        """Read a swap sample by sample; return which could be read, and the first failure."""
        readable = np.zeros(len(wanted), np.bool_)
        failure: BaseException | None = None
        for index in np.flatnonzero(wanted).tolist():
            one = slice(index, index + 1)
            try:
                self._storage.read(swap.positions[one], _chosen(swap.columns, one))
                readable[index] = True
            except (CorruptionError, OSError) as error:
                if failure is None:
                    id = int(self._placement.members.ids[swap.positions[index]])
                    error.add_note(f"the sample of id {id} could not be swapped in; forget({{'id': {id}}}) removes it")
                    failure = error
        return readable, failure

    # Removal, sizes, checkpoints.

    def drop(self, doomed: Ints) -> None:
        """Take samples out of memory, and out of swaps under way once these were read."""
        self._settle()
        for position in doomed.tolist():
            slot = self._placement.leave_memory(position)
            if slot >= 0:
                self._memory.clear(np.array([slot]))
            for swap in self.under_way:
                gone = swap.positions == position
                for values in swap.columns.values():
                    values[gone] = 0
                swap.positions[gone] = -1
                swap.late.pop(position, None)

    def renamed(self, position: int, old: int) -> None:
        """Note that the sample at position `old` has moved to another."""
        for swap in self.under_way:
            swap.positions[swap.positions == old] = position
            if old in swap.late:
                swap.late[position] = swap.late.pop(old)

    def _settle(self) -> None:
        """Wait until everything under way was read; a failure is told when it is due."""
        for swap in self.under_way:
            if swap.read is not None:
                swap.read.exception()

    def resize(self, slots: int, random: np.random.Generator) -> None:
        """Move memory to a slab of another size; if it shrinks, slots drawn at random go."""
        self._settle()
        placement, old = self._placement, self._placement.slots
        keep = placement.slots_kept(slots, self._settings.admission.by_class, random)
        memory = Memory.make(self._schema, slots)
        self.write_back()
        keep = self._fitting(keep, memory, random)
        for start in range(0, len(keep), _MOVED):
            some = keep[start : start + _MOVED]
            batch = Batch.empty(self._schema, len(some))
            self._memory.read(some, batch)
            memory.write(np.arange(start, start + len(some)), batch.data, batch.labels, batch.ids)
        number = placement.resize_memory(slots, keep)
        for swap in self.under_way:
            there = number[swap.slots] >= 0
            swap.columns = _chosen(swap.columns, there)
            swap.slots, swap.positions = number[swap.slots[there]], swap.positions[there]
        self._storage.drop_index_rows(SLOTS.keys(0, SLOTS.rows(old)))
        self._memory.adopt(memory)

    def _fitting(self, keep: Ints, memory: Memory, random: np.random.Generator) -> Ints:
        """Return the slots of `keep` whose samples another memory has blocks for: all, or as many drawn at random."""
        if memory.blocks is None:
            return keep
        self._free_blocks()
        drawn = random.permutation(keep)
        ends = np.cumsum(self._memory.blocks_at(drawn))
        return np.sort(drawn[ends <= memory.blocks.count])

    def state(self) -> list[list[Any]]:
        """Return the step, the slots and the positions of each swap under way, for JSON."""
        there = [(swap, swap.positions >= 0) for swap in self.under_way]
        return [[swap.step, swap.slots[some].tolist(), swap.positions[some].tolist()] for swap, some in there]

    def restore(self, step: int) -> list[int]:
        """Read the visible samples of a checkpoint into memory; return the ids of damaged ones, which have left it."""
        self.step = step
        visible = self._placement.visible
        # In the order of storage: neighbours share pages and reads.
        used = np.argsort(visible, kind="stable")[np.count_nonzero(visible < 0) :]
        together = max(1, self._storage.buffers.together // (self._schema.sample_bytes + 64))
        damaged: list[int] = []
        for start in range(0, len(used), together):
            some = used[start : start + together]
            damaged += self._show_readable(some, visible[some])
        return damaged

    def resume(self, state: Sequence[Sequence[Any]], damaged: int) -> None:
        """Read again the swaps that were under way, and count damaged samples."""
        self.errors += damaged
        for step, slots, positions in state:
            self._issue(step, np.array(slots, np.int64), np.array(positions, np.int64))

    def _show_readable(self, slots: Ints, positions: Ints) -> list[int]:
        """Read samples into their slots, empty the slots of damaged ones, and return the ids of these."""
        columns, whole = self._storage.read_whole(positions)
        for slot in slots[~whole].tolist():
            self._placement.drop_unreadable(slot)
        blocks = self._memory.blocks
        if blocks is not None and self._memory.blocks_for(columns).sum() > blocks.free_count:
            raise CorruptionError(f"{self._storage.path}: memory has no room for the samples that it held")
        self._memory.write(slots[whole], columns, *self._placement.labels_and_ids(positions[whole]))
        ids: list[int] = self._placement.members.ids[positions[~whole]].tolist()
        return ids


def _as_coming(core: Any, swap: Swap) -> Any:
    """Return a swap of one field for the compiled core."""
    (rows,) = swap.columns.values()
    return core.Coming(slots=swap.slots, positions=swap.positions, rows=rows)


def _chosen(columns: Mapping[str, NDArray[Any]], which: Any) -> Columns:
    """Return some samples of columns."""
    return {name: values[which] for name, values in columns.items()}


def _some(scored: _Scored | None, which: NDArray[Any]) -> _Scored | None:
    """Return the scores of some samples."""
    return None if scored is None else (scored[0][which], scored[1][which])


def _bytes(columns: Columns) -> int:
    return sum(column.nbytes for column in columns.values())
