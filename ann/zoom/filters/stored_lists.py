"""A column of lists of one part on SSD: where each list begins, and a column of the items of all.

i64 [n + 1], the item at which each list begins, and the number of items; then, where any row is null, u64
[ceil(n / 64)] with a bit for each that is. The segment ... + ``-items`` is a column of the items
(`memhier.ann.zoom.filters.stored_column`), none of which is null; ... + ``-items-sets`` says which rows hold each item
(`memhier.ann.zoom.filters.postings`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.bitmaps import Words, pack, unpack, word_count
from memhier.ann.zoom.filters.columns import BLOCK_ROWS, DTYPES, Bounds, ListColumn
from memhier.ann.zoom.filters.conditions import LIST_TYPES, ItemType, ListCells, ListType, Value, points_of
from memhier.ann.zoom.filters.lists import item_rows
from memhier.ann.zoom.filters.postings import POSTINGS, Postings, write_postings
from memhier.ann.zoom.filters.stored_column import StoredColumn, converted, joined_bits, write_column
from memhier.ann.zoom.pauses import pause
from memhier.errors import CorruptionError
from memhier.fields import stored_segment
from memhier.io.ranges import Ranges, Reading
from memhier.io.reader import Reader
from memhier.store.store import Staging, Store, Transaction

__all__ = ["ITEMS", "StoredListColumn", "write_lists"]

Ints: TypeAlias = npt.NDArray[np.int64]

ITEMS = "-items"
_START_BYTES = 8


class StoredListColumn:
    """A column in two segments, or three for text.

    Raises
    ------
    CorruptionError
        When it has not `count` rows.
    """

    width: int = 2 * _START_BYTES  # of a row in DRAM: as read, and as it is compared

    def __init__(self, store: Store, name: str, kind: ItemType, count: int, reader: Reader) -> None:
        self.type: ListType | None = LIST_TYPES[kind]
        self._count, self._reader = count, reader
        info, items = stored_segment(store, name), stored_segment(store, name + ITEMS)
        self._path = info.path
        plain = _START_BYTES * (count + 1)
        has_bits = info.payload == plain + 8 * word_count(count) and count > 0
        if info.payload != plain and not has_bits:
            raise CorruptionError(f"{info.path}: {info.payload} bytes do not hold {count} lists")
        self._bits_at = plain if has_bits else None
        self._items = StoredColumn(store, name + ITEMS, kind, items.payload // np.dtype(DTYPES[kind]).itemsize, reader)
        self._handle = store.attach(name, reader)
        self.postings: Postings | None = None
        if name + POSTINGS in store.segments():  # indexes of earlier versions have none
            self.postings = Postings(store, name + POSTINGS, kind == "float64", reader)

    def __len__(self) -> int:
        return self._count

    @property
    def items(self) -> StoredColumn:
        """The items of all lists."""
        return self._items

    @property
    def word_count(self) -> int:
        """Distinct words of the items."""
        return self._items.word_count

    def bounds(self, rows: Ints) -> Bounds:
        """Return the items of `rows`, in any order."""
        raw = self._reader.read(self._handle, rows * _START_BYTES, 2 * _START_BYTES)
        bits = None
        if self._bits_at is not None:
            bits = self._reader.read(self._handle, self._bits_at + rows // 8, 1)[:, 0]
        return self._bounds(rows, raw, bits)

    def take(self, rows: Ints) -> Reading[npt.NDArray[Any]]:
        """Read the lists of `rows`, in any order: objects ``[m]``, None where null."""
        asked = [Ranges.of(self._handle, rows * _START_BYTES, 2 * _START_BYTES)]
        if self._bits_at is not None:
            asked.append(Ranges.of(self._handle, self._bits_at + rows // 8, 1))
        raw = yield asked
        starts, stops, nulls = self._bounds(rows, raw[0], raw[1] if len(raw) > 1 else None)
        lengths = stops - starts
        found = yield from self._items.take(starts, lengths)
        items = list(found) if found.dtype.kind == "M" else np.ma.getdata(found).tolist()
        ends = np.cumsum(lengths)
        lists = (items[low:high] for low, high in zip((ends - lengths).tolist(), ends.tolist(), strict=True))
        made = np.fromiter(lists, object, len(rows))
        made[nulls] = None
        return made

    def block(
        self, start: int, count: int, buffer: npt.NDArray[np.uint8], item_buffer: npt.NDArray[np.uint8]
    ) -> ListCells:
        """Return the lists of neighbouring rows, whose starts lie in `buffer`; `start` is a multiple of 64."""
        out = buffer[: _START_BYTES * (count + 1)]
        self._reader.read(self._handle, [start * _START_BYTES], len(out), out[None])
        starts = out.view("<i8")
        self._check(starts[:-1], starts[1:])
        bits = self.nulls(start, count)
        nulls = None if bits is None else unpack(bits, count)
        return ListCells(starts, nulls, _Items(self._items, int(starts[0]), int(starts[-1]), item_buffer))

    def posted(self, start: int, count: int, directory: Words) -> ListCells:
        """Return the lists of neighbouring rows, of which only the items are asked for, found by :attr:`postings`."""

        def holding(values: tuple[Value, ...]) -> npt.NDArray[np.bool_]:
            return unpack(self.holding(start, count, [[values]], directory)[0], count)

        bits = self.nulls(start, count)
        nulls = None if bits is None else unpack(bits, count)
        return ListCells(np.empty(0, np.int64), nulls, lambda: iter(()), holding)

    def holding(
        self, start: int, count: int, filters: Sequence[Sequence[tuple[Value, ...]]], directory: Words
    ) -> Words:
        """Return for each filter which of neighbouring rows hold one value of every group; see :attr:`postings`."""
        assert self.postings is not None
        dtype = self.postings.dtype
        points = [[points_of(values, dtype) for values in groups] for groups in filters]
        return self.postings.holding(start, count, points, directory)

    def nulls(self, start: int, count: int) -> Words | None:
        """Return which of neighbouring rows are null, a bit for each; None for none. `start` is a multiple of 64."""
        if self._bits_at is None:
            return None
        words: Words = self._reader.read(self._handle, [self._bits_at + start // 8], 8 * word_count(count))[0].view(
            "<u8"
        )
        return words

    def posted_right(self) -> bool:
        """Return whether postings, where there are any, tell the items of the lists; reads both."""
        return self.postings is None or _digest(self.postings.pairs()) == _digest(self._pairs())

    def _pairs(self) -> Iterator[tuple[Ints, npt.NDArray[Any]]]:
        """Yield rows with an item of each, list after list."""
        for start in range(0, self._count, BLOCK_ROWS):
            for some, of in item_rows(self.bounds(np.arange(start, min(start + BLOCK_ROWS, self._count))), BLOCK_ROWS):
                yield start + of, self._items.read(some).values

    def find(self, texts: list[str]) -> dict[str, tuple[int, bool]]:
        """Return the rank of each text, and whether it is in a list."""
        return self._items.find(texts)

    def close(self) -> None:
        """Detach from the reader."""
        handle, self._handle = self._handle, -1  # which may be another file's from now on
        self._reader.remove(handle)
        self._items.close()
        if self.postings is not None:
            self.postings.close()

    def _bounds(self, rows: Ints, raw: npt.NDArray[np.uint8], bits: npt.NDArray[np.uint8] | None) -> Bounds:
        both = raw.view("<i8").reshape(-1, 2)
        self._check(both[:, 0], both[:, 1])
        nulls = np.zeros(len(rows), np.bool_)
        if bits is not None:
            nulls = (bits >> (rows % 8).astype(np.uint8) & 1).view(np.bool_)
        return Bounds(both[:, 0], both[:, 1], nulls)

    def _check(self, starts: Ints, stops: Ints) -> None:
        if ((starts < 0) | (starts > stops) | (stops > len(self._items))).any():
            raise CorruptionError(f"{self._path}: a list lies outside of the {len(self._items)} items")


def _digest(pairs: Iterable[tuple[Ints, npt.NDArray[Any]]]) -> int:
    """Return a hash of the different pairs of a row and an item, however they are cut into runs of ascending rows."""
    total, last, known = 0, -1, np.empty(0, np.uint64)
    for rows, items in pairs:
        if not len(rows):
            continue
        plain = items + 0.0 if items.dtype.kind == "f" else items.astype(np.int64)  # 0.0 and -0.0 are one item
        # As splitmix64 does it. Of one row, no two items have the same.
        mixed = (plain.view(np.uint64) ^ rows.astype(np.uint64) << np.uint64(32)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ mixed >> np.uint64(29)) * np.uint64(0x94D049BB133111EB)
        mixed, place = np.unique(mixed ^ mixed >> np.uint64(32), return_index=True)
        total += int(mixed[~np.isin(mixed, known)].sum())
        top = int(rows.max())
        of_top = mixed[rows[place] == top]
        last, known = top, np.union1d(known, of_top) if top == last else of_top
    return total % 2**64


class _Items:
    """The items of neighbouring lists in runs; read once where one run takes them all.

    Parameters
    ----------
    buffer
        Room for a run.
    """

    def __init__(self, items: StoredColumn, start: int, stop: int, buffer: npt.NDArray[np.uint8]) -> None:
        self._items, self._start, self._stop, self._buffer = items, start, stop, buffer
        self._whole: npt.NDArray[Any] | None = None

    def __call__(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        step = len(self._buffer) // self._items.width
        if self._whole is not None:
            yield self._start, self._whole
            return
        for first in range(self._start, self._stop, step):
            values = self._items.block(first, min(step, self._stop - first), self._buffer).values
            if self._stop - self._start <= step:
                self._whole = values
            yield first, values


def write_lists(
    tx: Transaction | Staging,
    segment_name: str,
    name: str,
    kind: ItemType,
    column: ListColumn,
    blocks: Callable[[], Iterator[Ints]],
    step: int,
    *,
    posted: int,
) -> None:
    """Write rows of a column of lists into segments, block by block; see `write_column`.

    Parameters
    ----------
    step
        Items written at a time.
    posted
        Items of a block of postings.
    """
    segment, count, total = tx.segment(segment_name), 0, 0
    bits: list[tuple[int, npt.NDArray[np.uint64]]] = []
    for rows in blocks():
        pause()
        bounds = column.bounds(rows)
        ends = total + np.cumsum(bounds.stops - bounds.starts)
        segment.append(np.concatenate([[total], ends[:-1]]).astype("<i8"))
        if bounds.nulls.any():
            bits.append((count // 64, pack(bounds.nulls)))
        count, total = count + len(rows), int(ends[-1])
    segment.append(np.array([total], "<i8"))
    if bits:
        segment.append(joined_bits(bits, count))

    def items() -> Iterator[Ints]:
        return (some for rows in blocks() for some, _ in item_rows(column.bounds(rows), step))

    written = write_column(tx, segment_name + ITEMS, name, kind, column.items, items)

    def pairs() -> Iterator[tuple[Ints, Any]]:
        first = 0
        for rows in blocks():
            for some, of in item_rows(column.bounds(rows), posted):
                values = converted(name, written.read(some), kind, of).values
                yield first + of, values.astype(np.float64 if kind == "float64" else np.int64)
            first += len(rows)

    write_postings(tx, segment_name + POSTINGS, kind == "float64", pairs())
