"""The DRAM of an index of items: the bytes that it holds, the most that these become, and room for more items."""

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.multivector.coding.book import COLUMNS
from memhier.ann.multivector.coding.postings import postings_bytes
from memhier.ann.multivector.storage.catalog import ItemDescription
from memhier.ann.multivector.storage.layout import (
    CODER_TIMES,
    ItemLayout,
    lists_for,
    read_bytes,
    token_bytes_held,
    workspace_bytes,
)
from memhier.ann.multivector.storage.snapshot import ItemSnapshot
from memhier.ann.zoom.filters.bitmaps import BitmapCache, bitmap_bytes
from memhier.ann.zoom.ids.stored_texts import PAGE_DRAM, text_pages
from memhier.ann.zoom.payload.stored import records_bytes
from memhier.ann.zoom.renewal.documents import ChangedDocuments
from memhier.ann.zoom.storage.fresh import fresh_row_bytes, value_bytes
from memhier.ann.zoom.storage.ids import Ids
from memhier.ann.zoom.storage.layout import fresh_bytes, read_contexts
from memhier.budget import format_bytes
from memhier.errors import BudgetError
from memhier.io.page_file import PAGE_BYTES
from memhier.io.reader import Reader
from memhier.shield import settle
from memhier.store.store import Store

__all__ = ["ItemFootprint"]

Ints: TypeAlias = npt.NDArray[np.int64]

_PART_BYTES = 2 * PAGE_BYTES  # of a part: its description, and checksums of the last pages of its segments


class ItemFootprint:
    """The DRAM of an index.

    Parameters
    ----------
    store, reader, cache
        Of the index; `cache` holds the bitmaps of filters.
    about
        The catalog's description of the index.

    Attributes
    ----------
    audit_bytes
        DRAM of an audit.
    """

    def __init__(self, store: Store, reader: Reader, cache: BitmapCache, about: ItemDescription) -> None:
        self._store, self._reader, self._cache = store, reader, cache
        self._dram, self._searches = about.dram, about.searches
        self.audit_bytes: int = 0

    def held(self, state: ItemSnapshot) -> int:
        """Return the DRAM held, in bytes: codes, ids, lists, checksums, items that wait, buffers of all searches."""
        settle()  # closes the files of parts that no snapshot has any more
        outside = self._store.memory_bytes + self._reader.memory_bytes + self._cache.memory_bytes + self.audit_bytes
        return state.memory_bytes + outside + self._searches * self.search_bytes(state, state.longest)

    def planned(self, state: ItemSnapshot) -> int:
        """Return the most DRAM: with all searches running, with filters, and items removed from every part.

        Joins of parts, and lists and codes made anew, come on top.
        """
        idle = min(self._searches, read_contexts(self._dram)) * self._reader.planned_bytes - self._reader.memory_bytes
        filters = self._cache.limit - self._cache.memory_bytes if state.schema else 0
        rows = [len(part) for part in state.parts]
        removals = bitmap_bytes(*rows, *[len(part) for part in state.parts if part.alive is None])
        return self.held(state) + max(0, idle) + filters + removals

    def search_bytes(self, state: ItemSnapshot, longest: int, more: int = 0) -> int:
        """Return the DRAM of one search, of a filter as well, with `more` items than there are."""
        items = int(state.bases[-1]) + more
        each = workspace_bytes(state.book.lists, items, read_bytes(self._dram), state.token_bytes, longest)
        return each + bitmap_bytes(items) * (1 + bool(state.schema))

    def check_room(
        self,
        state: ItemSnapshot,
        lengths: Ints,
        ids: Ids,
        columns: Mapping[str, npt.NDArray[np.object_]],
        documents: ChangedDocuments,
    ) -> Ints:
        """Return the bytes of each item while it waits; refuse items that leave no room once they are written.

        Raises
        ------
        BudgetError
            When it is exceeded; the message names a budget that is enough.
        """
        if not len(lengths):
            return lengths
        book, waiting, fresh = state.book, state.waiting, state.fresh
        token_bytes = state.token_bytes
        row = 8 + fresh_row_bytes(0, columns, fresh.texts, ids.texts, documents=bool(documents.names))
        each = lengths * token_bytes + row + value_bytes(columns, len(ids)) + documents.sizes
        longest = max(state.longest, int(lengths.max()))
        room = max(fresh_bytes(self._dram), int(each.max()))
        tokens, items = int(lengths.sum()) + int(waiting.starts[-1]), len(ids) + len(waiting)
        needed = self.planned(state) - waiting.memory_bytes + _PART_BYTES
        needed += 2 * min(room, int(each.sum()) + waiting.memory_bytes) + CODER_TIMES * book.dimension * book.lists
        needed += tokens * token_bytes_held(book.book.code_bytes) + 20 * items
        needed += postings_bytes(tokens, items, book.lists) + 3 * bitmap_bytes(items)
        needed += 4 * (tokens * (token_bytes + token_bytes_held(book.book.code_bytes)) // PAGE_BYTES)
        needed += records_bytes(items, documents.record_bytes + fresh.record_bytes) + documents.work_bytes
        if ids.texts is not None and fresh.texts is not None:
            letters = len(ids.texts.letters) + len(fresh.texts.letters)
            needed += PAGE_DRAM * text_pages(items, letters, max(ids.texts.longest, fresh.texts.longest))
        more = self.search_bytes(state, longest, items) - self.search_bytes(state, state.longest)
        needed += self._searches * more
        if needed > self._dram:
            total = state.count + len(ids)
            raise BudgetError(
                f"{len(ids):,} more items need {format_bytes(needed)} ({needed} bytes) of DRAM in all, "
                f"dram={format_bytes(self._dram)} was given at build. Build it again with grow_to={total}, which makes "
                f"shorter codes where dram= is not raised to as much; compact() frees the DRAM of removed items"
            )
        return each

    def layout_anew(self, state: ItemSnapshot, lengths: Ints) -> ItemLayout:
        """Return the layout for an index that has changed: codes of the same length, and as many lists as have room."""
        book = state.book
        wanted = lists_for(int(lengths.sum()))
        spare = max(0, self._dram - self.planned(state))
        each = (2 + CODER_TIMES) * book.dimension + 16 + (4 * COLUMNS + 12) * self._searches
        lists = max(1, min(wanted, book.lists + spare // (2 * each)))
        return ItemLayout(lists, book.book.code_bytes, book.book.rotation.ndim == 2, self._searches, 0)
