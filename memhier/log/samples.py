"""Samples: records of any size by key, changed by appending."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import as_bytes
from memhier.log.log import Bytes, Ints, LogOptions
from memhier.log.parts import ENTRY
from memhier.log.record_log import RecordLog
from memhier.log.tail import BLOCK_BYTES, LogTail
from memhier.shield import shielded
from memhier.store.segments import PAGE_BYTES
from memhier.store.store import Store

if TYPE_CHECKING:
    from memhier.io.reader import Reader

__all__ = ["SampleFormat", "Samples"]

SAMPLE_BYTES_MAX = 2**30


@dataclass(frozen=True, slots=True)
class SampleFormat:
    """Records of any size, end to end."""

    record_bytes: int = 0
    per_page: int | None = None
    kind: ClassVar[str] = "Samples"

    def fetch(self, reader: "Reader", handles: NDArray[np.int32], offsets: Ints, lengths: Ints) -> list[memoryview]:
        """Read the pages of each record one after the other into one array; the records are slices of it."""
        first = offsets // PAGE_BYTES
        pages = np.where(lengths > 0, (offsets + lengths - 1) // PAGE_BYTES - first + 1, 0)
        starts = np.cumsum(pages) - pages
        numbers = np.repeat(first - starts, pages) + np.arange(int(pages.sum()))
        contents = reader.read(np.repeat(handles, pages), numbers * PAGE_BYTES, PAGE_BYTES).reshape(-1)
        contents.flags.writeable = False
        begins = starts * PAGE_BYTES + offsets % PAGE_BYTES
        whole = contents.data
        return [whole[begin : begin + length] for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True)]

    def copy(self, tail: LogTail, offsets: Ints, lengths: Ints) -> list[memoryview]:
        """Copy records from the tail."""
        pairs = zip(offsets.tolist(), lengths.tolist(), strict=True)
        return [memoryview(tail.record(offset, length)) for offset, length in pairs]

    def block(self, records: list[memoryview], start: int, stop: int, offsets: Ints) -> Bytes:
        """Return a range of records end to end."""
        if stop - start == 1:
            return np.frombuffer(records[start], np.uint8)
        return np.frombuffer(b"".join(records[start:stop]), np.uint8)


class Samples(RecordLog):
    """Records of different sizes by int64 key, in a store: images, texts, any bytes.

    Works as :class:`~memhier.log.row_log.RowLog`: records are appended, readable at once, and durable with
    :meth:`commit`; one thread changes them, any number may read.

    Parameters
    ----------
    store
        Open store; for writing, if the samples are to be changed.
    name
        Of the samples in the store: 1 to 70 letters, digits, ``-`` or ``_``. They own the store's segments with names
        that begin with it, and the value ``log/<name>``.
    reader
        Does the reads; stays the caller's.
    capacity
        Most distinct keys at a time, 1 to 2**31 - 1: 40 bytes of DRAM are taken at once for each.
    key_space
        As in :class:`~memhier.log.row_log.RowLog`, but for 12 bytes.
    compact_below, grows, block_bytes, beside
        As in :class:`~memhier.log.row_log.RowLog`.

    Raises
    ------
    FormatError
        When the store is open for reading and has no such samples, or the name is that of rows.
    BudgetError
        When there are more keys than `capacity`.
    CorruptionError
        When the entries are damaged.

    Examples
    --------
    >>> import tempfile
    >>> from memhier import Reader, Samples, Store
    >>> place = tempfile.mkdtemp() + "/store"
    >>> with Store.create(place, kind="example") as store, Reader() as reader:
    ...     with Samples(store, "texts", reader=reader, capacity=100) as samples:
    ...         samples.put([3, 4], [b"three", b""])
    ...         generation = samples.commit()
    ...         [None if text is None else bytes(text) for text in samples.get([4, 5, 3])]
    [b'', None, b'three']
    """

    def __init__(
        self,
        store: Store,
        name: str,
        reader: "Reader",
        capacity: int,
        *,
        compact_below: float = 0,
        key_space: int | None = None,
        grows: bool = False,
        block_bytes: int = BLOCK_BYTES,
        beside: RecordLog | None = None,
    ) -> None:
        options = LogOptions(capacity, compact_below, key_space, grows, block_bytes=block_bytes)
        super().__init__(store, name, reader, SampleFormat(), options, beside)

    @shielded
    def put(self, keys: Any, records: Sequence[Any]) -> None:
        """Set records. If a key comes twice, its last record counts.

        Parameters
        ----------
        keys
            Integers [n].
        records
            n objects with a C-contiguous buffer each, of at most 2**30 bytes.

        Raises
        ------
        BudgetError
            When there would be more keys than `capacity`. Nothing has changed then.
        OSError
            When the store is open for reading, or a write fails.
        """
        wanted = self.log.checked_keys(keys)
        if isinstance(records, bytes | bytearray | memoryview | str) or not isinstance(records, Sequence):
            raise TypeError(f"records: expected a list of bytes-like objects, got {type(records).__name__}")
        if len(records) != len(wanted):
            raise ValueError(f"records: expected {len(wanted)}, one for each key, got {len(records)}")
        views = [as_bytes(f"records[{index}]", record) for index, record in enumerate(records)]
        lengths = np.fromiter((view.nbytes for view in views), np.int64, len(views))
        if len(lengths) and int(lengths.max()) > SAMPLE_BYTES_MAX:
            index = int(np.argmax(lengths))
            raise ValueError(f"records[{index}]: {lengths[index]} bytes, expected at most {SAMPLE_BYTES_MAX}")
        with self.compactor.owing(int(lengths.sum()) + len(wanted) * ENTRY.itemsize):
            self.log.append(wanted, lengths, views)

    @shielded
    def get(self, keys: Any) -> list[memoryview | None]:
        """Read records in one submission to the reader.

        Parameters
        ----------
        keys
            Integers [n]; may repeat.

        Returns
        -------
        list of memoryview or None
            Read-only bytes of each record; None for a key without one. The records of one call share memory, whole
            pages of each: copy one to keep it for long without the others.

        Raises
        ------
        CorruptionError
            When a page does not match its checksum.
        """
        wanted = self.log.checked_keys(keys)
        records: list[memoryview | None] = [None] * len(wanted)
        log = self.log
        with log.reading():
            found = log.find(wanted)
            for index, record in zip(np.flatnonzero(found.in_tail).tolist(), found.copied or (), strict=True):
                records[index] = record
            at = np.flatnonzero(found.there & ~found.in_tail)
            fetched = log.format.fetch(log.reader, found.handles[at], found.offsets[at], found.lengths[at])
            for index, record in zip(at.tolist(), fetched, strict=True):
                records[index] = record
        return records
