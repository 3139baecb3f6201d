"""Writing several parts as one: what was removed goes, and all is in list order again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.blocks import codes_of, interleave
from memhier.ann.zoom.code_scan import PART_SHIFT
from memhier.ann.zoom.codes import CodeBook
from memhier.ann.zoom.fullview import RowWriter, vectors_of
from memhier.ann.zoom.pages import page_order
from memhier.ann.zoom.part import Part, PartArrays, compact_ids
from memhier.ann.zoom.preview import Preview
from memhier.ann.zoom.source import VectorSource
from memhier.reader import Reader

__all__ = ["Merged", "alive_blocks", "merge_parts", "radii_of"]

_CHUNK_BYTES = 16 << 20  # of full vectors, held while they are put in order

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
    sources
        int64 ``[n]``: the position that each row had before.
    """

    arrays: PartArrays
    sources: Ints


@dataclass(slots=True)
class _Chunk:
    """The rows of a few neighbouring lists, from all parts, in list order, with what is kept of them in DRAM."""

    lengths: Ints  # of the lists
    sources: Ints
    vectors: Bytes
    codes: Bytes
    numbers: npt.NDArray[np.uint16]
    ids: Ints


def merge_parts(
    parts: Sequence[Part], numbers: Sequence[int], preview: Preview, reader: Reader, writer: RowWriter
) -> Merged:
    """Write the vectors of `parts` that are alive and return what else there is to keep of them.

    Parameters
    ----------
    parts, numbers
        Parts, and their numbers in positions.
    preview
        Of the index.
    writer
        Takes the vectors.

    Notes
    -----
    Holds, beside the new codes, some 16 MiB of vectors, or the longest list where that is more.
    """
    book = preview.book
    assert isinstance(book, CodeBook)  # the paper's form is written once
    total = sum(part.alive_count for part in parts)
    codes = np.empty((total, book.code_bytes), np.uint8)
    values = np.empty((2, total), np.uint16)
    ids, sources = np.empty(total, np.int64), np.empty(total, np.int64)
    lengths = []
    at = 0
    for chunk in _chunks(parts, numbers, preview.lists, book, reader):
        lengths.append(chunk.lengths)
        ends = np.concatenate([[0], np.cumsum(chunk.lengths)])
        order = page_order(book, chunk.codes, chunk.numbers, ends, parts[0].places.row_bytes, at)
        writer.append(chunk.vectors[order])
        place = slice(at, at + len(chunk.ids))
        codes[place], values[:, place] = chunk.codes[order], chunk.numbers[:, order]
        ids[place], sources[place] = chunk.ids[order], chunk.sources[order]
        at = place.stop
    writer.finish()
    interleave(codes, book.dimensions)
    starts = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
    return Merged(PartArrays(starts, codes, values, compact_ids(ids)), sources)


def radii_of(parts: Sequence[PartArrays], preview: Preview) -> Floats:
    """Return the root mean square distance of the vectors of each list to its centroid, removed ones included."""
    lists = len(parts[0].starts) - 1
    squared, counts = np.zeros(lists), np.zeros(lists, np.int64)
    unit = getattr(preview.book, "unit", 1.0)
    for part in parts:
        away = part.numbers[0].view(np.float16).astype(np.float64) * unit
        sums = np.concatenate([[0.0], np.cumsum(np.square(away))])
        squared += np.diff(sums[part.starts])
        counts += np.diff(part.starts)
    radii: Floats = np.sqrt(squared / np.maximum(counts, 1)).astype(np.float32)
    return radii


