"""Reads the entries of a log, and rebuilds its index from them."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memhier.cache.slots import SlotMap
from memhier.errors import ClosedError, CorruptionError
from memhier.log.index import LogIndex, place
from memhier.log.parts import DELETED, ENTRY, LogRecord, Part, PartTable, lay_out, page_after
from memhier.store.store import Store

if TYPE_CHECKING:
    from memhier.io.reader import Reader

__all__ = ["Block", "EntryReader", "committed_record", "replay"]

BLOCK_ENTRIES = 2**16

Block = tuple[NDArray[Any], NDArray[np.int64], int]
"""Entries, `ENTRY` [n]; the offsets of the records of those that do not delete, int64; the end of the last of these."""


@dataclass(frozen=True, slots=True)
class EntryReader:
    """Reads the entries of the parts of a log.

    Attributes
    ----------
    name
        Of the log.
    per_page
        As in `lay_out`.
    """

    store: Store
    name: str
    reader: "Reader"
    per_page: int | None

    def committed(self, part: Part, count: int) -> Iterator[Block]:
        """Return the entries of a committed part in order, `count` at a time; its segment may be dropped meanwhile."""
        return self.behind(self.store.attach(part.segments(self.name)[1], self.reader), part, count)

    def behind(self, handle: int, part: Part, count: int) -> Iterator[Block]:
        """Yield the entries behind a handle in order, `count` at a time; the handle is removed in the end."""
        try:
            end = 0
            for start in range(0, part.entries, count):
                block = self._block(handle, part, start, end, count)
                end = block[2]
                yield block
        finally:
            # A generator that was forgotten half-way may be collected after its reader was closed.
            with suppress(ClosedError):
                self.reader.remove(handle)

    def newest_first(self, part: Part) -> Iterator[Block]:
        """Yield the blocks of a committed part from the last to the first.

        The offsets in a block are known only once the blocks before it were read, so long parts are read twice.
        """
        ends = [0]
        last: Block | None = None
        for block in self.committed(part, BLOCK_ENTRIES):
            ends.append(block[2])
            last = block
        if last is None:
            return
        yield last
        handle = self.store.attach(part.segments(self.name)[1], self.reader)
        try:
            for number in range(len(ends) - 3, -1, -1):
                yield self._block(handle, part, number * BLOCK_ENTRIES, ends[number], BLOCK_ENTRIES)
        finally:
            with suppress(ClosedError):
                self.reader.remove(handle)

    def _block(self, handle: int, part: Part, start: int, end: int, most: int) -> Block:
        count = min(most, part.entries - start)
        raw = self.reader.read(handle, [start * ENTRY.itemsize], count * ENTRY.itemsize)
        block = raw.reshape(-1).view(ENTRY)
        lengths = block["length"][block["length"] != DELETED].astype(np.int64)
        offsets = np.empty(0, np.int64)
        if len(lengths):
            if self.per_page is not None and not lengths.all():
                raise CorruptionError(f"{self.store.path}: part {part.number} of a log has a record of no bytes")
            offsets, end = lay_out(end, lengths, self.per_page)
        return block, offsets, end


def replay(log: EntryReader, record: LogRecord, index: LogIndex, table: PartTable) -> dict[int, Part]:
    """Fill an empty index and table; return the parts by slot, in the order of writing.

    It goes from the newest entry to the oldest, and the first one met of a key counts. In the other order there could
    be more keys on the way than are alive in the end. While it works, 28 bytes per deletion are held.
    """
    store = log.store
    deleted = SlotMap(max(1, sum(part[2] for part in record.parts)), batch=BLOCK_ENTRIES)
    parts: list[Part] = []
    for number, entries, deletions, size in reversed(record.parts):
        part = Part(number, table.take(), entries, deletions, size)
        records = part.segments(log.name)[0]
        payload = store.segments()[records].payload
        table.handles[part.slot] = store.attach(records, log.reader)
        for block, offsets, end in log.newest_first(part):
            part.end = max(part.end, end)
            lengths = block["length"][block["length"] != DELETED]
            wrong = record.record_bytes and (lengths != record.record_bytes).any()
            if wrong or part.end > payload:
                raise CorruptionError(f"{store.path}: the entries of {records!r} do not describe its records")
            try:
                _apply(block, place(part.slot, offsets), index, deleted)
            except (ValueError, IndexError, MemoryError) as error:
                raise CorruptionError(
                    f"{store.path}: {records!r} has keys that {log.name!r} cannot: {error}"
                ) from error
        if page_after(part.end) != payload:
            raise CorruptionError(f"{store.path}: the entries of {records!r} do not describe its records")
        parts.append(part)
    if len(index) != record.live:
        raise CorruptionError(f"{store.path}: {log.name!r} holds {len(index)} keys, but {record.live} were committed")
    return {part.slot: part for part in reversed(parts)}


def _apply(block: NDArray[Any], places: NDArray[np.int64], index: LogIndex, deleted: SlotMap) -> None:
    keys = block["key"].astype(np.int64)
    is_row = block["length"] != DELETED
    where = np.full(len(block), -1, np.int64)
    where[is_row] = places
    unique, inverse = deleted.unique(keys)
    last = np.empty(len(unique), np.int64)
    last[inverse] = np.arange(len(keys))  # of the numbers given to one element, the last stays
    new = (index.places(unique) < 0) & (deleted.find(unique) < 0)
    rows, gone = last[new & is_row[last]], last[new & ~is_row[last]]
    deleted.insert(keys[gone])
    index.point(index.reserve(keys[rows]), where[rows], block["length"][rows].astype(np.int64))


def committed_record(store: Store, name: str) -> LogRecord | None:
    """Return the catalog's record of a log, compared with its files before any memory is taken for it."""
    value = store.get(f"log/{name}")
    if value is None:
        return None
    record = LogRecord.decode(value)
    if record is None:
        raise CorruptionError(f"{store.path}: the record of log {name!r} has {len(value)} bytes")
    if record.live > sum(part[1] for part in record.parts):
        raise CorruptionError(f"{store.path}: log {name!r} has not the entries for {record.live} keys")
    segments = store.segments()
    numbers = [part[0] for part in record.parts]
    if record.following >= 2**62 or numbers != sorted({*numbers, record.following})[:-1]:
        raise CorruptionError(
            f"{store.path}: log {name!r} names parts {numbers}, expected rising numbers below {record.following}"
        )
    for number, count, deletions, _ in record.parts:
        records, entries = Part(number, 0).segments(name)
        if records not in segments or entries not in segments:
            raise CorruptionError(f"{store.path}: segment {records!r} or {entries!r} is missing, but {name!r} names it")
        if segments[entries].payload != count * ENTRY.itemsize or deletions > count:
            raise CorruptionError(
                f"{segments[entries].path}: {segments[entries].payload} bytes do not hold {count} entries, "
                f"{deletions} of them deletions"
            )
    return record
