"""The engine of a log: which parts there are, and what is being written.

How parts are rewritten is in `memhier.log.compaction`, the public face of it all in `memhier.log.record_log`.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memhier.errors import BudgetError, ClosedError
from memhier.log.index import LogIndex
from memhier.log.parts import (
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
)
from memhier.log.replay import replay
from memhier.log.tail import BLOCK_BYTES, LogTail, OpenPart
from memhier.store.segments import PAGE_BYTES, FullError
from memhier.store.store import Store
from memhier.store.transaction import Transaction

if TYPE_CHECKING:
    from memhier.io.reader import Reader

__all__ = ["BlockOf", "Bytes", "Flags", "Ints", "LogCore"]

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
BlockOf = Callable[[int, int, Ints], Bytes]
"""Takes the range of a batch and the offsets of its records; returns them as they lie, from the first offset on."""

_ENTRIES_BLOCK = 2**16
_PART_BYTES = 2**34  # A part is compacted whole: no compaction of one needs more room than this.


class LogCore:
    """State and inner workings of a `RecordLog`.

    Parameters
    ----------
    record_bytes
        Of every record; 0 where they differ.
    per_page
        As in `lay_out`.
    beside
        The log whose transaction this one writes in.

    Attributes
    ----------
    patient
        Whether a full disk is waited out: an append or a commit that finds no room raises `FullError`, has changed
        nothing that counts, and may be made again. Not for logs that write past the page cache.
    part_bytes
        Of records in a part, about; None for the most that there may be. Small ones give space back in small steps.
    """

    patient = False
    part_bytes: int | None = None

    def __init__(
        self,
        store: Store,
        name: str,
        reader: "Reader",
        capacity: int,
        record: LogRecord,
        per_page: int | None,
        direct: bool,
        key_space: int | None = None,
        grows: bool = False,
        beside: "LogCore | None" = None,
    ) -> None:
        self._store = store
        self._name = name
        self._reader = reader
        self._record_bytes = record.record_bytes
        self._per_page = per_page
        self._direct = direct
        self._following = record.following
        self._index = LogIndex(capacity, record.record_bytes or None, key_space, grows)
        self._table = PartTable()
        self._parts: dict[int, Part] = {}  # committed ones by slot, in the order of writing
        self._fresh: list[OpenPart] = []  # those of the open transaction; the last one is being written
        self._tail = LogTail()
        self._leader = beside
        self._followers: list[LogCore] = []
        self._tx: Transaction | None = None
        # Held through a whole change. Logs that share a transaction share it: the threads that compact write there too.
        self._writer: AbstractContextManager[Any] = threading.RLock() if beside is None else beside._writer
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
        if beside is not None:
            beside._followers.append(self)

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
        with self._failing(waits=True):
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
        if self._leader is not None:
            self._leader._begin()
            self._tx = self._leader._tx
            return False  # the leader's, which may hold changes already: not to be aborted by this log
        self._tx = self._store.begin()
        return True

    @contextmanager
    def _failing(self, *, waits: bool = False) -> Iterator[Transaction]:
        """Close the log where the block fails; but with `waits` a patient one not for lack of room."""
        assert self._tx is not None
        try:
            yield self._tx
        except BaseException as error:
            if waits and self.patient and isinstance(error, FullError):
                raise
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Take no more calls, nor does any log of the same transaction: each holds changes that are gone."""
        for log in self._together():
            log._failure = error
            if log._tx is not None:
                log._tx.abort()
                log._tx = None

    def _together(self) -> "list[LogCore]":
        """The logs that share a transaction, the one that commits it first."""
        leader = self if self._leader is None else self._leader
        return [leader, *leader._followers]

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
            fits = int(np.searchsorted(ends, before + self._block_bytes(), "right"))
            if barrier > start:
                stop = min(barrier, max(fits, start + 1))
            else:
                # Large records go one by one, but for those of one length that leaves nothing to fill up.
                run = self._record_bytes and self._record_bytes % PAGE_BYTES == 0
                stop = max(fits, start + 1) if run else start + 1
            with self._failing(waits=True), self._lock:
                opened = self._part_to_write()
                offsets, end = lay_out(opened.part.end, lengths[start:stop], self._per_page)
                block = block_of(start, stop, offsets)
                add = opened.append_large if barrier == start else opened.append
                before = opened.part.bytes
                add(block, int(offsets[0]), end)
                entries = np.empty(stop - start, ENTRY)
                entries["key"], entries["length"] = keys[start:stop], lengths[start:stop]
                opened.enter(entries)
                self._written_bytes += opened.part.bytes - before
                self._index.point(slots[start:stop], place(opened.part.slot, offsets), lengths[start:stop])
            start = stop

    def _enter_deletions(self, keys: Ints) -> None:
        for start in range(0, len(keys), _ENTRIES_BLOCK):
            entries = np.empty(len(keys[start : start + _ENTRIES_BLOCK]), ENTRY)
            entries["key"], entries["length"] = keys[start : start + _ENTRIES_BLOCK], DELETED
            with self._failing(waits=True), self._lock:
                self._part_to_write().enter(entries)
                self._written_bytes += entries.nbytes

    def _most_bytes(self) -> int:
        return self.part_bytes or _PART_BYTES

    def _block_bytes(self) -> int:
        """Return how much is appended in one piece: no part grows far beyond what it may."""
        if self.part_bytes is None:
            return BLOCK_BYTES
        left = self.part_bytes - (self._fresh[-1].part.end if self._fresh else 0)
        return min(BLOCK_BYTES, left if left > 0 else self.part_bytes)

    def _part_to_write(self) -> OpenPart:
        if self._fresh and self._fresh[-1].part.end < self._most_bytes():
            self._fresh[-1].settle()
            return self._fresh[-1]
        if self._fresh:
            self._fresh[-1].seal()
        assert self._tx is not None
        part, patient = Part(self._following, self._table.take()), self.patient and not self._direct
        try:
            opened = OpenPart(
                self._tx, self._name, part, self._tail, self._reader, self._table, self._direct, patient
            )  # fmt: skip
        except BaseException:
            self._table.give_back(part.slot)
            raise
        self._following += 1
        self._fresh.append(opened)
        return opened

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
