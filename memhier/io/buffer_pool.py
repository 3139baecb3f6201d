"""Pages of files held in DRAM, as the Python core keeps them: a read takes them from here in place of the device."""

import threading

import numpy as np
from numpy.typing import NDArray

from memhier import backend
from memhier.io.page_file import PAGE_BYTES
from memhier.policies import S3FIFO

__all__ = ["BufferPool", "held_page_bytes"]

_PAGE_BITS = 40
_TABLE_BYTES = 176  # of a page, in the tables of the compiled core, at most
_PYTHON_TABLE_BYTES = 640  # likewise in dicts
_ENTRY_BYTES = 200  # of a page in `_frames`, and of its frame while it is free


def held_page_bytes() -> int:
    """Return the DRAM of a page in a pool, with its share of the tables; for budgets made beforehand."""
    return PAGE_BYTES + (_PYTHON_TABLE_BYTES if backend.core is None else _TABLE_BYTES)


class BufferPool:
    """The pages that a reader holds. S3-FIFO says which leave, so one pass over many does not push out those in use.

    Parameters
    ----------
    pages
        That it may hold, at least 1.
    """

    def __init__(self, pages: int) -> None:
        self.room: int = pages
        self.hits: int = 0
        self._policy = S3FIFO(pages)
        self._pages: NDArray[np.uint8] = np.empty((pages, PAGE_BYTES), np.uint8)
        self._frames: dict[int, int] = {}  # by key
        self._free = list(range(pages))
        self._files: set[int] = set()
        self._lock = threading.Lock()

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes: of all pages that it may hold."""
        return self._pages.nbytes + self._policy.memory_bytes + self.room * _ENTRY_BYTES

    def __len__(self) -> int:
        return len(self._frames)

    def add_file(self, file: int) -> None:
        """Let the pages of a file enter from now on; `file` is a number that no other has had."""
        with self._lock:
            self._files.add(file)

    def drop_file(self, file: int) -> None:
        """Let the pages of a file leave, and none enter any more."""
        with self._lock:
            self._files.discard(file)
            gone = [key for key in self._frames if key >> _PAGE_BITS == file]
            self._policy.discard(np.array(gone, np.int64))
            self._free.extend(self._frames.pop(key) for key in gone)

    def take(self, file: int, first: int, count: int) -> NDArray[np.uint8] | None:
        """Return a copy of neighbouring pages, uint8 ``[count, 4096]``; None unless all are there."""
        keys = list(range(file << _PAGE_BITS | first, (file << _PAGE_BITS | first) + count))
        with self._lock:
            frames = [self._frames.get(key, -1) for key in keys]
            if -1 in frames:
                return None
            self._policy.replay(keys)
            self.hits += count
            return self._pages[frames]

    def put(self, file: int, number: int, page: NDArray[np.uint8]) -> None:
        """Take in a checked page, uint8 ``[4096]``, unless it is there or its file is gone."""
        key = file << _PAGE_BITS | number
        with self._lock:
            if key in self._frames or file not in self._files:
                return
            for victim in self._policy.access([key]).evicted.tolist():
                self._free.append(self._frames.pop(victim))
            frame = self._free.pop()
            self._frames[key] = frame
            self._pages[frame] = page
