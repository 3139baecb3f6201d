"""Rebuilds the index of a log from its entries."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memhier.cache.slots import SlotMap
from memhier.errors import ClosedError, CorruptionError
from memhier.log.index import LogIndex
from memhier.log.parts import DELETED, ENTRY, LogRecord, Part, PartTable, lay_out, page_after, place
from memhier.store.store import Store

if TYPE_CHECKING:
    from memhier.io.reader import Reader

__all__ = ["Block", "check_parts", "read_blocks", "read_entries", "replay"]

_BLOCK = 2**16

Block = tuple[NDArray[Any], NDArray[np.int64], int]
"""Entries, `ENTRY` [n]; where the records of those that do not delete begin, int64; where the last of these ends."""


def replay(
    store: Store,
    name: str,
    reader: "Reader",
    record: LogRecord,
    index: LogIndex,
    table: PartTable,
    per_page: int | None,
) -> dict[int, Part]:
    """Fill an empty index and table; return the parts by slot, in the order of writing.

    From the newest entry to the oldest, so that the first one met of a key is the one that counts. The other way round
    there could be more keys on the way than are alive in the end. While it works, 28 bytes per deletion are held.
    """
    deleted = SlotMap(max(1, sum(part[2] for part in record.parts)), batch=_BLOCK)
    parts: list[Part] = []
    for number, entries, deletions, size in reversed(record.parts):
        part = Part(number, table.take(), entries, deletions, size)
        records = part.segments(name)[0]
        table.handles[part.slot] = store.attach(records, reader)
        for block, offsets, end in _newest_first(store, name, reader, part, per_page):
            part.end = max(part.end, end)
            _check_lengths(store, records, block, part, record)
            try:
                _apply(block, place(part.slot, offsets), index, deleted)
            except (ValueError, IndexError, MemoryError) as error:
                raise CorruptionError(f"{store.path}: {records!r} has keys that {name!r} cannot: {error}") from error
        if page_after(part.end) != store.segments()[records].payload:
            raise CorruptionError(f"{store.path}: the entries of {records!r} do not describe its records")
        parts.append(part)
    if len(index) != record.live:
        raise CorruptionError(f"{store.path}: {name!r} holds {len(index)} keys, but {record.live} were committed")
    return {part.slot: part for part in reversed(parts)}


def read_entries(
    store: Store, name: str, reader: "Reader", part: Part, per_page: int | None, count: int = _BLOCK
) -> Iterator[Block]:
    """Return the entries of a committed part in order, so many at a time; its segment may be dropped meanwhile."""
    return read_blocks(store.path, store.attach(part.segments(name)[1], reader), reader, part, per_page, count)


def read_blocks(
    where: Path, handle: int, reader: "Reader", part: Part, per_page: int | None, count: int
) -> Iterator[Block]:
    """Yield the entries behind a handle in order, so many at a time; the handle is removed in the end."""
    try:
        end = 0
        for start in range(0, part.entries, count):
            block = _read_block(where, reader, handle, part, per_page, start, end, count)
            end = block[2]
            yield block
    finally:
        # Blocks that are forgotten half-way may be collected after their reader was closed.
        with suppress(ClosedError):
            reader.remove(handle)


def _newest_first(store: Store, name: str, reader: "Reader", part: Part, per_page: int | None) -> Iterator[Block]:
    """Yield the blocks of `read_entries` from the last to the first.

    Where a block's records begin is known only once those before it were read, so long parts are read twice.
    """
    ends = [0]
    last: Block | None = None
    for block in read_entries(store, name, reader, part, per_page):
        ends.append(block[2])
        last = block
    if last is None:
        return
    yield last
    handle = store.attach(part.segments(name)[1], reader)
    try:
        for number in range(len(ends) - 3, -1, -1):
            yield _read_block(store.path, reader, handle, part, per_page, number * _BLOCK, ends[number])
    finally:
        with suppress(ClosedError):
            reader.remove(handle)


def _read_block(
    where: Path,
    reader: "Reader",
    handle: int,
    part: Part,
    per_page: int | None,
    start: int,
    end: int,
    most: int = _BLOCK,
) -> Block:
    count = min(most, part.entries - start)
    raw = reader.read(handle, [start * ENTRY.itemsize], count * ENTRY.itemsize)
    block = raw.reshape(-1).view(ENTRY)
    lengths = block["length"][block["length"] != DELETED].astype(np.int64)
    offsets = np.empty(0, np.int64)
    if len(lengths):
        if per_page is not None and not lengths.all():
            raise CorruptionError(f"{where}: part {part.number} of a log has a record of no bytes")
        offsets, end = lay_out(end, lengths, per_page)
    return block, offsets, end


def _apply(block: NDArray[Any], places: NDArray[np.int64], index: LogIndex, deleted: SlotMap) -> None:
    keys = block["key"].astype(np.int64)
    is_row = block["length"] != DELETED
    where = np.full(len(block), -1, np.int64)
    where[is_row] = places
    unique, inverse = deleted.unique(keys)
    last = np.empty(len(unique), np.int64)
    last[inverse] = np.arange(len(keys))  # of the places given to one element, the last stays
    new = (index.places(unique) < 0) & (deleted.find(unique) < 0)
    rows, gone = last[new & is_row[last]], last[new & ~is_row[last]]
    deleted.insert(keys[gone])
    index.point(index.reserve(keys[rows]), where[rows], block["length"][rows].astype(np.int64))


def check_parts(store: Store, name: str, record: LogRecord) -> None:
    """Compare what the catalog says of a log with its files, before any memory is taken for it."""
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


def _check_lengths(store: Store, records: str, block: NDArray[np.void], part: Part, record: LogRecord) -> None:
    """Refuse lengths of records that the part's file does not have."""
    lengths = block["length"][block["length"] != DELETED]
    wrong = record.record_bytes and (lengths != record.record_bytes).any()
    if wrong or part.end > store.segments()[records].payload:
        raise CorruptionError(f"{store.path}: the entries of {records!r} do not describe its records")
