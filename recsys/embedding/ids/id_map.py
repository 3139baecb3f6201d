"""IdMap: a row for each id, given out as ids come, and taken back by age or use."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memhier import backend
from memhier.errors import CorruptionError
from memhier.recsys.embedding.ids.hash64 import CELLS_BLOCK, Hash64
from memhier.recsys.embedding.ids.python_id_map import PythonIdMap
from memhier.table.shortage import Shortage

if TYPE_CHECKING:
    from memhier_native._core import IdMap as NativeIdMap

__all__ = ["ENTRY", "GROUP", "RECORD_BYTES", "IdMap", "in_use"]

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

GROUP = 16
"""Slots of a record."""
RECORD_BYTES = 256
"""Bytes of a record of a map on SSD: 16 slots, or 256 counts of the sketch."""
ENTRY = np.dtype([("id", "<i8"), ("last", "<u4"), ("uses", "<u4")])
"""A slot in a record."""
_NUMBERS = ("batches", "free", "fresh", "live", "hand")
_INDEX_BYTES = 16  # of the core, for each slot
_BATCHES_MAX = 2**32 - 1


def in_use(entries: Any, batches: int, expire_after: int | None) -> Ints:
    """Return the places of the slots in use among `ENTRY` [n], after so many batches."""
    used = entries["uses"] != 0
    if expire_after is not None:
        used &= batches - entries["last"].astype(np.int64) <= expire_after
    return np.flatnonzero(used)


class IdMap:
    """The slots 0 to ``capacity - 1`` of a table, by id, worked a batch at a time.

    A batch may be mapped before its turn: its changes are a frame, and :meth:`begun` shows the map without the frames
    of batches that did not begin. One thread uses a map at a time.

    Parameters
    ----------
    capacity
        The most slots.
    rules
        When ids get slots and lose them.
    room
        Slots that memory is taken for at once; :meth:`make_room` takes more as ids come. All by default.

    Attributes
    ----------
    room
        Slots that memory is there for.
    numbers
        int64: batches so far; the first free slot, -1 for none; slots ever used; slots in use; place of the sketch's
        hand.
    """

    def __init__(self, capacity: int, rules: Hash64, room: int | None = None) -> None:
        cells = rules.cells(capacity)
        self.capacity = capacity
        self.room: int = capacity if room is None else min(capacity, room)
        self.rules = rules
        self._groups = -(-capacity // GROUP)
        self._ids: Ints = np.zeros(self.room, np.int64)
        self._last = np.zeros(self.room, np.uint32)
        self._uses = np.zeros(self.room, np.uint32)
        self._cells: Bytes = np.zeros(cells, np.uint8)
        self._changed: Bytes = np.zeros(self._groups_there + cells // CELLS_BLOCK, np.uint8)
        self.numbers: Ints = np.array([0, -1, 0, 0, 0], np.int64)
        make: Any = PythonIdMap if backend.core is None else backend.core.IdMap
        self._core: NativeIdMap | PythonIdMap = make(
            ids=self._ids,
            last=self._last,
            uses=self._uses,
            cells=self._cells,
            changed=self._changed,
            numbers=self.numbers,
            capacity=capacity,
            admit_after=rules.admit_after,
            expire_after=rules.expire_after or 0,
            evict={None: 0, "lru": 1, "lfu": 2}[rules.evict],
            pending=rules.pending,
        )

    @staticmethod
    def bytes_for(capacity: int, rules: Hash64) -> int:
        """Return the DRAM of such a map, without frames, in bytes: 32.1 for each slot, and the sketch."""
        cells = rules.cells(capacity)
        return (ENTRY.itemsize + _INDEX_BYTES) * capacity + cells + IdMap.records_for(capacity, rules)

    @property
    def _groups_there(self) -> int:
        return -(-self.room // GROUP)

    @property
    def fresh(self) -> int:
        """Slots that were ever used."""
        return int(self.numbers[2])

    def make_room(self, new: int, spare: int) -> None:
        """Take memory for so many new ids, mostly by a quarter, but not for more than `spare` slots more."""
        needed = min(self.capacity, self.fresh + new)
        if needed > self.room and spare > 0:
            self.resize(min(self.capacity, self.room + spare, max(needed, self.room + min(self.room, spare) // 4)))

    def resize(self, room: int) -> None:
        """Have memory for so many slots, at least for those that were ever used."""
        if room == self.room:
            return
        # In this order: where memory runs out nothing has changed.
        ids, last, uses = (_resized(each, self.room, room) for each in (self._ids, self._last, self._uses))
        changed = _resized(self._changed, self._groups_there, -(-room // GROUP))
        self._core.resize(ids=ids, last=last, uses=uses, changed=changed)
        self.room, self._ids, self._last, self._uses, self._changed = room, ids, last, uses, changed

    @staticmethod
    def records_for(capacity: int, rules: Hash64) -> int:
        """Return the number of records of such a map on SSD."""
        return -(-capacity // GROUP) + rules.cells(capacity) // CELLS_BLOCK

    @property
    def memory_bytes(self) -> int:
        """DRAM held, the frames included, in bytes."""
        arrays = (self._ids, self._last, self._uses, self._cells, self._changed)
        return sum(array.nbytes for array in arrays) + self._core.bytes()

    def __len__(self) -> int:
        """How many ids have a slot."""
        return int(self.numbers[3])

    @property
    def frames(self) -> int:
        """The number of batches that were mapped and did not begin."""
        return self._core.frames()

    @property
    def last_bytes(self) -> int:
        """DRAM of the newest frame, in bytes."""
        return self._core.last_bytes()

    def map(self, ids: Ints, spare: int = 0) -> tuple[Ints, Ints, Ints]:
        """Map a batch of training after those before, as a frame of its own.

        Parameters
        ----------
        ids
            int64 [n].
        spare
            Slots more that the map may take memory for.

        Returns
        -------
        slots : numpy.ndarray
            int64 [n]; -1 for an id without one.
        added, ids_added : numpy.ndarray
            int64: the slots that were given out, and their ids.

        Raises
        ------
        Shortage
            When new ids need more room. Nothing has changed then.
        """
        if self.numbers[0] == _BATCHES_MAX:
            raise OverflowError(f"a table for any ids takes {_BATCHES_MAX} look-ups in training, and has had them")
        slots, added, places = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        count = self._core.map(ids=ids, slots=slots, added=added, places=places)
        if count < 0:
            self.make_room(len(np.unique(ids[self.find(ids) < 0])), spare)
            count = self._core.map(ids=ids, slots=slots, added=added, places=places)
        if count < 0:
            raise Shortage("ids: no room for new ones", "ids", needed=len(ids), room=self.room, enough=self.capacity)
        return slots, added[:count].copy(), ids[places[:count]]

    def find(self, ids: Ints) -> Ints:
        """Return the slot of each id, -1 for none; nothing changes."""
        slots = np.empty(len(ids), np.int64)
        self._core.find(ids=ids, slots=slots)
        return slots

    def undo(self) -> None:
        """Take the last batch back, which did not begin."""
        self._core.undo()

    def begin(self, frames: int) -> None:
        """Take the changes of the first frames as final."""
        self._core.begin(frames)

    def drop(self) -> None:
        """Take the changes of all frames back."""
        self._core.rewind()
        self._core.drop()

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Be without the changes of the frames inside the block."""
        if not self._core.frames():
            yield
            return
        self._core.rewind()
        try:
            yield
        finally:
            self._core.advance()

    def ids(self, start: int, stop: int) -> tuple[Ints, Ints]:
        """Return the slots in use from `start` to `stop`, and their ids."""
        part = slice(start, stop)
        entries = {"uses": self._uses[part], "last": self._last[part]}
        used = in_use(entries, int(self.numbers[0]), self.rules.expire_after)
        return used + start, self._ids[part][used]

    # On SSD.

    def changed(self) -> Ints:
        """Return the numbers of the records that changed since the last call of :meth:`written`, rising."""
        numbers = np.flatnonzero(self._changed)
        numbers[numbers >= self._groups_there] += self._groups - self._groups_there
        return numbers

    def records(self, numbers: Ints) -> Bytes:
        """Return records by their numbers, which rise, uint8 [n, 256]."""
        groups = numbers[: np.searchsorted(numbers, self._groups)]
        entries = np.zeros((len(groups), GROUP), ENTRY)
        slots = groups[:, None] * GROUP + np.arange(GROUP)
        there = slots < self.room
        for name, values in (("id", self._ids), ("last", self._last), ("uses", self._uses)):
            entries[name][there] = values[slots[there]]
        blocks = self._cells.reshape(-1, CELLS_BLOCK)[numbers[len(groups) :] - self._groups]
        return np.concatenate([entries.view(np.uint8).reshape(-1, RECORD_BYTES), blocks])

    def written(self) -> None:
        """Note that all changes were written."""
        self._changed[:] = 0

    def read(self, first: int, records: Bytes) -> None:
        """Fill records in, from number `first` on, uint8 [n, 256]; :meth:`complete` ends this."""
        slots = min(self._groups, first + len(records)) - first
        if slots > 0:
            entries = np.ascontiguousarray(records[:slots]).view(ENTRY).reshape(-1)
            part = slice(first * GROUP, min(self.room, (first + slots) * GROUP))
            entries = entries[: part.stop - part.start]
            self._ids[part], self._last[part], self._uses[part] = entries["id"], entries["last"], entries["uses"]
        blocks = records[max(0, slots) :]
        begin = max(0, first - self._groups) * CELLS_BLOCK
        self._cells[begin : begin + blocks.size] = blocks.reshape(-1)

    def complete(self, numbers: dict[str, int], where: str) -> None:
        """Take the numbers of a map that was read; CorruptionError if it contradicts itself."""
        self.numbers[:] = [numbers[name] for name in _NUMBERS]
        batches, free, fresh, live, hand = self.numbers.tolist()
        used = self._uses != 0
        hands = max(1, len(self._cells) // 8)
        fits = fresh <= self.room and not used[fresh:].any() and int(np.count_nonzero(used)) == live
        if not fits or hand >= hands or (used.any() and int(self._last[used].max()) > batches):
            raise CorruptionError(f"{where}: its slots do not match its counts")
        for _ in range(fresh - live):
            if not 0 <= free < fresh or used[free]:
                raise CorruptionError(f"{where}: free slots are not linked as expected")
            used[free] = True  # no slot comes twice
            free = int(self._ids[free])
        if free != -1:
            raise CorruptionError(f"{where}: free slots are not linked as expected")
        if not self._core.reindex():
            raise CorruptionError(f"{where}: an id has two slots")
        self.written()

    def described(self) -> dict[str, int]:
        """Return the numbers by name."""
        return dict(zip(_NUMBERS, self.numbers.tolist(), strict=True))


def _resized(array: NDArray[Any], count: int, size: int) -> NDArray[Any]:
    """Return an array with `size` elements in place of its first `count`, new ones zero; the rest follows them."""
    kept = min(count, size)
    return np.concatenate((array[:kept], np.zeros(size - kept, array.dtype), array[count:]))
