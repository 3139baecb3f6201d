"""Joining parts: several parts are written as one, in list order and without removed rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.attributes import Schema, chain, write_attributes
from memhier.ann.zoom.ids.stored_texts import in_order as texts_in_order
from memhier.ann.zoom.ids.stored_texts import write_texts
from memhier.ann.zoom.ids.texts import Texts
from memhier.ann.zoom.pauses import pause
from memhier.ann.zoom.payload.stored import in_order, write_records
from memhier.ann.zoom.preview.blocks import interleave
from memhier.ann.zoom.preview.clusters import pieces_of
from memhier.ann.zoom.preview.codes import CodeBook
from memhier.ann.zoom.preview.preview import Preview
from memhier.ann.zoom.preview.scan_arguments import positions_of
from memhier.ann.zoom.source import VectorSource
from memhier.ann.zoom.storage.arrays import PartArrays, Spread, compact_ids
from memhier.ann.zoom.storage.fresh import Fresh
from memhier.ann.zoom.storage.fullview import RowWriter, vectors_of
from memhier.ann.zoom.storage.ids import Located, texts_at
from memhier.ann.zoom.storage.pages import page_order
from memhier.ann.zoom.storage.part import IndexPart
from memhier.ann.zoom.storage.rows import RowPart
from memhier.ann.zoom.storage.stored_arrays import StoredArrays
from memhier.errors import CorruptionError
from memhier.io.reader import Reader
from memhier.shield import check_interrupt
from memhier.store.store import Staging, Transaction

__all__ = [
    "WRITTEN_BYTES",
    "Merged",
    "PartsSource",
    "alive_blocks",
    "first_to_join",
    "merge_parts",
    "merged_bytes",
    "radii_after",
    "radii_of",
    "write_carried",
]

_CHUNK_BYTES = 16 << 20  # held while vectors are put in order
_ROW_BYTES = 48  # of a row on its way: list, part and row, id and numbers
_FEWEST_ROWS = 16
WRITTEN_BYTES = 64  # of a row of an attribute that is being written
_JOIN = 2  # a part is joined with those after it once they hold half as many rows
_ALIVE = 0.75  # of its rows, below which it is

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Merged:
    """One part made of several.

    Attributes
    ----------
    arrays
        Its codes, ids and lists.
    rows
        uint32 or int64 ``[n]``: number of each row when all rows of all parts are counted, removed ones included.
        None where nothing goes with rows.
    """

    arrays: PartArrays
    rows: npt.NDArray[Any] | None


@dataclass(slots=True)
class _Chunk:
    """The rows of a few neighbouring lists, from all parts, in list order, with their codes and ids."""

    lengths: Ints  # of the lists
    part: npt.NDArray[np.int32]  # of each row
    rows: Ints  # of that part
    codes: Bytes
    numbers: npt.NDArray[np.uint16]
    ids: npt.NDArray[Any]


def merge_parts(
    parts: Sequence[IndexPart], preview: Preview, reader: Reader, writer: RowWriter, work_bytes: int, with_rows: bool
) -> Merged:
    """Write the vectors of `parts` that are alive, and return their codes and ids.

    Parameters
    ----------
    parts
        In their order.
    preview
        Of the index.
    writer
        Takes the vectors.
    work_bytes
        DRAM for the work, beside the new arrays.
    with_rows
        Whether to return where rows came from, for 4 bytes each (8 if there are more than 2**32 rows).
    """
    book = preview.book
    assert isinstance(book, CodeBook)  # the paper's form is written once
    total = sum(part.alive_count for part in parts)
    codes, values = np.empty((total, book.code_bytes), np.uint8), np.empty((2, total), np.uint16)
    ids = np.empty(total, np.result_type(*(part.arrays.id_dtype for part in parts)))
    offsets = np.cumsum([0, *map(len, parts)])
    rows = np.empty(total if with_rows else 0, np.uint32 if offsets[-1] <= 2**32 else np.int64)
    files = np.array([part.file for part in parts], np.int32)
    starts, at = np.zeros(preview.lists + 1, np.int64), 0
    for low, chunk in _chunks(parts, preview.lists, book, work_bytes):
        pause()
        ends = np.concatenate([[0], np.cumsum(chunk.lengths)])
        starts[low + 1 : low + len(ends)] = at + ends[1:]
        row_bytes = parts[0].row_bytes
        order = page_order(book, chunk.codes, chunk.numbers, ends, row_bytes, at, work_bytes)
        part, of_part = chunk.part[order], chunk.rows[order]
        writer.append(reader.read(files[part], parts[0].offsets(of_part), row_bytes))
        place = slice(at, at + len(order))
        codes[place], values[:, place] = chunk.codes[order], chunk.numbers[:, order]
        ids[place] = chunk.ids[order]
        if with_rows:
            rows[place] = offsets[part] + of_part
        at = place.stop
    writer.finish()
    interleave(codes, book.dimensions)
    return Merged(PartArrays(starts, codes, values, ids), rows if with_rows else None)


def merged_bytes(parts: Sequence[IndexPart], preview: Preview, with_rows: bool) -> int:
    """Return the DRAM that joining parts takes beside them: the new arrays, and the work on attributes."""
    each = preview.book.code_bytes + 4 + 8 + 4 * with_rows
    columns = sum(part.attributes.joined_bytes for part in parts if part.attributes is not None)
    # Arrays of checksums and of first rows that grow are copied.
    records = 2 * sum(part.records.planned_bytes for part in parts if part.records is not None)
    return each * sum(part.alive_count for part in parts) + 8 * (preview.lists + 1) + records + columns


def first_to_join(
    parts: Sequence[IndexPart], preview: Preview, earliest: int, room: Callable[[], int], *, with_rows: bool,
    most: int | None = None,
) -> int:  # fmt: skip
    """Return the part, from number `earliest` on, from which on all are joined.

    Joins make sizes fall by a factor from part to part, and leave no part of which a quarter is removed. They go as far
    as there is room for the new part beside the old ones, which searches use until it is there.

    Parameters
    ----------
    room
        Returns the bytes of DRAM.
    with_rows
        As in :func:`merged_bytes`.
    most
        Rows to write; None for any number.
    """
    first, rows, free = len(parts), 0, None
    for number in range(len(parts) - 1, earliest - 1, -1):
        part = parts[number]
        if most is not None and sum([each.alive_count for each in parts[number:]]) > most:
            break
        if (rows and len(part) <= _JOIN * rows) or part.alive_count < _ALIVE * len(part):
            free = room() if free is None else free
            if merged_bytes(parts[number:], preview, with_rows) > free:
                break
            first = number
        rows += len(part)
    return first


def radii_of(pieces: Sequence[PartArrays | StoredArrays | Spread], preview: Preview) -> Floats:
    """Return the root mean square distance of the vectors of each list to its centroid, of all pieces together."""
    if not pieces:
        return preview.radii
    squared, counts = np.sum(_spreads(pieces, preview), axis=0)
    radii: Floats = np.sqrt(squared / np.maximum(counts, 1)).astype(np.float32)
    return radii


def radii_after(
    parts: Sequence[IndexPart],
    preview: Preview,
    gone: Sequence[PartArrays | StoredArrays | Spread],
    come: Sequence[PartArrays | StoredArrays | Spread],
) -> Floats:
    """Return the radii of lists once some pieces of `parts` are gone and others have come, from those before.

    Work is in proportion to these pieces and the lists, not to all rows. Lists of neither keep their radii.
    """
    counts = np.sum([np.diff(part.arrays.starts) for part in parts], axis=0, initial=0)
    less, more = (np.sum(_spreads(pieces, preview), axis=0, initial=0) for pieces in (gone, come))
    change, left = more - less, np.maximum(counts + more[1] - less[1], 0)
    squared = np.maximum(np.square(preview.radii, dtype=np.float64) * counts + change[0], 0)
    squared = np.where(left == more[1], more[0], squared)  # nothing is left from before
    radii = np.sqrt(squared / np.maximum(left, 1)).astype(np.float32)
    touched: npt.NDArray[np.bool_] = (less[1] > 0) | (more[1] > 0)
    return np.where(touched, radii, preview.radii)


def _spreads(pieces: Sequence[PartArrays | StoredArrays | Spread], preview: Preview) -> list[Spread]:
    none = np.zeros((2, preview.lists))
    return [none, *(each if isinstance(each, np.ndarray) else each.spread(preview) for each in pieces)]


def alive_blocks(
    parts: Sequence[IndexPart], dtype: np.dtype[Any], reader: Reader
) -> Iterator[tuple[Ints, npt.NDArray[Any]]]:
    """Yield positions and vectors ``[n, d]`` of all rows that are alive, some 8 MiB at a time."""
    for number, part in enumerate(parts):
        step = max(1, (_CHUNK_BYTES // 2) // part.row_bytes)
        for start in range(0, len(part), step):
            check_interrupt()
            rows = np.arange(start, min(start + step, len(part)))
            rows = rows[part.is_alive(rows)]
            if len(rows):
                yield positions_of(number, rows), vectors_of(part.read(reader, rows), dtype)


def _chunks(parts: Sequence[IndexPart], lists: int, book: CodeBook, work_bytes: int) -> Iterator[tuple[int, _Chunk]]:
    """Yield the first list of each chunk, and the chunk: a few lists, or a piece of a long list."""
    # Three copies at most: the rows taken, those put in order, and those on their way.
    each = 3 * (parts[0].row_bytes + book.code_bytes + _ROW_BYTES)
    limit = max(_FEWEST_ROWS, min(_CHUNK_BYTES, work_bytes) // each)
    rows_before = np.sum([part.arrays.starts for part in parts], axis=0)
    low = 0
    while low < lists:
        high = max(low + 1, int(np.searchsorted(rows_before, rows_before[low] + limit, side="right")) - 1)
        if rows_before[high] - rows_before[low] <= limit:
            starts = [part.arrays.starts[low : high + 1] for part in parts]
            yield low, _chunk([_take(part, number, starts[number], book) for number, part in enumerate(parts)])
        else:
            for number, part in enumerate(parts):
                first, stop = part.arrays.starts[low : high + 1].tolist()
                for start in range(first, stop, limit):
                    borders = np.array([start, min(start + limit, stop)])
                    yield low, _chunk([_take(part, number, borders, book)])
        low = high


def _chunk(taken: Sequence[tuple[npt.NDArray[Any], ...]]) -> _Chunk:
    lengths, member, part, rows, codes, ids, values = zip(*taken, strict=True)
    order = np.argsort(np.concatenate(member), kind="stable")
    return _Chunk(
        np.sum(lengths, axis=0), np.concatenate(part)[order], np.concatenate(rows)[order],
        np.concatenate(codes)[order], np.concatenate(values)[order].T, np.concatenate(ids)[order],
    )  # fmt: skip


def _take(part: IndexPart, number: int, starts: Ints, book: CodeBook) -> tuple[npt.NDArray[Any], ...]:
    """Return the rows alive in the lists of a part that begin and end at `starts`: first their number in each list."""
    rows = np.arange(starts[0], starts[-1])
    alive = part.is_alive(rows)
    member = np.repeat(np.arange(len(starts) - 1), np.diff(starts))[alive]
    rows = rows[alive]
    found = part.arrays.take(rows, book)
    return (
        np.bincount(member, minlength=len(starts) - 1), member, np.full(len(rows), number, np.int32), rows,
        found.codes, found.ids, found.numbers.T,
    )  # fmt: skip


def write_carried(
    tx: Transaction | Staging,
    name: str,
    parts: Sequence[RowPart],
    schema: Schema,
    rows: npt.NDArray[Any],
    work_bytes: int,
) -> None:
    """Write the attributes, documents and strings of rows of `parts` as those of the part `name`.

    Parameters
    ----------
    rows
        Integers ``[n]``: the number of each row when the rows of all `parts` are counted.
    work_bytes
        DRAM for attributes and documents on their way.
    """
    if schema:
        attributes = [part.attributes for part in parts if part.attributes is not None]
        block_rows = max(1, work_bytes // WRITTEN_BYTES)
        write_attributes(tx, f"{name}-a-", schema, chain(attributes, schema), rows, block_rows)
    records = [part.records for part in parts]
    if any(each is not None for each in records):
        write_records(tx, f"{name}-docs", in_order(records, [*map(len, parts)], rows, work_bytes))
    if any(part.texts is not None for part in parts):
        offsets, none = np.cumsum([0, *map(len, parts)]), Fresh.empty(1, np.dtype(np.float32), texts=True)

        def take(some: npt.NDArray[Any]) -> Texts:
            part = np.searchsorted(offsets, some, side="right") - 1
            positions = positions_of(part, some.astype(np.int64) - offsets[part])
            return texts_at(parts, none, Located(positions, np.full(len(some), -1)))

        write_texts(tx, f"{name}-texts", texts_in_order(take, rows))


class PartsSource(VectorSource):
    """The vectors alive in all parts, in their order, as a source to build from.

    Attributes
    ----------
    ids
        uint32 or int64 ``[n]``.
    rows
        uint32 or int64 ``[n]``: number of each vector when all rows of all parts are counted, removed ones included.
    """

    def __init__(self, parts: Sequence[IndexPart], dtype: np.dtype[Any], dimension: int, reader: Reader) -> None:
        self._parts, self._reader = parts, reader
        self._offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
        number = np.uint32 if self._offsets[-1] < 2**32 else np.int64
        self.rows: npt.NDArray[Any] = np.concatenate([np.empty(0, number), *self._alive(number)])
        each = zip(parts, self._rows_by_part(), strict=True)
        ids = [part.arrays.ids_of(rows[some]) for part, rows in each for some in pieces_of(len(rows))]
        self.ids: npt.NDArray[Any] = compact_ids(np.concatenate([np.empty(0, np.uint32), *ids]))
        self.count: int = len(self.rows)
        self.dimension: int = dimension
        self.dtype: np.dtype[Any] = dtype

    def _alive(self, number: npt.DTypeLike) -> Iterator[npt.NDArray[Any]]:
        """Yield the numbers of the rows alive, a piece at a time."""
        for part, offset in zip(self._parts, self._offsets.tolist(), strict=False):
            for piece in pieces_of(len(part)):
                rows = np.arange(piece.start, piece.stop)
                yield (rows[part.is_alive(rows)] + offset).astype(number)

    def _rows_by_part(self) -> Iterator[Ints]:
        """Yield the rows alive of each part."""
        edges = np.searchsorted(self.rows, self._offsets)
        for offset, low, high in zip(self._offsets, edges, edges[1:], strict=False):
            yield self.rows[low:high] - offset

    def blocks(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield ``(first row, block)`` in order."""
        step = max(1, (_CHUNK_BYTES // 2) // (4 * self.dimension))
        for start in range(0, self.count, step):
            yield start, self.take(np.arange(start, min(start + step, self.count)))

    def take(self, rows: Ints) -> npt.NDArray[Any]:
        """Return the given vectors, in any order; those of a part are read together."""
        pause()
        out = np.empty((len(rows), self.dimension), self.dtype)
        order = np.argsort(rows, kind="stable")
        numbers = self.rows[rows[order]]
        edges = np.searchsorted(numbers, self._offsets)
        for part, offset, low, high in zip(self._parts, self._offsets, edges, edges[1:], strict=False):
            if low < high:
                raw = part.read(self._reader, numbers[low:high] - offset)
                out[order[low:high]] = vectors_of(raw, self.dtype)
        if self.dtype.kind == "f" and not (finite := np.isfinite(out).all(axis=1)).all():
            self._refuse(int(self.rows[rows[int(np.argmin(finite))]]))
        return out

    def _refuse(self, row: int) -> NoReturn:
        """Raise for a row of the parts that holds NaN or infinity, which no call writes."""
        at = int(np.searchsorted(self._offsets, row, "right")) - 1
        part, row = self._parts[at], row - int(self._offsets[at])
        texts = None if part.texts is None else part.texts.read(np.array([row]))
        name = int(part.arrays.ids_of(np.array([row]))[0]) if texts is None else texts[0]
        raise CorruptionError(
            f"the vector of id {name!r} (row {row} of part {part.name}) holds NaN or infinity, behind a right "
            "checksum; remove or update this id, and call again"
        )
