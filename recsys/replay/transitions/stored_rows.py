"""Rows of a numbered stream on SSD, of which the oldest go: the number of a row gives its place without an index."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.errors import ClosedError, CorruptionError
from memhier.io.reader import Reader
from memhier.store.segments import FullError, PatientSegmentWriter
from memhier.store.store import Store
from memhier.store.transaction import Transaction

__all__ = ["Place", "StoredRows"]

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_SMALL_PARTS = 8
_COPIED = 256


@dataclass(slots=True)
class _Part:
    """Rows of following numbers in one segment.

    Attributes
    ----------
    start, count
        Number of the first row, and how many there are.
    handle
        The reader's, -1 while the file has none of the rows.
    readable
        Bytes that the reader has.
    writer
        Of a part that is not committed.
    """

    start: int
    count: int
    handle: int
    readable: int
    writer: PatientSegmentWriter | None

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def name(self) -> str:
        return f"rows-{self.start}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where rows lie, so that another thread can read them: handles int32 [n] and offsets int64 [n]."""

    handles: NDArray[np.int32]
    offsets: Ints


class StoredRows:
    """Appends rows in runs and reads them by number. Parts whose rows are all too old leave.

    A commit ends the part that is being written. Once eight parts that follow each other are together smaller than one
    part, the next part begins with their rows, so there are few parts however often there is a commit.

    Parameters
    ----------
    store
        Open for writing; no one else changes it.
    row_bytes
        Of a row, a multiple of eight.
    part_rows
        Rows of a part.
    run_bytes
        Whole pages of 4,096 bytes that wait for a write.
    parts
        Number of the first row and count of the committed parts, rising.
    """

    def __init__(
        self, store: Store, reader: Reader, row_bytes: int, part_rows: int, run_bytes: int,
        parts: Sequence[tuple[int, int]],
    ) -> None:  # fmt: skip
        self._store = store
        self._reader = reader
        self._row_bytes = row_bytes
        whole = 4096 // np.gcd(row_bytes, 4096)
        self._part_rows = int(-(-part_rows // whole) * whole)  # a full part ends with a page
        self._run_bytes = run_bytes
        self._tx: Transaction | None = None
        self._parts: list[_Part] = []
        for start, count in parts:
            part = _Part(start, count, -1, count * row_bytes, None)
            part.handle = store.attach(part.name, reader)
            self._parts.append(part)

    @property
    def stop(self) -> int:
        """The number after the last row."""
        return self._parts[-1].stop if self._parts else 0

    @property
    def unreadable(self) -> int:
        """The number of the first row that is not in a file yet."""
        if not self._parts:
            return 0
        last = self._parts[-1]
        return last.start + last.readable // self._row_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes on SSD of all rows that are there."""
        return sum(part.count for part in self._parts) * self._row_bytes

    def append(self, rows: Bytes, first: int) -> None:
        """Append rows, uint8 [n, row_bytes], of which the first has the number `first`, or else `stop`.

        Raises
        ------
        FullError
            When the disk has no room; `stop` tells which rows were appended.
        """
        start = 0
        while start < len(rows):
            part = self._open_part(first + start)
            assert part.writer is not None
            self._flush(part)
            count = min(len(rows) - start, self._part_rows - part.count)
            part.writer.append(rows[start : start + count])
            part.count += count
            start += count
            with suppress(FullError):  # the bytes wait in DRAM; the next call tries again
                self._flush(part)

    def drop_before(self, oldest: int) -> None:
        """Let parts go whose rows are all older than the number `oldest`; none of them may be read meanwhile."""
        while self._parts and self._parts[0].stop <= oldest and self._parts[0] is not self._parts[-1]:
            part = self._parts.pop(0)
            self._reader.remove(part.handle)
            if part.writer is not None:
                assert self._tx is not None
                self._tx.discard(part.name)

    def place(self, numbers: Ints) -> Place:
        """Return where rows lie that are in files; good until `append`, `drop_before` or `commit`."""
        starts = np.array([part.start for part in self._parts], np.int64)
        handles = np.array([part.handle for part in self._parts], np.int32)
        at = np.searchsorted(starts, numbers, "right") - 1
        return Place(handles[at], (numbers - starts[at]) * self._row_bytes)

    def read(self, place: Place) -> Bytes:
        """Read rows, uint8 [n, row_bytes]; any one thread at a time."""
        return self._reader.read(place.handles, place.offsets, self._row_bytes)

    def commit(self, segments: Mapping[str, Sequence[NDArray[Any]]], key: str, value: "bytes") -> int:
        """Make all rows durable, with arrays and one value beside them; return the generation.

        Raises
        ------
        FullError
            When the disk has no room: the call may be made again.
        OSError
            When a write failed; the store is closed for writing then.
        """
        tx = self._transaction()
        if self._parts and self._parts[-1].writer is not None:
            self._flush(self._parts[-1])
        for name, arrays in segments.items():
            if name in tx.written:
                tx.discard(name)
            writer = tx.segment(name, patient=True)
            assert isinstance(writer, PatientSegmentWriter)
            for array in arrays:
                flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                for start in range(0, len(flat), self._run_bytes):
                    writer.settle()
                    writer.append(flat[start : start + self._run_bytes])
        tx.put(key, value)
        tx.reserve(len(value))
        kept = {part.name for part in self._parts} | set(segments)
        tx.swap_dropped([name for name in self._store.segments() if name not in kept])
        generation = tx.commit()
        self._tx = None
        for part in self._parts:
            if part.writer is not None:
                if part.handle >= 0:
                    self._reader.remove(part.handle)
                part.handle = self._store.attach(part.name, self._reader)
                part.readable, part.writer = part.count * self._row_bytes, None
        return generation

    def table(self) -> list[tuple[int, int]]:
        """Return the argument `parts` of a store as the next commit leaves it."""
        return [(part.start, part.count) for part in self._parts]

    def close(self) -> None:
        """Forget uncommitted changes, and let go of the reader's files."""
        if self._tx is not None:
            self._tx.abort()
        for part in self._parts:
            if part.handle >= 0:
                with suppress(ClosedError):
                    self._reader.remove(part.handle)
        self._parts = []

    def _transaction(self) -> Transaction:
        if self._tx is None:
            self._tx = self._store.begin(self._run_bytes)
        return self._tx

    def _open_part(self, start: int) -> _Part:
        """Return the part that takes the next row; begin one if there is none."""
        last = self._parts[-1] if self._parts else None
        if last is not None and last.writer is not None and last.count < self._part_rows:
            return last
        if last is not None and last.writer is not None:
            self._flush(last)
            last.writer.complete()  # it ends with a page: nothing is written, and its buffer goes
        joined = self._parts[-_SMALL_PARTS:]
        if len(joined) < _SMALL_PARTS or sum(part.count for part in joined) >= self._part_rows:
            joined = []
        tx = self._transaction()
        part = self._begun(joined[0].start if joined else start)
        try:
            for old in joined:
                self._copy(old, part)
        except (FullError, CorruptionError) as error:
            if part.handle >= 0:
                self._reader.remove(part.handle)
            tx.discard(part.name)
            if isinstance(error, FullError):
                raise
            # Damaged parts stay as they are.
            part, joined = self._begun(start), []
        for old in joined:
            self._reader.remove(old.handle)
        self._parts[len(self._parts) - len(joined) :] = [part]
        return part

    def _begun(self, start: int) -> _Part:
        writer = self._transaction().segment(f"rows-{start}", patient=True)
        assert isinstance(writer, PatientSegmentWriter)
        return _Part(start, 0, -1, 0, writer)

    def _copy(self, old: _Part, part: _Part) -> None:
        """Append the rows of a committed part to the one that is being written."""
        assert part.writer is not None
        step = max(1, min(_COPIED, self._run_bytes // self._row_bytes))
        for first in range(0, old.count, step):
            numbers = np.arange(first, min(first + step, old.count), dtype=np.int64)
            self._flush(part)
            handles: NDArray[np.int32] = np.full(len(numbers), old.handle, np.int32)
            part.writer.append(self.read(Place(handles, numbers * self._row_bytes)))
            part.count += len(numbers)
        self._flush(part)

    def _flush(self, part: _Part) -> None:
        """Write the whole pages of a part, and let the reader have them."""
        assert part.writer is not None
        length, checksums = part.writer.flush()
        if length == part.readable:
            return
        if part.handle < 0:
            part.handle = self._reader.add(str(part.writer.path), length, checksums)
        else:
            self._reader.extend(part.handle, length, checksums)
        part.readable = length
