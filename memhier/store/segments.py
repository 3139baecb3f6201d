"""Segments: files of whole pages that are only ever appended to, with a checksum per page kept in the catalog.

The checksum lies in the reference and not in the page: rows keep their powers of two, and a page that was written to
the wrong place is caught as well.
"""

import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.errors import ClosedError, CorruptionError
from memhier.files import File
from memhier.io.kernels import crc32c_pages
from memhier.shield import check_interrupt, shielded

__all__ = [
    "BUFFER_BYTES",
    "PAGE_BYTES",
    "SegmentInfo",
    "SegmentWriter",
    "as_bytes",
    "check_segment_name",
    "read_pages",
    "segment_file_name",
]

PAGE_BYTES = 4096
_CHUNK_PAGES = 8192  # Checksums per catalog entry: 32 MiB of a segment in 32 KiB.
BUFFER_BYTES = 2**20
_LEAST_BYTES = 2**14
_READ_BYTES = 4 * 2**20
_RECORD = struct.Struct("<QQQ")  # generation in the file's name, length, payload
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


def check_segment_name(name: str) -> None:
    """Refuse what would not make a plain file name."""
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: expected text")
    if not _NAME.fullmatch(name):
        raise ValueError(f"name={name!r}: expected 1 to 100 letters, digits, '-' or '_'")


@dataclass(frozen=True, slots=True, eq=False)
class SegmentInfo:
    """A committed segment.

    Attributes
    ----------
    name
        What the catalog calls it.
    path
        Its file.
    length
        Committed bytes, a whole number of pages; the file may be longer, and the rest does not exist.
    payload
        Bytes that were appended; up to a page less than `length`.
    checksums
        uint32 [length / 4096], CRC32C per page; None where the store was opened with ``verify="off"``.
    """

    name: str
    path: Path
    generation: int
    length: int
    payload: int
    checksums: NDArray[np.uint32] | None

    @classmethod
    def decode(cls, name: str, directory: Path, entries: Mapping[bytes, bytes], checked: bool) -> "SegmentInfo":
        """Assemble a segment from the entries of a catalog."""
        record = entries[b"segment/" + name.encode()]
        if len(record) != _RECORD.size:
            raise CorruptionError(f"{directory}: the record of segment {name!r} has {len(record)} bytes")
        if not _NAME.fullmatch(name):
            raise CorruptionError(f"{directory}: a segment is named {name!r}, which is no name of one")
        generation, length, payload = _RECORD.unpack(record)
        if length % PAGE_BYTES or length >= 2**63 or not 0 <= length - payload < PAGE_BYTES or generation >= 2**63:
            raise CorruptionError(
                f"{directory}: the record of segment {name!r} says generation {generation}, {payload} bytes in "
                f"pages of {length}"
            )
        info = cls(name, directory / segment_file_name(name, generation), generation, length, payload, None)
        if not checked:
            return info
        # Found before room is made for them: a length could be anything.
        chunks: list[bytes] = []
        for key, part in info.chunk_keys():
            chunk = entries.get(key, b"")
            if len(chunk) != 4 * (part.stop - part.start):
                raise CorruptionError(f"{directory}: {len(chunk)} bytes of checksums for {key!r}")
            chunks.append(chunk)
        checksums = np.frombuffer(b"".join(chunks), "<u4").astype(np.uint32)
        checksums.flags.writeable = False
        return cls(name, info.path, generation, length, payload, checksums)

    def encode(self) -> dict[bytes, bytes]:
        """Return the entries of the catalog that describe this segment."""
        assert self.checksums is not None
        entries = {b"segment/" + self.name.encode(): _RECORD.pack(self.generation, self.length, self.payload)}
        for key, part in self.chunk_keys():
            entries[key] = self.checksums[part].astype("<u4").tobytes()
        return entries

    def keys(self) -> list[bytes]:
        """Return the keys of the entries of `encode`."""
        return [b"segment/" + self.name.encode(), *(key for key, _ in self.chunk_keys())]

    def chunk_keys(self) -> Iterator[tuple[bytes, slice]]:
        """Yield the keys of the checksums and the pages that each covers."""
        pages = self.length // PAGE_BYTES
        for start in range(0, pages, _CHUNK_PAGES):
            key = f"pages/{self.name}.{self.generation:08d}/{start // _CHUNK_PAGES:08d}"
            yield key.encode(), slice(start, min(start + _CHUNK_PAGES, pages))

    @property
    def memory_bytes(self) -> int:
        """DRAM held by the checksums."""
        return 0 if self.checksums is None else self.checksums.nbytes


