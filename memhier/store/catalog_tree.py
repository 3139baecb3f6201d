"""Reads the B-trees of an LMDB 0.9 file without mapping it.

LMDB trusts its file: it has no checksums, and a cut or flipped page can end the process with SIGSEGV or SIGBUS. So the
library lets LMDB only write, after the file was checked. Reads go through this walk, which compares every page with a
checksum kept elsewhere and believes no number before it is in range. LMDB never overwrites a page of its newest
snapshot, so a walk needs no lock: a page that does not match means that the snapshot is no longer the newest, or
damaged.

The structures are those of lmdb's ``mdb.c`` on 64-bit little-endian machines; FORMAT.md lists them.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memhier.errors import CorruptionError, FormatError
from memhier.files import File
from memhier.io.kernels import crc32c_pages
from memhier.io.page_file import PAGE_BYTES

__all__ = ["BLOCK_BYTES", "PAGE_SIZES", "CatalogTree", "Meta"]

BLOCK_BYTES = PAGE_BYTES  # Bytes per checksum; every LMDB page is a whole number of them.
PAGE_SIZES = (4096, 8192, 16384, 32768, 65536)
_HEAD_BYTES = 2**16
_READ_BYTES = 2**20
_MAGIC = 0xBEEFC0DE
_VERSION = 1
_NO_PAGE = 2**64 - 1
_DEPTH_LIMIT = 32  # LMDB's own cursor stack.
_BRANCH, _LEAF, _OVERFLOW, _META = 0x01, 0x02, 0x04, 0x08
_BIG_DATA = 0x01
_HEADER = struct.Struct("<QHHHH")  # page number, pad, flags, lower, upper
_META_HEAD = struct.Struct("<IIQQ")  # magic, version, address, map size
_DATABASE = struct.Struct("<IHHQQQQQ")  # page size (first one only), flags, depth, 3 page counts, entries, root
_META_TAIL = struct.Struct("<QQ")  # last page, transaction
_NODE = struct.Struct("<HHHH")  # low and high half of the size (or page), flags (or the page's top), key size


@dataclass(frozen=True, slots=True)
class Meta:
    """One of the two root pages: a snapshot."""

    transaction: int
    last_page: int
    free_root: int
    main_root: int
    entries: int


class CatalogTree:
    """Checked access to the pages of one LMDB file.

    Parameters
    ----------
    file
        Open for reading; stays the caller's.
    page_size
        Bytes per LMDB page; None takes it from the first root page, for files that have no guard yet.
    checksums
        uint32 [blocks], CRC32C of each 4096 bytes from the start; None believes the pages' contents (but no
        number in them).
    found
        Takes the damage that `walk` meets, which goes on behind it; None raises.
    """

    def __init__(
        self, file: File, page_size: int | None = None, checksums: NDArray[np.uint32] | None = None,
        found: list[CorruptionError] | None = None,
    ) -> None:  # fmt: skip
        self._file = file
        self._found = found
        self._checksums = checksums
        size = file.size()
        head = memoryview(bytearray(min(size, _HEAD_BYTES)))
        head = head[: file.read_into(head, 0)].toreadonly()
        self.page_size: int = page_size or self._page_size_of(head)
        self._limit = size // self.page_size
        # Read and checked at once: a small catalog needs no other read.
        self._head = head[: len(head) // self.page_size * self.page_size]
        self._head_checksums = np.empty(0, np.uint32) if checksums is None else crc32c_pages(self._head)

    def read_meta(self, transaction: int) -> Meta:
        """Return the root page at the place of a transaction's snapshot: two places take turns."""
        return Meta(*self._root(transaction & 1))

    def newest(self) -> Meta:
        """Return the root page of the newest snapshot."""
        return Meta(*max(self._root(0), self._root(1)))

    def checksum(self, numbers: NDArray[np.int64], out: NDArray[np.uint32]) -> None:
        """Set the checksums, in `out` by number of the block, of rising pages as they are now."""
        by_page = out.reshape(-1, self.page_size // BLOCK_BYTES)
        step = _READ_BYTES // self.page_size
        for start in range(0, len(numbers), step):
            some = numbers[start : start + step]
            runs = np.split(some, np.flatnonzero(np.diff(some) > 1) + 1)
            contents = b"".join([self._contents(int(run[0]), len(run)) for run in runs])
            by_page[some] = crc32c_pages(contents).reshape(len(some), -1)

    def _root(self, slot: int) -> tuple[int, int, int, int, int]:
        page = self._read(slot, 1)
        flags = _HEADER.unpack_from(page)[2]
        magic, version = _META_HEAD.unpack_from(page, _HEADER.size)[:2]
        if magic != _MAGIC or not flags & _META:
            raise self._damage(f"page {slot} is not a root page of LMDB")
        if version != _VERSION:
            raise FormatError(
                f"{self._file.path}: LMDB data version {version}, expected {_VERSION}; written by another LMDB"
            )
        offset = _HEADER.size + _META_HEAD.size
        page_size, *_, free_root = _DATABASE.unpack_from(page, offset)
        *_, entries, main_root = _DATABASE.unpack_from(page, offset + _DATABASE.size)
        last_page, transaction = _META_TAIL.unpack_from(page, offset + 2 * _DATABASE.size)
        if page_size != self.page_size:
            raise self._damage(f"root page {slot} says pages of {page_size} bytes, expected {self.page_size}")
        return transaction, last_page, free_root, main_root, entries

    def walk(self, meta: Meta) -> Iterator[tuple[bytes, bytes]]:
        """Check every page that a snapshot reaches, the list of free pages included, and yield its keys and values."""
        seen = {0, 1}
        for _ in self._walk(meta.free_root, seen, 0):
            pass
        count = 0
        for entry in self._walk(meta.main_root, seen, 0):
            count += 1
            yield entry
        if count != meta.entries:
            self._tell(self._damage(f"{count} entries, expected {meta.entries}"))

    def free_pages(self, meta: Meta) -> NDArray[np.bool_]:
        """Return which pages, up to the last, are free in a snapshot.

        The next transaction writes these pages and pages past the last, and no others.
        """
        free = np.zeros(min(meta.last_page + 1, self._limit), np.bool_)
        for _, value in self._walk(meta.free_root, {0, 1}, 0):
            # How many, then their numbers; room may be left behind them.
            numbers = np.frombuffer(value[: len(value) // 8 * 8], "<u8")
            if not len(numbers) or numbers[0] >= len(numbers):
                raise self._damage("a list of free pages is cut short")
            numbers = numbers[1 : int(numbers[0]) + 1]
            free[numbers[numbers < len(free)]] = True
        return free

    def _tell(self, error: CorruptionError) -> None:
        if self._found is None:
            raise error
        self._found.append(error)

    def _walk(self, number: int, seen: set[int], depth: int) -> Iterator[tuple[bytes, bytes]]:
        try:
            yield from self._walk_page(number, seen, depth)
        except CorruptionError as error:
            self._tell(error)

    def _walk_page(self, number: int, seen: set[int], depth: int) -> Iterator[tuple[bytes, bytes]]:
        if number == _NO_PAGE and depth == 0:
            return
        if number in seen or depth >= _DEPTH_LIMIT:
            raise self._damage(f"page {number} is reached twice")
        seen.add(number)
        page = self._read(number, 1)
        _, _, flags, lower, upper = _HEADER.unpack_from(page)
        if flags & (_BRANCH | _LEAF) not in (_BRANCH, _LEAF) or not _HEADER.size <= lower <= upper <= len(page):
            raise self._damage(f"page {number} is no page of a tree")
        for (position,) in struct.iter_unpack("<H", page[_HEADER.size : lower - lower % 2]):
            if position < upper or position + _NODE.size > len(page):
                raise self._damage(f"page {number}: an entry lies outside")
            low, high, node_flags, key_size = _NODE.unpack_from(page, position)
            data = position + _NODE.size + key_size
            if data > len(page):
                raise self._damage(f"page {number}: a key lies outside")
            if flags & _BRANCH:
                yield from self._walk(low | high << 16 | node_flags << 32, seen, depth + 1)
            else:
                key = bytes(page[position + _NODE.size : data])
                try:
                    value = self._value(page, number, data, low | high << 16, node_flags, seen)
                except CorruptionError as error:
                    self._tell(error)
                    continue
                yield key, value

    def _value(self, page: memoryview, number: int, data: int, size: int, flags: int, seen: set[int]) -> bytes:
        if not flags & _BIG_DATA:
            if data + size > len(page):
                raise self._damage(f"page {number}: a value lies outside")
            return bytes(page[data : data + size])
        if data + 8 > len(page):
            raise self._damage(f"page {number}: a reference lies outside")
        first = int.from_bytes(page[data : data + 8], "little")
        count = -(-(_HEADER.size + size) // self.page_size)
        if first in seen:
            raise self._damage(f"page {first} is reached twice")
        seen.add(first)
        run = self._read(first, count)
        if not _HEADER.unpack_from(run)[2] & _OVERFLOW:
            raise self._damage(f"page {first} does not hold a large value")
        return bytes(run[_HEADER.size : _HEADER.size + size])

    def _read(self, number: int, count: int) -> memoryview:
        """Return `count` consecutive pages, checked."""
        if number + count > self._limit:
            raise self._damage(f"pages {number} to {number + count - 1} lie past the end at page {self._limit}")
        contents = self._contents(number, count)
        if self._checksums is not None:
            blocks = slice(number * self.page_size // BLOCK_BYTES, (number + count) * self.page_size // BLOCK_BYTES)
            in_head = blocks.stop <= len(self._head_checksums)
            found = self._head_checksums[blocks] if in_head else crc32c_pages(contents)
            if not np.array_equal(found, self._checksums[blocks]):
                raise self._damage(f"page {number} does not match its checksum")
        return contents

    def _contents(self, number: int, count: int) -> memoryview:
        start, stop = number * self.page_size, (number + count) * self.page_size
        if stop <= len(self._head):
            return self._head[start:stop]
        contents = memoryview(bytearray(stop - start))
        if self._file.read_into(contents, start) != len(contents):
            raise self._damage(f"cut short while page {number} was read")
        return contents.toreadonly()

    def _page_size_of(self, head: memoryview) -> int:
        end = _HEADER.size + _META_HEAD.size + 4
        if len(head) >= end and _META_HEAD.unpack_from(head, _HEADER.size)[0] == _MAGIC:
            size = int.from_bytes(head[end - 4 : end], "little")
            if size in PAGE_SIZES:
                return size
        raise self._damage("does not begin with a root page of LMDB")

    def _damage(self, problem: str) -> CorruptionError:
        return CorruptionError(f"{self._file.path}: {problem}")
