"""The guard of a catalog: which transaction counts, and a checksum for each block of the file as that one left it."""

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memhier.errors import CorruptionError, FormatError
from memhier.files import File
from memhier.io.kernels import crc32c, crc32c_pages
from memhier.store.catalog_tree import BLOCK_BYTES, PAGE_SIZES, CatalogTree, Meta

__all__ = ["Guard", "Published"]

_MAGIC = b"mhguard1"
_HEAD = struct.Struct("<8sQQQ")  # magic, transaction, page size, blocks
_CHECKSUM = struct.Struct("<I")
_READ_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Guard:
    """What ``catalog.sum`` says."""

    transaction: int
    page_size: int
    checksums: NDArray[np.uint32]

    def encode(self) -> bytes:
        """Return the file's contents."""
        head = _HEAD.pack(_MAGIC, self.transaction, self.page_size, len(self.checksums))
        body = head + self.checksums.astype("<u4").tobytes()
        return body + _CHECKSUM.pack(crc32c(body))

    @classmethod
    def decode(cls, contents: bytes, path: str) -> "Guard":
        """Read the contents of the file at `path`."""
        body, checksum = contents[: -_CHECKSUM.size], contents[-_CHECKSUM.size :]
        if len(body) < _HEAD.size or checksum != _CHECKSUM.pack(crc32c(body)):
            raise CorruptionError(f"{path}: does not match its own checksum")
        magic, transaction, page_size, blocks = _HEAD.unpack_from(body)
        if magic != _MAGIC:
            raise FormatError(f"{path}: unknown format {magic!r}, expected {_MAGIC!r}")
        if len(body) != _HEAD.size + 4 * blocks:
            raise CorruptionError(f"{path}: {len(body)} bytes for {blocks} blocks")
        if page_size not in PAGE_SIZES or blocks % (page_size // BLOCK_BYTES):
            raise CorruptionError(f"{path}: {blocks} blocks in pages of {page_size} bytes")
        return cls(transaction, page_size, np.frombuffer(body, "<u4", blocks, _HEAD.size))


@dataclass(frozen=True, slots=True)
class Published:
    """A guard, and the pages that were free in its snapshot: the only ones that the next transaction may write.

    So a commit reads what it wrote and not the whole catalog; and a page that was damaged since does not get a checksum
    that fits the damage.
    """

    guard: Guard
    free: NDArray[np.bool_]

    @property
    def memory_bytes(self) -> int:
        """DRAM held."""
        return self.guard.checksums.nbytes + self.free.nbytes

    @classmethod
    def of(cls, file: File, tree: CatalogTree, meta: Meta, page_size: int, before: "Published | None") -> "Published":
        """Take the checksums of a snapshot that LMDB has made durable.

        Parameters
        ----------
        before
            Of the transaction before; None reads every page.
        """
        free = tree.free_pages(meta)
        pages = min(file.size() // page_size, meta.last_page + 1)
        stale, blocks = np.ones(pages, np.bool_), page_size // BLOCK_BYTES
        checksums = np.zeros(pages * blocks, np.uint32)
        if before is not None and before.guard.transaction + 1 == meta.transaction:
            known = min(pages, len(before.free), len(before.guard.checksums) // blocks)
            checksums[: known * blocks] = before.guard.checksums[: known * blocks]
            stale[:known] = before.free[:known]
            stale &= ~free[:pages]
            stale[meta.transaction & 1] = True
        numbers = np.flatnonzero(stale)
        for run in np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1):
            _read(file, checksums, int(run[0]) * blocks, int(run[-1] + 1) * blocks)
        return cls(Guard(meta.transaction, page_size, checksums), free)


def _read(file: File, checksums: NDArray[np.uint32], start: int, stop: int) -> None:
    """Set the checksums of a run of blocks."""
    step = _READ_BYTES // BLOCK_BYTES
    buffer = memoryview(bytearray(min(step, stop - start) * BLOCK_BYTES))
    for first in range(start, stop, step):
        block = buffer[: min(step, stop - first) * BLOCK_BYTES]
        if file.read_into(block, first * BLOCK_BYTES) != len(block):
            raise CorruptionError(f"{file.path}: cut short at {first * BLOCK_BYTES}")
        checksums[first : first + len(block) // BLOCK_BYTES] = crc32c_pages(block)
