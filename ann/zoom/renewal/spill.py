"""Vectors become the arrays of a part for lists and codes that there are: block by block, so that little is held."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.preview.codes import CodeBook
from memhier.ann.zoom.preview.preview import Preview
from memhier.ann.zoom.preview.space import PreviewSpace
from memhier.ann.zoom.search.search import Snapshot
from memhier.ann.zoom.storage.pages import page_order
from memhier.ann.zoom.storage.part import PartArrays, compact_ids

__all__ = ["coded", "spilled"]

_AXIS_BYTES = 48  # of a vector on its way to its code
_FEWEST = 64
_ROUTED = 32  # lists that are looked for where a graph finds them, so that the nearest is among them

Ints: TypeAlias = npt.NDArray[np.int64]


def spilled(state: Snapshot, work_bytes: int) -> tuple[PartArrays, Ints]:
    """Return a part's arrays of the fresh vectors of a snapshot, and which of these each row is, int64 ``[n]``.

    `work_bytes` is what may be held beside both.
    """
    vectors = state.fresh.vectors
    return coded(lambda rows: vectors[rows], state.fresh.ids, state.preview, state.space, state.row_bytes, work_bytes)


def coded(
    take: Callable[[Ints], npt.NDArray[Any]],
    ids: npt.NDArray[Any],
    preview: Preview,
    space: PreviewSpace,
    row_bytes: int,
    work_bytes: int,
) -> tuple[PartArrays, Ints]:
    """Return a part's arrays of vectors, and which of the vectors each row is, int64 ``[n]``.

    Parameters
    ----------
    take
        Returns the vectors ``[m, d]`` of int64 ``[m]`` rows, in any order; each is asked for twice.
    ids
        Integers ``[n]``: of each vector.
    preview, space
        Lists and codes, and the space that they are of.
    row_bytes
        Of a vector on SSD.
    work_bytes
        What may be held beside what is returned.
    """
    assert isinstance(preview.book, CodeBook)  # the paper's form is written once
    count = len(ids)
    step = max(_FEWEST, work_bytes // (_AXIS_BYTES * space.padded))
    routed, lists = min(_ROUTED, max(1, preview.lists - 1)), np.empty(count, np.int32)  # all of them come in no order
    for start in range(0, count, step):
        turned = preview.turn(space.vectors(take(np.arange(start, min(start + step, count)))))
        lists[start : start + step] = preview.nearest_lists(turned, routed)
    starts = np.concatenate([[0], np.cumsum(np.bincount(lists, minlength=preview.lists))]).astype(np.int64)
    order = np.argsort(lists, kind="stable")
    codes, numbers = np.empty((count, preview.book.code_bytes), np.uint8), np.empty((2, count), np.uint16)
    for start in range(0, count, step):
        part = order[start : start + step]
        turned = preview.turn(space.vectors(take(part)))
        codes[start : start + step], numbers[:, start : start + step], _ = preview.encode(turned, lists[part])
    places = page_order(preview.book, codes, numbers, starts, row_bytes, work_bytes=work_bytes)
    order, codes, numbers = order[places], codes[places], np.ascontiguousarray(numbers[:, places])
    preview.arrange(codes)
    return PartArrays(starts, codes, numbers, compact_ids(np.asarray(ids[order], np.int64))), order
