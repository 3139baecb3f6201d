"""Which blocks of an array changed, and what those held that change while they wait to be saved."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlockTracker"]

Ints = NDArray[np.int64]


class BlockTracker:
    """Copy on write in software: a block about to change is copied first, if the image being saved still needs it.

    Parameters
    ----------
    source
        uint8 [bytes]: the array, in blocks of `block_bytes`, the last one maybe shorter.
    spares
        Copies held at a time; whoever changes one block more waits until one was saved.
    clean
        Whether the last image is just what the array holds now.
    """

    def __init__(self, source: NDArray[np.uint8], block_bytes: int, spares: int, clean: bool) -> None:
        self._source = source
        self._block_bytes = block_bytes
        count = -(-len(source) // block_bytes)
        self._dirty: NDArray[np.bool_] = np.full(count, not clean)
        self._pending: NDArray[np.bool_] = np.zeros(count, np.bool_)
        self._captured: Ints = np.empty(0, np.int64)
        self._position = 0
        self._spares: NDArray[np.uint8] = np.zeros((spares, block_bytes), np.uint8)
        self._free = list(range(spares))
        self._preserved: dict[int, int] = {}
        self._changing: list[int] = []  # the threads that are changing blocks now
        self._capturing = False
        self._state = threading.Condition()

    @property
    def memory_bytes(self) -> int:
        """DRAM held: 10 bytes per block, and the spares."""
        return self._spares.nbytes + 10 * len(self._dirty)

    def __len__(self) -> int:
        return len(self._dirty)

    @contextmanager
    def changing(self, blocks: Ints) -> Iterator[None]:
        """Let the caller change these blocks until the context ends."""
        thread = threading.get_ident()
        with self._state:
            self._state.wait_for(lambda: not self._capturing or thread in self._changing)
            self._changing.append(thread)
            try:
                self._dirty[blocks] = True
                for block in np.unique(blocks[self._pending[blocks]]).tolist():
                    self._preserve(block)
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

        What had to be preserved goes first: someone may be waiting for its place.
        """
        with self._state:
            numbers: list[int] = []
            while len(numbers) < len(out) and self._preserved:
                block, spare = self._preserved.popitem()
                out[len(numbers), : self._block_bytes] = self._spares[spare]
                self._free.append(spare)
                numbers.append(block)
                self._pending[block] = False
            while len(numbers) < len(out) and self._position < len(self._captured):
                block = int(self._captured[self._position])
                self._position += 1
                if self._pending[block] and block not in self._preserved:
                    self._copy(block, out[len(numbers)])
                    numbers.append(block)
                    self._pending[block] = False
            self._state.notify_all()
        return np.array(numbers, np.int64)

    def give_up(self) -> None:
        """The image was not saved: its blocks are to be saved with the next one."""
        with self._state:
            self._dirty[self._captured] = True
            self._pending[:] = False
            self._free.extend(self._preserved.values())
            self._preserved.clear()
            self._captured = np.empty(0, np.int64)
            self._state.notify_all()

    def _preserve(self, block: int) -> None:
        self._state.wait_for(lambda: not self._pending[block] or block in self._preserved or self._free)
        if self._pending[block] and block not in self._preserved:
            spare = self._free.pop()
            self._copy(block, self._spares[spare])
            self._preserved[block] = spare

    def _copy(self, block: int, out: NDArray[np.uint8]) -> None:
        contents = self._source[block * self._block_bytes : (block + 1) * self._block_bytes]
        out[: len(contents)] = contents
        out[len(contents) :] = 0
