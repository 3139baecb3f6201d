"""A log of records by key: an index in DRAM, parts on SSD, and the part that is being written.

Records are only ever appended; the newest of a key counts. The index is not stored: it is rebuilt at open from the
entries, newest first, so that it never holds more keys than are alive.
"""

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import as_ints, check_int, check_number
from memhier.errors import BudgetError, ClosedError, FormatError
from memhier.log.group import TransactionGroup
from memhier.log.index import Live, LogIndex, offset_of, place, slot_of
from memhier.log.parts import DELETED, ENTRY, LARGE_BYTES, LogRecord, Part, PartTable, lay_out, record_size
from memhier.log.replay import EntryReader, committed_record, replay
from memhier.log.tail import BLOCK_BYTES, LogTail, OpenPart
from memhier.store.segments import PAGE_BYTES
from memhier.store.store import SegmentInfo, Store
from memhier.store.transaction import Transaction

if TYPE_CHECKING:
    from memhier.io.reader import PendingRead, Reader

__all__ = ["Bytes", "Flags", "FoundRecords", "Ints", "Log", "LogOptions", "RecordFormat"]

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Bytes = NDArray[np.uint8]

COMPACT_BELOW_MAX = 0.9  # ten bytes are moved for one that becomes free
PART_BYTES = 2**34  # a part is compacted whole, so no compaction of one needs more room than this
ENTRIES_BLOCK = 2**16
_NAME = re.compile(r"[A-Za-z0-9_-]{1,70}")


