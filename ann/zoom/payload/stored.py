"""The records of a part on SSD, in list order: the results of a query share pages.

One segment holds the records end to end, another their lengths, in pages that are complete in themselves: u64, where
the first record of the page begins; u32 [1022], the length of each. Records of one length have no lengths stored. DRAM
holds nothing of a record but the checksums of its pages.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.pauses import pause
from memhier.errors import CorruptionError
from memhier.io.page_file import PAGE_BYTES
from memhier.io.reader import Reader
from memhier.store.contents import SegmentInfo
from memhier.store.segments import SegmentWriter
from memhier.store.store import Staging, Transaction

__all__ = [
    "RECORDS_BYTES",
    "RecordWriter",
    "Spans",
    "StoredRecords",
    "in_order",
    "record_checksum_bytes",
    "write_records",
]

RECORDS_BYTES = 512  # held for the records of a part, beside the checksums of their pages
PAGE_ROWS = (PAGE_BYTES - 8) // 4
_BLOCK_ROWS = 256  # on their way to another order
_JOINED_BYTES = 64 << 10  # appended together

Ints: TypeAlias = npt.NDArray[np.int64]


def record_checksum_bytes(count: int, record_bytes: int) -> int:
    """Return the DRAM that `count` records of so many bytes in all take at most."""
    pages = -(-record_bytes // PAGE_BYTES) + -(-count // PAGE_ROWS)
    return RECORDS_BYTES + 4 * pages if record_bytes else 0


class RecordWriter:
    """Writes records into the segments `name` and, where their lengths differ, `name` + ``-lengths``.

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
        self._records: SegmentWriter | None = None
        self._lengths: SegmentWriter | None = None
        self._width = 0
        self.count = 0
        self._begins = 0  # the record after those whose lengths were noted
        self._page: npt.NDArray[np.uint32] = np.zeros(PAGE_ROWS + 2, "<u4")
        self._filled = 0

    def append(self, records: Sequence[bytes]) -> None:
        """Append records."""
        lengths = np.fromiter(map(len, records), np.int64, len(records))
        if not self.count and len(lengths):
            self._width = int(lengths[0])
        if self._lengths is None and (lengths != self._width).any():
            self._lengths = self._tx.segment(f"{self._name}-lengths")
            for start in range(0, self.count, PAGE_ROWS):
                self._note(np.full(min(PAGE_ROWS, self.count - start), self._width))
        if self._lengths is not None:
            self._note(lengths)
        self.count += len(lengths)
        if lengths.any():
            if self._records is None:
                self._records = self._tx.segment(self._name)
            for low, high in _runs(lengths, _JOINED_BYTES):
                self._records.append(b"".join(records[low:high]))  # which does not copy a single one

    def finish(self) -> None:
        """Write the lengths that wait."""
        if self._lengths is not None and self._filled:
            self._page[2 + self._filled :] = 0
            self._lengths.append(self._page)
            self._filled = 0

    def complete(self) -> dict[str, SegmentInfo]:
        """Finish, and return the segments, which can be read before any commit."""
        self.finish()
        found = {}
        for writer in (self._records, self._lengths):
            if writer is not None:
                payload = writer.length
                length, checksums = writer.complete()
                found[writer.name] = SegmentInfo(writer.name, writer.path, 0, length, payload, checksums)
        return found

    def _note(self, lengths: Ints) -> None:
        assert self._lengths is not None
        while len(lengths):
            if not self._filled:
                self._page[:2].view("<u8")[0] = self._begins
            some = lengths[: PAGE_ROWS - self._filled]
            self._page[2 + self._filled : 2 + self._filled + len(some)] = some
            self._begins += int(some.sum())
            self._filled += len(some)
            if self._filled == PAGE_ROWS:
                self._lengths.append(self._page)
                self._filled = 0
            lengths = lengths[len(some) :]


class Spans(NamedTuple):
    """Where records lie: int64 ``[n]`` the first byte of each, and their bytes."""

    starts: Ints
    lengths: Ints


