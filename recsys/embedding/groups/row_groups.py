"""RowGroups: the tables whose rows share a tier, and the keys that rows have there."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["TIER_BYTES", "Part", "RowGroups", "groups_by_width"]

Ints = NDArray[np.int64]
Part: TypeAlias = tuple[Ints | slice, Ints]
"""The places of some rows among others, and their keys in the tier of one group."""

TIER_BYTES = 2**22
"""About the DRAM that a tier costs for its log, beside three threads. Padding that takes no more is cheaper."""
_ALL = slice(None)


class RowGroups:
    """Groups of tables. A row takes the room of the widest of its group.

    Rows have two numbers: the key, by which all tables lie one after the other, and the key in their group, by which
    the tables of the group do.

    Parameters
    ----------
    of
        The group of each table.
    widths, rows
        Of each table: floats of a row, and number of rows.

    Attributes
    ----------
    of
        int64 [tables].
    tables
        The tables of each group.
    widths, rows
        Of each group: floats of a row, and number of rows.
    bases
        int64 [tables + 1]: the first key of each table, and the end of the last one.
    """

    def __init__(self, of: Sequence[int], widths: Sequence[int], rows: Sequence[int]) -> None:
        self.of: Ints = np.array(of, np.int64)
        self.tables: list[list[int]] = [np.flatnonzero(self.of == group).tolist() for group in range(max(of) + 1)]
        self.widths: list[int] = [max(widths[table] for table in mine) for mine in self.tables]
        self.bases: Ints = np.cumsum([0, *rows])
        self._bases = [np.cumsum([0, *(rows[table] for table in mine)]) for mine in self.tables]
        self.rows: list[int] = [int(bases[-1]) for bases in self._bases]
        # To add to a key for the key in the group.
        self._shifts: Ints = np.zeros(len(rows), np.int64)
        for mine, bases in zip(self.tables, self._bases, strict=True):
            self._shifts[mine] = bases[:-1] - self.bases[mine]

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def weights(self) -> list[float]:
        """The share of each group in the rows that DRAM has room for: half by tables, half by rows.

        A step asks about as much of every table, and no more of a table than its rows.
        """
        tables = [len(mine) / len(self.of) for mine in self.tables]
        return [share + rows / self.bases[-1] for share, rows in zip(tables, self.rows, strict=True)]

    def key(self, table: int, rows: Ints) -> Ints:
        """Return the keys in their group of rows of a table."""
        keys: Ints = rows + (self.bases[table] + self._shifts[table])
        return keys

    def split(self, keys: Ints, starts: Ints) -> list[Part]:
        """Return the part of each group, of rising keys; those of each table begin at `starts`."""
        if len(self) == 1:
            return [(_ALL, keys)]
        return self._parts(keys, np.repeat(np.arange(len(self.of)), np.diff(starts)))

    def split_any(self, keys: Ints) -> list[Part]:
        """Return the part of each group, of keys in any order."""
        if len(self) == 1:
            return [(_ALL, keys)]
        return self._parts(keys, np.searchsorted(self.bases, keys, side="right") - 1)

    def _parts(self, keys: Ints, tables: Ints) -> list[Part]:
        of, numbers, found = self.of[tables], keys + self._shifts[tables], list[Part]()
        for group in range(len(self)):
            places = np.flatnonzero(of == group)
            mine = numbers[places]
            mine.flags.writeable = False  # so that a ticket recognises it at once
            found.append((places, mine))
        return found

    def everywhere(self, group: int, numbers: Ints) -> Ints:
        """Return the keys of rows of a group."""
        if len(self) == 1:
            return numbers
        among = np.searchsorted(self._bases[group], numbers, side="right") - 1
        keys: Ints = numbers - self._shifts[np.array(self.tables[group])[among]]
        return keys


def groups_by_width(widths: Sequence[int], rows: Sequence[int]) -> list[int]:
    """Return the group of each table: one for each width, but that few narrow rows go with the next wider ones."""
    of = np.zeros(len(widths), np.int64)
    group, widest, padding = 0, max(widths), 0
    for width in sorted({*widths}, reverse=True):
        mine = [table for table, some in enumerate(widths) if some == width]
        padding += 4 * (widest - width) * sum(rows[table] for table in mine)
        if padding > TIER_BYTES:
            group, widest, padding = group + 1, width, 0
        of[mine] = group
    found: list[int] = of.tolist()
    return found
