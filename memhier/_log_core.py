"""The engine of a log: which parts there are, what is being written, and how parts are rewritten.

The public face of it is `memhier._record_log`.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memhier._log_index import LogIndex
from memhier._log_parts import (
    DELETED,
    ENTRY,
    LARGE_BYTES,
    LogRecord,
    Part,
    PartTable,
    lay_out,
    offset_of,
    place,
    slot_of,
)  # fmt: skip
from memhier._log_replay import read_entries, replay
from memhier._log_tail import BLOCK_BYTES, LogTail, OpenPart
from memhier._segments import PAGE_BYTES
from memhier._transaction import Transaction
from memhier.errors import BudgetError, ClosedError, CorruptionError
from memhier.store import Store

if TYPE_CHECKING:
    from memhier.reader import Reader

__all__ = ["BlockOf", "Bytes", "Flags", "Ints", "LogCore"]

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
BlockOf = Callable[[int, int, Ints], Bytes]
"""Takes the range of a batch and the offsets of its records; returns them as they lie, from the first offset on."""

_ENTRIES_BLOCK = 2**16
_MOVE_BYTES = 2**20
_PART_BYTES = 2**34  # A part is compacted whole: no compaction of one needs more room than this.
# So many parts of about one size (within a factor of 8) become one, so that there are at most 7 of each size.
_MERGE_PARTS = 8
_MERGE_BYTES_MAX = _PART_BYTES // _MERGE_PARTS


class LogCore:
    """State and inner workings of a `RecordLog`.

    Parameters
    ----------
    record_bytes
        Of every record; 0 where they differ.
    per_page
        As in `lay_out`.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        reader: "Reader",
        capacity: int,
        record: LogRecord,
        per_page: int | None,
        direct: bool,
    ) -> None:
        self._store = store
        self._name = name
        self._reader = reader
        self._record_bytes = record.record_bytes
        self._per_page = per_page
        self._direct = direct
        self._following = record.following
        self._index = LogIndex(capacity, record.record_bytes or None)
        self._table = PartTable()
        self._parts: dict[int, Part] = {}  # committed ones by slot, in the order of writing
        self._fresh: list[OpenPart] = []  # those of the open transaction; the last one is being written
        self._tail = LogTail()
        self._tx: Transaction | None = None
        self._writer = threading.RLock()  # held through a whole change
        self._lock = threading.Lock()  # held while index, table and tail change together
        self._reads = 0
        self._retired: list[int] = []
        self._failure: BaseException | None = None
        self._closed = False
        self._appended_bytes = 0
        self._written_bytes = 0
        try:
            self._parts = replay(store, name, reader, record, self._index, self._table, per_page)
        except BaseException:
            self._let_go()
            raise

    # What the two shapes of record differ in.

    def _fetch(self, handles: NDArray[np.int32], offsets: Ints, lengths: Ints) -> Any:
        """Read records from files in one submission."""
        raise NotImplementedError

    def _block_of(self, records: Any) -> BlockOf:
        """Return how to lay out what `_fetch` returned, or what was handed in."""
        raise NotImplementedError

    # Reading.

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Keep the files of dropped parts open until the reads that may use them are over."""
        with self._lock:
            self._reads += 1
        try:
            yield
        finally:
            with self._lock:
                self._reads -= 1
                retired: list[int] = []
                if self._reads == 0:
                    retired, self._retired = self._retired, []
            for handle in retired:
                self._reader.remove(handle)

    def _let_go(self) -> None:
        """Close the files."""
        handles = [int(handle) for handle in self._table.handles if handle >= 0]
        for handle in [*handles, *self._retired]:
            with suppress(ClosedError):
                self._reader.remove(handle)

    def _in_tail(self, places: Ints) -> Flags:
        """Return which places are read from DRAM, the others being in files; with the lock held."""
        if not self._fresh:
            return np.zeros(len(places), np.bool_)
        opened, offsets = self._fresh[-1], offset_of(places)
        written = slot_of(places) == opened.part.slot
        with self._failing():
            opened.make_readable(offsets[written & ~self._tail.holds(offsets)])
        inside: Flags = written & self._tail.holds(offsets)
        return inside

    def _files(self, places: Ints) -> tuple[NDArray[np.int32], Ints]:
        """Return the reader's handles and the offsets of places; with the lock held."""
        return self._table.handles[slot_of(places)], offset_of(places)

    # Writing. Everything that could leave index and files at odds happens under `_failing`.

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{type(self).__name__} {self._name!r} is closed")
        if self._failure is not None:
            raise ClosedError(
                f"{type(self).__name__} {self._name!r}: a write failed ({self._failure}), what was not committed is "
                "gone; open it again"
            ) from self._failure

    def _begin(self) -> bool:
        """Make sure that there is a transaction; return whether it is new."""
        self._check_open()
        if self._tx is not None:
            self._tx.check_open()
            return False
        self._tx = self._store.begin()
        return True

    @contextmanager
    def _failing(self) -> Iterator[Transaction]:
        assert self._tx is not None
        try:
            yield self._tx
        except BaseException as error:
            self._failure = error
            self._tx.abort()
            self._tx = None
            raise

    def _append(self, keys: Ints, lengths: Ints, records: Any) -> None:
        with self._writer:
            fresh = self._begin()
            try:
                with self._lock:
                    slots = self._index.reserve(keys)
            except BudgetError:
                if fresh and self._tx is not None:
                    self._tx.abort()
                    self._tx = None
                raise
            self._write(keys, slots, lengths, self._block_of(records))
            self._appended_bytes += int(lengths.sum())

    def _write(self, keys: Ints, slots: Ints, lengths: Ints, block_of: BlockOf) -> None:
        """Append records in blocks that fit the tail."""
        ends = np.cumsum(lengths)
        large = np.append(np.flatnonzero(lengths >= LARGE_BYTES), len(keys))
        start = 0
        while start < len(keys):
            before = int(ends[start - 1]) if start else 0
            barrier = int(large[np.searchsorted(large, start)])
            fits = int(np.searchsorted(ends, before + BLOCK_BYTES, "right"))
            if barrier > start:
                stop = min(barrier, max(fits, start + 1))
            else:
                # Large records go one by one, but for those of one length that leaves nothing to fill up.
                run = self._record_bytes and self._record_bytes % PAGE_BYTES == 0
                stop = max(fits, start + 1) if run else start + 1
            with self._failing(), self._lock:
                opened = self._part_to_write()
                offsets, end = lay_out(opened.part.end, lengths[start:stop], self._per_page)
                block = block_of(start, stop, offsets)
                add = opened.append_large if barrier == start else opened.append
                self._written_bytes -= opened.part.bytes
                add(block, int(offsets[0]), end)
                entries = np.empty(stop - start, ENTRY)
                entries["key"], entries["length"] = keys[start:stop], lengths[start:stop]
                opened.enter(entries)
                self._written_bytes += opened.part.bytes
                self._index.point(slots[start:stop], place(opened.part.slot, offsets), lengths[start:stop])
            start = stop

    def _enter_deletions(self, keys: Ints) -> None:
        for start in range(0, len(keys), _ENTRIES_BLOCK):
            entries = np.empty(len(keys[start : start + _ENTRIES_BLOCK]), ENTRY)
            entries["key"], entries["length"] = keys[start : start + _ENTRIES_BLOCK], DELETED
            with self._failing(), self._lock:
                self._part_to_write().enter(entries)
                self._written_bytes += entries.nbytes

    def _part_to_write(self) -> OpenPart:
        if self._fresh and self._fresh[-1].part.end < _PART_BYTES:
            return self._fresh[-1]
        if self._fresh:
            self._fresh[-1].seal()
        assert self._tx is not None
        part = Part(self._following, self._table.take())
        self._following += 1
        self._fresh.append(OpenPart(self._tx, self._name, part, self._tail, self._reader, self._table, self._direct))
        return self._fresh[-1]

    def _record(self) -> LogRecord:
        parts = [*self._parts.values(), *(opened.part for opened in self._fresh)]
        described = [(part.number, part.entries, part.deletions, part.size) for part in parts]
        return LogRecord(self._record_bytes, len(self._index), self._following, described)

    def _adopt(self) -> None:
        """The parts of the transaction are committed: let the store's copy of their checksums serve."""
        with self._lock:
            for part in (opened.part for opened in self._fresh):
                info = self._store.segments()[part.segments(self._name)[0]]
                self._reader.extend(int(self._table.handles[part.slot]), info.length, info.checksums)
                self._parts[part.slot] = part
            self._fresh.clear()

    # Compaction.

    def _sparse_parts(self, live_below: float) -> list[Part]:
        """Return the parts of which less than a share is alive."""
        records, sizes = self._index.live(len(self._table.handles))
        sparse: list[Part] = []
        for older, part in enumerate(self._parts.values()):
            # A deletion is needed as long as an older part may hold what it deletes.
            needed = part.deletions if len(sparse) < older else 0
            live = sizes[part.slot] + (records[part.slot] + needed) * ENTRY.itemsize
            if live < live_below * (part.size + part.entries * ENTRY.itemsize):
                sparse.append(part)
        return sparse

    def _merge(self) -> None:
        """Rewrite small parts that have become many; each byte is rewritten once per size, a factor of 8 apart."""
        sizes: dict[int, list[Part]] = {}
        for part in self._parts.values():
            if part.bytes <= _MERGE_BYTES_MAX:
                sizes.setdefault(part.bytes.bit_length() // 3, []).append(part)
        crowded = [part for parts in sizes.values() if len(parts) >= _MERGE_PARTS for part in parts]
        for part in sorted(crowded, key=lambda part: part.number):
            try:
                self._rewrite(part)
            except (CorruptionError, OSError):
                # What cannot be read stays where it is, and keeps no one from committing.
                if self._failure is not None:
                    raise

    def _rewrite(self, part: Part) -> None:
        """Append what is alive in a committed part once more, and drop the part."""
        is_oldest = part.slot == next(iter(self._parts))
        for entries, offsets, _ in read_entries(self._store, self._name, self._reader, part, self._per_page):
            has_record = entries["length"] != DELETED
            keys = entries["key"].astype(np.int64)
            kept, lengths = keys[has_record], entries["length"][has_record].astype(np.int64)
            # The length as well: what follows an empty record begins where it does.
            live = (self._index.places(kept) == place(part.slot, offsets)) & (self._index.lengths(kept) == lengths)
            self._move(part, kept[live], offsets[live], lengths[live])
            if not is_oldest:
                gone = keys[~has_record]
                self._enter_deletions(gone[self._index.places(gone) < 0])
        with self._reading(), self._failing() as tx, self._lock:
            for segment in part.segments(self._name):
                tx.drop(segment)
            del self._parts[part.slot]
            self._retired.append(self._table.give_back(part.slot))

    def _move(self, part: Part, keys: Ints, offsets: Ints, lengths: Ints) -> None:
        ends = np.cumsum(lengths)
        handle = self._table.handles[part.slot]
        start = 0
        while start < len(keys):
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + _MOVE_BYTES, "right")))
            some = slice(start, stop)
            records = self._fetch(np.full(stop - start, handle), offsets[some], lengths[some])
            self._write(keys[some], self._index.reserve(keys[some]), lengths[some], self._block_of(records))
            start = stop
