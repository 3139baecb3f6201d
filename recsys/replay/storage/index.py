"""Rows of the index on SSD: what it says of positions and of slots, and what of that has changed.

All lies in one log, since each log of a commit costs syncs. The rows of a kind have every third key.
"""

from collections.abc import Iterator, Mapping
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["INDEX_ROW_BYTES", "POSITIONS", "SLOTS", "IndexTable", "Kind", "index_keys"]

Ints = NDArray[np.int64]

# Many entries to a row: the keys of rows take DRAM.
INDEX_ROW_BYTES = 1536
_ROWS = 1024  # packed at a time


class Kind(IntEnum):
    """What rows are about: positions, slots, and batches drawn ahead."""

    POSITIONS = 0
    SLOTS = 1
    AHEAD = 2


def index_keys(kind: Kind, start: int, stop: int) -> Ints:
    """Return the keys of rows of a kind."""
    return len(Kind) * np.arange(start, stop) + kind


class IndexTable:
    """Entries by number, in rows of `INDEX_ROW_BYTES`, and which rows have to be written.

    Parameters
    ----------
    entry
        What there is of each number; some of them fill a row.
    kind
        Of the rows.
    """

    def __init__(self, entry: np.dtype[np.void], kind: Kind) -> None:
        self._entry = entry
        self._kind = kind
        self.per_row = INDEX_ROW_BYTES // entry.itemsize
        self._dirty: NDArray[np.bool_] = np.zeros(0, np.bool_)

    @property
    def memory_bytes(self) -> int:
        """DRAM held."""
        return self._dirty.nbytes

    def rows(self, size: int) -> int:
        """Return how many rows so many entries take."""
        return -(-size // self.per_row)

    def keys(self, start: int, stop: int) -> Ints:
        """Return the keys of rows."""
        return index_keys(self._kind, start, stop)

    def reserve(self, size: int) -> None:
        """Make room for so many entries."""
        more = self.rows(size) - len(self._dirty)
        if more > 0:
            self._dirty = np.concatenate([self._dirty, np.zeros(more, np.bool_)])

    def mark(self, numbers: Ints | int) -> None:
        """Say that entries have changed."""
        self._dirty[numbers // self.per_row] = True

    def changed(
        self, size: int, columns: Mapping[str, NDArray[np.integer]]
    ) -> Iterator[tuple[Ints, NDArray[np.uint8]]]:
        """Yield the keys and contents of the rows that changed since the last call, of so many entries."""
        # Rows past the last are those of entries that have gone.
        rows = np.flatnonzero(self._dirty[: self.rows(size)])
        self._dirty[:] = False
        for start in range(0, len(rows), _ROWS):
            some = rows[start : start + _ROWS]
            entries = np.zeros((len(some), self.per_row), self._entry)
            numbers = some[:, None] * self.per_row + np.arange(self.per_row)
            there = numbers < size
            for name, values in columns.items():
                entries[name][there] = values[numbers[there]]
            yield len(Kind) * some + self._kind, entries.view(np.uint8).reshape(len(some), INDEX_ROW_BYTES)

    def unpack(self, rows: NDArray[np.uint8], size: int) -> NDArray[np.void]:
        """Return the first entries of rows."""
        return rows.reshape(-1).view(self._entry)[:size]


POSITIONS = np.dtype([("id", "<i8"), ("label", "<i8"), ("rank", "<i8")])
"""Id, label (-1 for none), and rank in its group."""
SLOTS = np.dtype([("planned", "<i8"), ("visible", "<i8"), ("swapped", "<i8"), ("order", "<i8")])
"""The positions planned and shown in a slot, the step of its last swap; in another order, which slots are in use."""