class RecordFormat(Protocol):
    """The shape of a log's records."""

    kind: ClassVar[str]

    @property
    def record_bytes(self) -> int:
        """Bytes of every record; 0 if they differ."""

    @property
    def per_page(self) -> int | None:
        """As in `lay_out`."""

    def fetch(self, reader: "Reader", handles: NDArray[np.int32], offsets: Ints, lengths: Ints) -> Any:
        """Read records from files in one submission."""

    def copy(self, tail: LogTail, offsets: Ints, lengths: Ints) -> Any:
        """Copy records from the tail."""

    def block(self, records: Any, start: int, stop: int, offsets: Ints) -> Bytes:
        """Return a range of records, fetched or handed in, as they lie in a part from the first offset on."""


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The options of a log that do not depend on its records; see `RowLog`."""

    capacity: int
    compact_below: float = 0
    key_space: int | None = None
    grows: bool = False
    at_once: bool = False
    block_bytes: int = BLOCK_BYTES

    def __post_init__(self) -> None:
        if self.key_space is not None:
            check_int("key_space", self.key_space, 1, 2**63 - 1)
        check_number("compact_below", self.compact_below, 0, COMPACT_BELOW_MAX)
        check_int("block_bytes", self.block_bytes, PAGE_BYTES, BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class FoundRecords:
    """The records of keys.

    Attributes
    ----------
    there
        The keys that have a record.
    in_tail
        Those of them whose record is in DRAM.
    copied
        A copy of the records in DRAM; None if there are none.
    handles, offsets, lengths
        The reader's handle, the offset and the length of the records in files; undefined for other keys.
    """

    there: Flags
    in_tail: Flags
    copied: Any
    handles: NDArray[np.int32]
    offsets: Ints
    lengths: Ints


class Log:
    """Records by key, in a store. `RecordLog` has the calls for users.

    Attributes
    ----------
    group
        Owns the transaction that it writes in, and the lock that changes hold.
    parts
        The committed parts by slot, in the order of writing.
    fresh
        The parts of the open transaction; the last one is being written.
    lock
        Held while index, table, parts and tail change together, and while they are read.
    patient
        Whether a full disk is waited out: an append or a commit that finds no room raises `FullError`, has changed
        nothing that counts, and may be made again.
    part_bytes
        Bytes of records in a part, about; None for the most that there may be. Small parts give space back in small
        steps.
    block_bytes
        Of records that are appended in one piece, at most.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        reader: "Reader",
        record_format: RecordFormat,
        options: LogOptions,
        group: TransactionGroup,
    ) -> None:
        if not isinstance(name, str):
            raise TypeError(f"name={name!r}: expected text")
        if not _NAME.fullmatch(name):
            raise ValueError(f"name={name!r}: expected 1 to 70 letters, digits, '-' or '_'")
        self.store = store
        self.name = name
        self.reader = reader
        self.format = record_format
        self.group = group
        self.value_key: str = f"log/{name}"
        record = self._read_record(options.capacity)
        self._following = record.following
        expected = options.capacity if options.at_once else record.live
        self.index: LogIndex = LogIndex(
            options.capacity, record.record_bytes or None, options.key_space, options.grows, expected
        )
        self.table: PartTable = PartTable()
        self.parts: dict[int, Part] = {}
        self.fresh: list[OpenPart] = []
        self.block_bytes: int = options.block_bytes
        self.tail: LogTail = LogTail(self.block_bytes, record_format.record_bytes)
        self.lock: threading.Lock = threading.Lock()
        self.patient = False
        self.part_bytes: int | None = None
        self._reads = 0
        self._retired: list[int] = []
        self._closed = False
        self._appended_bytes = 0
        self._written_bytes = 0
        self.entries: EntryReader = EntryReader(store, name, reader, record_format.per_page)
        try:
            self.parts = replay(self.entries, record, self.index, self.table)
        except BaseException:
            self._let_go()
            raise

    def _read_record(self, capacity: int) -> LogRecord:
        """Return the catalog's record of the log; a new one if a writer opens a log that is not there."""
        expected, record = self.format.record_bytes, committed_record(self.store, self.name)
        if record is None:
            if not self.store.writable:
                raise FormatError(
                    f"{self.store.path}: no {self.format.kind} named {self.name!r}; its values are {self.store.keys()}"
                )
            return LogRecord(expected, 0, 0, [])
        if record.record_bytes != expected:
            sizes = [
                "of different lengths" if size == 0 else f"of {size} bytes" for size in (record.record_bytes, expected)
            ]
            raise FormatError(f"{self.store.path}: log {self.name!r} holds records {sizes[0]}, expected {sizes[1]}")
        if isinstance(capacity, int) and capacity < record.live:
            raise BudgetError(
                f"capacity={capacity}: log {self.name!r} holds {record.live} keys; expected at least as many"
            )
        return record

    @property
    def memory_bytes(self) -> int:
        """DRAM held by index, table and tail, in bytes."""
        return self.index.memory_bytes + self.table.memory_bytes + self.tail.buffer.nbytes

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def check_open(self) -> None:
        """Raise ClosedError when it is closed, or a write of its group failed."""
        if self._closed:
            raise ClosedError(f"{self.format.kind} {self.name!r} is closed")
        if self.group.failure is not None:
            raise ClosedError(
                f"{self.format.kind} {self.name!r}: a write failed ({self.group.failure}); uncommitted changes are "
                "gone; open it again"
            ) from self.group.failure

    def checked_keys(self, keys: Any) -> Ints:
        """Return keys as int64 [n], or raise; ClosedError as in `check_open`."""
        self.check_open()
        wanted = as_ints("keys", keys)
        if wanted.ndim != 1:
            raise ValueError(f"keys: expected shape [n], got {list(wanted.shape)}")
        return wanted

    def close(self) -> None:
        """Take no more calls. Its files stay open until `release`."""
        self._closed = True

    def release(self) -> None:
        """Forget the changes of the group, and let go of the reader's files."""
        self.group.close()
        self._let_go()

    # Reading.

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the files of dropped parts open until the reads that may use them are over."""
        with self.lock:
            self._reads += 1
        try:
            yield
        finally:
            with self.lock:
                self._reads -= 1
                retired: list[int] = []
                if self._reads == 0:
                    retired, self._retired = self._retired, []
            for handle in retired:
                self.reader.remove(handle)

    def find(self, keys: Ints) -> FoundRecords:
        """Return the records of keys, to be read from their files under `reading`."""
        with self.lock:
            places, lengths = self.index.places(keys), self.index.lengths(keys)
            there: Flags = places >= 0
            slots, offsets = slot_of(places), offset_of(places)
            in_tail = there & self._in_tail_locked(slots, offsets)
            copied = self.format.copy(self.tail, offsets[in_tail], lengths[in_tail]) if in_tail.any() else None
            return FoundRecords(there, in_tail, copied, self.table.handles[slots], offsets, lengths)

    def places(self, keys: Ints) -> Ints:
        """Return the place of each key's record, -1 for none."""
        with self.lock:
            return self.index.places(keys)

    def begin_read(self, keys: Ints, out: Bytes, flushes: bool) -> "PendingRead | None":
        """Begin to read records of one width; None where not all lie in files, or the reader cannot.

        `flushes` says whether to write records that have left the tail and are in no file yet.
        """
        self.check_open()
        with self.lock:
            if self.fresh:
                opened, places = self.fresh[-1], self.index.places(keys)
                written = offset_of(places[slot_of(places) == opened.part.slot])
                if self.tail.holds(written).any():
                    return None
                if not opened.are_readable(written):
                    if not flushes:
                        return None
                    with self.group.failing(waits=self.patient):
                        opened.make_readable(written)
            found = self.index.locate(keys, self.table.handles)
            return self.reader.begin_read(*found, self.format.record_bytes, out) if found and len(keys) else None

    def contains(self, keys: Ints) -> Flags:
        """Return whether each key has a record."""
        with self.lock:
            found: Flags = self.index.places(keys) >= 0
        return found

    def fetch_part(self, part: Part, offsets: Ints, lengths: Ints) -> Any:
        """Read records of a sealed part from its file; None if the part is gone."""
        with self.reading():
            with self.lock:
                if not self.has(part):
                    return None
                handles = np.full(len(offsets), self.table.handles[part.slot])
            return self.format.fetch(self.reader, handles, offsets, lengths)

    def are_alive_locked(self, part: Part, keys: Ints, offsets: Ints, lengths: Ints) -> Flags:
        """Return which records of a part are the newest of their key; with `lock` or the group's lock held."""
        # The length as well: the record after an empty one begins at the same place.
        alive: Flags = self.index.places(keys) == place(part.slot, offsets)
        alive &= self.index.lengths(keys) == lengths
        return alive

    def opened(self, part: Part) -> OpenPart | None:
        """Return a part as the open transaction writes it; None for any other."""
        return next((opened for opened in self.fresh if opened.part is part), None)

    def has(self, part: Part) -> bool:
        """Whether a part is still there: its slot may be another's by now."""
        return self.parts.get(part.slot) is part or self.opened(part) is not None

    def all_parts(self) -> list[Part]:
        """Return the parts as the next commit would leave them, in the order of writing."""
        return [*self.parts.values(), *(opened.part for opened in self.fresh)]

    def live_by_slot_locked(self) -> Live:
        """Return the records that are the newest of their key; with `lock` or the group's lock held."""
        return self.index.live(len(self.table.handles))

    def stats(self) -> dict[str, int | float]:
        """Return plain numbers; see `RecordLog.stats`."""
        with self.lock:
            parts, live = self.all_parts(), int(self.live_by_slot_locked().sizes.sum())
            return {
                "records": len(self.index),
                "capacity": self.index.capacity,
                "parts": len(parts),
                "live_bytes": live,
                "dead_bytes": sum(part.size for part in parts) - live,
                "log_bytes": sum(part.bytes for part in parts),
                "appended_bytes": self._appended_bytes,
                "written_bytes": self._written_bytes,
                "write_amplification": self._written_bytes / max(1, self._appended_bytes),
            }

    def _in_tail_locked(self, slots: Ints, offsets: Ints) -> Flags:
        """Return which places are read from DRAM, the others being in files; with the lock held."""
        if not self.fresh:
            return np.zeros(len(slots), np.bool_)
        opened = self.fresh[-1]
        written = slots == opened.part.slot
        with self.group.failing(waits=self.patient):
            opened.make_readable(offsets[written & ~self.tail.holds(offsets)])
        inside: Flags = written & self.tail.holds(offsets)
        return inside

    def _let_go(self) -> None:
        handles = [int(handle) for handle in self.table.handles if handle >= 0]
        for handle in [*handles, *self._retired]:
            with suppress(ClosedError):
                self.reader.remove(handle)

    # Writing, under the group's lock. Steps that could leave index and files at odds run under `group.failing`.

    def begin(self) -> bool:
        """Make sure that there is a transaction; return whether it is new."""
        self.check_open()
        return self.group.begin()

    def append(self, keys: Ints, lengths: Ints, records: Any) -> None:
        """Set records; BudgetError if the keys do not fit, and nothing has changed then."""
        with self.group.lock:
            fresh = self.begin()
            try:
                self.write_locked(keys, lengths, records)
            except BudgetError:
                if fresh:
                    self.group.cancel()
                raise
            self._appended_bytes += int(lengths.sum())

    def delete(self, keys: Ints) -> None:
        """Delete the records of keys that have one."""
        with self.group.lock:
            self.begin()
            there = keys[self.index.places(keys) >= 0]
            with self.lock:
                self.index.erase(there)
            self.enter_deletions_locked(there)

    def write_locked(self, keys: Ints, lengths: Ints, records: Any) -> None:
        """Append records in blocks that fit the tail, in a transaction that is open."""
        with self.lock:
            slots = self.index.reserve(keys)
        ends = np.cumsum(lengths)
        large = np.append(np.flatnonzero(lengths >= LARGE_BYTES), len(keys))
        start = 0
        while start < len(keys):
            before = int(ends[start - 1]) if start else 0
            barrier = int(large[np.searchsorted(large, start)])
            fits = int(np.searchsorted(ends, before + self._block_bytes(), "right"))
            if barrier > start:
                stop = min(barrier, max(fits, start + 1))
            else:
                # Large records go one by one; those that all fill whole pages leave nothing to pad, and go together.
                run = self.format.record_bytes and self.format.record_bytes % PAGE_BYTES == 0
                stop = max(fits, start + 1) if run else start + 1
            with self.group.failing(waits=self.patient) as tx, self.lock:
                opened = self._part_to_write_locked(tx)
                offsets, end = lay_out(opened.part.end, lengths[start:stop], self.format.per_page)
                block = self.format.block(records, start, stop, offsets)
                add = opened.append_large if barrier == start else opened.append
                padded = end - opened.part.end
                add(block, int(offsets[0]), end)
                entries = np.empty(stop - start, ENTRY)
                entries["key"], entries["length"] = keys[start:stop], lengths[start:stop]
                opened.enter(entries)
                self._written_bytes += padded + entries.nbytes
                self.index.point(slots[start:stop], place(opened.part.slot, offsets), lengths[start:stop])
            start = stop

    def enter_deletions_locked(self, keys: Ints) -> None:
        """Append entries that delete keys."""
        for start in range(0, len(keys), ENTRIES_BLOCK):
            entries = np.empty(len(keys[start : start + ENTRIES_BLOCK]), ENTRY)
            entries["key"], entries["length"] = keys[start : start + ENTRIES_BLOCK], DELETED
            with self.group.failing(waits=self.patient) as tx, self.lock:
                self._part_to_write_locked(tx).enter(entries)
                self._written_bytes += entries.nbytes

    def drop_locked(self, part: Part) -> None:
        """Remove a part none of whose records is alive; its file is closed after the reads that may use it."""
        with self.reading(), self.group.failing() as tx, self.lock:
            opened = self.opened(part)
            for segment in part.segments(self.name):
                if opened is None:
                    tx.drop(segment)
                else:
                    tx.discard(segment)
            if opened is None:
                del self.parts[part.slot]
            else:
                self.fresh.remove(opened)
            self._retired.append(self.table.give_back(part.slot))

    def most_bytes(self) -> int:
        """Return the bytes of records after which a new part begins."""
        return self.part_bytes or PART_BYTES

    def _block_bytes(self) -> int:
        """Return how much is appended in one piece: no part grows far beyond its limit."""
        if self.part_bytes is None:
            return self.block_bytes
        left = self.part_bytes - (self.fresh[-1].part.end if self.fresh else 0)
        return min(self.block_bytes, left if left > 0 else self.part_bytes)

    def _part_to_write_locked(self, tx: Transaction) -> OpenPart:
        if self.fresh and self.fresh[-1].part.end < self.most_bytes():
            self.fresh[-1].settle()
            return self.fresh[-1]
        if self.fresh:
            self.fresh[-1].seal()
        part = Part(self._following, self.table.take())
        try:
            records, entries = tx.segments(part.segments(self.name), patient=self.patient)
        except BaseException:
            self.table.give_back(part.slot)
            raise
        opened = OpenPart(part, records, entries, self.tail, self.reader, self.table)
        self._following += 1
        self.fresh.append(opened)
        return opened

    # The steps of a commit, made by the group with its lock held.

    def give_locked(self) -> int:
        """Hand the segments all records and write whole pages, or raise FullError; return the catalog entry's bytes."""
        if self.fresh:
            with self.lock:
                self.fresh[-1].give()
        return record_size(len(self.parts) + len(self.fresh))

    def seal_locked(self) -> None:
        """Finish the part that is being written."""
        if self.fresh:
            with self.lock:
                self.fresh[-1].seal()

    def catalog_entry_locked(self) -> tuple[str, bytes]:
        """Return the key and the value that describe the log in the catalog."""
        described = [(part.number, part.entries, part.deletions, part.size) for part in self.all_parts()]
        record = LogRecord(self.format.record_bytes, len(self.index), self._following, described)
        return self.value_key, record.encode()

    def adopt_locked(self, segments: Mapping[str, SegmentInfo]) -> None:
        """Count the parts of the transaction as committed, and let the store's copy of their checksums serve."""
        with self.lock:
            for opened in self.fresh:
                part = opened.part
                info = segments[opened.name]
                self.reader.extend(int(self.table.handles[part.slot]), info.length, info.checksums)
                self.parts[part.slot] = part
            self.fresh.clear()