def alive_blocks(
    parts: Sequence[Part], dtype: np.dtype[Any], reader: Reader
) -> Iterator[tuple[Ints, npt.NDArray[Any]]]:
    """Yield positions and vectors ``[n, d]`` of all that is alive, some 8 MiB at a time."""
    for number, part in enumerate(parts):
        step = max(1, (_CHUNK_BYTES // 2) // part.places.row_bytes)
        for start in range(0, len(part), step):
            rows = np.arange(start, min(start + step, len(part)))
            rows = rows[part.is_alive(rows)]
            if len(rows):
                yield rows | number << PART_SHIFT, vectors_of(part.places.read(reader, rows), dtype)


def _chunks(
    parts: Sequence[Part], numbers: Sequence[int], lists: int, book: CodeBook, reader: Reader
) -> Iterator[_Chunk]:
    row_bytes = parts[0].places.row_bytes
    rows_before = np.sum([part.arrays.starts for part in parts], axis=0)
    low = 0
    while low < lists:
        most = rows_before[low] + _CHUNK_BYTES // row_bytes
        high = max(low + 1, int(np.searchsorted(rows_before, most, side="right")) - 1)
        taken = [_take(part, number, low, high, book, reader) for number, part in zip(numbers, parts, strict=True)]
        member, sources, vectors, codes, ids, values = map(np.concatenate, zip(*taken, strict=True))
        order = np.argsort(member, kind="stable")
        lengths = np.bincount(member, minlength=high - low)
        yield _Chunk(lengths, sources[order], vectors[order], codes[order], values[order].T, ids[order])
        low = high


def _take(part: Part, number: int, low: int, high: int, book: CodeBook, reader: Reader) -> tuple[npt.NDArray[Any], ...]:
    """Return what is alive of the lists from `low` to `high` of a part, its numbers as ``[n, 2]``."""
    arrays = part.arrays
    starts = arrays.starts[low : high + 1]
    rows = np.arange(starts[0], starts[-1])
    alive = part.is_alive(rows)
    member = np.repeat(np.arange(high - low), np.diff(starts))[alive]
    rows = rows[alive]
    vectors = part.places.read(reader, rows)
    codes = codes_of(arrays.codes, rows, book.dimensions)
    return member, rows | number << PART_SHIFT, vectors, codes, arrays.ids[rows], arrays.numbers[:, rows].T


class PartsSource(VectorSource):
    """What is alive of all parts, in their order, as a source to build from.

    Attributes
    ----------
    ids
        uint32 or int64 ``[n]``.
    rows
        int64 ``[n]``: number of each vector when the rows of all parts are counted, with those that were removed.
    positions
        int64 ``[n]``: the number of its part, and its row there, in one.
    """

    def __init__(self, parts: Sequence[Part], dtype: np.dtype[Any], dimension: int, reader: Reader) -> None:
        self._parts, self._reader = parts, reader
        self._offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
        alive = [np.flatnonzero(part.is_alive(np.arange(len(part)))) for part in parts]
        self.rows: Ints = np.concatenate([rows + start for rows, start in zip(alive, self._offsets[:-1], strict=True)])
        self.positions: Ints = np.concatenate([rows | number << PART_SHIFT for number, rows in enumerate(alive)])
        self.ids = compact_ids(
            np.concatenate([part.arrays.ids[rows].astype(np.int64) for part, rows in zip(parts, alive, strict=True)])
        )
        self.dtype, self.dimension, self.count = dtype, dimension, len(self.rows)

    def blocks(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield ``(first row, block)`` in order."""
        step = max(1, (_CHUNK_BYTES // 2) // (4 * self.dimension))
        for start in range(0, self.count, step):
            yield start, self.take(np.arange(start, min(start + step, self.count)))

    def take(self, rows: Ints) -> npt.NDArray[Any]:
        """Return the given vectors, ascending."""
        out = np.empty((len(rows), self.dimension), self.dtype)
        numbers = self.rows[rows]
        edges = np.searchsorted(numbers, self._offsets)
        for part, offset, low, high in zip(self._parts, self._offsets, edges, edges[1:], strict=False):
            if low < high:
                raw = part.places.read(self._reader, numbers[low:high] - offset)
                out[low:high] = vectors_of(raw, self.dtype)
        return out
