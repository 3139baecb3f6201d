"""Coding vectors for an existing preview and writing them as a part, block by block, so that little is held."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.preview.codes import CodeBook
from memhier.ann.zoom.preview.preview import Preview
from memhier.ann.zoom.preview.space import PreviewSpace
from memhier.ann.zoom.source import VectorSource
from memhier.ann.zoom.storage.arrays import PartArrays, compact_ids
from memhier.ann.zoom.storage.fullview import RowWriter, raw_rows
from memhier.ann.zoom.storage.pages import page_order
from memhier.store.store import Staging, Transaction

__all__ = ["code_vectors", "write_coded"]

_AXIS_BYTES = 48  # of a vector on its way to its code
_FEWEST = 64
_ROUTED = 32  # lists that the graph looks for, so that it finds the nearest

Ints: TypeAlias = npt.NDArray[np.int64]


def write_coded(
    tx: Transaction | Staging,
    name: str,
    source: VectorSource,
    ids: npt.NDArray[Any],
    preview: Preview,
    space: PreviewSpace,
    work_bytes: int,
) -> tuple[PartArrays, Ints]:
    """Write vectors and their codes as the part `name`; return its arrays, and the vector of each row, int64 ``[n]``.

    Parameters are those of :func:`code_vectors`.
    """
    arrays, order = code_vectors(source, ids, preview, space, work_bytes)
    row_bytes = source.dtype.itemsize * source.dimension
    writer = RowWriter(tx.segment(f"{name}-rows"), row_bytes)
    step = max(1, work_bytes // (4 * row_bytes))
    for start in range(0, len(order), step):
        writer.append(raw_rows(source.take(order[start : start + step])))
    writer.finish()
    arrays.write(tx, name, preview)
    return arrays, order


def code_vectors(
    source: VectorSource, ids: npt.NDArray[Any], preview: Preview, space: PreviewSpace, work_bytes: int
) -> tuple[PartArrays, Ints]:
    """Return the arrays of a part made of vectors, and the vector of each row, int64 ``[n]``.

    Parameters
    ----------
    source
        The vectors, each taken twice, in any order.
    ids
        Integers ``[n]``: of each vector.
    preview, space
        Lists and codes, and the space that they are of.
    work_bytes
        DRAM for the work, beside the result.
    """
    assert isinstance(preview.book, CodeBook)  # the paper's form is written once
    count = len(ids)
    step = max(_FEWEST, work_bytes // (_AXIS_BYTES * space.padded))
    routed, lists = min(_ROUTED, max(1, preview.lists - 1)), np.empty(count, np.int32)  # a router sorts no full set
    for start in range(0, count, step):
        turned = preview.turn(space.vectors(source.take(np.arange(start, min(start + step, count)))))
        lists[start : start + step] = preview.nearest_lists(turned, routed)
    preview.deal_out(lists, np.asarray(ids))
    starts = np.concatenate([[0], np.cumsum(np.bincount(lists, minlength=preview.lists))]).astype(np.int64)
    order = np.argsort(lists, kind="stable")
    codes, numbers = np.empty((count, preview.book.code_bytes), np.uint8), np.empty((2, count), np.uint16)
    for start in range(0, count, step):
        part, here = order[start : start + step], slice(start, start + step)
        turned = preview.turn(space.vectors(source.take(part)))
        codes[here], numbers[:, here], _ = preview.encode(turned, lists[part])
    row_bytes = source.dtype.itemsize * source.dimension
    places = page_order(preview.book, codes, numbers, starts, row_bytes, work_bytes=work_bytes)
    order, codes, numbers = order[places], codes[places], np.ascontiguousarray(numbers[:, places])
    preview.arrange(codes)
    return PartArrays(starts, codes, numbers, compact_ids(np.asarray(ids[order], np.int64))), order
