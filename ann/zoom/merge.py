"""Rewriting parts into one: what was removed goes, long lists are divided, and all is in list order again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.clusters import split_list
from memhier.ann.zoom.code_scan import PART_SHIFT
from memhier.ann.zoom.fullview import RowWriter, vectors_of
from memhier.ann.zoom.part import Part, PartArrays, compact_ids
from memhier.ann.zoom.preview import Preview
from memhier.ann.zoom.router import Router
from memhier.ann.zoom.space import PreviewSpace
from memhier.reader import Reader

__all__ = ["Division", "Merged", "alive_blocks", "merge_parts", "plan_division", "radii_of"]

_CHUNK_BYTES = 16 << 20  # of full vectors, held while they are put in order
_LONG = 3  # times the length aimed at: what is longer is divided
_LENGTHEN = 1.25

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Division:
    """Which lists become several, or none.

    Attributes
    ----------
    pieces
        int64 ``[lists]``: how many lists each becomes; 0 for one without vectors.
    seed
        Fixes how a list is divided.
    """

    pieces: Ints
    seed: int


@dataclass(frozen=True, slots=True)
class Merged:
    """One part made of several.

    Attributes
    ----------
    arrays
        Its codes, ids and lists.
    preview
        The lists there are now.
    sources
        int64 ``[n]``: the position that each row had before.
    """

    arrays: PartArrays
    preview: Preview
    sources: Ints


@dataclass(slots=True)
class _Chunk:
    """The rows of a few neighbouring lists, from all parts, in list order, with what is kept of them in DRAM."""

    low: int
    edges: Ints  # of the lists, in rows of the chunk
    sources: Ints
    vectors: Bytes
    codes: Bytes
    numbers: npt.NDArray[np.float16]
    ids: Ints

    def reorder(self, rows: slice, order: Ints) -> None:
        """Put rows in another order, but for their codes, which are made anew."""
        self.sources[rows] = self.sources[rows][order]
        self.vectors[rows] = self.vectors[rows][order]
        self.ids[rows] = self.ids[rows][order]


def plan_division(parts: Sequence[Part], length: float, most: int, seed: int) -> Division:
    """Return which lists to divide so that they come to some `length` vectors, and to at most `most` lists.

    Lists are never made fewer than those with vectors, even where these are more than `most`.
    """
    sizes = np.sum([_alive_of_lists(part) for part in parts], axis=0)
    while True:
        pieces = np.where(sizes > _LONG * length, np.rint(sizes / length), sizes > 0).astype(np.int64)
        if pieces.sum() <= max(most, int((sizes > 0).sum())):
            return Division(pieces, seed)
        length *= _LENGTHEN


def merge_parts(
    parts: Sequence[Part],
    numbers: Sequence[int],
    preview: Preview,
    space: PreviewSpace,
    dtype: np.dtype[Any],
    reader: Reader,
    writer: RowWriter,
    division: Division | None,
) -> Merged:
    """Write the vectors of `parts` that are alive and return what else there is to keep of them.

    Parameters
    ----------
    parts, numbers
        Parts, and their numbers in positions; at least one vector is alive.
    preview, space, dtype
        Of the index.
    writer
        Takes the vectors.
    division
        How lists change; then `parts` must be all there are. None leaves them as they are.

    Notes
    -----
    Holds, beside the new codes, some 16 MiB of vectors, or the longest list where that is more.
    """
    total = sum(part.alive_count for part in parts)
    codes = np.empty((total, preview.book.code_bytes), np.uint8)
    values = np.empty((3, total), np.float16)
    ids, sources = np.empty(total, np.int64), np.empty(total, np.int64)
    centroids: list[npt.NDArray[np.float16]] = []
    counts: list[Ints] = []
    at = 0
    for chunk in _chunks(parts, numbers, preview, reader):
        sizes = np.diff(chunk.edges)
        if division is not None:
            made, sizes = _divide(chunk, division, preview, space, dtype)
            centroids.append(made)
        counts.append(sizes)
        writer.append(chunk.vectors)
        place = slice(at, at + len(chunk.ids))
        codes[place], values[:, place] = chunk.codes, chunk.numbers
        ids[place], sources[place] = chunk.ids, chunk.sources
        at = place.stop
    writer.finish()
    starts = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)
    arrays = PartArrays(starts, codes, values, compact_ids(ids))
    if division is None:
        return Merged(arrays, preview, sources)
    router = Router.build(np.concatenate(centroids).astype(np.float32))
    return Merged(arrays, Preview(router, preview.book, radii_of([arrays], preview)), sources)


def radii_of(parts: Sequence[PartArrays], preview: Preview) -> Floats:
    """Return the root mean square distance of the vectors of each list to its centroid, removed ones included."""
    lists = len(parts[0].starts) - 1
    squared, counts = np.zeros(lists), np.zeros(lists, np.int64)
    unit = getattr(preview.book, "unit", 1.0)
    for part in parts:
        sums = np.concatenate([[0.0], np.cumsum(np.square(part.numbers[0].astype(np.float64) * unit))])
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


def _divide(
    chunk: _Chunk, division: Division, preview: Preview, space: PreviewSpace, dtype: np.dtype[Any]
) -> tuple[npt.NDArray[np.float16], Ints]:
    """Divide the long lists of a chunk in place, and return all its centroids with the lengths of their lists."""
    centroids, counts = [preview.router.centroids[:0]], [np.empty(0, np.int64)]
    for each in range(len(chunk.edges) - 1):
        number, rows = chunk.low + each, slice(int(chunk.edges[each]), int(chunk.edges[each + 1]))
        if division.pieces[number] == 1:
            centroids.append(preview.router.centroids[number][None])
            counts.append(np.array([rows.stop - rows.start]))
        elif division.pieces[number] > 1:
            turned = preview.turn(space.vectors(vectors_of(chunk.vectors[rows], dtype)))
            made, member = split_list(turned, int(division.pieces[number]), division.seed + number)
            order = np.argsort(member, kind="stable")
            chunk.reorder(rows, order)
            halves = made.astype(np.float16)
            # To the fp16 centroids, which are those that a search will see.
            residuals = turned[order] - halves[member[order]].astype(np.float32)
            chunk.codes[rows], chunk.numbers[:, rows] = preview.book.encode(residuals)
            centroids.append(halves)
            counts.append(np.bincount(member, minlength=len(halves)))
    return np.concatenate(centroids), np.concatenate(counts)


def _chunks(parts: Sequence[Part], numbers: Sequence[int], preview: Preview, reader: Reader) -> Iterator[_Chunk]:
    row_bytes = parts[0].places.row_bytes
    rows_before = np.sum([part.arrays.starts for part in parts], axis=0)
    low = 0
    while low < preview.lists:
        most = rows_before[low] + _CHUNK_BYTES // row_bytes
        high = max(low + 1, int(np.searchsorted(rows_before, most, side="right")) - 1)
        taken = [_take(part, number, low, high, reader) for number, part in zip(numbers, parts, strict=True)]
        member, sources, vectors, codes, ids, values = map(np.concatenate, zip(*taken, strict=True))
        order = np.argsort(member, kind="stable")
        edges = np.concatenate([[0], np.cumsum(np.bincount(member, minlength=high - low))])
        yield _Chunk(low, edges, sources[order], vectors[order], codes[order], values[order].T, ids[order])
        low = high


def _take(part: Part, number: int, low: int, high: int, reader: Reader) -> tuple[npt.NDArray[Any], ...]:
    """Return what is alive of the lists from `low` to `high` of a part, its numbers as ``[n, 3]``."""
    arrays = part.arrays
    starts = arrays.starts[low : high + 1]
    rows = np.arange(starts[0], starts[-1])
    alive = part.is_alive(rows)
    member = np.repeat(np.arange(high - low), np.diff(starts))[alive]
    rows = rows[alive]
    vectors = part.places.read(reader, rows)
    return member, rows | number << PART_SHIFT, vectors, arrays.codes[rows], arrays.ids[rows], arrays.numbers[:, rows].T


def _alive_of_lists(part: Part) -> Ints:
    if part.alive is None:
        return np.diff(part.arrays.starts)
    sums = np.concatenate([[0], np.cumsum(part.is_alive(np.arange(len(part))))])
    return np.diff(sums[part.arrays.starts])
