"""RowLog: rows of one width by key, changed by appending."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import check_int
from memhier.io.read_arguments import empty_rows
from memhier.log.log import Bytes, Ints, LogOptions
from memhier.log.parts import ENTRY
from memhier.log.record_log import RecordLog
from memhier.log.tail import BLOCK_BYTES, LogTail
from memhier.rows.rows import ROW_BYTES_MAX, rows_per_page
from memhier.shield import shielded
from memhier.store.store import Store

if TYPE_CHECKING:
    from memhier.io.reader import PendingRead, Reader

__all__ = ["RowFormat", "RowLog"]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Records of one width, packed into pages as `rows_per_page` says."""

    record_bytes: int
    per_page: int | None
    kind: ClassVar[str] = "RowLog"

    def fetch(self, reader: "Reader", handles: NDArray[np.int32], offsets: Ints, lengths: Ints) -> Bytes:
        """Read rows from files, uint8 [n, record_bytes]."""
        return reader.read(handles, offsets, self.record_bytes)

    def copy(self, tail: LogTail, offsets: Ints, lengths: Ints) -> Bytes:
        """Copy rows from the tail, uint8 [n, record_bytes]."""
        return tail.rows(offsets, self.record_bytes)

    def block(self, records: Bytes, start: int, stop: int, offsets: Ints) -> Bytes:
        """Return a range of rows as they lie in a part."""
        rows = records[start:stop]
        if self.per_page is None:
            return np.ascontiguousarray(rows).reshape(-1)
        packed = np.zeros(int(offsets[-1] - offsets[0]) + self.record_bytes, np.uint8)
        places = np.lib.stride_tricks.sliding_window_view(packed, self.record_bytes, writeable=True)
        places[offsets - offsets[0]] = rows
        return packed


