"""Segments written past the page cache, by a thread, from two buffers: one is filled while the other is written."""

import mmap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memhier.files import File
from memhier.store.segments import SegmentWriter

__all__ = ["DirectSegmentWriter"]

_BUFFER_BYTES = 2**20


class DirectSegmentWriter(SegmentWriter):
    """As `SegmentWriter`, for long segments that nobody will read soon. Its file was opened with mode ``d``.

    A failed write is reported by the call after it.
    """

    def __init__(
        self, name: str, generation: int, path: Path, file: File, abort: Callable[[], None], buffer_bytes: int
    ) -> None:
        super().__init__(name, generation, path, file, abort, buffer_bytes)
        # Anonymous maps begin on a page, as direct writes demand.
        self._buffers = [np.frombuffer(mmap.mmap(-1, _BUFFER_BYTES), np.uint8) for _ in range(2)]
        self._writes: list[Future[int] | None] = [None, None]
        self._turn = 0
        self._thread = ThreadPoolExecutor(1, "segment")

    @property
    def memory_bytes(self) -> int:
        """DRAM held by the buffers and the checksums."""
        return super().memory_bytes + 2 * _BUFFER_BYTES

    def close(self) -> None:
        """Close the file, after a write that is under way."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        super().close()

    def _put(self, pages: NDArray[np.uint8]) -> None:
        for start in range(0, len(pages), _BUFFER_BYTES):
            piece = pages[start : start + _BUFFER_BYTES]
            self._wait(self._turn)
            buffer = self._buffers[self._turn][: len(piece)]
            buffer[:] = piece
            self._writes[self._turn] = self._thread.submit(self._file.append, buffer.data)
            self._turn = 1 - self._turn

    def _drain(self) -> None:
        # The older write first: what it reports comes first.
        self._wait(self._turn)
        self._wait(1 - self._turn)

    def _wait(self, turn: int) -> None:
        write, self._writes[turn] = self._writes[turn], None
        if write is not None:
            write.result()
