"""Segments that wait out a full disk: what was appended stays in DRAM until the file has room for it."""

import errno
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.store.segments import BUFFER_BYTES, PAGE_BYTES, SegmentWriter, as_bytes

__all__ = ["FullError", "PatientSegmentWriter", "is_full", "said_as_full"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class FullError(OSError):
    """The disk is full, or a limit of it reached, and nothing has changed: the call may be made again."""


def is_full(error: BaseException) -> bool:
    """Whether an error says that there is no room, which may be made."""
    return isinstance(error, OSError) and error.errno in _FULL


@contextmanager
def said_as_full() -> Iterator[None]:
    """Raise errors of a full disk as `FullError`: where nothing has changed."""
    try:
        yield
    except FullError:
        raise
    except OSError as error:
        if not is_full(error):
            raise
        raise FullError(error.errno, error.strerror, error.filename) from error


class PatientSegmentWriter(SegmentWriter):
    """As `SegmentWriter`; a full disk aborts nothing.

    `append` takes everything, and is for callers that `settle` first: so one append at most waits beside a buffer.
    """

    def append(self, data: Any) -> int:
        """Append bytes and return the offset where they begin; they wait in DRAM where the file has no room."""
        self._check_open()
        source, offset = as_bytes(data), self._length
        self._hold(self._filled + len(source))
        self._buffer[self._filled : self._filled + len(source)] = source
        self._filled += len(source)
        self._length += len(source)
        try:
            self.settle()
        except FullError:
            return offset
        return offset

    def settle(self) -> None:
        """Write what waits, if it is a buffer's worth; raise FullError where that is not to be had."""
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
        """Write everything, so that `finish` needs no more room; what is appended afterwards takes its place."""
        self.flush()
        if self._filled:
            page = np.zeros(PAGE_BYTES, np.uint8)
            page[: self._filled] = self._buffer[: self._filled]
            with said_as_full():
                self._file.pwrite(page.data, self._pages * PAGE_BYTES)

    def _hold(self, wanted: int) -> None:
        if wanted > len(self._buffer):
            self._move(max(-(-wanted // PAGE_BYTES) * PAGE_BYTES, self._most))

    def _move(self, size: int) -> None:
        # Not from the heap, which would keep the memory a commit releases: pages that are not written take none.
        moved = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        moved[: self._filled] = self._buffer[: self._filled]
        self._buffer = moved

    def _put(self, pages: NDArray[np.uint8]) -> None:
        # Not at the file's end: what was written in part is written again.
        self._file.pwrite(pages.data, self._pages * PAGE_BYTES)