class RowLog(RecordLog):
    """Rows of one width by int64 key, in a store; any number of rows may be replaced or deleted at any time.

    A change is an append to a log, so it costs no read, and the log is written in order for any order of the keys. This
    log reads an appended row at once; others that open the store read it after :meth:`commit`. Until then the log holds
    the store's one transaction: two logs of a store change by turns, a commit between them.

    One thread changes a log at a time; any number may read meanwhile. A read sees every row whole, as it was before or
    after a change that runs meanwhile. After a failed write the log refuses everything; the last commit is there when
    it is opened again.

    Parameters
    ----------
    store
        Open store; for writing, if the log is to be changed.
    name
        Of the log in the store: 1 to 70 letters, digits, ``-`` or ``_``. The log owns the store's segments with names
        that begin with it, and the value ``log/<name>``.
    row_bytes
        Bytes per row, 1 to 2**30.
    reader
        Does the reads; stays the caller's.
    capacity
        Most distinct keys at a time, 1 to 2**31 - 1. DRAM is taken as keys come: 36 to 45 bytes for each, and 16 more
        while the index grows.
    compact_below
        While there are changes, a thread rewrites the parts of the log with a live share below this; 0 to 0.9, 0
        never. Changes wait for a megabyte of it at most. :meth:`commit` moves the bytes that are due and that
        the thread has not moved: with 0.5 one byte for each that died, with 0.9 nine, so that the log takes little more
        than its rows divided by this. Reads return the same rows. A forked child has to open a log of its own.
    key_space
        Says that all keys are 0 to ``key_space - 1``. If 8 bytes of DRAM for each possible key are less than 52 for
        each of `capacity`, they take their place, and `capacity` is no limit.
    grows
        Whether a larger key doubles `key_space`, and with it the DRAM taken for places.
    at_once
        Whether the index takes its room for `capacity` keys at once, 36 bytes each. Else it grows with the keys, and 52
        bytes each are the most that it takes.
    block_bytes
        Of the pieces that are written, a multiple of 4,096 up to 2**19: the buffers follow it.
    beside
        A log of the same store; this one writes in its transaction, and its commit makes both durable. The same thread
        changes them, they fail together, and they are closed together.

    Raises
    ------
    FormatError
        When the store is open for reading and has no such log, or its rows have another width.
    BudgetError
        When it holds more than `capacity` keys.
    CorruptionError
        When its entries are damaged.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier import Reader, RowLog, Store
    >>> place = tempfile.mkdtemp() + "/store"
    >>> with Store.create(place, kind="example") as store, Reader() as reader:
    ...     with RowLog(store, "table", row_bytes=4, reader=reader, capacity=100) as log:
    ...         log.append([7, -1, 7], np.array([[1], [2], [3]], "<i4").view(np.uint8))
    ...         rows, found = log.read([7, 5, -1])
    ...         generation = log.commit()
    >>> rows.view("<i4").ravel().tolist(), found.tolist()
    ([3, 0, 2], [True, False, True])
    """

    def __init__(
        self,
        store: Store,
        name: str,
        row_bytes: int,
        reader: "Reader",
        capacity: int,
        *,
        compact_below: float = 0,
        key_space: int | None = None,
        grows: bool = False,
        at_once: bool = False,
        block_bytes: int = BLOCK_BYTES,
        beside: RecordLog | None = None,
    ) -> None:
        self.row_bytes: int = check_int("row_bytes", row_bytes, 1, ROW_BYTES_MAX)
        options = LogOptions(capacity, compact_below, key_space, grows, at_once, block_bytes)
        super().__init__(store, name, reader, RowFormat(row_bytes, rows_per_page(row_bytes)), options, beside)

    @shielded
    def append(self, keys: Any, rows: NDArray[np.uint8]) -> None:
        """Set rows. If a key comes twice, its last row counts.

        Parameters
        ----------
        keys
            Integers [n].
        rows
            uint8 [n, row_bytes], of any strides.

        Raises
        ------
        BudgetError
            When there would be more keys than `capacity`. Nothing has changed then.
        OSError
            When the store is open for reading, or a write fails.
        """
        wanted = self.log.checked_keys(keys)
        if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8:
            raise TypeError(f"rows: expected an array of uint8, got {getattr(rows, 'dtype', type(rows).__name__)}")
        if rows.shape != (len(wanted), self.row_bytes):
            raise ValueError(f"rows: expected shape [{len(wanted)}, {self.row_bytes}], got {list(rows.shape)}")
        with self.compactor.owing(rows.size + len(wanted) * ENTRY.itemsize):
            self.log.append(wanted, np.full(len(wanted), self.row_bytes, np.int64), rows)

    @shielded
    def read(self, keys: Any, out: NDArray[np.uint8] | None = None) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Read rows in one submission to the reader.

        Parameters
        ----------
        keys
            Integers [n]; may repeat.
        out
            uint8 [n, row_bytes], C-contiguous, to fill instead of allocating.

        Returns
        -------
        rows : numpy.ndarray
            uint8 [n, row_bytes]; zeros for a key without a row.
        found : numpy.ndarray
            bool [n].

        Raises
        ------
        CorruptionError
            When a page does not match its checksum.
        """
        wanted = self.log.checked_keys(keys)
        shape = (len(wanted), self.row_bytes)
        if out is None:
            out = empty_rows(*shape)
        elif not isinstance(out, np.ndarray) or out.dtype != np.uint8:
            raise TypeError(f"out: expected an array of uint8, got {getattr(out, 'dtype', type(out).__name__)}")
        elif out.shape != shape or not (out.flags.c_contiguous and out.flags.writeable):
            raise ValueError(f"out: expected a writable, C-contiguous array of shape {list(shape)}")
        with self.log.reading():
            found = self.log.find(wanted)
            in_file = found.there & ~found.in_tail
            if in_file.any():
                # Other keys read the first row that is in a file: one call fills `out` in place, at no more than the
                # cost of that page.
                first, others = int(np.argmax(in_file)), ~in_file
                found.handles[others], found.offsets[others] = found.handles[first], found.offsets[first]
                self.log.reader.read(found.handles, found.offsets, self.row_bytes, out)
            if not found.there.all():
                out[~found.there] = 0
            if found.copied is not None:
                out[found.in_tail] = found.copied
        return out, found.there

    def begin_read(self, keys: Ints, out: Bytes, flushes: bool = True) -> "PendingRead | None":
        """Begin to read rows, on a thread of the reader; None where :meth:`read` has to do it.

        Parameters
        ----------
        keys
            int64 [n].
        out
            uint8 [n, row_bytes], C-contiguous, to be left alone until the read has ended.
        flushes
            Whether to write rows that are in no file yet, where that is all they need; else an interrupt harms nothing.
        """
        return self.log.begin_read(keys, out, flushes)
