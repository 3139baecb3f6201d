"""The rows that hold each item of a column of lists, on SSD: a filter reads those of the items that it names.

Rows lie in blocks of neighbours, so that writing holds one block. Layout of the segment: of each block its records, one
for each different item in their order (the item, i64 or f64; u32, where its rows begin, in u16 from the first of the
block; u32, their number), then u16 [m], the rows of the items, counted from the block's first, a multiple of 64; zeros
up to a multiple of 8. More than 4,096 rows of an item are a bitmap of 65,536 rows, which takes less. One or two rows
are two u16 of the record, in the place of where they begin. Then the item of every 256th record, block by block; then
of each block i64 its first row, i64 where its records begin, i64 their number; then u64, the number of blocks.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.ann.zoom.filters.bitmaps import Words, pack, word_count
from memhier.ann.zoom.pauses import pause
from memhier.errors import CorruptionError
from memhier.fields import stored_segment
from memhier.io.page_file import PAGE_BYTES
from memhier.io.ranges import CountedReads, Ranges, Reading, read_together
from memhier.io.reader import Reader
from memhier.store.store import Staging, Store, Transaction

__all__ = ["BLOCK_ITEMS", "LOOK_UP_BYTES", "POSTED_BYTES", "POSTINGS", "Postings", "write_postings"]

Ints: TypeAlias = npt.NDArray[np.int64]
Groups: TypeAlias = Sequence[npt.NDArray[Any]]
Runs: TypeAlias = tuple[Ints, Ints, Ints]
"""Runs of rows of an item in a block: where each begins in the segment, its rows, and the block's first row."""

POSTINGS = "-items-sets"
BLOCK_ITEMS = 1 << 20
"""Items of a block at most, where DRAM is no matter."""
POSTED_BYTES = 20
"""Bytes on SSD of an item at most."""

_SPAN = 1 << 16  # rows of a block at most
_FEW_ROWS, _MOST_ROWS = 2, _SPAN // 16  # of an item: up to these in its record, or as numbers behind all records
_PAGE_RECORDS = 256
_HEAD_BYTES, _ROW_BYTES = 32, 16  # that a head and a row take on their way
LOOK_UP_BYTES = 1 << 15
"""DRAM of a look-up."""

_BLOCK = np.dtype([("first", "<i8"), ("records", "<i8"), ("count", "<i8")])
_NO_BLOCKS = np.empty(0, _BLOCK)


def write_postings(tx: Transaction | Staging, name: str, floats: bool, pairs: Iterable[tuple[Ints, Any]]) -> None:
    """Write the rows of items, block by block.

    Parameters
    ----------
    floats
        Whether items are floats; otherwise they are integers.
    pairs
        Of each block rows, ascending and within 65,536 from a multiple of 64 on, and the item of each.
    """
    segment, record = tx.segment(name), _record(floats)
    blocks, heads = list[tuple[int, int, int]](), list[npt.NDArray[Any]]()
    for rows, items in pairs:
        pause()
        first = int(rows[0]) // 64 * 64
        order = np.argsort(items, kind="stable")
        sorted_items, places = items[order], (rows[order] - first).astype("<u2")
        apart = sorted_items[1:] != sorted_items[:-1]
        kept = np.concatenate([[True], apart | (places[1:] != places[:-1])])  # a list may hold an item twice
        sorted_items, places = sorted_items[kept], places[kept]
        starts = np.flatnonzero(np.concatenate([[True], sorted_items[1:] != sorted_items[:-1]]))
        counts = np.diff(starts, append=len(places))
        behind = counts > _FEW_ROWS
        lengths = np.where(behind, np.minimum(counts, _MOST_ROWS), 0)
        records = np.empty(len(starts), record)
        records["item"], records["count"] = sorted_items[starts], counts
        second = places[np.minimum(starts + 1, len(places) - 1)].astype("<u4") << 16
        records["first"] = np.where(
            behind, np.cumsum(lengths) - lengths, places[starts] | np.where(counts > 1, second, 0)
        )
        places, counts = places[np.repeat(behind, counts)], np.where(behind, counts, 0)
        starts = np.cumsum(counts) - counts
        blocks.append((first, segment.length, len(records)))
        heads.append(records["item"][::_PAGE_RECORDS].copy())
        segment.append(records)
        for item in np.flatnonzero(counts > _MOST_ROWS)[::-1].tolist():
            start, stop = int(starts[item]), int(starts[item] + counts[item])
            flags = np.zeros(_SPAN, np.bool_)
            flags[places[start:stop]] = True
            bits = np.packbits(flags, bitorder="little").view("<u2")
            places = np.concatenate([places[:start], bits, places[stop:]])
        segment.append(places)
        segment.append(bytes(-segment.length % 8))
    segment.append(np.concatenate([np.empty(0, record["item"]), *heads]))
    segment.append(np.array(blocks, _BLOCK))
    segment.append(np.array([len(blocks)], "<u8"))


