"""The part of a log that is being written, readable while it grows."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memhier.log.parts import DELETED, LARGE_BYTES, Part, PartTable
from memhier.store.segments import PAGE_BYTES, PatientSegmentWriter, SegmentWriter

if TYPE_CHECKING:
    from memhier.io.reader import Reader

__all__ = ["BLOCK_BYTES", "LogTail", "OpenPart"]

BLOCK_BYTES = 2**19


class LogTail:
    """The end of a part's records, in DRAM because the file may not have it yet. All parts use one buffer in turn.

    Parameters
    ----------
    block_bytes
        Of records that are appended together, at most, but for a single one.
    record_bytes
        Of every record; 0 if they differ.

    Attributes
    ----------
    kept
        The bytes before those that the file lacks which stay: a record may begin in them and reach across.
    """

    def __init__(self, block_bytes: int, record_bytes: int) -> None:
        self.kept: int = _kept(record_bytes)
        self.buffer: NDArray[np.uint8] = np.empty(self.bytes_for(block_bytes, record_bytes), np.uint8)
        self.start: int = 0
        self.filled: int = 0

    @staticmethod
    def bytes_for(block_bytes: int, record_bytes: int) -> int:
        """Return the DRAM of a tail."""
        kept = _kept(record_bytes)
        block = max(block_bytes, kept)
        # A block is padded by an eighth; a page of padding, and one that the file has in part, always fit.
        return kept + block + block // 8 + 3 * PAGE_BYTES

    def reset(self, start: int) -> None:
        """Begin anew at an offset."""
        self.start, self.filled = start, 0

    def holds(self, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which records lie in the tail, whole."""
        return offsets >= self.start

    def rows(self, offsets: NDArray[np.int64], length: int) -> NDArray[np.uint8]:
        """Return records of one length, uint8 [n, length], a copy."""
        if len(offsets) == 0:
            return np.empty((0, length), np.uint8)
        windows = np.lib.stride_tricks.sliding_window_view(self.buffer[: self.filled], length)
        rows: NDArray[np.uint8] = windows[offsets - self.start]
        return rows

    def record(self, offset: int, length: int) -> bytes:
        """Return one record, a copy."""
        begin = offset - self.start
        return self.buffer[begin : begin + length].tobytes()


def _kept(record_bytes: int) -> int:
    return min(record_bytes or LARGE_BYTES, LARGE_BYTES)


class OpenPart:
    """Appends records and entries to the two segments of a new part.

    Every record below `LARGE_BYTES` is readable from the tail or from the file: the tail keeps the bytes that the file
    lacks, and those before them in which a record that reaches across may begin. `make_readable` writes
    larger records, and those before them, when they are read: few are before the commit.

    Attributes
    ----------
    name
        Of the segment of records.
    """

    def __init__(
        self,
        part: Part,
        records: SegmentWriter,
        entries: SegmentWriter,
        tail: LogTail,
        reader: "Reader",
        table: PartTable,
    ) -> None:
        self.part = part
        self.name: str = records.name
        self._records = records
        self._entries = entries
        self._tail = tail
        self._reader = reader
        self._table = table
        self._readable = 0  # bytes of the file that the reader has
        self._given = 0  # bytes of records handed to the segment
        self._padded = False
        self._sealed: tuple[int, NDArray[np.uint32]] | None = None  # the entries, once they are complete
        tail.reset(0)

    def settle(self) -> None:
        """Raise FullError if the disk has no room for the bytes that wait; for patient logs, before they append."""
        for writer in (self._records, self._entries):
            if isinstance(writer, PatientSegmentWriter):
                writer.settle()

    def give(self) -> None:
        """Hand the segment all records, and write the whole pages; FullError if these find no room."""
        self._flush(self._tail.kept)

    def append(self, data: NDArray[np.uint8], offset: int, end: int) -> None:
        """Append records below `LARGE_BYTES`, a block of them and an eighth more of padding at most."""
        tail = self._tail
        if tail.filled + end - self.part.end > len(tail.buffer) - PAGE_BYTES:
            self._flush(tail.kept)
        begin = tail.filled + offset - self.part.end
        tail.buffer[tail.filled : begin] = 0
        tail.buffer[begin : begin + len(data)] = data
        tail.filled = begin + len(data)
        self.part.end = end

    def append_large(self, record: NDArray[np.uint8], offset: int, end: int) -> None:
        """Append one record of `LARGE_BYTES` or more, or several of whole pages, from a page boundary to another."""
        self._pad()
        self._give()
        self._records.append(record)
        self._records.append(bytes(end - offset - len(record)))
        self._given = self.part.end = end
        self._tail.reset(end)

    def make_readable(self, offsets: NDArray[np.int64]) -> None:
        """Let the reader have records that left the tail and may not be in the file yet."""
        if not self.are_readable(offsets):
            self._flush(self._tail.kept)

    def are_readable(self, offsets: NDArray[np.int64]) -> bool:
        """Whether the reader has records that left the tail."""
        tail = self._tail
        return not (tail.start > self._readable and len(offsets) and int(offsets.max()) >= self._readable - tail.kept)

    def enter(self, entries: NDArray[np.void]) -> None:
        """Append entries, `ENTRY` [n]."""
        self._entries.append(entries)
        self.part.entries += len(entries)
        deletions = entries["length"] == DELETED
        self.part.deletions += int(np.count_nonzero(deletions))
        self.part.size += int(entries["length"][~deletions].sum(dtype=np.int64))

    def seal(self) -> None:
        """Fill up the last page and write everything, so that the tail is free for another part.

        A patient part may be sealed again after a FullError; its segments are completed by the commit.
        """
        if not self._padded:
            self._pad()
        self._padded = True
        self._flush(0)
        if not isinstance(self._entries, PatientSegmentWriter):
            self._records.complete()
            self._sealed = self._entries.complete()

    def attach_entries(self) -> int:
        """Let the reader have the entries of a part that was sealed; return its handle."""
        assert self._sealed is not None
        return self._reader.add(str(self._entries.path), *self._sealed)

    def _pad(self) -> None:
        tail, padding = self._tail, -self.part.end % PAGE_BYTES
        tail.buffer[tail.filled : tail.filled + padding] = 0
        tail.filled += padding

    def _give(self) -> None:
        tail = self._tail
        self._records.append(tail.buffer[self._given - tail.start : tail.filled])
        self._given = tail.start + tail.filled

    def _flush(self, keep: int) -> None:
        """Write whole pages, let the reader have them, and keep `keep` bytes before those not in the file."""
        self._give()
        length, checksums = self._records.flush()
        handle = int(self._table.handles[self.part.slot])
        if handle < 0:
            self._table.handles[self.part.slot] = self._reader.add(str(self._records.path), length, checksums)
        else:
            self._reader.extend(handle, length, checksums)
        self._readable = length
        tail = self._tail
        start = max(tail.start, length - keep)
        rest = tail.buffer[start - tail.start : tail.filled]
        tail.buffer[: len(rest)] = rest.copy()
        tail.reset(start)
        tail.filled = len(rest)
