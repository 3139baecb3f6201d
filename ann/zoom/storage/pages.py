"""The order of rows within their lists: vectors near each other share a page.

A search reads a page for one row and ranks all its rows, so it reads fewer pages where the neighbours of a query lie on
fewer. The rows of a list are halved again and again, across the direction in which they differ most, at the border of a
page. Their codes tell that direction as well as the vectors themselves: neighbours lie on 7.40 pages instead of 7.38,
and on 7.83 without an order (30 bytes for 128 dimensions).
"""

import itertools
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.pauses import pause
from memhier.ann.zoom.preview.codes import CodeBook
from memhier.io.page_file import PAGE_BYTES
from memhier.rows.ranking import page_rows_of

__all__ = ["page_order"]

_FEWEST = 8  # rows that are worth halving
_ROUNDS = 4
_COPIES = 8  # of decoded vectors, at most
_BLOCK_BYTES = 16 << 20  # of vectors decoded at a time: a longer list is put in order piece by piece

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


def page_order(
    book: CodeBook,
    codes: npt.NDArray[np.uint8],
    numbers: npt.NDArray[np.uint16],
    starts: Ints,
    row_bytes: int,
    first: int = 0,
    work_bytes: int | None = None,
) -> Ints:
    """Return the row for each place, int64 ``[n]``; all rows stay in their list.

    Parameters
    ----------
    book, codes, numbers
        Of the rows: codes uint8 ``[n, code_bytes]``, one row after the other, and their numbers.
    starts
        int64 ``[lists + 1]``, ascending from 0 to n; it may hold further borders, which rows do not cross either.
    row_bytes
        Of a row on SSD.
    first
        The row of the file that row 0 becomes.
    work_bytes
        DRAM for the work; some 128 MiB by default.
    """
    on_page = page_rows_of(row_bytes) or max(1, PAGE_BYTES // row_bytes)
    block = _BLOCK_BYTES if work_bytes is None else work_bytes // _COPIES
    together = on_page * -(-_FEWEST // on_page)
    most = max(together, block // (4 * len(book.alpha)))
    borders = np.union1d(starts, np.arange(0, len(codes), most))
    order = np.arange(len(codes))
    for low, high in itertools.pairwise(borders.tolist()):
        pause()
        cuts = list(range(together - (first + low) % together, high - low, together))
        if cuts:
            values = book.decode(codes[low:high], numbers[:, low:high])
            order[low:high] = low + np.concatenate(_halved(values, np.arange(high - low), cuts))
    return order


def _halved(values: Floats, rows: Ints, cuts: list[int]) -> list[Ints]:
    """Return the rows of values ``[n, d]`` in pieces, divided at the places `cuts`."""
    if not cuts:
        return [rows]
    cut = cuts[len(cuts) // 2]
    order = rows[np.argsort(_along(values[rows]), kind="stable")]
    before, after = [each for each in cuts if each < cut], [each - cut for each in cuts if each > cut]
    return _halved(values, order[:cut], before) + _halved(values, order[cut:], after)


def _along(values: Floats) -> Floats:
    """Return the places of values ``[n, d]`` along a direction that separates two halves of them."""
    # By einsum: a product of BLAS may depend on the number of threads.
    apart = values - values.mean(axis=0)
    direction = apart[np.einsum("ij,ij->i", apart, apart).argmax()]
    for _ in range(_ROUNDS):
        direction = np.einsum("ij,i->j", apart, np.einsum("ij,j->i", apart, direction))
        direction = direction / max(float(np.sqrt(np.einsum("i,i->", direction, direction))), 1e-30)
    side = np.einsum("ij,j->i", apart, direction) > 0
    if side.any() and not side.all():
        direction = apart[side].mean(axis=0) - apart[~side].mean(axis=0)
    along: Floats = np.einsum("ij,j->i", apart, direction)
    return along
