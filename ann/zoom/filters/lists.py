"""Columns of lists in DRAM, and those of several parts as one."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.columns import (
    AnyColumn,
    ArrayColumn,
    Bounds,
    ChainedColumn,
    Column,
    ListColumn,
    NullColumn,
    is_missing,
)
from memhier.ann.zoom.filters.conditions import LIST_TYPES, ItemType, ListCells, ListType

__all__ = ["ArrayListColumn", "ChainedListColumn", "item_rows", "whole_lists"]

Ints: TypeAlias = npt.NDArray[np.int64]


class ArrayListColumn:
    """A column from objects, each a list, a tuple, an array ``[m]`` or null.

    Parameters
    ----------
    name
        For errors.
    array
        Objects ``[n]``.
    mask
        bool ``[n]``: further nulls.
    kind
        The type of items where no list has any; None where it is not known.

    Raises
    ------
    ValueError, TypeError
        For a row that is no list, an item that is null, and as `ArrayColumn` does for the items.
    """

    def __init__(
        self, name: str, array: npt.NDArray[np.object_], mask: npt.NDArray[np.bool_], kind: ItemType | None = None
    ) -> None:
        self._nulls = mask | np.fromiter(map(is_missing, array), np.bool_, len(array))
        lists = [() if null else value for null, value in zip(self._nulls, array, strict=True)]
        for row, value in enumerate(lists):
            if not isinstance(value, list | tuple | np.ndarray) or (isinstance(value, np.ndarray) and value.ndim != 1):
                raise TypeError(
                    f"attribute {name!r} holds lists and, in row {row}, a {type(value).__name__}: expected a list of "
                    f"int, float, bool, str or datetime, or None where it is missing"
                )
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        self._starts = np.concatenate([[0], np.cumsum(lengths)])

        def place(item: int) -> str:
            return f"the list of row {self._row(item)}"

        items = np.fromiter(chain.from_iterable(map(_items, lists)), object, int(self._starts[-1]))
        missing = next((number for number, item in enumerate(items) if is_missing(item)), None)
        if missing is not None:
            raise ValueError(
                f"attribute {name!r} holds {items[missing]} in {place(missing)}: expected lists without missing values"
            )
        self.items: Column = ArrayColumn(name, items, None, place) if len(items) else NullColumn(0, kind)
        found = None if self.items.type is None else LIST_TYPES[self.items.type]
        self.type: ListType | None = found or (None if self._nulls.all() else "list[]")

    def __len__(self) -> int:
        return len(self._nulls)

    def bounds(self, rows: Ints) -> Bounds:
        """Return the items of `rows`, in any order."""
        return Bounds(self._starts[rows], self._starts[rows + 1], self._nulls[rows])

    def _row(self, item: int) -> int:
        return int(np.searchsorted(self._starts, item, side="right")) - 1


class ChainedListColumn:
    """The rows of several columns of lists of one type, one column after the other; see `ChainedColumn`."""

    def __init__(self, columns: Sequence[AnyColumn]) -> None:
        self._columns = [column if isinstance(column, ListColumn) else NullColumn(len(column)) for column in columns]
        lists = [column.type for column in self._columns if isinstance(column, ListColumn)]
        self.type: ListType | None = next((kind for kind in lists if kind is not None), None)
        self._starts = np.cumsum([0, *map(len, columns)])
        items = [column.items if isinstance(column, ListColumn) else NullColumn(0) for column in columns]
        self._items_before = np.cumsum([0, *map(len, items)])
        self.items: Column = ChainedColumn(items)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def bounds(self, rows: Ints) -> Bounds:
        """Return the items of `rows`, in any order."""
        part = np.searchsorted(self._starts, rows, side="right") - 1
        found = Bounds(np.zeros_like(rows), np.zeros_like(rows), np.ones(len(rows), np.bool_))
        for number, column in enumerate(self._columns):
            where = np.flatnonzero(part == number)
            if len(where) and isinstance(column, ListColumn):
                starts, stops, nulls = column.bounds(rows[where] - self._starts[number])
                found.starts[where] = starts + self._items_before[number]
                found.stops[where] = stops + self._items_before[number]
                found.nulls[where] = nulls
        return found


def item_rows(bounds: Bounds, step: int) -> Iterator[tuple[Ints, Ints]]:
    """Yield the numbers of the items of lists, one list after the other, at most `step` at a time, with its list."""
    lengths = bounds.stops - bounds.starts
    ends = np.cumsum(lengths)
    for low in range(0, int(ends[-1]) if len(ends) else 0, step):
        places = np.arange(low, min(low + step, int(ends[-1])))
        of = np.searchsorted(ends, places, side="right")
        yield bounds.starts[of] + places - (ends[of] - lengths[of]), of


def whole_lists(column: ListColumn) -> ListCells:
    """Return all lists of a column, whose items lie in their order."""
    starts, stops, nulls = column.bounds(np.arange(len(column)))

    def items() -> Iterator[tuple[int, npt.NDArray[Any]]]:
        if len(column.items):
            yield 0, column.items.read(np.arange(len(column.items))).values

    return ListCells(np.append(starts, stops[-1:]), nulls, items)


def _items(values: Any) -> Any:
    """Return the items of a list; masked ones as None."""
    return values.tolist(None) if isinstance(values, np.ma.MaskedArray) else values
