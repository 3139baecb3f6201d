"""Checks of vectors to add: the DRAM of the budget, and the range of the preview's numbers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.bitmaps import bitmap_bytes
from memhier.ann.zoom.ids.stored_texts import PAGE_DRAM, text_pages
from memhier.ann.zoom.payload.stored import records_bytes
from memhier.ann.zoom.preview.space import PreviewSpace
from memhier.ann.zoom.storage.arrays import compact_dtype
from memhier.ann.zoom.storage.fullview import stored_bytes
from memhier.ann.zoom.storage.ids import Ids
from memhier.ann.zoom.storage.layout import PART_BYTES
from memhier.ann.zoom.storage.snapshot import IndexSnapshot
from memhier.budget import format_bytes
from memhier.errors import BudgetError
from memhier.io.page_file import PAGE_BYTES

__all__ = ["AddedBytes", "check_range", "check_room", "check_values", "check_values_room"]

_NUMBERS_BYTES = 4  # of a code: radius, factor and error
_BLOCK = 4096
_ROUNDING = 1 + 1e-6


@dataclass(frozen=True, slots=True)
class AddedBytes:
    """The bytes of vectors to add.

    Attributes
    ----------
    each
        Of one vector while it waits.
    values, records
        Of all: of the values of attributes beyond that, and of documents.
    work
        Of documents on their way.
    items
        Of the items of lists on SSD.
    """

    each: int
    values: int
    records: int
    work: int
    items: int


def check_values(beyond: npt.NDArray[np.int64], most: int) -> None:
    """Refuse attributes of one row that an index with room for `most` bytes could not hold while they wait."""
    row = int(beyond.argmax()) if len(beyond) else 0
    if len(beyond) and beyond[row] > most:
        raise BudgetError(
            f"the attributes of row {row} take {format_bytes(int(beyond[row]))}: an index holds up to "
            f"{format_bytes(most)} of one row in DRAM until they are written, a thirty-second of dram= and at most "
            f"8 MiB; raise dram= at build"
        )


def check_values_room(held: int, waiting: int, dram: int) -> int:
    """Return the DRAM with values of attributes that wait, in bytes; refuse those that leave no room in the budget.

    Parameters
    ----------
    held
        The most DRAM that the index holds without them, in bytes.
    waiting
        Their bytes.
    dram
        The budget.
    """
    needed = held + 2 * waiting  # they are copied when others join them
    if needed > dram:
        raise BudgetError(
            f"the new values of attributes need {format_bytes(needed)} ({needed} bytes) of DRAM in all, "
            f"dram={format_bytes(dram)} was given at build. Call compact() and then again, update fewer vectors at a "
            f"time with a commit() after each, or build the index again with more"
        )
    return needed


def check_room(
    state: IndexSnapshot, held: int, ids: Ids, waiting: int, filters: int, dram: int, added: AddedBytes
) -> int:
    """Return the DRAM that vectors need, in bytes; refuse those that leave no room in the budget once they are written.

    Parameters
    ----------
    state
        The index without them.
    held
        The most DRAM that it holds, in bytes.
    ids
        Of the vectors.
    waiting
        The most bytes of vectors that wait in DRAM.
    filters
        Searches with a filter at a time.
    dram
        The budget.
    added
        Bytes of the vectors' fields.

    Raises
    ------
    BudgetError
        When it is exceeded; the message names a budget that is enough.
    """
    more, texts = len(ids.numbers), ids.texts
    count = more + len(state.fresh.ids)
    id_bytes = compact_dtype(ids.numbers, state.fresh.ids).itemsize
    on_disk = state.preview.book.code_bytes + _NUMBERS_BYTES + id_bytes
    each = 0 if state.preview.on_ssd else on_disk
    per_part = 8 * (state.preview.lists + 1) + PART_BYTES
    # Waiting vectors are copied when others join them. A removal makes a second bitmap.
    needed = held - state.fresh.memory_bytes + 2 * waiting + per_part + count * each
    needed += (2 + filters) * bitmap_bytes(count)
    needed += 4 * ((stored_bytes(count, state.row_bytes) + count * on_disk) // PAGE_BYTES + 2)
    needed += records_bytes(count, added.records + state.fresh.record_bytes)
    needed += added.work
    # On SSD the items of lists that wait take no more than they do in DRAM.
    needed += 4 * ((added.items + state.fresh.value_bytes) // PAGE_BYTES + 1)
    if texts is not None and state.fresh.texts is not None:
        both = (texts, state.fresh.texts)
        letters = sum(len(each.letters) for each in both)
        needed += PAGE_DRAM * text_pages(count, letters, max(each.longest for each in both))
    if needed > dram:
        total = state.count + more
        raise BudgetError(
            f"{more:,} more vectors need {format_bytes(needed)} ({needed} bytes) of DRAM in all, "
            f"dram={format_bytes(dram)} was given at build. Build it again with grow_to={total}, which makes shorter "
            f"codes where dram= is not raised to as much; commit() and compact() free the DRAM of removed vectors"
        )
    return needed


def check_range(space: PreviewSpace, vectors: npt.NDArray[Any], *, fitted: bool) -> None:
    """Refuse vectors that the preview cannot hold; with `fitted`, it was trained on those of the build.

    Raises
    ------
    ValueError
        For inner products, when a norm is larger than all at build; for others, when distances overflow.
    """
    most = float(np.finfo(np.float32).max) / (4 * space.dimension)
    for start in range(0, len(vectors), _BLOCK):
        values = vectors[start : start + _BLOCK].astype(np.float64)
        squared = np.einsum("ij,ij->i", values, values)
        row = int(squared.argmax())
        if fitted and space.metric == "ip" and squared[row] > (space.reach * _ROUNDING) ** 2:
            raise ValueError(
                f"vectors row {start + row} has a norm of {squared[row] ** 0.5:.6g}, the largest at build was "
                f"{space.reach:.6g}: with metric='ip' the index must be built again, with this vector"
            )
        largest = float(np.abs(values).max())
        if largest**2 > most:
            raise ValueError(
                f"vectors hold values up to {largest:.3g}: their squared distances overflow float32; scale them down"
            )
