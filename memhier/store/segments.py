"""Writers of segments: files of whole pages that are only ever appended to."""

import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.errors import ClosedError
from memhier.files import File
from memhier.io.kernels import crc32c_pages
from memhier.shield import shielded
from memhier.store.contents import PAGE_BYTES, SegmentInfo

__all__ = [
    "BUFFER_BYTES", "PAGE_BYTES", "FullError", "PatientSegmentWriter", "SegmentWriter", "finish_segments",
    "is_full", "said_as_full",
]  # fmt: skip

BUFFER_BYTES = 2**20
_LEAST_BYTES = 2**14
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class FullError(OSError):
    """The disk is full, or a limit of it is reached, and nothing has changed: the call may be made again."""


def is_full(error: BaseException) -> bool:
    """Return whether an error is that of a full disk."""
    return isinstance(error, OSError) and error.errno in _FULL


@contextmanager
def said_as_full() -> Iterator[None]:
    """Raise errors of a full disk as `FullError`; for blocks that change nothing when they fail."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FullError) or not is_full(error):
            raise
        raise FullError(error.errno, error.strerror, error.filename) from error


class SegmentWriter:
    """Appends to a new segment. Made by `Transaction.segment`; for one thread.

    Writes wait in a buffer of `buffer_bytes` at most, less while little waits. Long pieces go straight to the file, so
    the memory held does not grow with the segment, but for 4 bytes of checksum per page.

    Attributes
    ----------
    name, path, file
        Of the segment in the catalog; of its file; the file, open.
    """

    def __init__(
        self, name: str, generation: int, path: Path, file: File, abort: Callable[[], None],
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:  # fmt: skip
        self.name = name
        self.path = path
        self._generation = generation
        self.file = file
        self._abort = abort
        self._most = buffer_bytes
        self._buffer: NDArray[np.uint8] = np.empty(min(_LEAST_BYTES, buffer_bytes), np.uint8)
        self._filled = 0
        self._length = 0
        self._pages = 0
        self._checksums: NDArray[np.uint32] = np.empty(buffer_bytes // PAGE_BYTES, np.uint32)
        self._pid = os.getpid()
        self._open = True

    @property
    def length(self) -> int:
        """Bytes appended so far."""
        return self._length

    @property
    def memory_bytes(self) -> int:
        """DRAM held by the buffers and the checksums."""
        return self._buffer.nbytes + self._checksums.nbytes

    @shielded
    def append(self, data: Any) -> int:
        """Append bytes and return the offset where they begin.

        Parameters
        ----------
        data
            Anything with a C-contiguous buffer.

        Raises
        ------
        ClosedError
            When the transaction is over.
        OSError
            When the write fails; the transaction is then aborted.
        """
        self._check_open()
        source = _as_bytes(data)
        offset = self._length
        try:
            while len(source):
                if self._filled == 0 and len(source) >= self._most:
                    # The buffer ends on a page, so the bytes after an empty one begin on a page: no copy is needed.
                    whole = min(len(source) // PAGE_BYTES * PAGE_BYTES, BUFFER_BYTES)
                    self._write(source[:whole])
                    source = source[whole:]
                    self._length += whole
                    continue
                self._make_room(self._filled + len(source))
                size = min(len(source), self._most - self._filled)
                self._buffer[self._filled : self._filled + size] = source[:size]
                source = source[size:]
                self._filled += size
                self._length += size
                if self._filled == self._most:
                    self._write(self._buffer)
                    self._filled = 0
        except BaseException:
            self._abort()
            raise
        return offset

    def flush(self) -> tuple[int, NDArray[np.uint32]]:
        """Write the whole pages that wait, so that others can read them before the commit.

        Returns
        -------
        length : int
            Bytes in the file; up to a page less than was appended. A crash may still take them.
        checksums : numpy.ndarray
            uint32 [length / 4096], CRC32C per page. A view that later appends leave as it is.

        Raises
        ------
        ClosedError, OSError
            As in `append`.
        """
        self._check_open()
        whole = self._filled // PAGE_BYTES * PAGE_BYTES
        try:
            if whole:
                self._write(self._buffer[:whole])
        except BaseException:
            self._abort()
            raise
        rest = self._filled - whole
        self._buffer[:rest] = self._buffer[whole : self._filled]
        self._filled = rest
        return self._pages * PAGE_BYTES, self._checksums[: self._pages]

    def complete(self) -> tuple[int, NDArray[np.uint32]]:
        """Fill up the last page and write everything: nothing is appended after it, and no buffer is held.

        Returns
        -------
        length, checksums
            As of `flush`.

        Raises
        ------
        ClosedError, OSError
            As in `append`.
        """
        self._check_open()
        try:
            self._fill_up()
        except BaseException:
            self._abort()
            raise
        self._filled, self._buffer = 0, np.empty(0, np.uint8)
        return self._pages * PAGE_BYTES, self._checksums[: self._pages]

    def info(self) -> SegmentInfo:
        """Describe the segment, once it is complete."""
        checksums = self._checksums[: self._pages].copy()
        checksums.flags.writeable = False
        length = self._pages * PAGE_BYTES
        return SegmentInfo(self.name, self.path, self._generation, length, self._length, checksums)

    @shielded
    def close(self) -> None:
        """Close the file; the segment is part of nothing."""
        self._open = False
        self.file.close()

    def _check_open(self) -> None:
        if not self._open:
            raise ClosedError(f"segment {self.name!r}: its transaction is over")
        if self._pid != os.getpid():
            # A forked child has the file open and the buffers filled, and would write over its parent's pages.
            raise ClosedError(f"segment {self.name!r}: belongs to process {self._pid}, which forked this one")

    def _fill_up(self) -> None:
        """Write the buffer, with zeros to the end of its last page."""
        end = -(-self._filled // PAGE_BYTES) * PAGE_BYTES
        self._buffer[self._filled : end] = 0
        if end:
            self._write(self._buffer[:end])

    def _make_room(self, wanted: int) -> None:
        """Let the buffer hold `wanted` bytes, rounded up to pages, or its limit."""
        size = len(self._buffer)
        if size < min(wanted, self._most):
            grown = np.empty(min(max(2 * size, -(-wanted // PAGE_BYTES) * PAGE_BYTES), self._most), np.uint8)
            grown[: self._filled] = self._buffer[: self._filled]
            self._buffer = grown

    def _write(self, pages: NDArray[np.uint8]) -> None:
        """Write whole pages behind those of the file. Pages that were written in part are written again."""
        count = len(pages) // PAGE_BYTES
        if self._pages + count > len(self._checksums):
            grown = np.empty(max(2 * len(self._checksums), self._pages + count), np.uint32)
            grown[: self._pages] = self._checksums[: self._pages]
            self._checksums = grown
        self._checksums[self._pages : self._pages + count] = crc32c_pages(pages)
        self.file.pwrite(pages.data, self._pages * PAGE_BYTES)
        self._pages += count


class PatientSegmentWriter(SegmentWriter):
    """Waits out a full disk: appended bytes stay in DRAM until the file has room, and nothing is aborted.

    `append` takes everything, so callers `settle` first: one append at most waits beside a buffer.
    """

    def append(self, data: Any) -> int:
        """Append bytes and return the offset where they begin; they wait in DRAM while the file has no room."""
        self._check_open()
        source, offset = _as_bytes(data), self._length
        if self._filled + len(source) > len(self._buffer):
            self._move(max(-(-(self._filled + len(source)) // PAGE_BYTES) * PAGE_BYTES, self._most))
        self._buffer[self._filled : self._filled + len(source)] = source
        self._filled += len(source)
        self._length += len(source)
        with suppress(FullError):
            self.settle()
        return offset

    def settle(self) -> None:
        """Write the waiting pages if they fill a buffer; raise FullError if the disk has no room for them."""
        if self._filled >= self._most:
            self.flush()

    def flush(self) -> tuple[int, NDArray[np.uint32]]:
        """Write the whole pages that wait; see `SegmentWriter.flush`. After a FullError it may be called again."""
        self._check_open()
        whole, start = self._filled // PAGE_BYTES * PAGE_BYTES, 0
        try:
            with said_as_full():
                while start < whole:
                    stop = min(start + BUFFER_BYTES, whole)
                    self._write(self._buffer[start:stop])
                    start = stop
        except FullError:
            raise
        except BaseException:
            self._abort()
            raise
        finally:
            self._filled -= start
            self._buffer[: self._filled] = self._buffer[start : start + self._filled].copy()
            if len(self._buffer) > self._most >= self._filled:
                self._move(self._most)
        return self._pages * PAGE_BYTES, self._checksums[: self._pages]

    def reserve(self) -> None:
        """Write everything, so that `complete` needs no more room; later appends take the place of the padding."""
        self.flush()
        if self._filled:
            page = np.zeros(PAGE_BYTES, np.uint8)
            page[: self._filled] = self._buffer[: self._filled]
            with said_as_full():
                self.file.pwrite(page.data, self._pages * PAGE_BYTES)

    def _move(self, size: int) -> None:
        # Not from the heap, which would keep the memory that a commit releases: unwritten pages of a map take none.
        moved = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        moved[: self._filled] = self._buffer[: self._filled]
        self._buffer = moved


def finish_segments(writers: Sequence[SegmentWriter]) -> list[SegmentInfo]:
    """Fill up the last pages of segments, then make their files durable, close and describe them."""
    for writer in writers:
        writer.complete()
    for writer in writers:
        writer.file.fdatasync()
        writer.close()
    return [writer.info() for writer in writers]


def _as_bytes(data: Any) -> NDArray[np.uint8]:
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("data: expected a C-contiguous buffer; numpy.ascontiguousarray makes one")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
