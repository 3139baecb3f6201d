"""The rows that hold each item of a column of lists, on SSD: a filter reads those of the items that it names.

Rows lie in blocks of neighbours, so that writing holds one block. Layout of the segment: of each block its records, one
for each different item in their order (the item, i64 or f64; u32, the first of its rows in the block; u32, their
number), then u16 [m], the rows of the items, counted from the block's first; zeros up to a multiple of 8. Then the item
of every 256th record, block by block; then of each block i64 its first row, i64 where its records begin, i64 their
number; then u64, the number of blocks.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.pauses import pause
from memhier.errors import CorruptionError
from memhier.fields import stored_segment
from memhier.io.page_file import PAGE_BYTES
from memhier.io.ranges import CountedReads, Ranges, Reading, read_together
from memhier.io.reader import Reader
from memhier.store.store import Staging, Store, Transaction

__all__ = ["BLOCK_ITEMS", "LOOK_UP_BYTES", "POSTED_BYTES", "POSTINGS", "Postings", "Runs", "write_postings"]

Ints: TypeAlias = npt.NDArray[np.int64]
Runs: TypeAlias = tuple[Ints, Ints, Ints]
"""Runs of rows of an item in a block: where each begins in the segment, its rows, and the block's first row."""

POSTINGS = "-items-rows"
BLOCK_ITEMS = 1 << 20
"""Items of a block at most, where DRAM is no matter."""
POSTED_BYTES = 20
"""Bytes on SSD of an item at most."""

_SPAN = 1 << 16  # rows of a block at most
_PAGE_RECORDS = 256
_HEAD_BYTES, _ROW_BYTES, _RUN_BYTES = 32, 16, 24  # that a head, a row, and a run of rows take on their way
_HELD_BLOCKS = 64  # whose directory stays in DRAM, where there are no more
LOOK_UP_BYTES = 1 << 18
"""DRAM of a look-up at most."""

