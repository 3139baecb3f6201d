"""The construction of lists, codes and calibration from vectors."""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.calibration.calibration import Calibration
from memhier.ann.zoom.calibration.mixtures import calibrate_newest, play_queries
from memhier.ann.zoom.calibration.truth import QUERIES
from memhier.ann.zoom.construction.mapped_array import mapped_array
from memhier.ann.zoom.pauses import pause
from memhier.ann.zoom.preview.clusters import deal_out, pieces_of, sizes_of, training_rows
from memhier.ann.zoom.preview.codes import CodeBook
from memhier.ann.zoom.preview.preview import Preview, train_preview
from memhier.ann.zoom.preview.routing.router import Router
from memhier.ann.zoom.preview.scan_arguments import CodedPart
from memhier.ann.zoom.preview.space import PreviewSpace
from memhier.ann.zoom.source import VectorSource
from memhier.ann.zoom.storage.arrays import PartArrays
from memhier.ann.zoom.storage.fullview import SortedRows, raw_rows
from memhier.ann.zoom.storage.layout import IndexLayout
from memhier.ann.zoom.storage.pages import page_order

__all__ = ["BOOK_ROWS", "Constructed", "construct", "held_out_rows"]

BOOK_ROWS = 8192  # of the sample, that a code book is learned from, at least
_SAMPLE_BYTES = 4 << 20  # of vectors on their way into the sample
_ALL_SHUFFLED = 1 << 20  # vectors: to shuffle the numbers of more takes DRAM that grows with them
_ENCODED = 2048  # vectors at a time: each takes a dozen copies
_HELD_OUT_MOST = 8  # at most one vector in as many is held out from training as a query

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Constructed:
    """The parts of an index made of the vectors of a source.

    Attributes
    ----------
    preview
        Lists and code book.
    arrays
        Codes and ids, in list order.
    calibration
        The effort for each recall.
    rows
        The full vectors, staged to be written in list order.
    order
        Integers ``[n]``: the number in the source of each row in list order.
    """

    preview: Preview
    arrays: PartArrays
    calibration: Calibration
    rows: SortedRows
    order: npt.NDArray[Any]


