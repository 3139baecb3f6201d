"""A file written past the page cache, by a thread, from two buffers: one is filled while the other is written."""

import mmap
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from memhier.files import File

__all__ = ["WriteBehind"]

_BUFFER_BYTES = 2**20


class WriteBehind:
    """Writes to a file that was opened with mode ``d``. A failed write is reported by the call after it."""

    memory_bytes = 2 * _BUFFER_BYTES

    def __init__(self, file: File) -> None:
        self._file = file
        # Anonymous maps begin on a page, as direct writes demand.
        self._buffers = [np.frombuffer(mmap.mmap(-1, _BUFFER_BYTES), np.uint8) for _ in range(2)]
        self._writes: list[Future[None] | None] = [None, None]
        self._turn = 0
        self._thread = ThreadPoolExecutor(1, "segment")

    def write(self, pages: NDArray[np.uint8], offset: int) -> None:
        """Have whole pages written at an offset; their memory may be changed afterwards."""
        for start in range(0, len(pages), _BUFFER_BYTES):
            piece = pages[start : start + _BUFFER_BYTES]
            self._wait(self._turn)
            buffer = self._buffers[self._turn][: len(piece)]
            buffer[:] = piece
            self._writes[self._turn] = self._thread.submit(self._file.pwrite, buffer.data, offset + start)
            self._turn = 1 - self._turn

    def drain(self) -> None:
        """Wait until the file has all pages."""
        # The older write first: its error comes first.
        self._wait(self._turn)
        self._wait(1 - self._turn)

    def close(self) -> None:
        """End the thread, after a write that is under way. The file stays open."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _wait(self, turn: int) -> None:
        write, self._writes[turn] = self._writes[turn], None
        if write is not None:
            write.result()
