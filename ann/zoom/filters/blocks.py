"""Stored columns, read in blocks of neighbouring rows by a filter."""

from collections.abc import Mapping
from typing import TypeAlias

from memhier.ann.zoom.filters.bitmaps import Words
from memhier.ann.zoom.filters.columns import BLOCK_ROWS
from memhier.ann.zoom.filters.conditions import SORTED_BYTES, Cells, ListCells
from memhier.ann.zoom.filters.postings import LOOK_UP_BYTES
from memhier.ann.zoom.filters.stored_column import StoredColumn
from memhier.ann.zoom.filters.stored_lists import StoredListColumn
from memhier.io.page_file import PAGE_BYTES
from memhier.io.read_arguments import empty_rows

__all__ = ["Blocks", "StoredAny"]

StoredAny: TypeAlias = StoredColumn | StoredListColumn

_ITEM_BYTES = 8 + 8  # widest value of a list, and where it was found


class Blocks:
    """Reads columns in blocks: that of a column when it is first asked for.

    Parameters
    ----------
    columns
        By attribute.
    count
        Rows of all.
    work_bytes
        DRAM for the blocks, their items and the evaluation; half of it for items where there are lists.
    each
        Bytes that the evaluation takes for a row.
    posted
        The directories of the postings of lists, by attribute, where a filter asks for items alone.

    Attributes
    ----------
    rows
        Of a block.
    """

    def __init__(
        self, columns: Mapping[str, StoredAny], count: int, work_bytes: int, each: int, posted: Mapping[str, Words]
    ) -> None:
        self._columns, self._posted = columns, posted
        read = {name: column for name, column in columns.items() if name not in posted}
        lists = sum(isinstance(column, StoredListColumn) for column in read.values())
        for_items = work_bytes // 2 if lists else 0
        work_bytes -= for_items + len(columns) * PAGE_BYTES
        work_bytes -= LOOK_UP_BYTES if posted else 0
        each += sum(column.width for column in read.values()) + 2 * len(columns)
        self.rows: int = _whole_pages(work_bytes // each)
        room = min(self.rows, count) + 1
        self._buffers = {name: empty_rows(1, room * column.width)[0] for name, column in read.items()}
        # The items of one list column at a time are compared; those of the others stay beside them.
        items = _whole_pages(for_items // (lists * _ITEM_BYTES + SORTED_BYTES)) if lists else 0
        self._item_buffer = empty_rows(lists, items * _ITEM_BYTES // 2)
        self._start, self._read = -1, dict[str, Cells | ListCells]()

    def cells(self, start: int, count: int, name: str) -> Cells | ListCells | None:
        """Return the cells of neighbouring rows, which stay until another block is asked for; None for no column."""
        if start != self._start:
            self._start, self._read = start, {}
        column = self._columns.get(name)
        if column is not None and name not in self._read:
            if isinstance(column, StoredColumn):
                self._read[name] = column.block(start, count, self._buffers[name])
            elif name in self._posted:
                self._read[name] = column.posted(start, count, self._posted[name])
            else:
                lists = [each for each in self._buffers if isinstance(self._columns[each], StoredListColumn)]
                item_buffer = self._item_buffer[lists.index(name)]
                self._read[name] = column.block(start, count, self._buffers[name], item_buffer)
        return self._read.get(name)


def _whole_pages(most: int) -> int:
    """Return the rows of a block, at most `most` and at least 64; whole pages of every column if it has a page."""
    rows = max(64, min(BLOCK_ROWS, most))
    return rows - rows % (PAGE_BYTES if rows >= PAGE_BYTES else 64)
