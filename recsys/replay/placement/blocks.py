"""Values of different lengths in blocks of equal size, each value a chain of them: no bytes are lost between values."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK_BYTES", "Blocks", "BlocksLayout", "blocks_of"]

BLOCK_BYTES = 64

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


def blocks_of(sizes: Ints) -> Ints:
    """Return how many blocks values of so many bytes take."""
    return -(-sizes // BLOCK_BYTES)


class BlocksLayout(NamedTuple):
    """The bytes of a pool of blocks: first their contents, then the number of the next block of each, int32."""

    blocks: int

    @property
    def bytes(self) -> int:
        """Of the pool."""
        return self.blocks * (BLOCK_BYTES + 4)


class Blocks:
    """A pool of blocks in memory that others may read meanwhile; only the owner writes, and keeps the free ones.

    Parameters
    ----------
    layout
        Of the pool.
    flat
        Its bytes, read-only: they are all free.
    """

    def __init__(self, layout: BlocksLayout, flat: Bytes) -> None:
        self._layout = layout
        self._contents, self._next = _parts(layout, flat)
        self._free: NDArray[np.int32] | None = None  # a stack; made for the first write, as readers need none
        self._free_count = layout.blocks

    @property
    def count(self) -> int:
        """Of all blocks."""
        return self._layout.blocks

    @property
    def free_count(self) -> int:
        """Of blocks that no value has."""
        return self._free_count

    @property
    def memory_bytes(self) -> int:
        """DRAM held beside the pool: the numbers of the free blocks."""
        return 4 * self._layout.blocks

    def read(self, heads: NDArray[np.int32], sizes: Ints, out: Bytes) -> None:
        """Fill rows, uint8 [n, width], with values of so many bytes each, and zeros behind them.

        Numbers of blocks may be anything: another process may change them meanwhile.
        """
        width = out.shape[1]
        out[:] = 0
        taken = blocks_of(np.clip(sizes, 0, width))
        current = heads.astype(np.int64)
        for level in range(int(taken.max(initial=0))):
            some = np.flatnonzero(taken > level)
            start = level * BLOCK_BYTES
            stop = min(start + BLOCK_BYTES, width)
            contents = self._contents.take(current[some], axis=0, mode="clip")
            out[some, start:stop] = contents[:, : stop - start]
            current[some] = self._next.take(current[some], mode="clip")

    def free(self, flat: Bytes, heads: NDArray[np.int32], sizes: Ints) -> None:
        """Give back the blocks of values, overwritten with zeros."""
        contents, _ = _parts(self._layout, flat)
        taken = blocks_of(sizes)
        current = heads.astype(np.int64)
        stack = self._stack()
        for level in range(int(taken.max(initial=0))):
            some = np.flatnonzero(taken > level)
            numbers = current[some]
            contents[numbers] = 0
            stack[self._free_count : self._free_count + len(some)] = numbers
            self._free_count += len(some)
            current[some] = self._next[numbers]

    def put(self, flat: Bytes, values: Bytes, sizes: Ints) -> NDArray[np.int32]:
        """Write values, uint8 [n, width] of so many bytes each and zeros behind them; return the first block of each.

        There must be enough free blocks.
        """
        contents, following = _parts(self._layout, flat)
        taken = blocks_of(sizes)
        total = int(taken.sum())
        assert total <= self._free_count, "the swapper has made room"
        numbers = self._stack()[self._free_count - total : self._free_count].astype(np.int64)
        self._free_count -= total
        following[numbers[:-1]] = numbers[1:]
        starts = np.cumsum(taken) - taken
        for level in range(int(taken.max(initial=0))):
            some = np.flatnonzero(taken > level)
            piece = values[some, level * BLOCK_BYTES : (level + 1) * BLOCK_BYTES]
            contents[numbers[starts[some] + level], : piece.shape[1]] = piece
        heads = np.zeros(len(sizes), np.int32)
        heads[taken > 0] = numbers[starts[taken > 0]]
        return heads

    def _stack(self) -> NDArray[np.int32]:
        if self._free is None:
            self._free = np.arange(self._layout.blocks, dtype=np.int32)[::-1].copy()
        return self._free


def _parts(layout: BlocksLayout, flat: Bytes) -> tuple[Bytes, NDArray[np.int32]]:
    """Return the contents of the blocks and the numbers of the next ones, in place."""
    end = layout.blocks * BLOCK_BYTES
    return flat[:end].reshape(layout.blocks, BLOCK_BYTES), flat[end : layout.bytes].view(np.int32)
