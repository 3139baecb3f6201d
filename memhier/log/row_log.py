"""RowLog: rows of one width by key, changed by appending."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import check_int
from memhier.io.read_arguments import empty_rows
from memhier.log.core import BlockOf, Bytes, Flags, Ints
from memhier.log.parts import offset_of
from memhier.log.record_log import RecordLog
from memhier.rows.rows import ROW_BYTES_MAX, rows_per_page
from memhier.shield import shielded
from memhier.store.store import Store

if TYPE_CHECKING:
    from memhier.io.reader import Reader

__all__ = ["RowLog"]


class RowLog(RecordLog):
    """Rows of one width by int64 key, in a store; any number of rows may be replaced or deleted at any time.

    A change is an append to a log, so it costs no read, and is written in order whatever the order of the keys. What
    was appended is read at once by this log, and by others that open the store after :meth:`commit`. Until then it
    holds the store's one transaction: two logs of a store change by turns, a commit between them.

    One thread changes a log at a time; any number may read meanwhile. A read sees every row whole, as it was before or
    after a change that runs meanwhile. After a failed write the log refuses everything; the last commit is there when
    it is opened again.

    Parameters
    ----------
    store
        Open store; for writing, if the log is to be changed.
    name
        Of the log in the store: 1 to 70 letters, digits, ``-`` or ``_``. The store's segments whose names begin with it
        and the value ``log/<name>`` are the log's.
    row_bytes
        Bytes per row, 1 to 2**30.
    reader
        Does the reads; stays the caller's.
    capacity
        Most distinct keys at a time, 1 to 2**31 - 1: 36 bytes of DRAM are taken at once for each.
    compact_below
        While there are changes, a thread rewrites the parts of the log of which less than this share is alive; 0 to
        0.9, 0 never. Changes wait for a megabyte of it at most. :meth:`commit` moves what the thread has not of what is
        due: with 0.5 one byte for each that died, with 0.9 nine, so that the log takes little more than its rows
        divided by this. What is read is the same with and without. A forked child has to open a log of its own.
    key_space
        Where all keys are 0 to ``key_space - 1``: 8 bytes of DRAM for each possible key take the place of 36 for each
        of `capacity` where they are less, and `capacity` is then no limit.
    direct
        Write rows past the page cache, by a thread: for many megabytes a commit that are not read back soon.
    grows
        `key_space` is only what to begin with: a larger key doubles the DRAM taken for places.
    beside
        A log of the same store in whose transaction this one writes: one commit, of that log, makes both durable. They
        are changed by the same thread, fail together, and are closed together.

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
    >>> import tempfile, pathlib
    >>> from memhier.io.reader import Reader
    >>> place = pathlib.Path(tempfile.mkdtemp()) / "store"
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
        direct: bool = False,
        compact_below: float = 0,
        key_space: int | None = None,
        grows: bool = False,
        beside: RecordLog | None = None,
    ) -> None:
        self.row_bytes = check_int("row_bytes", row_bytes, 1, ROW_BYTES_MAX)
        if key_space is not None:
            check_int("key_space", key_space, 1, 2**63 - 1)
        super().__init__(
            store,
            name,
            reader,
            capacity,
            self.row_bytes,
            rows_per_page(self.row_bytes),
            direct,
            compact_below,
            key_space,
            grows,
            beside,
        )

    @shielded
    def append(self, keys: Any, rows: NDArray[np.uint8]) -> None:
        """Set rows. Where a key comes twice, its last row counts.

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
        self._check_open()
        wanted = self._as_keys(keys)
        if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8:
            raise TypeError(f"rows: expected an array of uint8, got {getattr(rows, 'dtype', type(rows).__name__)}")
        if rows.shape != (len(wanted), self.row_bytes):
            raise ValueError(f"rows: expected shape [{len(wanted)}, {self.row_bytes}], got {list(rows.shape)}")
        self._append(wanted, np.full(len(wanted), self.row_bytes, np.int64), rows)

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
            uint8 [n, row_bytes]; zeros where there is no row.
        found : numpy.ndarray
            bool [n].

        Raises
        ------
        CorruptionError
            When a page does not match its checksum.
        """
        self._check_open()
        wanted = self._as_keys(keys)
        shape = (len(wanted), self.row_bytes)
        if out is None:
            out = empty_rows(*shape)
        elif not isinstance(out, np.ndarray) or out.dtype != np.uint8:
            raise TypeError(f"out: expected an array of uint8, got {getattr(out, 'dtype', type(out).__name__)}")
        elif out.shape != shape or not (out.flags.c_contiguous and out.flags.writeable):
            raise ValueError(f"out: expected a writable, C-contiguous array of shape {list(shape)}")
        with self._reading():
            with self._lock:
                places = self._index.places(wanted)
                found: Flags = places >= 0
                in_tail = found & self._in_tail(places)
                in_file = found & ~in_tail
                from_tail = self._tail.rows(offset_of(places[in_tail]), self.row_bytes)
                any_in_file = bool(in_file.any())
                if any_in_file:
                    # What is in no file reads the first row that is: one call fills `out` in place, and a page that is
                    # read anyway is all that it costs.
                    places[~in_file] = places[int(np.argmax(in_file))]
                handles, offsets = self._files(places)
            if any_in_file:
                self._reader.read(handles, offsets, self.row_bytes, out)
            out[~found] = 0
            out[in_tail] = from_tail
        return out, found

    def _fetch(self, handles: NDArray[np.int32], offsets: Ints, lengths: Ints) -> Bytes:
        return self._reader.read(handles, offsets, self.row_bytes)

    def _block_of(self, records: Bytes) -> BlockOf:
        def block(start: int, stop: int, offsets: Ints) -> Bytes:
            rows = records[start:stop]
            if self._per_page is None:
                return np.ascontiguousarray(rows).reshape(-1)
            packed = np.zeros(int(offsets[-1] - offsets[0]) + self.row_bytes, np.uint8)
            places = np.lib.stride_tricks.sliding_window_view(packed, self.row_bytes, writeable=True)
            places[offsets - offsets[0]] = rows
            return packed

        return block
