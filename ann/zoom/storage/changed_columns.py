"""Columns of a part with changes, as those of all its rows: for writing the part anew, or together with others."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.columns import AnyColumn, Bounds, ChainedColumn, Column, ListColumn
from memhier.ann.zoom.filters.conditions import AttributeType, Cells, ItemType, ListType, is_list
from memhier.ann.zoom.filters.lists import ChainedListColumn
from memhier.ann.zoom.storage.changes import Change

__all__ = ["chained_sources", "changed_column", "last_places"]

Ints: TypeAlias = npt.NDArray[np.int64]


def last_places(changes: Sequence[Change], rows: Ints) -> tuple[Ints, Ints]:
    """Return for each row the number of the last change that has it, -1 for none, and its place there or the row."""
    which, places = np.full(len(rows), -1, np.int64), rows.copy()
    for number, change in enumerate(changes):
        if change.rows is not None and len(change.rows):
            at = np.minimum(np.searchsorted(change.rows, rows), len(change.rows) - 1)
            here = change.rows[at] == rows
            which[here], places[here] = number, at[here]
    return which, places


def chained_sources(changes: Sequence[Change], rows: Ints, first: int) -> Ints:
    """Return the number of each row where the columns of changes follow one another, after `first` rows of another."""
    which, places = last_places(changes, rows)
    lengths = [0 if change.rows is None else len(change.rows) for change in changes]
    starts = np.cumsum([0, first, *lengths])
    return starts[which + 1] + places


class _ChangedColumn:
    """A column with changes; see `Column`."""

    def __init__(self, columns: Sequence[Column], changes: Sequence[Change]) -> None:
        self._chained, self._changes, self._count = ChainedColumn(columns), changes, len(columns[0])
        self.type: ItemType | None = self._chained.type

    def __len__(self) -> int:
        return self._count

    def words(self) -> Iterator[bytes]:
        return self._chained.words()

    def read(self, rows: Ints) -> Cells:
        return self._chained.read(chained_sources(self._changes, rows, self._count))


class _ChangedListColumn:
    """A column of lists with changes; see `ListColumn`."""

    def __init__(self, columns: Sequence[AnyColumn], changes: Sequence[Change]) -> None:
        self._chained, self._changes, self._count = ChainedListColumn(columns), changes, len(columns[0])
        self.type: ListType | None = self._chained.type
        self.items: Column = self._chained.items

    def __len__(self) -> int:
        return self._count

    def bounds(self, rows: Ints) -> Bounds:
        return self._chained.bounds(chained_sources(self._changes, rows, self._count))


def changed_column(name: str, kind: AttributeType, base: AnyColumn, changes: Sequence[Change]) -> AnyColumn:
    """Return a column with its changes, each of some rows."""
    columns = [base, *(change.source(name) for change in changes)]
    if is_list(kind):
        return _ChangedListColumn(columns, changes)
    return _ChangedColumn([column for column in columns if not isinstance(column, ListColumn)], changes)
