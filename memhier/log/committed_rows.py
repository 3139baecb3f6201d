"""The rows of a log as one commit has them, read without the log's writer."""

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memhier.errors import ClosedError, FormatError
from memhier.log.index import LogIndex, offset_of, slot_of
from memhier.log.parts import LogRecord, PartTable
from memhier.log.replay import EntryReader, committed_record, replay
from memhier.rows.rows import rows_per_page
from memhier.shield import when_gone
from memhier.store.segments import PAGE_BYTES
from memhier.store.store import Store

if TYPE_CHECKING:
    from memhier.io.reader import Reader

__all__ = ["REPLAY_BYTES", "CommittedRows"]

Ints = NDArray[np.int64]

REPLAY_BYTES = 2**23
"""Working memory of the replay of a log without deletions."""
_NUMBER_BITS = 34  # a part has 16 GiB at most


class CommittedRows:
    """The rows of a :class:`memhier.RowLog` as a store that is open for reading has them.

    The writer may go on, and drop parts, as the store holds its files. Any number of threads may read.

    Parameters
    ----------
    store
        Open for reading.
    name, row_bytes, key_space
        As the log was made.
    reader
        Does the reads; stays the caller's.

    Attributes
    ----------
    following
        The number of the part that the writer makes next.
    checksums
        Those of the pages of each part, by its number.

    Raises
    ------
    FormatError
        When rows have another width.
    CorruptionError
        When entries are damaged.
    """

    def __init__(self, store: Store, name: str, row_bytes: int, reader: "Reader", key_space: int | None = None) -> None:
        record = committed_record(store, name) or LogRecord(row_bytes, 0, 0, [])
        if record.record_bytes != row_bytes:
            raise FormatError(f"{store.path}: rows of {record.record_bytes} bytes in {name!r}, expected {row_bytes}")
        self._row_bytes = row_bytes
        self._per_page = rows_per_page(row_bytes)
        self._reader = reader
        self._index = LogIndex(max(1, record.live), row_bytes, key_space, expected=record.live)
        self._table = PartTable()
        self.following: int = record.following
        when_gone(self, partial(_let_go, reader, self._table))
        parts = replay(EntryReader(store, name, reader, self._per_page), record, self._index, self._table)
        self._numbers: Ints = np.zeros(len(self._table.handles), np.int64)
        self._numbers[[*parts]] = [part.number for part in parts.values()]
        segments = store.segments()
        self.checksums: dict[int, NDArray[np.uint32] | None] = {
            part.number: segments[part.segments(name)[0]].checksums for part in parts.values()
        }

    @staticmethod
    def bytes_for(rows: int, key_space: int | None = None) -> int:
        """Return the DRAM for so many rows."""
        return LogIndex.bytes_for(max(1, rows), key_space) + 2**12

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes; checksums are the store's."""
        return self._index.memory_bytes + self._table.memory_bytes + self._numbers.nbytes

    def __len__(self) -> int:
        return len(self._index)

    def places(self, keys: Ints) -> Ints:
        """Return the place of each key's row, -1 for none."""
        return self._index.places(keys)

    def numbers(self, places: Ints) -> Ints:
        """Return a number for each place that no other row of the log ever had or will have."""
        offsets = offset_of(places)
        if self._per_page is None:
            rows = offsets // self._row_bytes
        else:
            rows = offsets // PAGE_BYTES * self._per_page + offsets % PAGE_BYTES // self._row_bytes
        return (self._numbers[slot_of(places)] << _NUMBER_BITS) + rows

    def read(self, places: Ints) -> NDArray[np.uint8]:
        """Return rows by their places, uint8 [n, row_bytes], in one submission."""
        return self._reader.read(self._table.handles[slot_of(places)], offset_of(places), self._row_bytes)

    def follows(self, before: "CommittedRows") -> bool:
        """Whether these are rows of the same log, so that a row's number in `before` still is that row's alone."""
        return all(
            number >= before.following
            or (number in before.checksums and np.array_equal(before.checksums[number], checksums))  # type: ignore[arg-type]
            for number, checksums in self.checksums.items()
        )


def _let_go(reader: "Reader", table: PartTable) -> None:
    for handle in table.handles[table.handles >= 0].tolist():
        with suppress(ClosedError):
            reader.remove(handle)