class Postings:
    """Finds the rows that hold items. For many threads.

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

    def directory(self) -> Words:
        """Return the blocks and the heads of their pages of records, for the caller to keep.

        Raises
        ------
        CorruptionError
            When they tell of places outside of the segment.
        """
        size = _BLOCK.itemsize * self._count
        blocks = self._reader.read(self._handle, [self._end - size], size).view(_BLOCK)[0] if size else _NO_BLOCKS
        counts = blocks["count"]
        fits = (counts >= 0) & (counts <= self._end // self._record.itemsize) & (blocks["first"] >= 0)
        fits &= (blocks["first"] % 64 == 0) & (blocks["records"] % 8 == 0)  # no number of a row crosses a page
        pages = int((-(-counts // _PAGE_RECORDS)).sum()) if fits.all() else 0
        heads_at = self._end - size - 8 * pages
        fits &= (blocks["records"] >= 0) & (blocks["records"] <= heads_at - counts * self._record.itemsize)
        if heads_at < 0 or not fits.all():
            raise CorruptionError(f"{self._path}: a block of postings lies outside of the segment")
        heads = self._reader.read(self._handle, [heads_at], 8 * pages)[0] if pages else np.empty(0, np.uint8)
        return np.concatenate([blocks.view(np.uint64), heads.view(np.uint64)])

    def holding(self, start: int, count: int, filters: Sequence[Groups], directory: Words) -> Words:
        """Return for each filter which of neighbouring rows hold one of the items of every group, a bit for each.

        The items of a group ascend and differ. `directory` is that of :meth:`directory`; `start` is a multiple of 64.
        It takes `LOOK_UP_BYTES` of DRAM, and as many bits as are returned of a filter for each further group of one.
        """
        found = np.zeros((len(filters), word_count(count)), np.uint64)
        if not self._count:
            return found
        core, compiled = backend.core, self._reader.compiled
        if core is None or compiled is None:
            blocks, heads = directory[: 3 * self._count].view(_BLOCK), directory[3 * self._count :].view(self.dtype)
            for first in range(start, start + count, _SPAN):
                some = min(_SPAN, start + count - first)
                at = (first - start) // 64
                for words, groups in zip(found, filters, strict=True):
                    each = [self._flags(first, some, items, blocks, heads) for items in groups]
                    words[at : at + word_count(some)] = np.bitwise_and.reduce(each)
            return found
        every = [items for groups in filters for items in groups]
        request = core.PostingRequest(
            file=self._handle, end=self._end, directory=directory, count=self._count,
            items=every[0] if len(every) == 1 else np.concatenate(every), ends=_ends(every), filters=_ends(filters),
            floats=self.dtype.kind == "f", start=start, rows=count,
        )  # fmt: skip
        self._reader.run(partial(compiled.mark_rows, request=request, words=found))
        return found

    def _flags(
        self, start: int, count: int, items: npt.NDArray[Any], blocks: npt.NDArray[Any], heads: npt.NDArray[Any]
    ) -> Words:
        """Return the same without the compiled core."""
        flags = np.zeros(count, np.bool_)
        most = max(64, LOOK_UP_BYTES // 2 // _ROW_BYTES)
        for rows, (firsts, counts, base) in self._runs(start, start + count, items, blocks, heads):
            flags[rows[(rows >= start) & (rows < start + count)] - start] = True
            dense = counts > _MOST_ROWS
            for at, first in zip(firsts[dense].tolist(), (base[dense] - start).tolist(), strict=True):
                bits = self._reader.read(self._handle, [at], _SPAN // 8)[0]
                rows = first + np.flatnonzero(np.unpackbits(bits, bitorder="little"))
                flags[rows[(rows >= 0) & (rows < count)]] = True
            for some in _in_reads((firsts[~dense], counts[~dense], base[~dense]), start, count, most):
                self._flag(flags, some, start)
        return pack(flags)

    def _flag(self, flags: npt.NDArray[np.bool_], runs: Runs, start: int) -> None:
        """Flag the rows of runs, of numbers."""
        firsts, lengths, base = runs
        raw = self._read(firsts, 2 * lengths).view("<u2")
        ends = np.cumsum(lengths)
        for low, high, first in zip((ends - lengths).tolist(), ends.tolist(), (base - start).tolist(), strict=True):
            rows = first + raw[low:high].astype(np.int64)
            flags[rows[(rows >= 0) & (rows < len(flags))]] = True

    def pairs(self) -> Iterator[tuple[Ints, npt.NDArray[Any]]]:
        """Yield the rows of each block, and the item of each, in any order."""
        size = self._record.itemsize
        for first, at, count in self.directory()[: 3 * self._count].view(_BLOCK).tolist():
            records = self._read(np.array([at]), np.array([count * size])).view(self._record)
            counts, starts = records["count"].astype(np.int64), records["first"].astype(np.int64)
            few, dense = counts <= _FEW_ROWS, counts > _MOST_ROWS
            some, lengths = ~few & ~dense, np.where(few, 0, np.minimum(counts, _MOST_ROWS))
            behind, total = at + count * size, int(lengths.sum())
            if behind + 2 * total > self._end or (starts + lengths)[~few].max(initial=0) > total:
                raise CorruptionError(f"{self._path}: rows of an item lie outside of the segment")
            raw = self._read(np.array([behind]), np.array([2 * total])) if total else np.empty(0, np.uint8)
            places = raw.view("<u2")
            two = np.stack([starts & 0xFFFF, starts >> 16], axis=1)[few]
            ends = np.cumsum(counts[some])
            within = np.repeat(starts[some] - ends + counts[some], counts[some]) + np.arange(ends[-1:].sum())
            rows = [two[np.arange(2) < counts[few, None]], places[within]]
            for start in starts[dense].tolist():
                bits = places[start : start + _MOST_ROWS].view(np.uint8)
                rows.append(np.flatnonzero(np.unpackbits(bits, bitorder="little")))
            items = [np.repeat(records["item"][which], counts[which]) for which in (few, some)]
            items += [np.full(len(each), item) for each, item in zip(rows[2:], records["item"][dense], strict=True)]
            yield first + np.concatenate(rows).astype(np.int64), np.concatenate(items)

    def close(self) -> None:
        """Detach from the reader."""
        handle, self._handle = self._handle, -1  # which may be another file's from now on
        self._reader.remove(handle)

    def _runs(
        self, start: int, stop: int, items: npt.NDArray[Any], blocks: npt.NDArray[Any], heads: npt.NDArray[Any]
    ) -> Iterator[tuple[Ints, Runs]]:
        """Yield the rows that records of items hold, and runs of others, that may lie from `start` to `stop`."""
        pages = -(-blocks["count"] // _PAGE_RECORDS)
        before = np.concatenate([[0], np.cumsum(pages)])
        near = np.flatnonzero((blocks["first"] < stop) & (blocks["first"] + _SPAN > start) & (pages > 0))
        group = np.cumsum(pages[near] + len(items)) // max(1, LOOK_UP_BYTES // 4 // _HEAD_BYTES)
        step = max(1, LOOK_UP_BYTES // 4 // (2 * PAGE_BYTES))
        for some in np.split(near, np.flatnonzero(np.diff(group)) + 1) if len(near) else ():
            sought = []
            for block in some.tolist():
                own = heads[before[block] : before[block + 1]]
                sought.append(np.unique(np.searchsorted(own, items, side="right") - 1))
            of, page = np.repeat(some, [len(each) for each in sought]), np.concatenate(sought)
            of, page = of[page >= 0], page[page >= 0]
            for place in range(0, len(of), step):
                part = slice(place, place + step)
                yield self._found(blocks[of[part]], page[part], items)

    def _found(self, blocks: npt.NDArray[Any], page: Ints, items: npt.NDArray[Any]) -> tuple[Ints, Runs]:
        """Return the rows that records of items hold on their pages, one of each block, and the runs of others."""
        size, first = self._record.itemsize, page * _PAGE_RECORDS
        counts = np.minimum(blocks["count"] - first, _PAGE_RECORDS)
        raw = self._read(blocks["records"] + first * size, counts * size)
        records, of = raw.view(self._record), np.repeat(np.arange(len(blocks)), counts)
        place = np.minimum(np.searchsorted(items, records["item"]), len(items) - 1)
        hits = items[place] == records["item"]
        hits &= records["count"] > 0
        records, of = records[hits], of[hits]
        few = records["count"] <= _FEW_ROWS
        two = np.stack([records["first"][few] & 0xFFFF, records["first"][few] >> 16], axis=1).astype(np.int64)
        rows = (two + blocks["first"][of[few]][:, None])[np.arange(2) < records["count"][few][:, None]]
        records, of = records[~few], of[~few]
        firsts = (blocks["records"] + blocks["count"] * size)[of] + 2 * records["first"].astype(np.int64)
        lengths = records["count"].astype(np.int64)
        if (firsts + 2 * np.minimum(lengths, _MOST_ROWS) > self._end).any():
            raise CorruptionError(f"{self._path}: rows of an item lie outside of the segment")
        return rows, (firsts, lengths, blocks["first"][of])

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


def _ends(lengths: Sequence[Sequence[Any] | npt.NDArray[Any]]) -> list[int]:
    """Return the sum of the lengths up to each."""
    return [*itertools.accumulate(map(len, lengths))]


def _record(floats: bool) -> np.dtype[Any]:
    return np.dtype([("item", "<f8" if floats else "<i8"), ("first", "<u4"), ("count", "<u4")])
