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

__all__ = ["Merged", "alive_blocks", "merge_parts", "radii_of"]

_CHUNK_BYTES = 16 << 20  # of full vectors, held while they are put in order
_LONG = 3  # times the mean length: what is longer is divided

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
    preview
        The lists there are now.
    sources
        int64 ``[n]``: the position that each row had before.
    """

    arrays: PartArrays
    preview: Preview
    sources: Ints


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The rows of a few neighbouring lists, from all parts, in list order."""

    sources: Ints
    lists: Ints
    vectors: Bytes


def merge_parts(
    parts: Sequence[Part],
    numbers: Sequence[int],
    preview: Preview,
    space: PreviewSpace,
    dtype: np.dtype[Any],
    reader: Reader,
    writer: RowWriter,
    seed: int | None,
) -> Merged:
    """Write the vectors of `parts` that are alive and return what else there is to keep of them.

    Parameters
    ----------
    parts, numbers
        Parts, and their numbers in positions.
    preview, space, dtype
        Of the index.
    writer
        Takes the vectors.
    seed
        Where not None, long lists are divided and empty ones left out; then `parts` must be all there are.

    Notes
    -----
    Holds, beside the new codes, some 16 MiB of vectors, or the longest list where that is more.
    """
    total = sum(part.alive_count for part in parts)
    codes = np.empty((total, preview.book.code_bytes), np.uint8)
    values = np.empty((3, total), np.float16)
    ids, sources = np.empty(total, np.int64), np.empty(total, np.int64)
    mean = max(1.0, total / preview.lists)
    centroids: list[npt.NDArray[np.float16]] = []
    counts: list[int] = []
    at = 0
    for low, high, chunk in _chunks(parts, numbers, preview.lists, reader):
        stop = at + len(chunk.sources)
        order = np.arange(stop - at)
        _take(parts, numbers, chunk.sources, codes[at:stop], values[:, at:stop], ids[at:stop])
        sizes = np.bincount(chunk.lists - low, minlength=high - low)
        if seed is None:
            counts += sizes.tolist()
        else:
            edges = np.concatenate([[0], np.cumsum(sizes)])
            for each in range(high - low):
                rows = np.arange(edges[each], edges[each + 1])
                if not len(rows):
                    continue
                own = preview.router.centroids[low + each][None]
                if len(rows) <= _LONG * mean:
                    centroids.append(own)
                    counts.append(len(rows))
                    continue
                turned = preview.turn(space.vectors(vectors_of(chunk.vectors[rows], dtype)))
                made, member = split_list(turned, round(len(rows) / mean), seed + low + each)
                place = rows[np.argsort(member, kind="stable")]
                order[rows] = place
                new = made.astype(np.float16)
                again = np.sort(member)
                fresh = preview.book.encode(turned[np.argsort(member, kind="stable")] - new[again].astype(np.float32))
                codes[at + rows], values[:, at + rows] = fresh
                ids[at + rows], chunk.sources[rows] = ids[at + place], chunk.sources[place]
                centroids.append(new)
                counts += np.bincount(member, minlength=len(new)).tolist()
        sources[at:stop] = chunk.sources
        writer.append(chunk.vectors[order])
        at = stop
    writer.finish()
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    arrays = PartArrays(starts, codes, values, compact_ids(ids))
    if seed is None:
        return Merged(arrays, preview, sources)
    kept = np.concatenate(centroids) if centroids else preview.router.centroids[:1]
    if not centroids:
        arrays = PartArrays(np.zeros(2, np.int64), codes, values, compact_ids(ids))
    divided = Preview(Router.build(kept.astype(np.float32)), preview.book, radii_of([arrays], preview))
    return Merged(arrays, divided, sources)


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


def _chunks(
    parts: Sequence[Part], numbers: Sequence[int], lists: int, reader: Reader
) -> Iterator[tuple[int, int, _Chunk]]:
    row_bytes = parts[0].places.row_bytes
    rows_before = np.sum([part.arrays.starts for part in parts], axis=0)
    low = 0
    while low < lists:
        most = rows_before[low] + _CHUNK_BYTES // row_bytes
        high = max(low + 1, int(np.searchsorted(rows_before, most, side="right")) - 1)
        high = min(high, lists)
        sources, member, vectors = [], [], []
        for number, part in zip(numbers, parts, strict=True):
            starts = part.arrays.starts[low : high + 1]
            rows = np.arange(starts[0], starts[-1])
            of = np.repeat(np.arange(low, high), np.diff(starts))
            alive = part.is_alive(rows)
            rows, of = rows[alive], of[alive]
            sources.append(rows | number << PART_SHIFT)
            member.append(of)
            if len(rows):
                vectors.append(part.places.read(reader, rows))
        of = np.concatenate(member)
        order = np.argsort(of, kind="stable")
        rows_read = np.concatenate(vectors) if vectors else np.empty((0, row_bytes), np.uint8)
        yield low, high, _Chunk(np.concatenate(sources)[order], of[order], rows_read[order])
        low = high


def _take(
    parts: Sequence[Part],
    numbers: Sequence[int],
    sources: Ints,
    codes: Bytes,
    values: npt.NDArray[np.float16],
    ids: Ints,
) -> None:
    which, rows = sources >> PART_SHIFT, sources & ((1 << PART_SHIFT) - 1)
    for number, part in zip(numbers, parts, strict=True):
        here = np.flatnonzero(which == number)
        codes[here] = part.arrays.codes[rows[here]]
        values[:, here] = part.arrays.numbers[:, rows[here]]
        ids[here] = part.arrays.ids[rows[here]]
