"""Rows that lie on pages which are read for other rows, and which announced batches need."""

import numpy as np
from numpy.typing import NDArray

from memhier import backend
from memhier.cache.slab_memory import whole_rows
from memhier.cache.slots import SlotMap
from memhier.log.row_log import RowLog
from memhier.policies import Belady
from memhier.rows.rows import rows_per_page
from memhier.store.segments import PAGE_BYTES

__all__ = ["Ahead", "PageMates", "may_share_pages"]

Ints = NDArray[np.int64]
Ahead = list[tuple[Ints, Ints]]
"""Keys that batches await, the next batch first, and the pages of their rows."""

_NONE = np.empty(0, np.int64)
_BATCHES = 32  # rows are kept for so many batches ahead; 48 spare no more reads


class PageMates:
    """Rows of announced batches that were read with the pages of other rows, to spare the next read of these pages.

    A row that is kept counts as long as the log has it at the place it was read from: the bytes there never change.

    `look_ahead` belongs to the thread of a call; all else to the thread that has the turn to read.

    Parameters
    ----------
    log
        The rows on SSD.
    rows
        uint8 [n, row_bytes]: room for rows.
    """

    def __init__(self, log: RowLog, rows: NDArray[np.uint8]) -> None:
        self._log = log.log
        self._rows = whole_rows(rows)
        self._map = SlotMap(len(rows))
        self._places: Ints = np.empty(len(rows), np.int64)
        self._awaited = np.empty((2, len(rows)), np.int64)  # of one read: keys ahead, and their pages
        self._given_back = 0
        self._ahead: dict[int, tuple[Ints, Ints]] = {}  # by the number of the batch
        self._is_stale = False  # whether the batches are others than those that rows are kept for

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes, beside the room for rows."""
        ahead = sum(keys.nbytes + pages.nbytes for keys, pages in tuple(self._ahead.values()))
        return self._map.memory_bytes + self._places.nbytes + self._awaited.nbytes + ahead

    def look_ahead(self, policy: Belady) -> Ahead:
        """Return the keys that the next batches await, and the pages of their rows."""
        known, self._ahead, total = self._ahead, {}, 0
        for number in policy.announced(_BATCHES):
            batch = known.get(number)
            if batch is None:
                keys = policy.awaited(number)
                batch = keys, _pages_of(self._log.places(keys))
            total += len(batch[0])
            if total > len(self._rows):
                break
            self._ahead[number] = batch
        self._is_stale = self._is_stale or not known.keys() & self._ahead.keys()
        return [*self._ahead.values()]

    def take(self, keys: Ints, out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Copy the rows of keys that are kept to the first rows of `out`, and forget them; return which were kept."""
        if not len(self._map):
            return np.zeros(len(keys), np.bool_)
        slots = self._map.erase(keys)
        kept: NDArray[np.bool_] = slots >= 0
        if kept.any():
            there = np.flatnonzero(kept)
            kept[there] = self._places[slots[there]] == self._log.places(keys[there])
            if self._log.table.given_back != self._given_back:
                self._forget_all()
                kept[:] = False
            slots = slots[np.flatnonzero(kept)]
            np.take(self._rows, slots, out=whole_rows(out[: len(slots)]), mode="clip")
        return kept

    def beside(self, keys: Ints, ahead: Ahead, most: int) -> tuple[Ints, Ints]:
        """Return those keys ahead whose rows lie on the pages of the rows of `keys`, at most so many, and their places.

        Rows that are kept are left out, and so are those for which there is no room.
        """
        if self._is_stale:
            self._forget_all()
        most = min(most, self._map.free)
        if not most:
            return _NONE, _NONE
        pages = _pages_of(self._log.places(keys))
        total = sum(len(batch) for batch, _ in ahead)
        awaited, of_rows = self._awaited[:, :total]
        np.concatenate([batch for batch, _ in ahead], out=awaited)
        np.concatenate([of_batch for _, of_batch in ahead], out=of_rows)
        near = awaited[np.flatnonzero(_are_among(of_rows, pages))]
        near = near[np.flatnonzero(self._map.find(near) < 0)[:most]]
        if self._log.table.given_back != self._given_back:
            self._forget_all()
        places = self._log.places(near)
        # A row may have moved since it was looked up.
        still = np.flatnonzero(_are_among(_pages_of(places), pages))
        return near[still], places[still]

    def keep(self, keys: Ints, places: Ints, rows: NDArray[np.void]) -> None:
        """Keep rows that were read since `beside` named their keys and places."""
        slots = self._map.insert(keys)
        np.put(self._rows, slots, rows, mode="clip")
        self._places[slots] = places

    def forget(self, keys: Ints) -> None:
        """Forget the rows of keys."""
        self._map.erase(keys)

    def _forget_all(self) -> None:
        self._map.erase(self._map.items()[0])
        self._is_stale, self._given_back = False, self._log.table.given_back


def may_share_pages(row_bytes: int) -> bool:
    """Whether several rows lie on a page, each of them whole."""
    return 2 * row_bytes <= PAGE_BYTES and (PAGE_BYTES % row_bytes == 0 or rows_per_page(row_bytes) is not None)


def _pages_of(places: Ints) -> Ints:
    return places // PAGE_BYTES


def _are_among(pages: Ints, others: Ints) -> NDArray[np.bool_]:
    """Return which pages are among others; -1, the page of no row, is not."""
    if backend.core is None:
        return np.isin(pages, others) & (pages >= 0)
    found = np.empty(len(pages), np.bool_)
    backend.core.are_among(pages=pages, others=others, found=found)
    return found
