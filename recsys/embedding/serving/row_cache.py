"""Rows of a table that is only read, held in DRAM by number."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from memhier.cache.slots import SlotMap
from memhier.policies import S3FIFO
from memhier.shield import shielded
from memhier.table.sizes import policy_bytes

__all__ = ["RowCache"]

Ints = NDArray[np.int64]
Rows = NDArray[Any]


class RowCache:
    """The rows that are used most (S3-FIFO), for any number of threads. A number always has the same row.

    Parameters
    ----------
    dram
        Bytes for all of it.
    width, dtype
        Of a row.
    batch
        Most rows of a call.
    """

    def __init__(self, dram: int, width: int, dtype: DTypeLike, batch: int) -> None:
        self.capacity: int = max(0, dram) // self.row_bytes(width, dtype)
        self._width, self._dtype = width, np.dtype(dtype)
        self._map = SlotMap(max(1, self.capacity), batch=min(batch, max(1, self.capacity)))
        self._policy = S3FIFO(max(1, self.capacity))
        self._rows: Rows = np.empty((self.capacity, width), dtype)
        self._lock = threading.Lock()
        self.hits: int = 0
        self.misses: int = 0

    @staticmethod
    def row_bytes(width: int, dtype: DTypeLike) -> int:
        """Return the DRAM of a row, with its share of the tables."""
        per_row = SlotMap.bytes_for(1000) / 1000 + policy_bytes("s3fifo")
        return width * np.dtype(dtype).itemsize + int(np.ceil(per_row))

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self._rows.nbytes + self._map.memory_bytes + self._policy.memory_bytes

    def rows(self, numbers: Ints, read: Callable[[Ints], Rows]) -> Rows:
        """Return rows, [n, width], a copy.

        Parameters
        ----------
        numbers
            int64 [n], distinct.
        read
            Returns the rows that are not held, by their positions in `numbers`, int64 [m].
        """
        found = np.empty((len(numbers), self._width), self._dtype)
        missing = self._take(numbers, found)
        if len(missing):
            found[missing] = read(missing)
        if self.capacity:
            self._use(numbers, found)
        return found

    def _take(self, numbers: Ints, out: Rows) -> Ints:
        """Fill in the rows that are held; return the positions of the others."""
        with self._lock:
            slots = self._map.find(numbers)
            there = slots >= 0
            out[there] = self._rows[slots[there]]
            missing = np.flatnonzero(~there)
            self.hits += len(numbers) - len(missing)
            self.misses += len(missing)
        return missing

    @shielded
    def _use(self, numbers: Ints, rows: Rows) -> None:
        """Let the policy see the numbers of a call, and hold the rows that it keeps."""
        step = max(1, self.capacity // 2)
        with self._lock:
            for start in range(0, len(numbers), step):
                some = numbers[start : start + step]
                self._map.erase(self._policy.access(some).evicted)
                new = np.flatnonzero(self._map.find(some) < 0)
                self._rows[self._map.insert(some[new])] = rows[start + new]
