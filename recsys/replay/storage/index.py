"""Rows of the index on SSD: packed entries of positions and slots, and batches drawn ahead.

All rows lie in one log, since each log of a commit costs syncs. Each kind has every third key.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["INDEX_ROW_BYTES", "POSITIONS", "POSITIONS_2", "SLOTS", "IndexTable", "Kind", "index_keys", "joined"]

Ints = NDArray[np.int64]

# Many entries to a row: the keys of rows take DRAM.
INDEX_ROW_BYTES = 1536
_ROWS = 64  # packed at a time


class Kind(IntEnum):
    """Subjects of rows: positions, slots, and batches drawn ahead."""

    POSITIONS = 0
    SLOTS = 1
    AHEAD = 2


def index_keys(kind: Kind, start: int, stop: int) -> Ints:
    """Return the keys of rows of a kind."""
    return len(Kind) * np.arange(start, stop) + kind


def joined(parts: Iterable[tuple[Ints, NDArray[np.uint8]]]) -> Iterator[tuple[Ints, NDArray[np.uint8]]]:
    """Join keys and contents of rows that follow each other, as long as they are few: each append has a price."""
    waiting: list[tuple[Ints, NDArray[np.uint8]]] = []
    for part in parts:
        if waiting and sum(len(keys) for keys, _ in [*waiting, part]) > _ROWS:
            yield _join(waiting)
            waiting = []
        waiting.append(part)
    if waiting:
        yield _join(waiting)


def _join(parts: list[tuple[Ints, NDArray[np.uint8]]]) -> tuple[Ints, NDArray[np.uint8]]:
    keys, rows = zip(*parts, strict=True)
    return parts[0] if len(parts) == 1 else (np.concatenate(keys), np.concatenate(rows))


class IndexTable(NamedTuple):
    """The layout of entries by number in rows of `INDEX_ROW_BYTES`.

    Attributes
    ----------
    entry
        The type of an entry; several fill a row.
    kind
        Of the rows.
    """

    entry: np.dtype[np.void]
    kind: Kind

    @property
    def per_row(self) -> int:
        """Entries of a row."""
        return INDEX_ROW_BYTES // self.entry.itemsize

    def rows(self, size: int) -> int:
        """Return the number of rows that hold `size` entries."""
        return -(-size // self.per_row)

    def keys(self, start: int, stop: int) -> Ints:
        """Return the keys of rows."""
        return index_keys(self.kind, start, stop)

    def pack(
        self, rows: Ints, size: int, columns: Mapping[str, NDArray[np.integer]]
    ) -> Iterator[tuple[Ints, NDArray[np.uint8]]]:
        """Yield the keys and contents of rows, in parts.

        Parameters
        ----------
        rows
            int64 [n]: their numbers.
        size
            Number of entries; the rest of the last row is zero.
        columns
            The values of all entries, by field.
        """
        for start in range(0, len(rows), _ROWS):
            some = rows[start : start + _ROWS]
            entries = np.zeros((len(some), self.per_row), self.entry)
            numbers = some[:, None] * self.per_row + np.arange(self.per_row)
            there = numbers < size
            for name, values in columns.items():
                entries[name][there] = values[numbers[there]]
            yield len(Kind) * some + self.kind, entries.view(np.uint8).reshape(len(some), INDEX_ROW_BYTES)

    def unpack(self, rows: NDArray[np.uint8], size: int) -> NDArray[np.void]:
        """Return the first entries of rows."""
        return rows.reshape(-1).view(self.entry)[:size]


POSITIONS = IndexTable(
    np.dtype([("id", "<i8"), ("label", "<i4"), ("rank", "<i4"), ("time", "<u4"), ("beside", "<i4")]), Kind.POSITIONS
)
"""By position: id, label (-1 for none), rank in its group, the Unix time of its arrival in seconds, and its group where
that is no label, or its float32 key, or 0."""
POSITIONS_2 = IndexTable(np.dtype([("id", "<i8"), ("label", "<i8"), ("rank", "<i8")]), Kind.POSITIONS)
"""Those of buffers of version 2, without times."""
SLOTS = IndexTable(np.dtype([("planned", "<i8"), ("visible", "<i8"), ("swapped", "<i8"), ("order", "<i8")]), Kind.SLOTS)
"""By slot: the positions planned and shown, the step of its last swap; by rank, the slot of that rank in `order`."""
