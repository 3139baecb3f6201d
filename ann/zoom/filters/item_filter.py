"""Filters that ask for items of lists alone: evaluated on bitmaps that postings fill, without a byte for each row."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from memhier.ann.zoom.filters.bitmaps import Words, word_count
from memhier.ann.zoom.filters.conditions import And, Contains, Expression, IsNull, Leaf, Not, Or, Value, conjuncts
from memhier.ann.zoom.filters.postings import LOOK_UP_BYTES
from memhier.ann.zoom.filters.stored_lists import StoredListColumn

__all__ = ["ASKING", "ItemFilter", "Posted"]

ASKING = (Contains, IsNull)
"""The conditions that postings tell of."""

_TOGETHER = 8  # conditions on items of a column that all have to be true, at most
_LEAF_BITMAPS = 2  # that a condition holds: its rows, and those that are null


class Posted(NamedTuple):
    """A column of lists, and the directory of its postings (`memhier.ann.zoom.filters.postings`)."""

    column: StoredListColumn
    directory: Words


class ItemFilter:
    """Evaluates a filter that asks for items of lists alone.

    Parameters
    ----------
    columns
        By attribute; one that is not among them is null in every row.
    count
        Rows of all.
    """

    def __init__(self, columns: Mapping[str, Posted], count: int) -> None:
        self._columns, self._count = columns, count

    @staticmethod
    def takes(every: Sequence[Leaf]) -> bool:
        """Return whether all conditions ask for items, or for nulls."""
        return all(isinstance(leaf, ASKING) for leaf in every)

    def select(self, expression: Expression, room: int) -> Words:
        """Return the rows for which a filter is true, a bit for each; it takes `room` bytes of DRAM beside these."""
        fitting = 8 * max(0, room - LOOK_UP_BYTES) // _bitmaps(expression)
        step = max(64, fitting // 64 * 64)
        if step >= self._count:
            return self._selected(expression, 0, self._count, True)
        words = np.zeros(word_count(self._count), np.uint64)
        for start in range(0, self._count, step):
            count = min(step, self._count - start)
            words[start // 64 : word_count(start + count)] = self._selected(expression, start, count, True)
        return words

    def _selected(self, expression: Expression, start: int, count: int, wanted: bool) -> Words:
        """Return the neighbouring rows where a condition is `wanted`, as `conditions.select` does."""
        if isinstance(expression, Not):
            return self._selected(expression.operand, start, count, not wanted)
        if wanted and isinstance(expression, And):
            return self._all_of(expression, start, count)
        if isinstance(expression, Contains):
            return self._holding(expression.name, [expression.values], start, count, wanted)
        if isinstance(expression, And | Or):
            every = isinstance(expression, And) == wanted
            rows = self._selected(expression.operands[0], start, count, wanted)
            for operand in expression.operands[1:]:
                if every and not rows.any():
                    break  # further postings cannot change the result: they are not read
                further = self._selected(operand, start, count, wanted)
                np.bitwise_and(rows, further, out=rows) if every else np.bitwise_or(rows, further, out=rows)
            return rows
        assert isinstance(expression, IsNull)
        return self._null(expression.name, start, count, wanted)

    def _all_of(self, expression: And, start: int, count: int) -> Words:
        """Return the neighbouring rows where all operands are true: those of a column that ask for items together."""
        groups: dict[str, list[tuple[Value, ...]]] = {}
        asked = list[Callable[[], Words]]()
        for operand in conjuncts(expression):
            if isinstance(operand, Contains):
                groups.setdefault(operand.name, []).append(operand.values)
            else:
                asked.append(partial(self._selected, operand, start, count, True))
        for name, every in groups.items():
            for first in range(0, len(every), _TOGETHER):
                asked.append(partial(self._holding, name, every[first : first + _TOGETHER], start, count, True))
        rows = asked.pop()()
        while asked and rows.any():  # otherwise further postings cannot change the result: they are not read
            np.bitwise_and(rows, asked.pop()(), out=rows)
        return rows

    def _null(self, name: str, start: int, count: int, wanted: bool) -> Words:
        posted = self._columns.get(name)
        if posted is None:
            return _every(count) if wanted else np.zeros(word_count(count), np.uint64)
        nulls = posted.column.nulls(start, count)
        if nulls is None:
            return np.zeros(word_count(count), np.uint64) if wanted else _every(count)
        return nulls if wanted else nulls ^ _every(count)

    def _holding(self, name: str, groups: list[tuple[Value, ...]], start: int, count: int, wanted: bool) -> Words:
        posted = self._columns.get(name)
        if posted is None:
            return np.zeros(word_count(count), np.uint64)
        rows: Words = posted.column.holding(start, count, [groups], posted.directory)[0]
        if wanted:
            return rows  # postings have no row that is null
        np.bitwise_xor(rows, _every(count), out=rows)
        nulls = posted.column.nulls(start, count)
        return rows if nulls is None else np.bitwise_and(rows, ~nulls, out=rows)


def _every(count: int) -> Words:
    """Return a bitmap of all rows."""
    words = np.full(word_count(count), np.uint64(2**64 - 1))
    if count % 64:
        words[-1] >>= np.uint64(64 - count % 64)
    return words


def _bitmaps(expression: Expression) -> int:
    """Return how many bitmaps an evaluation holds at a time."""
    if isinstance(expression, Not):
        return _bitmaps(expression.operand)
    if isinstance(expression, And | Or):
        return 1 + max(min(_TOGETHER, len(conjuncts(expression))), *map(_bitmaps, expression.operands))
    return 1 + _LEAF_BITMAPS
