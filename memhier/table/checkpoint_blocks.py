"""Which blocks of an array changed, and what rows held that change while their blocks wait to be saved."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from memhier.cache.slots import SlotMap

__all__ = ["BlockTracker"]

Ints = NDArray[np.int64]

_MOVE_BYTES = 2**18


class BlockTracker:
    """Copy on write in software: a row about to change is copied first, if the image being saved still needs it.

    By rows, though saving goes by blocks: where changes are scattered, that is far less to copy.

    Parameters
    ----------
    source
        uint8 [rows, row_bytes]: the array.
    block_rows
        Rows per block; the last block may have fewer.
    spares
        Copies of rows held at a time; whoever changes more waits until some were saved.
    clean
        Whether the last image is just what the array holds now.
    """

    def __init__(self, source: NDArray[np.uint8], block_rows: int, spares: int, clean: bool) -> None:
        self._source = source
        self._block_rows = block_rows
        count = -(-len(source) // block_rows)
        self._dirty: NDArray[np.bool_] = np.full(count, not clean)
        self._pending: NDArray[np.bool_] = np.zeros(count, np.bool_)  # of the image, not taken yet
        self._captured: Ints = np.empty(0, np.int64)
        self._position = 0
        self._slots = SlotMap(spares)
        self._spares: NDArray[np.uint8] = np.empty((spares, source.shape[1]), np.uint8)
        self._spares.fill(0)  # so that no change has to wait for the system to find the pages
        self._moving: NDArray[np.uint8] = np.empty((max(1, _MOVE_BYTES // source.shape[1]), source.shape[1]), np.uint8)
        self._preserved: NDArray[np.bool_] = np.zeros(len(source), np.bool_)
        self._waiting = 0
        self._changing: list[int] = []  # the threads that are changing rows now
        self._capturing = False
        self._state = threading.Condition()

    @property
    def memory_bytes(self) -> int:
        """DRAM held: the spares and where they are, a byte per row, 10 per block."""
        held = self._spares.nbytes + self._moving.nbytes + self._slots.memory_bytes
        return held + self._preserved.nbytes + 10 * len(self._dirty)

    def __len__(self) -> int:
        return len(self._dirty)

    @contextmanager
    def changing(self, rows: Ints) -> Iterator[None]:
        """Let the caller change these rows until the context ends."""
        thread = threading.get_ident()
        with self._state:
            self._state.wait_for(lambda: not self._capturing or thread in self._changing)
            self._changing.append(thread)
            try:
                self._dirty[rows // self._block_rows] = True
                self._preserve(rows)
            except BaseException:
                self._changing.remove(thread)
                raise
        try:
            yield
        finally:
            with self._state:
                self._changing.remove(thread)
                self._state.notify_all()

    def capture(self) -> int:
        """Begin an image of this moment, when no one is changing anything; return how many blocks it needs."""
        thread = threading.get_ident()
        with self._state:
            if thread in self._changing:
                raise RuntimeError("a checkpoint cannot begin inside of this thread's own change; end the change first")
            self._capturing = True
            try:
                self._state.wait_for(lambda: not self._changing)
                self._captured, self._position = np.flatnonzero(self._dirty), 0
                self._pending[:] = self._dirty
                self._dirty[:] = False
            finally:
                self._capturing = False
                self._state.notify_all()
            return len(self._captured)

    def take(self, out: NDArray[np.uint8]) -> Ints:
        """Copy blocks of the image that were not taken yet to the rows of `out`; return their numbers, none at the end.

        Where someone waits for a spare, blocks that give back some go first.
        """
        with self._state:
            if self._waiting and self._slots.free == 0:
                numbers = np.unique(self._slots.items()[0] // self._block_rows)[: len(out)]
            else:
                numbers = self._next(len(out))
        for block, place in zip(numbers.tolist(), out, strict=False):
            with self._state:
                self._copy(block, place)
                self._pending[block] = False
                self._state.notify_all()
        return numbers

    def give_up(self) -> None:
        """The image was not saved: its blocks are to be saved with the next one."""
        with self._state:
            self._dirty[self._captured] = True
            self._pending[:] = False
            rows = self._slots.items()[0]
            self._slots.erase(rows)
            self._preserved[rows] = False
            self._captured = np.empty(0, np.int64)
            self._state.notify_all()

    def _preserve(self, rows: Ints) -> None:
        while True:
            needed = rows[self._pending[rows // self._block_rows] & ~self._preserved[rows]]
            if not len(needed):
                return
            # A row that comes twice is copied twice, which costs less than to find out.
            some = needed[: self._slots.free]
            slots = self._slots.insert(some)
            for start in range(0, len(some), len(self._moving)):
                part = some[start : start + len(self._moving)]
                moving = self._moving[: len(part)]
                np.take(self._source, part, axis=0, out=moving, mode="clip")
                self._spares[slots[start : start + len(part)]] = moving
            self._preserved[some] = True
            if self._slots.free == 0:
                self._waiting += 1
                self._state.wait_for(lambda: self._slots.free > 0)
                self._waiting -= 1

    def _next(self, count: int) -> Ints:
        numbers: list[int] = []
        while len(numbers) < count and self._position < len(self._captured):
            block = int(self._captured[self._position])
            self._position += 1
            if self._pending[block]:
                numbers.append(block)
        return np.array(numbers, np.int64)

    def _copy(self, block: int, out: NDArray[np.uint8]) -> None:
        """Copy a block as it was at the moment of the image, and let go of its preserved rows.

        Under the lock no row can begin to change; those that may be changing just now were preserved, and are not read.
        """
        start = block * self._block_rows
        now = self._source[start : start + self._block_rows]
        out[now.size :] = 0
        image = out[: now.size].reshape(now.shape)
        preserved = self._preserved[start : start + len(now)]
        if not (len(self._slots) and preserved.any()):
            image[:] = now
            return
        row = np.dtype((np.void, now.shape[1]))
        np.copyto(image.view(row), now.view(row), where=~preserved[:, None])
        old = np.flatnonzero(preserved)
        image[old] = self._spares[self._slots.erase(start + old)]
        preserved[old] = False
