"""The maps of the tables of a module whose ids are any: they turn the ids of a step into rows."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.errors import CorruptionError
from memhier.fields import decode_json, integer, mapping, optional, record
from memhier.log.row_log import RowLog
from memhier.recsys.embedding.ids.id_map import GROUP, IdMap
from memhier.recsys.embedding.ids.id_room import IdRoom
from memhier.recsys.embedding.initial import TableSpec
from memhier.recsys.embedding.records import IDS, as_json
from memhier.shield import shielded

__all__ = ["Added", "Mapped", "Vocabularies", "decoded_ids"]

Ints = NDArray[np.int64]

# A block of records, 256 KiB.
_BLOCK = 1024
_SLOTS = 65536
_CHECK = mapping(record({
    "batches": integer(0, 2**32), "free": integer(-1, 2**31), "fresh": integer(0, 2**31), "live": integer(0, 2**31),
    "hand": integer(0, 2**34),
}, {"padding": optional(integer(-(2**63), 2**63)), "expire_after": optional(integer(1, 2**32))}))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Added:
    """Rows of a table that ids were given, which begin anew."""

    table: int
    rows: Ints
    ids: Ints


@dataclass(slots=True)
class Mapped:
    """The rows of a batch.

    Attributes
    ----------
    rows
        int64 [n] of each table, look-up after look-up.
    added
        The rows that begin anew with this batch.
    frames
        The look-ups of the batch, if it is one of training; 0 once it has begun.
    bytes
        The DRAM of its frames.
    """

    rows: list[Ints]
    added: list[Added]
    frames: int
    bytes: int


class Vocabularies:
    """The map of each table for any ids; ids of the other tables are their rows.

    Batches of training are mapped in their order, maybe ahead of the training, and begin in that order. All other calls
    see the maps of the batch in training. Calls of both threads take turns.

    Parameters
    ----------
    specs
        All tables of the module.
    room
        For the ids of all tables; with None there is no limit.
    """

    def __init__(self, specs: Sequence[TableSpec], room: IdRoom | None = None) -> None:
        self._specs = specs
        self._lock = threading.Lock()
        self._room = room
        first = room.first_slots if room is not None else GROUP
        self._maps: dict[int, IdMap] = {
            number: IdMap(spec.capacity, spec.id_space, first)
            for number, spec in enumerate(specs)
            if spec.id_space is not None
        }
        self._rooms: list[int] = []  # of the maps, when last all batches had begun

    @property
    @shielded
    def memory_bytes(self) -> int:
        """DRAM held, that of frames included, in bytes."""
        with self._lock:
            return sum(one.memory_bytes for one in self._maps.values())

    @property
    @shielded
    def frames(self) -> int:
        """The look-ups that were mapped and did not begin."""
        with self._lock:
            return max((one.frames for one in self._maps.values()), default=0)

    @property
    def pending(self) -> int:
        """The most look-ups whose gradients may wait at once."""
        return min(one.rules.pending for one in self._maps.values())

    # Ids to rows.

    @shielded
    def map(self, look_ups: Sequence[Sequence[Ints]]) -> Mapped:
        """Map a batch of training after those before; each look-up has the ids of each table.

        Raises
        ------
        Shortage
            When there is no room for its new ids. Nothing has changed then.
        """
        with self._lock:
            added: list[Added] = []
            parts, held, done = [], 0, list[IdMap]()
            rooms = [one.room for one in self._maps.values()]
            if not any(one.frames for one in self._maps.values()):
                self._rooms = rooms
            try:
                for ids in look_ups:
                    parts.append(self._mapped_locked(ids, added, done))
                    held += sum(one.last_bytes for one in self._maps.values())
            except BaseException:
                for one in reversed(done):
                    one.undo()
                self._give_back_locked(rooms)
                raise
        rows = [np.concatenate(of_table) for of_table in zip(*parts, strict=True)]
        return Mapped(rows, added, len(look_ups), held)

    @shielded
    def find(self, ids: Sequence[Ints]) -> list[Ints]:
        """Return the rows of ids of each table; an id without one has the row of unknown ids."""
        with self._begun():
            return [self._found_locked(table, some) for table, some in enumerate(ids)]

    @shielded
    def find_in(self, table: int, ids: Ints) -> Ints:
        """Return the rows of ids of one table."""
        with self._begun():
            return self._found_locked(table, ids)

    @shielded
    def begin(self, mapped: Mapped) -> None:
        """Let the next batch begin: its ids have their rows from now on."""
        with self._lock:
            for one in self._maps.values():
                one.begin(mapped.frames)
        mapped.frames = 0

    @shielded
    def drop(self) -> None:
        """Forget the batches that did not begin, and give the room back that they took."""
        with self._lock:
            if not any(one.frames for one in self._maps.values()):
                return
            for one in self._maps.values():
                one.drop()
            self._give_back_locked(self._rooms)

    def _give_back_locked(self, rooms: list[int]) -> None:
        for one, room in zip(self._maps.values(), rooms, strict=True):
            one.resize(max(room, one.fresh))

    def _mapped_locked(self, ids: Sequence[Ints], added: list[Added], done: list[IdMap]) -> list[Ints]:
        rows = []
        for table, some in enumerate(ids):

            def mapped(one: IdMap, wanted: Ints, table: int = table) -> Ints:
                slots, new, names = one.map(wanted, self._spare_locked())
                done.append(one)
                if len(new):
                    added.append(Added(table, new, names))
                return slots

            rows.append(self._rows_locked(table, some, mapped))
        return rows

    def _spare_locked(self) -> int:
        """Return how many slots more the maps may take memory for."""
        slots = 2**62 if self._room is None else self._room.slots
        return slots - sum(one.room for one in self._maps.values())

    def _found_locked(self, table: int, ids: Ints) -> Ints:
        return self._rows_locked(table, ids, IdMap.find)

    def _rows_locked(self, table: int, ids: Ints, slots_of: Callable[[IdMap, Ints], Ints]) -> Ints:
        spec, one = self._specs[table], self._maps.get(table)
        if one is None:
            return ids
        ids = np.ascontiguousarray(ids)
        others = slice(None) if spec.padding_id is None else ids != spec.padding_id
        slots = slots_of(one, ids[others])
        slots[slots < 0] = spec.unknown_row
        if spec.padding_id is None:
            return slots
        rows = np.full(len(ids), spec.padding_row, np.int64)
        rows[others] = slots
        return rows

    @contextmanager
    def _begun(self) -> Iterator[None]:
        with self._lock, ExitStack() as begun:
            for one in self._maps.values():
                begun.enter_context(one.begun())
            yield

    # The ids of a table.

    @shielded
    def contains(self, table: int, ids: Ints) -> NDArray[np.bool_]:
        """Return whether each id has a row."""
        with self._begun():
            return self._maps[table].find(np.ascontiguousarray(ids)) >= 0

    def items(self, table: int) -> Iterator[tuple[Ints, Ints]]:
        """Yield rows and their ids in blocks; rows rise."""
        for start in range(0, self._maps[table].room, _SLOTS):
            yield self._items(table, start)

    @shielded
    def _items(self, table: int, start: int) -> tuple[Ints, Ints]:
        with self._begun():
            return self._maps[table].ids(start, start + _SLOTS)

    def has(self, table: int) -> bool:
        """Whether a table is for any ids."""
        return table in self._maps

    # Checkpoints.

    @shielded
    def values(self) -> dict[str, bytes]:
        """Return the value of a checkpoint that goes with the records."""
        if not self._maps:
            return {}
        with self._begun():
            return {IDS: as_json({self._specs[number].name: self._described(number) for number in self._maps})}

    def _described(self, number: int) -> dict[str, Any]:
        rules = {"padding": self._specs[number].padding_id, "expire_after": self._maps[number].rules.expire_after}
        return {**self._maps[number].described(), **rules}

    @shielded
    def write(self, log: RowLog) -> None:
        """Append all records that changed since the last call to the log."""
        first = 0
        with self._begun():
            for one in self._maps.values():
                changed = one.changed()
                for start in range(0, len(changed), _BLOCK):
                    some = changed[start : start + _BLOCK]
                    log.append(some + first, one.records(some))
                first += IdMap.records_for(one.capacity, one.rules)
            for one in self._maps.values():
                one.written()

    @shielded
    def read(self, log: RowLog, value: bytes | None, path: object) -> None:
        """Take the maps of a checkpoint: the records of the log, and the value beside them."""
        where = f"{path}: value {IDS!r}"
        numbers = decoded_ids(value, where)
        if {*numbers} != {self._specs[number].name for number in self._maps}:
            raise CorruptionError(f"{where}: belongs to other tables")
        first = 0
        for table, one in self._maps.items():
            there = numbers[self._specs[table].name]
            one.make_room(there["fresh"], there["fresh"] - one.room)
            if there["fresh"] > one.room:
                raise CorruptionError(f"{where}: more slots than table {self._specs[table].name!r} has")
            count, groups = IdMap.records_for(one.capacity, one.rules), -(-one.capacity // GROUP)
            for begin, end in ((0, min(-(-there["fresh"] // GROUP), groups)), (groups, count)):
                for start in range(begin, end, _BLOCK):
                    records, _ = log.read(first + np.arange(start, min(end, start + _BLOCK)))
                    one.read(start, records)
            one.complete(there, f"{where}: table {self._specs[table].name!r}")
            first += count


def decoded_ids(value: bytes | None, where: str) -> Mapping[str, Any]:
    """Return the numbers of each map in a checkpoint, by the name of its table."""
    if value is None:
        raise CorruptionError(f"{where}: is missing")
    numbers: Mapping[str, Any] = decode_json(value, where, _CHECK)
    return numbers