_BLOCK = np.dtype([("first", "<i8"), ("records", "<i8"), ("count", "<i8")])
_NO_BLOCKS = np.empty(0, _BLOCK)


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
    """Finds the rows that hold items. For many threads. It holds up to 1.5 KiB in DRAM.

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
        self._handle = store.attach(name, reader, held=True)
        if info.payload < 8 or info.payload % 8:
            raise CorruptionError(f"{info.path}: {info.payload} bytes are no postings")
        self._count = int(reader.read(self._handle, [self._end], 8).view("<u8")[0, 0])
        if self._count * _BLOCK.itemsize > self._end:
            raise CorruptionError(f"{info.path}: {info.payload} bytes do not hold {self._count} blocks")
        self._held = self._read_blocks() if self._count <= _HELD_BLOCKS else None

    def size(self, items: npt.NDArray[Any]) -> int:
        """Return the most DRAM that the runs of items take, in bytes."""
        return _RUN_BYTES * len(items) * self._count

    def holding(self, start: int, count: int, runs: Iterable[Runs], room: int) -> npt.NDArray[np.bool_]:
        """Return which of neighbouring rows are in :meth:`runs`, bool ``[count]``; it takes `room` bytes of DRAM."""
        flags = np.zeros(count, np.bool_)
        most = max(64, room // 2 // _ROW_BYTES)
        for firsts, lengths, base in (group for some in runs for group in _in_reads(some, start, count, most)):
            raw = self._read(firsts, 2 * lengths).view("<u2")
            ends = np.cumsum(lengths)
            for low, high, first in zip((ends - lengths).tolist(), ends.tolist(), (base - start).tolist(), strict=True):
                rows = raw[low:high]
                if first < 0 or first + int(rows.max()) >= count:
                    rows = rows[(rows >= -first) & (rows < count - first)]
                flags[rows.astype(np.int32) + first] = True
        return flags

    def rows(self, runs: Sequence[Runs], most: int) -> npt.NDArray[np.int32] | None:
        """Return the rows of :meth:`runs`, ascending; None where there are more than `most`, or too far apart."""
        if sum(int(lengths.sum()) for _, lengths, _ in runs) > most:
            return None
        found = [np.empty(0, np.int64)]
        for firsts, lengths, base in runs:
            if len(firsts):
                found.append(self._read(firsts, 2 * lengths).view("<u2") + np.repeat(base, lengths))
        every = np.sort(np.concatenate(found))
        return every.astype(np.int32) if not len(every) or every[-1] < 2**31 else None

    def close(self) -> None:
        """Detach from the reader."""
        handle, self._handle = self._handle, -1  # which may be another file's from now on
        self._reader.remove(handle)

    def runs(self, start: int, stop: int, items: npt.NDArray[Any], room: int) -> Iterator[Runs]:
        """Yield the runs of different ascending items that may hold rows from `start` to `stop`.

        It takes `room` bytes of DRAM, and for its directory 24 for each block.
        """
        if not len(items) or not self._count:
            return
        blocks = self._read_blocks() if self._held is None else self._held
        pages = -(-blocks["count"] // _PAGE_RECORDS)
        heads_at = self._end - _BLOCK.itemsize * self._count - 8 * int(pages.sum())
        ends = blocks["records"] + blocks["count"] * self._record.itemsize
        if heads_at < 0 or ((blocks["count"] < 0) | (blocks["records"] < 0) | (ends > heads_at)).any():
            raise CorruptionError(f"{self._path}: a block of postings lies outside of the segment")
        before = np.concatenate([[0], np.cumsum(pages)])
        near = np.flatnonzero((blocks["first"] < stop) & (blocks["first"] + _SPAN > start) & (pages > 0))
        group = np.cumsum(pages[near] + len(items)) // max(1, room // 4 // _HEAD_BYTES)
        step = max(1, room // 4 // (2 * PAGE_BYTES))
        for some in np.split(near, np.flatnonzero(np.diff(group)) + 1) if len(near) else ():
            low, high = int(before[some[0]]), int(before[some[-1] + 1])
            heads = self._reader.read(self._handle, [heads_at + 8 * low], 8 * (high - low)).view(self.dtype)[0]
            sought = []
            for block in some.tolist():
                own = heads[before[block] - low : before[block + 1] - low]
                sought.append(np.unique(np.searchsorted(own, items, side="right") - 1))
            of, page = np.repeat(some, [len(each) for each in sought]), np.concatenate(sought)
            of, page = of[page >= 0], page[page >= 0]
            for place in range(0, len(of), step):
                part = slice(place, place + step)
                yield self._found(blocks[of[part]], page[part], items)

    def _found(self, blocks: npt.NDArray[Any], page: Ints, items: npt.NDArray[Any]) -> Runs:
        """Return the runs of items on pages of records, one of each block."""
        size, first = self._record.itemsize, page * _PAGE_RECORDS
        counts = np.minimum(blocks["count"] - first, _PAGE_RECORDS)
        raw = self._read(blocks["records"] + first * size, counts * size)
        records, of = raw.view(self._record), np.repeat(np.arange(len(blocks)), counts)
        place = np.minimum(np.searchsorted(items, records["item"]), len(items) - 1)
        hits = items[place] == records["item"]
        records, of = records[hits], of[hits]
        firsts = (blocks["records"] + blocks["count"] * size)[of] + 2 * records["first"].astype(np.int64)
        lengths = records["count"].astype(np.int64)
        if (firsts + 2 * lengths > self._end).any():
            raise CorruptionError(f"{self._path}: rows of an item lie outside of the segment")
        return firsts, lengths, blocks["first"][of]

    def _read_blocks(self) -> npt.NDArray[Any]:
        size = _BLOCK.itemsize * self._count
        return self._reader.read(self._handle, [self._end - size], size).view(_BLOCK)[0] if size else _NO_BLOCKS

    def _read(self, offsets: Ints, lengths: Ints) -> npt.NDArray[np.uint8]:
        """Return ranges end to end."""
        widest = int(lengths.max(initial=0))
        if len(offsets) * widest <= 2 * int(lengths.sum()) + PAGE_BYTES:  # as long as the longest, in one submission
            starts = np.maximum(np.minimum(offsets, self._end - widest), 0)
            raw = self._reader.read(self._handle, starts, widest)
            place = np.arange(widest) - (offsets - starts)[:, None]
            return raw[(place >= 0) & (place < lengths[:, None])]

        def reading() -> Reading[npt.NDArray[np.uint8]]:
            (raw,) = yield [Ranges(self._handle, offsets, lengths)]
            return raw

        return read_together(CountedReads(self._reader), {0: reading()})[0]


def _in_reads(runs: Runs, start: int, count: int, most: int) -> Iterator[Runs]:
    """Yield the runs of blocks near some rows, in groups of `most` rows, or up to twice as many; a long one is cut."""
    firsts, counts, base = runs
    near = (counts > 0) & (base < start + count) & (base + _SPAN > start)
    firsts, counts, base = firsts[near], counts[near], base[near]
    if not len(counts):
        return
    pieces = -(-counts // most)
    of = np.repeat(np.arange(len(counts)), pieces)
    within = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
    lengths = np.minimum(counts[of] - within, most)
    firsts, base = firsts[of] + 2 * within, base[of]
    borders = np.flatnonzero(np.diff(np.cumsum(lengths) // most)) + 1
    for low, high in itertools.pairwise([0, *borders.tolist(), len(lengths)]):
        yield firsts[low:high], lengths[low:high], base[low:high]


def _record(floats: bool) -> np.dtype[Any]:
    return np.dtype([("item", "<f8" if floats else "<i8"), ("first", "<u4"), ("count", "<u4")])
