"""The map of ids to slots in Python: the twin of the core's, with the same results."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import check_int

__all__ = ["PythonIdMap"]

Ints = NDArray[np.int64]

_GROUP, _BLOCK, _SHARE = 16, 256, 64
_BATCHES, _FREE, _FRESH, _LIVE, _HAND = range(5)
_MASK = 2**64 - 1
_USES_MAX = 2**32 - 1
_FACTOR = 0xD6E8FEB86659FD93
_SEEDS = (0, 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
_HALVES = 0x7F7F7F7F7F7F7F7F


@dataclass(slots=True)
class _Frame:
    entries: list[tuple[int, int, int, int]]  # slot, id, last, uses
    words: list[tuple[int, int]]
    numbers: Ints


class _NoRoom(Exception):
    pass


class PythonIdMap:
    """The core's ``IdMap``: see ``id_map.hpp`` for the arrays and the rules."""

    def __init__(
        self, *, ids: Ints, last: Any, uses: Any, cells: Any, changed: Any, numbers: Ints, **rules: int
    ) -> None:
        self._ids, self._last, self._uses, self._changed, self._numbers = ids, last, uses, changed, numbers
        self._cells = cells
        self._words = cells.view("<u8")
        self._rules = rules
        self._groups = -(-len(ids) // _GROUP)
        self._index: dict[int, int] = {}
        self._frames: list[_Frame] = []

    def resize(self, *, ids: Ints, last: Any, uses: Any, changed: Any) -> None:
        """Take larger or smaller arrays with the same values."""
        self._ids, self._last, self._uses, self._changed = ids, last, uses, changed
        self._groups = -(-len(ids) // _GROUP)

    def reindex(self) -> bool:
        """Build the index anew; False if an id has two slots."""
        used = np.flatnonzero(self._uses)
        self._frames = []
        self._index = dict(zip(self._ids[used].tolist(), used.tolist(), strict=True))
        return len(self._index) == len(used)

    def frames(self) -> int:
        """Return the number of frames."""
        return len(self._frames)

    def bytes(self) -> int:
        """Return about the DRAM of index and frames."""
        return 16 * len(self._ids) + sum(24 * len(one.entries) + 16 * len(one.words) for one in self._frames)

    def last_bytes(self) -> int:
        """Return about the DRAM of the newest frame."""
        return sum(24 * len(one.entries) + 16 * len(one.words) for one in self._frames[-1:])

    def map(self, *, ids: Ints, slots: Ints, added: Ints, places: Ints) -> int:
        """Give each id its slot; return how many were given out, -1 if there is no room for them."""
        self._frames.append(_Frame([], [], self._numbers.copy()))
        self._numbers[_BATCHES] += 1
        self._barren = False
        try:
            return self._map(ids, slots, added, places)
        except _NoRoom:
            self.undo()
            return -1

    def _map(self, ids: Ints, slots: Ints, added: Ints, places: Ints) -> int:
        wanted = ids.tolist()
        for at, number in enumerate(wanted):
            slot = self._index.get(number, -1)
            if slot >= 0 and self._is_expired(slot):
                self._forget(slot, int(self._numbers[_FREE]))
                self._numbers[_FREE], slot = slot, -1
            elif slot >= 0:
                self._use(slot)
            slots[at] = slot
        found = 0
        for admits in (True, False):
            for at in np.flatnonzero(slots < 0).tolist():
                number = wanted[at]
                slot = self._index.get(number, -1)
                if slot >= 0:
                    self._use(slot)
                    slots[at] = slot
                elif admits and self._is_admitted(number):
                    slots[at] = slot = self._allocate(number)
                    if slot >= 0:
                        added[found], places[found] = slot, at
                        found += 1
        return found

    def find(self, *, ids: Ints, slots: Ints) -> None:
        """Find the slot of each id, or -1."""
        for at, number in enumerate(ids.tolist()):
            slot = self._index.get(number, -1)
            slots[at] = -1 if slot >= 0 and self._is_expired(slot) else slot

    def begin(self, frames: int) -> None:
        """Take the first frames as final."""
        check_int("frames", frames, 0, len(self._frames))
        del self._frames[:frames]

    def undo(self) -> None:
        """Go back over the newest frame, and forget it."""
        self._trade(self._frames.pop(), back=True)

    def rewind(self) -> None:
        """Go back over all frames."""
        for frame in reversed(self._frames):
            self._trade(frame, back=True)

    def advance(self) -> None:
        """Go forth over all frames."""
        for frame in self._frames:
            self._trade(frame, back=False)

    def drop(self) -> None:
        """Forget the frames."""
        self._frames = []

    @property
    def _now(self) -> int:
        return int(self._numbers[_BATCHES])

    def _is_expired(self, slot: int) -> bool:
        after = self._rules["expire_after"]
        return after != 0 and self._now - int(self._last[slot]) > after

    def _note(self, slot: int) -> None:
        if int(self._last[slot]) == self._now:
            return
        entry = slot, int(self._ids[slot]), int(self._last[slot]), int(self._uses[slot])
        self._frames[-1].entries.append(entry)
        self._last[slot] = self._now
        self._changed[slot // _GROUP] = 1

    def _note_word(self, at: int) -> None:
        self._frames[-1].words.append((at, int(self._words[at])))
        self._changed[self._groups + 8 * at // _BLOCK] = 1

    def _use(self, slot: int) -> None:
        self._note(slot)
        self._uses[slot] = min(int(self._uses[slot]) + 1, _USES_MAX)

    def _forget(self, slot: int, following: int) -> None:
        self._note(slot)
        del self._index[int(self._ids[slot])]
        self._ids[slot], self._uses[slot] = following, 0
        self._numbers[_LIVE] -= 1

    def _allocate(self, number: int) -> int:
        numbers = self._numbers
        if numbers[_FREE] < 0 and numbers[_FRESH] == self._rules["capacity"] and not self._collect():
            return -1
        slot = int(numbers[_FREE])
        if slot >= 0:
            self._note(slot)
            numbers[_FREE] = self._ids[slot]
        else:
            slot = int(numbers[_FRESH])
            if slot == len(self._ids):
                raise _NoRoom
            self._note(slot)
            numbers[_FRESH] += 1
        self._index[number] = slot
        self._ids[slot], self._uses[slot] = number, 1
        numbers[_LIVE] += 1
        return slot

    def _collect(self) -> bool:
        if self._barren:
            return False
        ages, after = self._now - self._last.astype(np.int64), self._rules["expire_after"]
        leaving = np.flatnonzero(ages > after) if after else np.empty(0, np.int64)
        share = max(1, self._rules["capacity"] // _SHARE)
        others = np.empty(0, np.int64)
        if len(leaving) < share and self._rules["evict"]:
            may = (ages >= self._rules["pending"]) & (self._uses != 0)
            may[leaving] = False
            others = np.flatnonzero(may)
            uses = self._uses[others] if self._rules["evict"] == 2 else np.zeros(len(others), np.uint32)
            order = np.lexsort((others, self._last[others], uses))
            others = np.sort(others[order[: share - len(leaving)]])
        freed = [*leaving.tolist(), *others.tolist()]
        for slot, following in zip(freed, [*freed[1:], -1], strict=False):
            self._forget(slot, following)
        if freed:
            self._numbers[_FREE] = freed[0]
        self._barren = not freed
        return bool(freed)

    def _is_admitted(self, number: int) -> bool:
        if self._rules["admit_after"] == 1:
            return True
        cells, hand = len(self._cells), int(self._numbers[_HAND])
        if self._words[hand]:
            self._note_word(hand)
            self._words[hand] = (int(self._words[hand]) >> 1) & _HALVES
        self._numbers[_HAND] = (hand + 1) % (cells // 8)
        places = [_tag((number ^ seed) & _MASK) * cells >> 32 for seed in _SEEDS]
        least = min(int(self._cells[at]) for at in places)
        for at in places if least < 255 else ():
            if self._cells[at] == least:
                self._note_word(at // 8)
                self._cells[at] += 1
        return least + 1 >= self._rules["admit_after"]

    def _trade(self, frame: _Frame, *, back: bool) -> None:
        for slot, *_ in frame.entries:
            if self._uses[slot]:
                del self._index[int(self._ids[slot])]
        for at, (slot, number, last, uses) in enumerate(frame.entries):
            frame.entries[at] = slot, int(self._ids[slot]), int(self._last[slot]), int(self._uses[slot])
            self._ids[slot], self._last[slot], self._uses[slot] = number, last, uses
            self._changed[slot // _GROUP] = 1
        for slot, *_ in frame.entries:
            if self._uses[slot]:
                self._index[int(self._ids[slot])] = slot
        order = range(len(frame.words))
        for at in reversed(order) if back else order:
            word, cells = frame.words[at]
            frame.words[at] = word, int(self._words[word])
            self._words[word] = cells
            self._changed[self._groups + 8 * word // _BLOCK] = 1
        held = self._numbers.copy()
        self._numbers[:], frame.numbers = frame.numbers, held


def _tag(number: int) -> int:
    for _ in range(2):
        number = (number ^ number >> 32) * _FACTOR & _MASK
    return number >> 32
