"""Rows: fixed-width records in a segment of a store, by row number.

A read of a row that straddles two pages costs twice the bytes, so rows are packed into pages where little space is
lost that way: up to 1/11 of a page, which keeps a file within 1.1 times the raw bytes. Where a page would lose more,
and for rows wider than one, rows lie end to end ("dense"); the two pages of a straddling row are neighbours, and the
reader merges them into one I/O, so the price is bandwidth and not operations.
"""

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import check_int
from memhier.closing import Closing
from memhier.errors import ClosedError, CorruptionError, FormatError
from memhier.shield import shielded
from memhier.store.segments import PAGE_BYTES
from memhier.store.store import Store
from memhier.store.transaction import Transaction

if TYPE_CHECKING:
    from memhier.io.reader import Reader

__all__ = ["Rows", "RowsWriter"]

_RECORD = struct.Struct("<QQ")  # row bytes, rows
_WASTE_MAX = PAGE_BYTES // 11
_BLOCK_PAGES = 256
ROW_BYTES_MAX = 2**30


def rows_per_page(row_bytes: int) -> int | None:
    """Return how many rows a page takes without straddling, None where rows are better laid end to end."""
    wasted = PAGE_BYTES % row_bytes
    return PAGE_BYTES // row_bytes if row_bytes <= PAGE_BYTES and 0 < wasted <= _WASTE_MAX else None