class StoredRecords:
    """Reads records by row. For many threads.

    Parameters
    ----------
    segments
        Those that a :class:`RecordWriter` wrote, by name.
    name
        As it was given.
    count
        The number of records expected.
    reader
        Does the reads; `files` are its handles, which the caller removes.

    Raises
    ------
    CorruptionError
        When they do not hold `count` records.
    """

    def __init__(self, segments: Mapping[str, SegmentInfo], name: str, count: int, reader: Reader) -> None:
        records, lengths = segments[name], segments.get(f"{name}-lengths")
        self.path, self._payload, self._reader = records.path, records.payload, reader
        self._width = records.payload // max(1, count) if lengths is None else None
        if self._width is not None and (not self._width or self._width * count != records.payload):
            raise CorruptionError(f"{records.path}: {records.payload} bytes do not hold {count} records of one length")
        if lengths is not None and lengths.payload != -(-count // PAGE_ROWS) * PAGE_BYTES:
            raise CorruptionError(f"{lengths.path}: {lengths.payload} bytes do not hold {count} lengths")
        self.files = [
            reader.add(str(info.path), info.length, info.checksums) for info in (records, lengths) if info is not None
        ]
        self.checksum_bytes = record_checksum_bytes(count, records.payload)

    @property
    def memory_bytes(self) -> int:
        """DRAM held besides that of the store, in bytes."""
        return RECORDS_BYTES

    def spans(self, rows: Ints, work_bytes: int, tally: Ints | None = None) -> Spans:
        """Return where the records of rows lie; each page of lengths is read once.

        Parameters
        ----------
        work_bytes
            Bytes read in one submission.
        tally
            int64 ``[3]`` to which the I/Os, pages and bytes read are added.

        Raises
        ------
        CorruptionError
            When a page differs from the page written.
        """
        if self._width is not None:
            return Spans(rows * self._width, np.full(len(rows), self._width))
        page_of = rows // PAGE_ROWS
        order = np.argsort(page_of, kind="stable")
        pages, first = np.unique(page_of[order], return_index=True)
        edges = np.append(first, len(rows))
        starts, lengths = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        step = max(1, work_bytes // PAGE_BYTES)
        for low in range(0, len(pages), step):
            read = self._reader.read(self.files[1], pages[low : low + step] * PAGE_BYTES, PAGE_BYTES, tally=tally)
            for number, page in enumerate(read, low):
                here = order[edges[number] : edges[number + 1]]
                slots, stored = rows[here] % PAGE_ROWS, page[8:].view("<u4")
                before = min(int(page[:8].view("<u8")[0]), self._payload)
                lengths[here] = stored[slots]
                starts[here] = before + np.cumsum(stored, dtype=np.int64)[slots] - lengths[here]
        if ((starts + lengths) > self._payload).any():  # damage that no checksum was checked for
            raise CorruptionError(f"{self.path}: a record lies outside of the file")
        return Spans(starts, lengths)

    def read(self, spans: Spans, work_bytes: int, tally: Ints | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield the records of different rows with their number among `spans`, in the order of the file.

        Each page is read once. The parameters are those of :meth:`spans`.
        """
        starts, lengths = spans
        for number in np.flatnonzero(lengths == 0).tolist():
            yield number, b""
        order = np.argsort(starts, kind="stable")
        waiting = order[lengths[order] > 0].tolist()[::-1]
        pages = _pages(starts[lengths > 0], lengths[lengths > 0])
        pieces: list[bytes] = []
        step, got = max(1, work_bytes // PAGE_BYTES), 0
        for low in range(0, len(pages), step):
            some = pages[low : low + step]
            read = self._reader.read(self.files[0], some * PAGE_BYTES, PAGE_BYTES, tally=tally).reshape(-1)
            while waiting:
                start, left = int(starts[waiting[-1]]) + got, int(lengths[waiting[-1]]) - got
                if start // PAGE_BYTES > some[-1]:
                    break
                at = int(np.searchsorted(some, start // PAGE_BYTES)) * PAGE_BYTES + start % PAGE_BYTES
                piece = read[at : at + left].tobytes()
                pieces.append(piece)
                if len(piece) < left:  # the rest lies on the pages to come
                    got += len(piece)
                    break
                yield waiting.pop(), pieces[0] if len(pieces) == 1 else b"".join(pieces)
                pieces, got = [], 0


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
        DRAM for a block and the pages that it is read from; a longer record is a block of its own.
    """
    offsets, share = np.cumsum([0, *counts]), max(1, work_bytes // 4)
    for first in range(0, len(rows), _BLOCK_ROWS):
        pause()
        some = rows[first : first + _BLOCK_ROWS].astype(np.int64)
        part = np.searchsorted(offsets, some, side="right") - 1
        starts, lengths = np.zeros(len(some), np.int64), np.zeros(len(some), np.int64)
        for number, source in enumerate(sources):
            here = np.flatnonzero(part == number)
            if source is not None and len(here):
                starts[here], lengths[here] = source.spans(some[here] - offsets[number], share)
        for low, high in _runs(lengths, share):
            block = [b""] * (high - low)
            for number, source in enumerate(sources):
                here = np.flatnonzero(part[low:high] == number)
                if source is not None and len(here):
                    spans = Spans(starts[low + here], lengths[low + here])
                    for place, record in source.read(spans, share):
                        block[here[place]] = record
            yield block


def write_records(tx: Transaction | Staging, name: str, blocks: Iterable[Sequence[bytes]]) -> None:
    """Write records, block by block."""
    writer = RecordWriter(tx, name)
    for block in blocks:
        writer.append(block)
    writer.finish()


def _pages(starts: Ints, lengths: Ints) -> Ints:
    """Return the pages of records that have bytes, ascending and each once."""
    first = starts // PAGE_BYTES
    counts = (starts + lengths - 1) // PAGE_BYTES - first + 1
    before = np.cumsum(counts) - counts
    return np.unique(np.repeat(first - before, counts) + np.arange(int(counts.sum())))


def _runs(lengths: Ints, most: int) -> Iterator[tuple[int, int]]:
    """Yield where runs begin and end that have `most` bytes at most, or one record."""
    ends, low = np.cumsum(lengths), 0
    while low < len(lengths):
        before = int(ends[low] - lengths[low])
        high = max(low + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield low, high
        low = high
