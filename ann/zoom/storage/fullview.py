"""The fullview: full vectors on SSD, in list order, packed so that no vector straddles a page needlessly.

The row of a vector's code tells its place, so no map from id to address is held in DRAM.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.io.page_file import PAGE_BYTES
from memhier.rows.ranking import page_rows_of
from memhier.rows.rows import rows_per_page
from memhier.store.segments import SegmentWriter

__all__ = ["RowWriter", "SortedRows", "make_workspace", "raw_rows", "stored_bytes", "vectors_of", "workspace_bytes"]

_BUCKET_BYTES = 16 << 20  # twice as much is held while a bucket is written
_BLOCK_BYTES = 1 << 20

Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]


def workspace_bytes(row_bytes: int) -> int:
    """Return the DRAM for the rows of one submission of reads: 256 KiB, or 128 rows where these take more.

    Rows that lie whole in pages take none: they are ranked in the reader's buffers.
    """
    return 0 if page_rows_of(row_bytes) else max(256 << 10, 128 * row_bytes)


def make_workspace(row_bytes: int) -> Bytes:
    """Return room for the rows of one submission, uint8 ``[w, row_bytes]``."""
    return np.empty((workspace_bytes(row_bytes) // row_bytes, row_bytes), np.uint8)


def stored_bytes(count: int, row_bytes: int) -> int:
    """Return the bytes of `count` rows on SSD."""
    per_page = rows_per_page(row_bytes)
    pages = -(-count * row_bytes // PAGE_BYTES) if per_page is None else -(-count // per_page)
    return pages * PAGE_BYTES


def raw_rows(vectors: npt.NDArray[Any]) -> Bytes:
    """Return vectors ``[n, d]`` as they are stored, uint8 ``[n, row_bytes]``, little-endian."""
    little = np.ascontiguousarray(vectors, dtype=vectors.dtype.newbyteorder("<"))
    return little.view(np.uint8).reshape(len(vectors), -1)


def vectors_of(rows: Bytes, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the vectors that are stored as these rows, the inverse of :func:`raw_rows`."""
    return np.ascontiguousarray(rows).view(dtype.newbyteorder("<")).astype(dtype, copy=False)


class RowWriter:
    """Writes rows to a segment, packed by page.

    Parameters
    ----------
    segment
        Empty.
    row_bytes
        Bytes of a row.
    """

    def __init__(self, segment: SegmentWriter, row_bytes: int) -> None:
        self._segment, self._row_bytes = segment, row_bytes
        self._per_page = rows_per_page(row_bytes)
        self._rest = np.empty((0, row_bytes), np.uint8)  # of the last page

    def append(self, rows: Bytes) -> None:
        """Append rows uint8 ``[n, row_bytes]``, copying them block by block."""
        step = max(1, _BLOCK_BYTES // self._row_bytes)
        for start in range(0, len(rows), step):
            block = rows[start : start + step]
            if self._per_page is None:
                self._segment.append(np.ascontiguousarray(block))
                continue
            block = np.concatenate([self._rest, block])
            whole = len(block) // self._per_page * self._per_page
            self._write_pages(block[:whole])
            self._rest = block[whole:]

    def finish(self) -> None:
        """Fill the last page up with zeros, so that every row can be read before the commit."""
        if len(self._rest):
            assert self._per_page is not None
            self._write_pages(
                np.concatenate([self._rest, np.zeros((self._per_page - len(self._rest), self._row_bytes), np.uint8)])
            )
            self._rest = self._rest[:0]
        over = self._segment.length % PAGE_BYTES
        if over:
            self._segment.append(bytes(PAGE_BYTES - over))

    def _write_pages(self, rows: Bytes) -> None:
        if not len(rows):
            return
        assert self._per_page is not None
        pages = np.zeros((len(rows) // self._per_page, PAGE_BYTES), np.uint8)
        pages[:, : self._per_page * self._row_bytes] = rows.reshape(len(pages), -1)
        self._segment.append(pages)


class SortedRows:
    """Puts rows that come in any order into the order of their positions: an external sort.

    Rows go to buckets of neighbouring positions first. Each bucket is small enough to be put in order in DRAM, so the
    source and the disk are both read and written forward.

    Parameters
    ----------
    count, row_bytes
        Of all rows.
    scratch
        An existing directory for the buckets.
    """

    def __init__(self, count: int, row_bytes: int, scratch: Path) -> None:
        self.row_bytes = row_bytes
        self._staged = np.dtype([("position", "<i8"), ("row", "u1", (row_bytes,))])
        self._per_bucket = max(1, _BUCKET_BYTES // self._staged.itemsize)
        self._paths = [scratch / f"bucket-{b}" for b in range(-(-count // self._per_bucket))]
        self._moved: npt.NDArray[Any] | None = None

    @property
    def borders(self) -> Ints:
        """Positions where buckets begin: :meth:`move` keeps every row between two of them."""
        return np.arange(len(self._paths)) * self._per_bucket

    def move(self, places: npt.NDArray[Any]) -> None:
        """Write the row staged at each position at ``places[position]`` instead."""
        self._moved = places

    def add(self, positions: Ints, rows: Bytes) -> None:
        """Stage rows uint8 ``[n, row_bytes]`` with their positions, each position once in all."""
        staged = np.empty(len(rows), self._staged)
        staged["position"], staged["row"] = positions, rows
        bucket = positions // self._per_bucket
        order = np.argsort(bucket, kind="stable")
        bounds = np.searchsorted(bucket[order], np.arange(len(self._paths) + 1))
        for path, low, high in zip(self._paths, bounds[:-1], bounds[1:], strict=True):
            if low < high:
                with path.open("ab") as file:
                    file.write(staged[order[low:high]].data)

    def write(self, writer: RowWriter) -> Iterator[int]:
        """Write all rows in order, yield the number of rows after each bucket, and finish the writer."""
        for path in self._paths:
            ordered = self._ordered(path)
            writer.append(ordered)
            yield len(ordered)
            del ordered  # before the next bucket is read
        writer.finish()

    def _ordered(self, path: Path) -> Bytes:
        """Return the rows of a bucket in order, and drop its file."""
        staged = np.fromfile(path, self._staged)
        path.unlink()
        ordered = np.empty((len(staged), self.row_bytes), np.uint8)
        positions = staged["position"] if self._moved is None else self._moved[staged["position"]]
        ordered[positions - positions.min()] = staged["row"]
        return ordered
