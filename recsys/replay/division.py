"""The division of a memory budget in bytes: buffers that follow it, the index of storage, and the slots of memory."""

from dataclasses import dataclass
from typing import Self

from memhier.io.page_file import PAGE_BYTES
from memhier.io.reader import Reader
from memhier.log.tail import BLOCK_BYTES, LogTail

__all__ = ["Buffers"]

_BLOCK_SHARE, _BLOCK_LEAST = 256, 2**13
_DEPTH_SHARE, _DEPTH_LEAST, _DEPTH = 2**18, 4, 128
_STAGED_SHARE, _STAGED = 128, 2**18
_AHEAD_SHARE = 16
_TOGETHER = 32 * 2**20
# A reader's plan and rings, and the bytes of each read in flight; the boundary of steps and the thread read at a time.
_CONTEXTS, _CONTEXT_BYTES, _FLIGHT_BYTES = 2, 66 * 2**10, 6600
_CATALOG_BYTES = 2**16  # and rows of the index, as a checkpoint packs them


@dataclass(frozen=True, slots=True)
class Buffers:
    """The sizes of everything that neither holds samples for good nor grows with storage; by default of no budget.

    Attributes
    ----------
    block
        Bytes that a log writes in one piece.
    depth
        Reads in flight.
    staged
        Bytes of samples that wait to be written together.
    ahead
        Bytes of samples that are read before their step; None for no limit.
    together
        Bytes of samples that are read together where many are.
    stored
        Samples of storage that there is room for at once in the index; None where it grows as they come.
    """

    block: int = BLOCK_BYTES
    depth: int = _DEPTH
    staged: int = _STAGED
    ahead: int | None = None
    together: int = _TOGETHER
    stored: int | None = None

    @classmethod
    def within(cls, dram: int, stored: int | None) -> Self:
        """Return the buffers of a budget, beside a storage of so many samples."""
        block = max(_BLOCK_LEAST, min(dram // _BLOCK_SHARE, BLOCK_BYTES) // PAGE_BYTES * PAGE_BYTES)
        depth = max(_DEPTH_LEAST, min(dram // _DEPTH_SHARE, _DEPTH))
        ahead = dram // _AHEAD_SHARE
        return cls(block, depth, min(dram // _STAGED_SHARE, _STAGED), ahead, min(ahead, _TOGETHER), stored)

    @property
    def reader_bytes(self) -> int:
        """DRAM of the reader."""
        return _CONTEXTS * (_CONTEXT_BYTES + _FLIGHT_BYTES * self.depth)

    def reader(self) -> Reader:
        """Return a reader that takes no more; the engines' buffers differ, so some have fewer reads in flight."""
        depth = self.depth
        while True:
            reader = Reader(depth=depth)
            taken = reader.memory_bytes if reader.compiled is None else _CONTEXTS * reader.planned_bytes
            if taken <= self.reader_bytes or depth == 1 or self.ahead is None:
                return reader
            reader.close()
            depth //= 2

    def bytes_for(self, record_bytes: list[int]) -> int:
        """Return the DRAM of all buffers, beside logs of records of these sizes, 0 for different ones."""
        logs = sum(LogTail.bytes_for(self.block, size) + 4 * self.block for size in record_bytes)
        return logs + self.reader_bytes + self.staged + (self.ahead or 0) + _CATALOG_BYTES
