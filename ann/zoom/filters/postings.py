"""The rows that hold each item of a column of lists, on SSD: a filter reads those of the items that it names.

Rows lie in blocks of neighbours, so that writing holds one block. Layout of the segment: of each block its records, one
for each different item in their order (the item, i64 or f64; u32, the first of its rows in the block; u32, their
number), then u16 [m], the rows of the items, counted from the block's first; zeros up to a multiple of 8. Then the item
of every 256th record, block by block; then of each block i64 its first row, i64 where its records begin, i64 their
number; then u64, the number of blocks.
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.pauses import pause
from memhier.errors import CorruptionError
from memhier.fields import stored_segment
from memhier.io.ranges import CountedReads, Ranges, read_together
from memhier.io.reader import Reader
from memhier.store.store import Staging, Store, Transaction

__all__ = ["BLOCK_ITEMS", "LOOK_UP_BYTES", "POSTED_BYTES", "POSTINGS", "Postings", "write_postings"]

Ints: TypeAlias = npt.NDArray[np.int64]

POSTINGS = "-items-rows"
BLOCK_ITEMS = 1 << 20
"""Items of a block at most, where DRAM is no matter."""
POSTED_BYTES = 20
"""Bytes on SSD of an item at most."""

_SPAN = 1 << 16  # rows of a block at most
_PAGE_RECORDS = 256
_PAIRS, _ROWS = 8, 1 << 13  # pages of records, and rows, that are read at a time
_HEADS = 1 << 12  # every 256th records, and items sought in them, that are held at a time, of a block at least
LOOK_UP_BYTES = 4096 * _PAIRS + 16 * _ROWS + 16 * _HEADS
"""DRAM of a look-up."""

_BLOCK = np.dtype([("first", "<i8"), ("records", "<i8"), ("count", "<i8")])


def write_postings(tx: Transaction | Staging, name: str, floats: bool, pairs: Iterable[tuple[Ints, Any]]) -> None:
    """Write the rows of items, block by block.

    Parameters
    ----------
    floats
        Whether items are floats; otherwise they are integers.
    pairs
        Of each block rows, ascending and within 65,536, and the item of each.
    """
    segment, record = tx.segment(name), _record(floats)
    blocks, heads = list[tuple[int, int, int]](), list[npt.NDArray[Any]]()
    for rows, items in pairs:
        pause()
        first = int(rows[0])
        order = np.argsort(items, kind="stable")
        sorted_items, places = items[order], (rows[order] - first).astype("<u2")
        apart = sorted_items[1:] != sorted_items[:-1]
        kept = np.concatenate([[True], apart | (places[1:] != places[:-1])])  # a list may hold an item twice
        sorted_items, places = sorted_items[kept], places[kept]
        starts = np.flatnonzero(np.concatenate([[True], sorted_items[1:] != sorted_items[:-1]]))
        records = np.empty(len(starts), record)
        records["item"], records["first"] = sorted_items[starts], starts
        records["count"] = np.diff(starts, append=len(places))
        blocks.append((first, segment.length, len(records)))
        heads.append(records["item"][::_PAGE_RECORDS].copy())
        segment.append(records)
        segment.append(places)
        segment.append(bytes(-segment.length % 8))
    segment.append(np.concatenate([np.empty(0, record["item"]), *heads]))
    segment.append(np.array(blocks, _BLOCK))
    segment.append(np.array([len(blocks)], "<u8"))


class Postings:
    """Finds the rows that hold items. For many threads. It holds nothing in DRAM.

    Raises
    ------
    CorruptionError
        When the segment cannot hold postings.
    """

    def __init__(self, store: Store, name: str, floats: bool, reader: Reader) -> None:
        info = stored_segment(store, name)
        self._path, self._reader, self._end = info.path, reader, info.payload - 8
        self._record = _record(floats)
        self.dtype: np.dtype[Any] = self._record["item"]
        self._handle = store.attach(name, reader)
        if info.payload < 8 or info.payload % 8:
            raise CorruptionError(f"{info.path}: {info.payload} bytes are no postings")
        self._count = int(reader.read(self._handle, [self._end], 8).view("<u8")[0, 0])
        if self._count * _BLOCK.itemsize > self._end:
            raise CorruptionError(f"{info.path}: {info.payload} bytes do not hold {self._count} blocks")

    def holding(self, start: int, count: int, items: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return which of neighbouring rows hold one of some items, bool ``[count]``."""
        flags = np.zeros(count, np.bool_)
        if not len(items) or not self._count:
            return flags
        for firsts, lengths, base in self._runs(start, start + count, np.unique(items)):
            (raw,) = self._read([Ranges(self._handle, firsts, 2 * lengths)])
            ends = np.cumsum(lengths)
            for low, high, first in zip((ends - lengths).tolist(), ends.tolist(), (base - start).tolist(), strict=True):
                rows = raw.view("<u2")[low:high]
                if first < 0 or first + int(rows[-1]) >= count:
                    rows = rows[(rows >= -first) & (rows < count - first)]
                flags[rows.astype(np.int32) + first] = True
        return flags

    def close(self) -> None:
        """Detach from the reader."""
        handle, self._handle = self._handle, -1  # which may be another file's from now on
        self._reader.remove(handle)

    def _runs(self, start: int, stop: int, items: npt.NDArray[Any]) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Yield runs of rows of items, as many as fit a read: where each begins, its rows, and its block's first."""
        blocks = self._reader.read(self._handle, [self._end - _BLOCK.itemsize * self._count],
                                   _BLOCK.itemsize * self._count).view(_BLOCK)[0]  # fmt: skip
        pages = -(-blocks["count"] // _PAGE_RECORDS)
        heads_at = self._end - _BLOCK.itemsize * self._count - 8 * int(pages.sum())
        if (
            (blocks["count"] < 0).any()
            or heads_at < 0
            or ((blocks["records"] < 0) | (blocks["records"] > heads_at)).any()
        ):
            raise CorruptionError(f"{self._path}: a block of postings lies outside of the segment")
        before = np.concatenate([[0], np.cumsum(pages)])
        near = np.flatnonzero((blocks["first"] < stop) & (blocks["first"] + _SPAN > start) & (pages > 0))
        group = np.cumsum(pages[near] + len(items)) // _HEADS
        for some in np.split(near, np.flatnonzero(np.diff(group)) + 1) if len(near) else ():
            low, high = int(before[some[0]]), int(before[some[-1] + 1])
            heads = self._reader.read(self._handle, [heads_at + 8 * low], 8 * (high - low)).view(self.dtype)[0]
            sought = []
            for block in some.tolist():
                own = heads[before[block] - low : before[block + 1] - low]
                sought.append(np.unique(np.searchsorted(own, items, side="right") - 1))
            of, page = np.repeat(some, [len(each) for each in sought]), np.concatenate(sought)
            of, page = of[page >= 0], page[page >= 0]
            for place in range(0, len(of), _PAIRS):
                yield from self._found(blocks[of[place : place + _PAIRS]], page[place : place + _PAIRS], items)

    def _found(
        self, blocks: npt.NDArray[Any], page: Ints, items: npt.NDArray[Any]
    ) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Yield the runs of items on pages of records, one of each block."""
        size, first = self._record.itemsize, page * _PAGE_RECORDS
        counts = np.minimum(blocks["count"] - first, _PAGE_RECORDS)
        (raw,) = self._read([Ranges(self._handle, blocks["records"] + first * size, counts * size)])
        records, of = raw.view(self._record), np.repeat(np.arange(len(blocks)), counts)
        place = np.minimum(np.searchsorted(items, records["item"]), len(items) - 1)
        hits = items[place] == records["item"]
        records, of = records[hits], of[hits]
        firsts = (blocks["records"] + blocks["count"] * size)[of] + 2 * records["first"].astype(np.int64)
        lengths = records["count"].astype(np.int64)
        if (firsts + 2 * lengths > self._end).any():
            raise CorruptionError(f"{self._path}: rows of an item lie outside of the segment")
        yield from _in_reads(firsts, lengths, blocks["first"][of])

    def _read(self, ranges: list[Ranges]) -> list[npt.NDArray[np.uint8]]:
        def reading() -> Any:
            return (yield ranges)

        found: list[npt.NDArray[np.uint8]] = read_together(CountedReads(self._reader), {0: reading()})[0]
        return found


def _in_reads(firsts: Ints, counts: Ints, base: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yield runs in groups of about as many rows as are read at a time; a long run is cut."""
    if not len(counts):
        return
    pieces = -(-counts // _ROWS)
    of = np.repeat(np.arange(len(counts)), pieces)
    within = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * _ROWS
    lengths = np.minimum(counts[of] - within, _ROWS)
    firsts, base = firsts[of] + 2 * within, base[of]
    group = np.cumsum(lengths) // _ROWS
    for low, high in zip(np.flatnonzero(np.diff(group, prepend=-1)),
                         [*np.flatnonzero(np.diff(group)) + 1, len(group)], strict=True):  # fmt: skip
        yield firsts[low:high], lengths[low:high], base[low:high]


def _record(floats: bool) -> np.dtype[Any]:
    return np.dtype([("item", "<f8" if floats else "<i8"), ("first", "<u4"), ("count", "<u4")])