def construct(
    source: VectorSource, ids: npt.NDArray[Any] | None, space: PreviewSpace, layout: IndexLayout, seed: int,
    scratch: Path, bar: Any, *, newest: int = 0,
) -> Constructed:  # fmt: skip
    """Train, assign, encode and calibrate; `ids` are those of the vectors of `source`, None for their numbers.

    Reads the source three times, and stages its vectors in files under `scratch`. `bar` shows the vectors done. Arrays
    with an entry for each vector are files there, mapped into memory, so DRAM does not grow with their number. Of the
    `newest` vectors, the last ones, some play queries that are measured apart.
    """
    count, number = source.count, np.dtype(np.uint32 if source.count < 2**32 else np.int64)
    last = count - 1 - _drawn(newest, min(newest, QUERIES) // 2, np.random.default_rng([seed, 2]))
    held_out = np.union1d(_held_out(count, seed), last)
    preview = _train(source, space, layout, held_out, seed, scratch)
    bar.set_description("assign")
    lists = mapped_array(scratch, (count,), np.int32)
    # The held-out vectors act as queries, so they go through the queries' map.
    truth = play_queries(space, source.take(held_out).astype(np.float32), held_out, count, seed)
    assigner = preview.assigner()
    for start, block in source.blocks():
        pause()
        mapped = space.vectors(block)
        turned, part = preview.turn(mapped), slice(start, start + len(block))
        lists[part] = assigner.assign(turned)
        truth.add(np.arange(start, start + len(block)), mapped)
        bar.update(len(block))
    centroids = preview.router.centroids.astype(np.float32)
    if deal_out(lists, centroids).any():
        preview = replace(preview, router=Router.build(centroids))
    starts = np.concatenate([[0], np.cumsum(sizes_of(lists, layout.lists))]).astype(np.int64)
    bar.set_description("encode")
    rows = SortedRows(count, source.dtype.itemsize * source.dimension, scratch)
    staged = _Staged(
        mapped_array(scratch, (count, preview.book.code_bytes), np.uint8),
        mapped_array(scratch, (2 if preview.coding == "rabitq" else 0, count), np.uint16),
        mapped_array(scratch, (count,), number),
        rows,
    )
    preview = _encode(source, space, preview, lists, starts, staged, bar)
    if isinstance(preview.book, CodeBook):
        _put_in_pages(preview.book, starts, staged, mapped_array(scratch, (count,), number))
    preview.arrange(staged.codes)
    truth.finish(staged.positions)
    bar.set_description("calibrate")
    coded = CodedPart(starts, staged.codes, staged.numbers)
    calibration = calibrate_newest(preview, [coded], truth, rows.row_bytes, np.isin(held_out, last))
    order = mapped_array(scratch, (count,), number)
    ordered = order if ids is None else mapped_array(scratch, (count,), ids.dtype)
    for part in pieces_of(count):
        order[staged.positions[part]] = np.arange(part.start, part.stop)
        if ids is not None:
            ordered[staged.positions[part]] = ids[part]
    return Constructed(preview, PartArrays(starts, staged.codes, staged.numbers, ordered), calibration, rows, order)


@dataclass(frozen=True, slots=True)
class _Staged:
    """The vectors of a source on their way into list order: codes and numbers there, and the position of each."""

    codes: npt.NDArray[np.uint8]
    numbers: npt.NDArray[np.uint16]
    positions: npt.NDArray[Any]
    rows: SortedRows


def held_out_rows(count: int) -> int:
    """Return how many of so many vectors play queries."""
    return min(QUERIES, max(count // _HELD_OUT_MOST, min(count, 64)))


def _held_out(count: int, seed: int) -> Ints:
    """Return the vectors that play queries, ascending; few of a small index, which trains on the rest."""
    return np.sort(_drawn(count, held_out_rows(count), np.random.default_rng([seed, 1])))


def _drawn(count: int, wanted: int, random: np.random.Generator) -> Ints:
    """Return so many different numbers below `count`, in random order; of very many, one of each of as many runs."""
    if count <= _ALL_SHUFFLED:
        return random.permutation(count)[:wanted]
    edges = np.arange(wanted + 1) * count // wanted
    return random.permutation(edges[:-1] + random.integers(np.diff(edges)))


def _train(
    source: VectorSource, space: PreviewSpace, layout: IndexLayout, held_out: Ints, seed: int, scratch: Path
) -> Preview:
    # Lists made with a query in them would find its neighbours too well.
    wanted = training_rows(layout.lists, layout.padded, BOOK_ROWS)
    spare = source.count - len(held_out)
    if spare < max(layout.lists, 2 * len(held_out)):
        rows = np.arange(source.count)[:wanted]  # too few to leave any out
    else:
        rows = _drawn(source.count, min(source.count, wanted + len(held_out)), np.random.default_rng(seed))
        rows = np.sort(rows[~np.isin(rows, held_out)][:wanted])
    sample = mapped_array(scratch, (len(rows), layout.padded), np.float32)
    step = max(1, _SAMPLE_BYTES // (4 * layout.padded))
    for start in range(0, len(rows), step):  # its own copies are in double precision
        part = slice(start, start + step)
        sample[part] = space.vectors(source.take(rows[part]))
    inner = space.metric == "ip"
    made = train_preview(
        sample, layout.lists, layout.coding, layout.code_bytes, seed, rotate=layout.rotate, inner=inner
    )
    return replace(made, on_ssd=layout.on_ssd)


def _encode(
    source: VectorSource, space: PreviewSpace, preview: Preview, lists: npt.NDArray[np.int32], starts: Ints,
    staged: _Staged, bar: Any,
) -> Preview:  # fmt: skip
    """Return the preview with its radii; stage codes, numbers, positions and vectors."""
    squared, free = np.zeros(preview.lists), starts[:-1].copy()
    for start, block in source.blocks():
        pause()
        turned, end = preview.turn(space.vectors(block)), start + len(block)
        place = _next_places(lists[start:end], free)
        for low in range(0, len(block), _ENCODED):
            of_block, of_all = slice(low, low + _ENCODED), slice(start + low, min(start + low + _ENCODED, end))
            codes, numbers, radii = preview.encode(turned[of_block], lists[of_all])
            staged.codes[place[of_block]], staged.numbers[:, place[of_block]] = codes, numbers
            squared += np.bincount(lists[of_all], radii, preview.lists)
        staged.positions[start:end] = place
        staged.rows.add(place, raw_rows(block))
        bar.update(len(block))
    return preview.with_radii(squared, np.diff(starts))


def _next_places(lists: npt.NDArray[np.int32], free: Ints) -> Ints:
    """Return the next free place in the list of each vector, and move `free`, those of all lists, on."""
    order, counts = np.argsort(lists, kind="stable"), np.bincount(lists, minlength=len(free))
    place = np.empty(len(lists), np.int64)
    place[order] = np.arange(len(lists)) + (free - np.cumsum(counts) + counts)[lists[order]]
    free += counts
    return place


def _put_in_pages(book: CodeBook, starts: Ints, staged: _Staged, places: npt.NDArray[Any]) -> None:
    """Change the order within lists, in place, so that vectors near each other share a page.

    `places` takes the new place of each position.
    """
    codes, numbers, rows = staged.codes, staged.numbers, staged.rows
    for low, high in itertools.pairwise([*rows.borders.tolist(), len(codes)]):  # so that little is copied
        part = slice(low, high)
        borders = np.union1d([0, high - low], starts[(starts > low) & (starts < high)] - low)
        order = page_order(book, codes[part], numbers[:, part], borders, rows.row_bytes, low)
        codes[part], numbers[:, part] = codes[low + order], numbers[:, low + order]
        places[low + order] = np.arange(low, high)
    for part in pieces_of(len(codes)):
        staged.positions[part] = places[staged.positions[part]]
    rows.move(places)
