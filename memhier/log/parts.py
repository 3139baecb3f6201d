"""The parts of a log: their names, their entries, and the offsets of records in them. A commit adds one or more.

A part is two segments: the records end to end, and an entry per record or deletion, in the same order. The offset of a
record follows from the lengths before it, so an entry holds none.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memhier.store.segments import PAGE_BYTES

__all__ = [
    "DELETED", "ENTRY", "LARGE_BYTES", "LogRecord", "Part", "PartTable", "lay_out", "page_after", "record_size",
]  # fmt: skip

Ints = NDArray[np.int64]

ENTRY = np.dtype([("key", "<i8"), ("length", "<u4")])
DELETED = 2**32 - 1
# Records of this size or more begin and end on a page: the device reads them straight into place, and less than this
# much of a part that is being written has to stay in DRAM to be readable.
LARGE_BYTES = 2**16

_HEAD = struct.Struct("<QQQQ")  # bytes per record (0: they differ), live records, number of the next part, parts
_PART = struct.Struct("<QQQQ")  # number, entries, deletions among them, bytes of records


@dataclass(slots=True)
class Part:
    """A part of a log that is committed or being written.

    Attributes
    ----------
    number
        Of the part, rising in the order of writing, never used twice.
    slot
        Its place in the `PartTable`.
    entries, deletions
        Entries in all, and those that delete.
    size
        Bytes of its records.
    end
        The end of the last record, padding between records included.
    """

    number: int
    slot: int
    entries: int = 0
    deletions: int = 0
    size: int = 0
    end: int = 0

    @property
    def bytes(self) -> int:
        """Bytes on SSD."""
        return self.end + self.entries * ENTRY.itemsize

    @property
    def disk_bytes(self) -> int:
        """Bytes on SSD in whole pages, as its two segments have them."""
        return page_after(self.end) + page_after(self.entries * ENTRY.itemsize)

    def segments(self, log: str) -> tuple[str, str]:
        """Return the names of the segments of records and of entries."""
        return f"{log}-{self.number}", f"{log}-{self.number}-keys"


@dataclass(frozen=True, slots=True)
class LogRecord:
    """The catalog's record of a log, in the value ``log/<name>``."""

    record_bytes: int
    live: int
    following: int
    parts: Sequence[tuple[int, int, int, int]]

    def encode(self) -> bytes:
        """Return the record as bytes for the catalog."""
        head = _HEAD.pack(self.record_bytes, self.live, self.following, len(self.parts))
        return head + b"".join(_PART.pack(*part) for part in self.parts)

    @classmethod
    def decode(cls, value: bytes) -> "LogRecord | None":
        """Return the record, None if the length is wrong."""
        if len(value) < _HEAD.size:
            return None
        record_bytes, live, following, count = _HEAD.unpack_from(value)
        if len(value) != _HEAD.size + count * _PART.size:
            return None
        return cls(record_bytes, live, following, list(_PART.iter_unpack(value[_HEAD.size :])))


def record_size(parts: int) -> int:
    """Return the bytes of the encoded `LogRecord` of a log of so many parts."""
    return _HEAD.size + parts * _PART.size


def lay_out(end: int, lengths: Ints, per_page: int | None) -> tuple[Ints, int]:
    """Return the offsets of records behind the first `end` bytes of a part, and the end of the last one.

    Parameters
    ----------
    lengths
        int64 [n] with n > 0.
    per_page
        As `memhier.rows.rows.rows_per_page` says, for records of one length; None lays them end to end.
    """
    if per_page is not None:
        size = int(lengths[0])
        numbers = end // PAGE_BYTES * per_page + end % PAGE_BYTES // size + np.arange(len(lengths))
        offsets = numbers // per_page * PAGE_BYTES + numbers % per_page * size
        return offsets, int(offsets[-1]) + size
    if int(lengths.min()) >= LARGE_BYTES and not (lengths % PAGE_BYTES).any():
        ends = page_after(end) + np.cumsum(lengths)
        return ends - lengths, int(ends[-1])
    offsets = np.empty(len(lengths), np.int64)
    start = 0
    for large in [*np.flatnonzero(lengths >= LARGE_BYTES).tolist(), len(lengths)]:
        ends = end + np.cumsum(lengths[start:large])
        offsets[start:large] = ends - lengths[start:large]
        end = int(ends[-1]) if large > start else end
        if large < len(lengths):
            offsets[large] = page_after(end)
            end = page_after(int(offsets[large] + lengths[large]))
        start = large + 1
    return offsets, end


def page_after(offset: int) -> int:
    """Return the page boundary at or after an offset."""
    return -(-offset // PAGE_BYTES) * PAGE_BYTES


class PartTable:
    """Gives parts small numbers, used again, and keeps the reader's handle of each: places have 20 bits for them."""

    def __init__(self) -> None:
        self.handles: NDArray[np.int32] = np.full(16, -1, np.int32)
        self._free = list(range(15, -1, -1))
        self.given_back = 0  # slots so far: a place names another record once its slot was given back

    @property
    def memory_bytes(self) -> int:
        """DRAM held."""
        return 3 * self.handles.nbytes

    def take(self) -> int:
        """Return a free slot."""
        if not self._free:
            size = len(self.handles)
            self._free = list(range(2 * size - 1, size - 1, -1))
            self.handles = np.concatenate([self.handles, np.full(size, -1, np.int32)])
        return self._free.pop()

    def give_back(self, slot: int) -> int:
        """Free a slot and return the handle it had."""
        handle = int(self.handles[slot])
        self.handles[slot] = -1
        self._free.append(slot)
        self.given_back += 1
        return handle
