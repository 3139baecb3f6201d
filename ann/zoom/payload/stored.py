"""The records of a part on SSD, in list order, packed into pages: the results of a query share few pages.

A page holds u32, the bytes of the last record that begins in it; u16, the number *c* of those that begin; u16 [c],
where they begin, counted from the start of the page; the rest of a record that began on a page before; their bytes,
end to end. A record that does not end on its page goes on behind the same fields of the next one. DRAM holds the first
row of each page, so one read finds a record of less than a page.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.pauses import pause
from memhier.errors import CorruptionError
from memhier.fields import stored_array, stored_segment
from memhier.io.page_file import PAGE_BYTES
from memhier.io.ranges import CountedReads
from memhier.io.reader import Reader
from memhier.store.contents import SegmentInfo
from memhier.store.segments import SegmentWriter
from memhier.store.store import Staging, Store, Transaction

__all__ = ["RecordWriter", "StoredRecords", "in_order", "records_bytes", "write_records"]

_HEAD_BYTES, _SLOT_BYTES = 6, 2
_ROOM = PAGE_BYTES - _HEAD_BYTES  # of a page where no record begins
_SPARE = PAGE_BYTES // 8  # at the end of a page: with less room a record begins on the next one
_BLOCK_ROWS = 1024  # on their way to another order
_HELD_BYTES = 512  # for the records of a part, beside those for each page:
_PAGE_DRAM = 8  # its checksum and its first row

Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]


def records_bytes(count: int, record_bytes: int) -> int:
    """Return the most DRAM that `count` records of so many bytes in all take."""
    pages = (record_bytes + _SLOT_BYTES * count) // (_ROOM - _SPARE) + 2
    return _HELD_BYTES + _PAGE_DRAM * pages if record_bytes else 0


class RecordWriter:
    """Writes records into the segment `name`, and the first row of each page into `name` + ``-rows``.

    No segment is begun before the first record that has any bytes.

    Parameters
    ----------
    tx
        The transaction, which holds the buffers.
    name
        Of the segment.
    """

    def __init__(self, tx: Transaction | Staging, name: str) -> None:
        self._tx, self._name = tx, name
        self._segment: SegmentWriter | None = None
        self._first = array("q", [0])
        self.count: int = 0
        self._empty = True  # as all records until now
        self._rest = b""  # of the record that began on a page before
        self._pieces: list[bytes] = []  # of the records that begin on this page
        self._left = _ROOM
        self._last = 0

    def append(self, records: Iterable[bytes]) -> None:
        """Append records."""
        for record in records:
            if self._empty and record:
                before, self.count, self._empty = self.count, 0, False
                for _ in range(before):
                    self._put(b"")
            if self._empty:
                self.count += 1
            else:
                self._put(record)

    def finish(self) -> None:
        """Write the page that waits, and the first rows."""
        if not self._empty:
            self._close()
            self._tx.segment(f"{self._name}-rows").append(np.array(self._first, _row_dtype(self.count)))

    def complete(self) -> tuple[SegmentInfo, npt.NDArray[np.integer]] | None:
        """Finish the segment and return it, with the first rows, to be read before any commit; None without bytes."""
        if self._empty:
            return None
        segment = self._close()
        payload = segment.length
        length, checksums = segment.complete()
        info = SegmentInfo(self._name, segment.path, 0, length, payload, checksums)
        return info, np.array(self._first, _row_dtype(self.count))

    def _put(self, record: bytes) -> None:
        room = self._left - _SLOT_BYTES
        if len(record) > room and room < _SPARE:
            self._close()
            room = self._left - _SLOT_BYTES
        self.count += 1
        self._last = len(record)
        self._pieces.append(record[:room])
        self._left = room - len(self._pieces[-1])
        for start in range(room, len(record), _ROOM):
            self._close()
            self._rest = record[start : start + _ROOM]
            self._left = _ROOM - len(self._rest)

    def _close(self) -> SegmentWriter:
        """Write the page that waits."""
        if self._segment is None:
            self._segment = self._tx.segment(self._name)
        page = np.zeros(PAGE_BYTES, np.uint8)
        starts = np.cumsum([_HEAD_BYTES + _SLOT_BYTES * len(self._pieces) + len(self._rest), *map(len, self._pieces)])
        page[:4].view("<u4")[0] = self._last
        page[4 : starts[0] - len(self._rest)].view("<u2")[:] = [len(self._pieces), *starts[:-1]]
        page[starts[0] - len(self._rest) : starts[-1]] = np.frombuffer(b"".join([self._rest, *self._pieces]), np.uint8)
        self._segment.append(page)
        self._first.append(self.count)
        self._rest, self._pieces, self._left, self._last = b"", [], _ROOM, 0
        return self._segment


class _Head(NamedTuple):
    """The bytes of a record on the page where it begins, and how many more there are from page `following` on."""

    bytes: bytes
    rest: int
    following: int


class StoredRecords:
    """Reads records by row. For many threads.

    Parameters
    ----------
    info
        Their segment.
    first
        Integers ``[pages + 1]``: the first row of each page, and the number of rows.
    reader
        Does the reads.
    file
        Its handle of the segment, which the caller removes.
    """

    def __init__(self, info: SegmentInfo, first: npt.NDArray[np.integer], reader: Reader, file: int) -> None:
        self._path, self._first, self._reader = info.path, first, reader
        self.file: int = file

    @classmethod
    def load(cls, store: Store, name: str, count: int, reader: Reader) -> Self:
        """Return the records that a :class:`RecordWriter` put into a store.

        Raises
        ------
        CorruptionError
            When they are not `count` records.
        """
        info = stored_segment(store, name)
        first = stored_array(store, f"{name}-rows", _row_dtype(count), (info.payload // PAGE_BYTES + 1,))
        if first[0] != 0 or first[-1] != count or (first[1:] < first[:-1]).any():
            raise CorruptionError(f"{info.path}: its pages do not hold the documents of {count} rows")
        return cls(info, first, reader, store.attach(name, reader))

    @property
    def path(self) -> Path:
        """Their file."""
        return self._path

    @property
    def memory_bytes(self) -> int:
        """DRAM held besides that of the store, in bytes."""
        return _HELD_BYTES + self._first.nbytes

    @property
    def planned_bytes(self) -> int:
        """DRAM held with the checksums in the store, in bytes."""
        return _HELD_BYTES + _PAGE_DRAM * len(self._first)

    def pages_of(self, rows: Ints) -> Ints:
        """Return the page where the record of each row begins."""
        # Of the same type, or NumPy would copy all first rows.
        return np.searchsorted(self._first, rows.astype(self._first.dtype), side="right").astype(np.int64) - 1

    def heads(
        self, rows: Ints, work_bytes: int, reads: CountedReads | None = None
    ) -> Iterator[list[tuple[int, _Head]]]:
        """Yield the beginnings of records, those of one submission at a time, with their numbers; see :meth:`read`."""
        page_of = self.pages_of(rows)
        order = np.argsort(page_of, kind="stable")
        pages, starts = np.unique(page_of[order], return_index=True)
        edges = np.append(starts, len(rows)).tolist()
        for low, read in self._pages(pages, work_bytes, reads):
            yield [
                (place, self._head(page, int(rows[place]), int(pages[number])))
                for number, page in enumerate(read, low)
                for place in order[edges[number] : edges[number + 1]].tolist()
            ]

    def read(self, rows: Ints, work_bytes: int, reads: CountedReads | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield the records of different rows with their number among `rows`, in any order.

        One submission reads the pages where they begin, and another those where they go on.

        Parameters
        ----------
        work_bytes
            Bytes read in one submission.
        reads
            Counts the work.

        Raises
        ------
        CorruptionError
            When a page differs from the page written.
        """
        for heads in self.heads(rows, work_bytes, reads):
            for place, head in heads:
                if not head.rest:
                    yield place, head.bytes
            longer = [(place, head) for place, head in heads if head.rest]
            records = self.whole([head for _, head in longer], work_bytes, reads)
            yield from zip([place for place, _ in longer], records, strict=True)

    def whole(self, heads: Sequence[_Head], work_bytes: int, reads: CountedReads | None = None) -> Iterator[bytes]:
        """Yield the records that begin with some heads, all of which go on; see :meth:`read`."""
        ranges = [np.arange(head.following, head.following + -(-head.rest // _ROOM)) for head in heads]
        every = np.concatenate([np.empty(0, np.int64), *ranges])
        if len(every) and int(every.max()) >= len(self._first) - 1:
            raise self._damage()
        number, record, rest = 0, BytesIO(), 0
        for _, read in self._pages(every, work_bytes, reads):
            for page in read:
                if not rest:
                    record, rest = BytesIO(), heads[number].rest
                    record.write(heads[number].bytes)
                at = _HEAD_BYTES + _SLOT_BYTES * int(page[4:6].view("<u2")[0])
                more = record.write(page[at : at + rest].data)
                if not more:
                    raise self._damage()
                rest -= more
                if not rest:
                    whole, record = record.getvalue(), BytesIO()  # not held twice
                    yield whole
                    number += 1
        if number != len(heads):
            raise self._damage()

    def _pages(self, pages: Ints, work_bytes: int, reads: CountedReads | None) -> Iterator[tuple[int, Bytes]]:
        """Yield pages, those of one submission at a time, with the number of the first."""
        step, reads = max(1, work_bytes // PAGE_BYTES), reads or CountedReads(self._reader)
        for low in range(0, len(pages), step):
            some = pages[low : low + step]
            yield low, reads.read(self.file, some * PAGE_BYTES, PAGE_BYTES)

    def _head(self, page: Bytes, row: int, number: int) -> _Head:
        count, slot = int(page[4:6].view("<u2")[0]), row - int(self._first[number])
        if count != int(self._first[number + 1]) - int(self._first[number]) or count > _ROOM // _SLOT_BYTES:
            raise self._damage()
        at = _HEAD_BYTES + _SLOT_BYTES * slot
        start = int(page[at : at + 2].view("<u2")[0])
        last = slot == count - 1
        end = start + int(page[:4].view("<u4")[0]) if last else int(page[at + 2 : at + 4].view("<u2")[0])
        if not _HEAD_BYTES + _SLOT_BYTES * count <= start <= min(end, PAGE_BYTES) or (end > PAGE_BYTES and not last):
            raise self._damage()
        return _Head(page[start:end].tobytes(), max(0, end - PAGE_BYTES), number + 1)

    def _damage(self) -> CorruptionError:
        # Found where no checksum was checked.
        return CorruptionError(f"{self._path}: a page does not hold the documents that it should")


def in_order(
    sources: Sequence[StoredRecords | None], counts: Sequence[int], rows: npt.NDArray[np.integer], work_bytes: int
) -> Iterator[list[bytes]]:
    """Yield the records of rows in their order, block by block.

    Parameters
    ----------
    sources, counts
        The records of parts, None where a part has none, and the rows of each.
    rows
        Integers ``[n]``, each once: the number of a row when those of all parts are counted.
    work_bytes
        DRAM for a block and the pages that it is read from, beside one record.
    """
    offsets, share = np.cumsum([0, *counts]), max(1, work_bytes // 4)
    for first in range(0, len(rows), _BLOCK_ROWS):
        pause()
        some = rows[first : first + _BLOCK_ROWS].astype(np.int64)
        part = np.searchsorted(offsets, some, side="right") - 1
        pages = np.full(len(some), -1)
        for number, source in enumerate(sources):
            here = np.flatnonzero(part == number)
            if source is not None and len(here):
                pages[here] = source.pages_of(some[here] - offsets[number])
        for low, high in _runs(part, pages, max(1, share // PAGE_BYTES)):
            begun: list[tuple[StoredRecords, _Head] | None] = [None] * (high - low)
            for number, source in enumerate(sources):
                here = np.flatnonzero(part[low:high] == number)
                if source is not None and len(here):
                    for heads in source.heads(some[low + here] - offsets[number], share):
                        for place, head in heads:
                            begun[here[place]] = (source, head)
            yield from _blocks(begun, share)


def write_records(tx: Transaction | Staging, name: str, blocks: Iterable[Sequence[bytes]]) -> None:
    """Write records, block by block."""
    writer = RecordWriter(tx, name)
    for block in blocks:
        writer.append(block)
    writer.finish()


def _blocks(begun: Sequence[tuple[StoredRecords, _Head] | None], most: int) -> Iterator[list[bytes]]:
    """Yield records in blocks of `most` bytes, or of one record; those that go on are read one at a time."""
    block: list[bytes] = []
    taken = 0
    for each in begun:
        record = b"" if each is None else each[1].bytes
        if each is not None and each[1].rest:
            if block:
                yield block
                block, taken = [], 0
            (record,) = each[0].whole([each[1]], most)
        if block and taken + len(record) > most:
            yield block
            block, taken = [], 0
        block.append(record)
        taken += len(record)
    yield block


def _runs(part: Ints, pages: Ints, most: int) -> Iterator[tuple[int, int]]:
    """Yield where runs of rows begin and end whose records begin on `most` pages; page -1 is none."""
    seen: set[tuple[int, int]] = set()
    low = 0
    for row, place in enumerate(zip(part.tolist(), pages.tolist(), strict=True)):
        if place[1] >= 0 and place not in seen and len(seen) == most:
            yield low, row
            low, seen = row, set()
        if place[1] >= 0:
            seen.add(place)
    if low < len(pages):
        yield low, len(pages)


def _row_dtype(count: int) -> str:
    return "<u4" if count < 2**32 else "<u8"
