"""Vectors that were added become the arrays of a part: block by block, so that little is held beside them."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.codes import CodeBook
from memhier.ann.zoom.pages import page_order
from memhier.ann.zoom.part import PartArrays, compact_ids
from memhier.ann.zoom.search import Snapshot

__all__ = ["spilled"]

_AXIS_BYTES = 48  # of a vector on its way to its code
_FEWEST = 64
_ROUTED = 32  # lists that are looked for where a graph finds them, so that the nearest is among them

Ints: TypeAlias = npt.NDArray[np.int64]


def spilled(state: Snapshot, work_bytes: int) -> tuple[PartArrays, Ints]:
    """Return a part's arrays of the fresh vectors of a snapshot, and which of these each row is, int64 ``[n]``.

    `work_bytes` is what may be held beside both.
    """
    fresh, preview, space = state.fresh, state.preview, state.space
    assert isinstance(preview.book, CodeBook)  # the paper's form is written once
    count = len(fresh)
    step = max(_FEWEST, work_bytes // (_AXIS_BYTES * space.padded))
    routed, lists = min(_ROUTED, max(1, preview.lists - 1)), np.empty(count, np.int32)  # all of them come in no order
    for start in range(0, count, step):
        turned = preview.turn(space.vectors(fresh.vectors[start : start + step]))
        lists[start : start + step] = preview.router.route(turned, routed)[:, 0]
    starts = np.concatenate([[0], np.cumsum(np.bincount(lists, minlength=preview.lists))]).astype(np.int64)
    order = np.argsort(lists, kind="stable")
    codes, numbers = np.empty((count, preview.book.code_bytes), np.uint8), np.empty((2, count), np.uint16)
    for start in range(0, count, step):
        part = order[start : start + step]
        turned = preview.turn(space.vectors(fresh.vectors[part]))
        coded, numbers[:, start : start + step], _ = preview.encode(turned, lists[part])
        codes[start : start + step] = coded
    places = page_order(preview.book, codes, numbers, starts, state.row_bytes, work_bytes=work_bytes)
    order, codes, numbers = order[places], codes[places], np.ascontiguousarray(numbers[:, places])
    preview.arrange(codes)
    return PartArrays(starts, codes, numbers, compact_ids(fresh.ids[order])), order
