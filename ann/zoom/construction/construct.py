"""The construction of lists, codes and calibration from vectors."""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.calibration.calibrate import Calibration
from memhier.ann.zoom.calibration.mixtures import calibrate_both, play_queries
from memhier.ann.zoom.calibration.truth import QUERIES
from memhier.ann.zoom.pauses import pause
from memhier.ann.zoom.preview.clusters import deal_out, training_rows
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
_SAMPLE_BLOCK = 8192
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
    positions
        int64 ``[n]``: the place of each vector of the source in list order.
    """

    preview: Preview
    arrays: PartArrays
    calibration: Calibration
    rows: SortedRows
    positions: Ints

    @property
    def order(self) -> Ints:
        """Number in the source of each row in list order, int64 ``[n]``."""
        order = np.empty_like(self.positions)
        order[self.positions] = np.arange(len(order))
        return order


def construct(
    source: VectorSource,
    ids: npt.NDArray[Any],
    space: PreviewSpace,
    layout: IndexLayout,
    seed: int,
    scratch: Path,
    bar: Any,
) -> Constructed:
    """Train, assign, encode and calibrate; `ids` are those of the vectors of `source`.

    Reads the source three times, and stages its vectors in files under `scratch`. `bar` shows the vectors done.
    """
    held_out = _held_out(source.count, seed)
    preview = _train(source, space, layout, held_out, seed)
    bar.set_description("assign")
    lists = np.empty(source.count, np.int32)
    # The held-out vectors act as queries, so they go through the queries' map.
    truth = play_queries(space, source.take(held_out).astype(np.float32), held_out, source.count, seed)
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
    positions, starts = _list_order(lists, layout.lists)
    bar.set_description("encode")
    rows = SortedRows(source.count, source.dtype.itemsize * source.dimension, scratch)
    preview, codes, numbers = _encode(source, space, preview, lists, positions, rows, bar)
    if isinstance(preview.book, CodeBook):
        _put_in_pages(preview.book, codes, numbers, starts, positions, rows)
    preview.arrange(codes)
    truth.finish(positions)
    bar.set_description("calibrate")
    calibration = calibrate_both(preview, [CodedPart(starts, codes, numbers)], truth, rows.row_bytes)
    ordered = np.empty_like(ids)
    ordered[positions] = ids
    arrays = PartArrays(starts, codes, numbers, ordered)
    return Constructed(preview, arrays, calibration, rows, positions)


def held_out_rows(count: int) -> int:
    """Return how many of so many vectors play queries."""
    return min(QUERIES, max(count // _HELD_OUT_MOST, min(count, 64)))


def _held_out(count: int, seed: int) -> Ints:
    """Return the vectors that play queries, ascending; few of a small index, which trains on the rest."""
    chosen = np.random.default_rng([seed, 1]).permutation(count)[: held_out_rows(count)]
    return np.sort(chosen).astype(np.int64)


def _train(source: VectorSource, space: PreviewSpace, layout: IndexLayout, held_out: Ints, seed: int) -> Preview:
    # Lists made with a query in them would find its neighbours too well.
    random = np.random.default_rng(seed)
    wanted = training_rows(layout.lists, layout.padded, BOOK_ROWS)
    spare = source.count - len(held_out)
    if spare < max(layout.lists, 2 * len(held_out)):
        rows = np.arange(source.count)  # too few to leave any out
    else:
        drawn = random.permutation(source.count)[: wanted + len(held_out)]
        rows = drawn[~np.isin(drawn, held_out)]
    rows = np.sort(rows[:wanted])
    wanted = len(rows)
    sample = np.empty((wanted, layout.padded), np.float32)
    for start in range(0, wanted, _SAMPLE_BLOCK):  # its own copies are in double precision
        part = slice(start, start + _SAMPLE_BLOCK)
        sample[part] = space.vectors(source.take(rows[part]))
    inner = space.metric == "ip"
    made = train_preview(
        sample, layout.lists, layout.coding, layout.code_bytes, seed, rotate=layout.rotate, inner=inner
    )
    return replace(made, on_ssd=layout.on_ssd)


def _list_order(lists: npt.NDArray[np.int32], count: int) -> tuple[Ints, Ints]:
    """Return the position of each vector in list order, and where the lists start."""
    positions = np.empty(len(lists), np.int64)
    positions[np.argsort(lists, kind="stable")] = np.arange(len(lists))
    starts = np.concatenate([[0], np.cumsum(np.bincount(lists, minlength=count))]).astype(np.int64)
    return positions, starts


def _encode(
    source: VectorSource,
    space: PreviewSpace,
    preview: Preview,
    lists: npt.NDArray[np.int32],
    positions: Ints,
    rows: SortedRows,
    bar: Any,
) -> tuple[Preview, npt.NDArray[np.uint8], npt.NDArray[np.uint16]]:
    """Return the preview with its radii, and codes and numbers in list order; stage the vectors for writing."""
    codes = np.empty((source.count, preview.book.code_bytes), np.uint8)
    numbers = np.empty((2 if preview.coding == "rabitq" else 0, source.count), np.uint16)
    squared = np.zeros(preview.lists)
    for start, block in source.blocks():
        pause()
        part = slice(start, start + len(block))
        place = positions[part]
        codes[place], numbers[:, place], radii = preview.encode(preview.turn(space.vectors(block)), lists[part])
        squared += np.bincount(lists[part], radii, preview.lists)
        rows.add(place, raw_rows(block))
        bar.update(len(block))
    return preview.with_radii(squared, np.bincount(lists, minlength=preview.lists)), codes, numbers


def _put_in_pages(
    book: CodeBook,
    codes: npt.NDArray[np.uint8],
    numbers: npt.NDArray[np.uint16],
    starts: Ints,
    positions: Ints,
    rows: SortedRows,
) -> None:
    """Change the order within lists, in place, so that vectors near each other share a page."""
    borders = np.union1d(starts, rows.borders)
    order = page_order(book, codes, numbers, borders, rows.row_bytes)
    for low, high in itertools.pairwise(borders.tolist()):  # so that little is copied
        part = slice(low, high)
        codes[part], numbers[:, part] = codes[order[part]], numbers[:, order[part]]
    places = np.empty(len(order), np.uint32 if len(order) < 2**32 else np.int64)
    places[order] = np.arange(len(order))
    positions[:] = places[positions]
    rows.move(places)