class RowsWriter:
    """Writes rows in order into a new segment of a transaction.

    Parameters
    ----------
    tx
        The transaction; the rows exist once it is committed.
    name
        Of the segment, and of the catalog's value ``rows/<name>`` that describes it. Replacing or dropping the segment
        otherwise makes the rows unreadable.
    row_bytes
        Bytes per row, 1 to 2**30.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier import Reader, Rows, RowsWriter, Store
    >>> place = tempfile.mkdtemp() + "/store"
    >>> with Store.create(place, kind="example") as store, store.begin() as tx:
    ...     writer = RowsWriter(tx, "points", row_bytes=8)
    ...     writer.append(np.arange(6, dtype="<f4").view(np.uint8).reshape(3, 8))
    ...     writer.finish()
    ...     generation = tx.commit()
    >>> with Store.open(place, kind="example") as store, Reader() as reader:
    ...     Rows(store, "points", reader).read([2, 0]).view("<f4").tolist()
    [[4.0, 5.0], [0.0, 1.0]]
    """

    def __init__(self, tx: Transaction, name: str, row_bytes: int) -> None:
        self.row_bytes: int = check_int("row_bytes", row_bytes, 1, ROW_BYTES_MAX)
        self._tx = tx
        self._name = name
        self._segment = tx.segment(name)
        self._count = 0
        self._finished = False
        self._per_page = rows_per_page(self.row_bytes)
        # Packed rows are laid out in these pages; the padding of a page stays zero.
        self._pages: NDArray[np.uint8] = np.zeros((0 if self._per_page is None else _BLOCK_PAGES, PAGE_BYTES), np.uint8)
        self._waiting = 0

    def __len__(self) -> int:
        """Rows appended so far."""
        return self._count

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes, without that of the transaction."""
        return self._pages.nbytes

    def append(self, rows: NDArray[np.uint8]) -> None:
        """Append rows, uint8 [n, row_bytes], of any strides."""
        if self._finished:
            raise ClosedError(f"rows {self._name!r}: already finished")
        if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8:
            raise TypeError(f"rows: expected an array of uint8, got {getattr(rows, 'dtype', type(rows).__name__)}")
        if rows.ndim != 2 or rows.shape[1] != self.row_bytes:
            raise ValueError(f"rows: expected shape [n, {self.row_bytes}], got {list(rows.shape)}")
        if self._per_page is not None:
            self._append_packed(rows, self._per_page)
        else:
            # In blocks, so that rows that lie apart are never all copied at once.
            step = max(1, _BLOCK_PAGES * PAGE_BYTES // self.row_bytes)
            for start in range(0, len(rows), step):
                self._segment.append(np.ascontiguousarray(rows[start : start + step]))
        self._count += len(rows)

    def finish(self) -> None:
        """Describe the rows in the catalog. Without it they cannot be opened."""
        if self._finished:
            raise ClosedError(f"rows {self._name!r}: already finished")
        self._flush()
        self._finished = True
        self._tx.put(f"rows/{self._name}", _RECORD.pack(self.row_bytes, self._count))

    def _append_packed(self, rows: NDArray[np.uint8], per_page: int) -> None:
        places = self._pages[:, : per_page * self.row_bytes].reshape(_BLOCK_PAGES, per_page, self.row_bytes)
        done = 0
        while done < len(rows):
            page, place = divmod(self._waiting, per_page)
            full = min((len(rows) - done) // per_page, _BLOCK_PAGES - page) if place == 0 else 0
            if full:
                count = full * per_page
                places[page : page + full] = rows[done : done + count].reshape(full, per_page, self.row_bytes)
            else:
                count = min(per_page - place, len(rows) - done)
                places[page, place : place + count] = rows[done : done + count]
            done += count
            self._waiting += count
            if self._waiting == _BLOCK_PAGES * per_page:
                self._flush()

    def _flush(self) -> None:
        if self._per_page is None or self._waiting == 0:
            return
        pages, rest = divmod(self._waiting, self._per_page)
        # The last page ends with its last row; the segment pads it.
        self._segment.append(self._pages.reshape(-1)[: pages * PAGE_BYTES + rest * self.row_bytes])
        self._waiting = 0


class Rows(Closing):
    """Reads rows by number.

    Safe to use from many threads at a time, as the reader is.

    Parameters
    ----------
    store
        Open store.
    name
        The name that `RowsWriter` was given.
    reader
        Does the reads; stays the caller's.

    Raises
    ------
    FormatError
        When the store has no rows of this name.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier import Reader, Rows, RowsWriter, Store
    >>> with Store.create(tempfile.mkdtemp() + "/store", kind="example") as store, Reader() as reader:
    ...     with store.begin() as tx:
    ...         writer = RowsWriter(tx, "points", row_bytes=8)
    ...         writer.append(np.arange(6, dtype="<f4").view(np.uint8).reshape(3, 8))
    ...         writer.finish()
    ...         generation = tx.commit()
    ...     rows = Rows(store, "points", reader)
    ...     len(rows), rows.read([2, 0]).view("<f4").tolist(), rows.read_range(0, 2).view("<f4").tolist()
    (3, [[4.0, 5.0], [0.0, 1.0]], [[0.0, 1.0], [2.0, 3.0]])
    """

    def __init__(self, store: Store, name: str, reader: "Reader") -> None:
        record = store.get(f"rows/{name}")
        info = store.segments().get(name)
        if record is None or info is None:
            raise FormatError(f"{store.path}: no rows named {name!r}; its segments are {sorted(store.segments())}")
        if len(record) != _RECORD.size:
            raise CorruptionError(f"{store.path}: the record of rows {name!r} has {len(record)} bytes")
        self.row_bytes: Any
        self.row_bytes, self._count = _RECORD.unpack(record)
        if not 1 <= self.row_bytes <= ROW_BYTES_MAX:
            raise CorruptionError(
                f"{store.path}: the record of rows {name!r} says {self.row_bytes} bytes per row, expected 1 to "
                f"{ROW_BYTES_MAX}"
            )
        self._per_page = rows_per_page(self.row_bytes)
        if info.payload != self._offset(self._count):
            raise CorruptionError(
                f"{info.path}: {info.payload} bytes do not hold {self._count} rows of {self.row_bytes}"
            )
        self._reader = reader
        self._handle = store.attach(name, reader)

    def __len__(self) -> int:
        """How many rows there are."""
        return int(self._count)

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes, without that of store and reader: 0."""
        return 0

    def read(
        self, numbers: Any, out: NDArray[np.uint8] | None = None, tally: NDArray[Any] | None = None
    ) -> NDArray[np.uint8]:
        """Read rows in any order; each page is read once.

        Parameters
        ----------
        numbers
            int64 [n], each 0 to ``len(self) - 1``; may repeat.
        out
            uint8 [n, row_bytes], C-contiguous, to fill instead of allocating.
        tally
            As :meth:`memhier.Reader.read` takes it.

        Returns
        -------
        numpy.ndarray
            uint8 [n, row_bytes].

        Raises
        ------
        IndexError
            For a number out of range, naming it.
        CorruptionError
            When a page does not match its checksum.
        """
        rows = np.asarray(numbers)
        if rows.ndim != 1:
            raise ValueError(f"numbers: expected shape [n], got {list(rows.shape)}")
        if rows.size and rows.dtype.kind not in "iu":
            raise TypeError(f"numbers: expected integers, got {rows.dtype}")
        if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= self._count):
            index = int(np.flatnonzero((rows < 0) | (rows >= self._count))[0])
            raise IndexError(f"numbers[{index}]={int(rows[index])}: expected 0 to {self._count - 1}")
        offsets = self._offset(rows.astype(np.int64, copy=False))
        return self._reader.read(self._handle, offsets, self.row_bytes, out, tally=tally)

    def read_range(self, start: int, stop: int, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """Read the rows from `start` up to but not including `stop`, for passing over all of them in blocks.

        Parameters
        ----------
        start, stop
            Numbers of rows.
        out
            uint8 [stop - start, row_bytes], C-contiguous, to fill instead of allocating.

        Returns
        -------
        numpy.ndarray
            uint8 [stop - start, row_bytes].

        Raises
        ------
        IndexError
            Unless ``0 <= start <= stop <= len(self)``.
        """
        if not 0 <= start <= stop <= self._count:
            raise IndexError(f"start={start}, stop={stop}: expected 0 <= start <= stop <= {self._count}")
        return self.read(np.arange(start, stop), out)

    @shielded
    def close(self) -> None:
        """Detach from the reader."""
        handle, self._handle = self._handle, -1  # which may be another file's from now on
        self._reader.remove(handle)

    def _offset(self, rows: Any) -> Any:
        """Return where rows begin; for the count of all rows, where the last one ends."""
        if self._per_page is None:
            return rows * self.row_bytes
        return rows // self._per_page * PAGE_BYTES + rows % self._per_page * self.row_bytes