class SegmentWriter:
    """Appends to a new segment. Made by `Transaction.segment`; for one thread.

    Writes wait in a buffer, of 1 MiB where nothing else is said, less while little waits; long pieces go straight to
    the file, so that the memory held does not depend on what is written, but for 4 bytes of checksum per page.
    """

    def __init__(
        self,
        name: str,
        generation: int,
        path: Path,
        file: File,
        abort: Callable[[], None],
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self.name = name
        self.path = path
        self._generation = generation
        self._file = file
        self._abort = abort
        self._most = buffer_bytes
        self._buffer: NDArray[np.uint8] = np.empty(min(_LEAST_BYTES, buffer_bytes), np.uint8)
        self._filled = 0
        self._length = 0
        self._pages = 0
        self._checksums: NDArray[np.uint32] = np.empty(BUFFER_BYTES // PAGE_BYTES, np.uint32)
        self._pid = os.getpid()
        self._open = True

    @property
    def length(self) -> int:
        """Bytes appended so far."""
        return self._length

    @property
    def memory_bytes(self) -> int:
        """DRAM held by the buffer and the checksums."""
        return self._buffer.nbytes + self._checksums.nbytes

    @shielded
    def append(self, data: Any) -> int:
        """Append bytes and return the offset where they begin.

        Parameters
        ----------
        data
            Anything with a C-contiguous buffer.

        Raises
        ------
        ClosedError
            When the transaction is over.
        OSError
            When the write fails; the transaction is then aborted.
        """
        self._check_open()
        source = as_bytes(data)
        offset = self._length
        try:
            while len(source):
                if self._filled == 0 and len(source) >= self._most:
                    # The buffer ends on a page, so what follows an empty one begins on a page: no copy needed.
                    whole = min(len(source) // PAGE_BYTES * PAGE_BYTES, BUFFER_BYTES)
                    self._write(source[:whole])
                    source = source[whole:]
                    self._length += whole
                    continue
                self._make_room(self._filled + len(source))
                size = min(len(source), self._most - self._filled)
                self._buffer[self._filled : self._filled + size] = source[:size]
                source = source[size:]
                self._filled += size
                self._length += size
                if self._filled == self._most:
                    self._write(self._buffer)
                    self._filled = 0
        except BaseException:
            self._abort()
            raise
        return offset

    def flush(self) -> tuple[int, NDArray[np.uint32]]:
        """Write the whole pages that wait, so that others can read them before the commit.

        Returns
        -------
        length : int
            Bytes in the file; up to a page less than was appended. A crash may still take them.
        checksums : numpy.ndarray
            uint32 [length / 4096], CRC32C per page. A view that later appends leave as it is.

        Raises
        ------
        ClosedError, OSError
            As in `append`.
        """
        self._check_open()
        whole = self._filled // PAGE_BYTES * PAGE_BYTES
        try:
            if whole:
                self._write(self._buffer[:whole])
            self._drain()
        except BaseException:
            self._abort()
            raise
        rest = self._filled - whole
        self._buffer[:rest] = self._buffer[whole : self._filled]
        self._filled = rest
        return self._pages * PAGE_BYTES, self._checksums[: self._pages]

    def complete(self) -> tuple[int, NDArray[np.uint32]]:
        """Fill up the last page and write everything: nothing is appended after it, and no buffer is held.

        Returns
        -------
        length, checksums
            As of `flush`.

        Raises
        ------
        ClosedError, OSError
            As in `append`.
        """
        self._check_open()
        try:
            self._fill_up()
        except BaseException:
            self._abort()
            raise
        self._filled, self._buffer = 0, np.empty(0, np.uint8)
        return self._pages * PAGE_BYTES, self._checksums[: self._pages]

    def _fill_up(self) -> None:
        """Write what waits, with zeros to the end of its last page."""
        end = -(-self._filled // PAGE_BYTES) * PAGE_BYTES
        self._buffer[self._filled : end] = 0
        if end:
            self._write(self._buffer[:end])
        self._drain()

    def finish(self) -> SegmentInfo:
        """Fill up the last page, make the file durable, close it and describe it."""
        self._fill_up()
        self._file.fdatasync()
        self.close()
        checksums = self._checksums[: self._pages].copy()
        checksums.flags.writeable = False
        length = self._pages * PAGE_BYTES
        return SegmentInfo(self.name, self.path, self._generation, length, self._length, checksums)

    @shielded
    def close(self) -> None:
        """Close the file; what was appended is part of nothing."""
        self._open = False
        self._file.close()

    def _check_open(self) -> None:
        if not self._open:
            raise ClosedError(f"segment {self.name!r}: its transaction is over")
        if self._pid != os.getpid():
            # A forked child has the file open and the buffers filled, and would write where its parent does.
            raise ClosedError(f"segment {self.name!r}: belongs to process {self._pid}, which forked this one")

    def _make_room(self, wanted: int) -> None:
        """Let the buffer hold so many bytes, and those of whole pages, as far as it may."""
        size = len(self._buffer)
        if size < min(wanted, self._most):
            grown = np.empty(min(max(2 * size, -(-wanted // PAGE_BYTES) * PAGE_BYTES), self._most), np.uint8)
            grown[: self._filled] = self._buffer[: self._filled]
            self._buffer = grown

    def _write(self, pages: NDArray[np.uint8]) -> None:
        count = len(pages) // PAGE_BYTES
        if self._pages + count > len(self._checksums):
            grown = np.empty(2 * len(self._checksums), np.uint32)
            grown[: self._pages] = self._checksums[: self._pages]
            self._checksums = grown
        self._checksums[self._pages : self._pages + count] = crc32c_pages(pages)
        self._put(pages)
        self._pages += count

    def _put(self, pages: NDArray[np.uint8]) -> None:
        """Hand pages to the file; the memory may be written again afterwards."""
        self._file.append(pages.data)

    def _drain(self) -> None:
        """Wait until the file has all that was handed to it. Here it has it at once."""


def read_pages(file: File, info: SegmentInfo, out: NDArray[np.uint8] | None = None) -> list[int]:
    """Read a segment from end to end and return the pages that do not match their checksum.

    Parameters
    ----------
    file
        The segment's file, open for reading.
    out
        uint8 [length] to fill; None reads only to check.

    Raises
    ------
    CorruptionError
        When the file is shorter than was committed.
    """
    size = min(_READ_BYTES, info.length)
    buffer = np.empty(0 if out is not None else size, np.uint8)
    damaged: list[int] = []
    for start in range(0, info.length, _READ_BYTES):
        if out is None:
            check_interrupt()
        stop = min(start + _READ_BYTES, info.length)
        block = buffer[: stop - start] if out is None else out[start:stop]
        if file.read_into(block.data, start) != len(block):
            raise CorruptionError(f"{info.path}: {file.size()} bytes, but {info.length} were committed")
        if info.checksums is not None:
            first = start // PAGE_BYTES
            wrong = crc32c_pages(block) != info.checksums[first : first + len(block) // PAGE_BYTES]
            damaged.extend((np.flatnonzero(wrong) + first).tolist())
    return damaged


def segment_file_name(name: str, generation: int) -> str:
    """Return the name of a segment's file. No two segments ever share one, so a file found is the file meant."""
    return f"{name}.{generation:08d}.seg"


def as_bytes(data: Any) -> NDArray[np.uint8]:
    """Return what a C-contiguous buffer holds."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("data: expected a C-contiguous buffer; numpy.ascontiguousarray makes one")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
