"""Swaps under way: one thread reads and decodes what comes in, the step boundary puts it in place."""

import os
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memhier.recsys.replay.schema import Columns, Schema
from memhier.recsys.replay.storage.storage import StorageTier

__all__ = ["Carousel", "Swap"]

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Swap:
    """What a step brings in.

    Attributes
    ----------
    step
        In which it was decided.
    slots, positions
        int64 [k]: which position goes where.
    columns
        What is read of them.
    room
        The arrays that they lie in, which may be larger.
    late
        From a position to columns [1] that it has got since.
    """

    step: int
    slots: Ints
    positions: Ints
    columns: Columns
    room: Columns
    late: dict[int, Columns] = field(default_factory=dict)
    read: "Future[None] | None" = None

    @property
    def memory_bytes(self) -> int:
        """DRAM held."""
        return _bytes(self.room)


class Carousel:
    """Reads swaps in the order in which they were decided.

    Attributes
    ----------
    under_way
        Swaps that have not arrived, the oldest first.
    stalls, stall_s
        Swaps that were waited for, and seconds spent so.
    read_s
        Seconds that the thread has spent reading and decoding.
    """

    def __init__(self, storage: StorageTier, schema: Schema) -> None:
        self._storage = storage
        self._schema = schema
        self._thread: ThreadPoolExecutor | None = None
        self._spare: list[Columns] = []
        self._pid = os.getpid()
        self.under_way: deque[Swap] = deque()
        self.swapped = 0
        self.stalls = 0
        self.stall_s = 0.0
        self.read_s = 0.0

    @property
    def memory_bytes(self) -> int:
        """DRAM held by what was read and by what is kept to be filled again."""
        return sum(map(_bytes, self._spare)) + sum(swap.memory_bytes for swap in self.under_way)

    def issue(self, step: int, slots: Ints, positions: Ints) -> None:
        """Begin to read."""
        room = self._room(len(slots))
        columns = {name: column[: len(slots)] for name, column in room.items()}
        swap = Swap(step, slots, positions, columns, room)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "carousel")
        swap.read = self._thread.submit(self._read, swap)
        self.under_way.append(swap)

    def due(self, step: int) -> Swap | None:
        """Return the oldest swap, read or failed to be, if it was decided by a step; None when there is none.

        It stays under way until it has arrived: whoever is kept from putting it in place finds it again.
        """
        if not self.under_way or self.under_way[0].step > step:
            return None
        swap = self.under_way[0]
        assert swap.read is not None
        if not swap.read.done():
            start = time.perf_counter()
            self.stalls += 1
            try:
                swap.read.exception()
            finally:
                self.stall_s += time.perf_counter() - start
        return swap

    def settle(self) -> None:
        """Wait until everything under way was read; a failure is told when it is due."""
        for swap in self.under_way:
            if swap.read is not None:
                swap.read.exception()

    def arrived(self) -> None:
        """Let go of the oldest swap, which is in place; its memory is kept for another."""
        swap = self.under_way.popleft()
        if len(self._spare) < 2:
            self._spare.append(swap.room)

    def close(self) -> None:
        """Stop the thread."""
        if self._thread is not None and self._pid == os.getpid():
            self._thread.shutdown(wait=True, cancel_futures=True)
        self.under_way.clear()

    def _room(self, count: int) -> Columns:
        """Return columns to read so many samples into."""
        for index, columns in enumerate(self._spare):
            if len(next(iter(columns.values()))) >= count:
                return self._spare.pop(index)
        self._spare.clear()
        return self._schema.empty(count)

    def _read(self, swap: Swap) -> None:
        start = time.perf_counter()
        self._storage.read(swap.positions, swap.columns)
        self.read_s += time.perf_counter() - start


def _bytes(columns: Columns) -> int:
    return sum(column.nbytes for column in columns.values())
