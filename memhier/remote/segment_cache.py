"""The extents of one segment on the local SSD: a sparse file of the segment's length, and a mark for each extent.

The marks lie in a file that processes share in memory, so a process sees the extents that another brought. Nothing is
synced: a mark that survived a power cut without its bytes is found by the checksums of the pages, and so is an extent
that another process took away while this one read it. The extent is then brought once more.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from memhier.files import FileBase, RealFiles, close_with
from memhier.io.kernels import crc32c_pages
from memhier.store.contents import PAGE_BYTES, SegmentInfo

if TYPE_CHECKING:
    from memhier.remote.extent_cache import ExtentCache

__all__ = ["EXTENT_BYTES", "SegmentCache", "remove_unheld", "suppress_full"]

EXTENT_BYTES = 64 * 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PAGES = EXTENT_BYTES // PAGE_BYTES
_REPAIRS = 4
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


class SegmentCache(FileBase):
    """A segment as a local file whose absent extents come from a place. It is a file of the store's file layer, for
    reading, and a `memhier.io.page_source.PageSource`.

    Parameters
    ----------
    cache
        Brings extents.
    path
        The file; its marks lie beside it, with the suffix ``.map``.
    info
        The segment, with checksums.
    objects, chunk_bytes
        Its objects, and the bytes of each.
    """

    extent_bytes = EXTENT_BYTES

    def __init__(
        self, cache: "ExtentCache", path: Path, info: SegmentInfo, objects: Sequence[str], chunk_bytes: int
    ) -> None:
        assert info.checksums is not None
        self.objects: tuple[str, ...] = tuple(objects)
        self.chunk_bytes: int = chunk_bytes
        self._cache, self._checksums, self._length = cache, info.checksums, info.length
        self._path = str(path)
        self._swept = 0
        self._file = RealFiles().open(self._path, "a")
        self._file.lock(exclusive=False)  # others leave it there
        if self._file.size() != info.length:
            self._file.truncate(info.length)
        self._descriptor = os.open(self._path, os.O_RDWR)  # to give space back, even once the name is gone
        close_with(self, self._descriptor)
        self.marks: NDArray[np.uint8] = _shared_marks(path.with_suffix(".map"), -(-info.length // EXTENT_BYTES))
        if os.fstat(self._descriptor).st_blocks * 512 > (self.present + 1) * EXTENT_BYTES:
            self._give_back(np.flatnonzero(self.marks == 0))  # of a process that died before it marked them

    @property
    def path(self) -> str:
        """The file."""
        return self._path

    @property
    def present(self) -> int:
        """Extents that are present."""
        return int(np.count_nonzero(self.marks))

    def size(self) -> int:
        """Bytes of the segment."""
        return self._length

    def read_into(self, buffer: bytearray | memoryview, offset: int) -> int:
        """Fill `buffer` with whole pages from `offset`, where a page begins."""
        view = memoryview(buffer).cast("B")[: max(0, self._length - offset)]
        extents = range(offset // EXTENT_BYTES, -(-(offset + len(view)) // EXTENT_BYTES))
        for _ in range(_REPAIRS):
            with suppress_full():
                if absent := [extent for extent in extents if not self.marks[extent]]:
                    self.fetch([(self, extent) for extent in absent])
            count = self._file.read_into(view, offset)
            wrong = self.wrong_pages(np.frombuffer(view, np.uint8), offset // PAGE_BYTES)
            if count == len(view) and not len(wrong):
                return count
            for page in wrong.tolist():
                self.forget(page)
        self._cache.read_past(self, view, offset)  # its room is too small, or others take that away
        return len(view)

    def wrong_pages(self, contents: NDArray[np.uint8], first: int) -> NDArray[np.int64]:
        """Return the pages that do not match their checksums, of some from `first` on."""
        count = len(contents) // PAGE_BYTES
        return np.flatnonzero(crc32c_pages(contents) != self._checksums[first : first + count]) + first

    def fetch(self, wanted: Sequence[tuple[Self, int]]) -> None:
        """Bring extents of this and other segments of the cache."""
        self._cache.fetch(wanted)

    def forget(self, page: int) -> None:
        """Mark the extent of a page as absent."""
        self.marks[page // _PAGES] = 0

    def gone(self) -> OSError:
        """Return the error of a call whose pages did not stay; see `memhier.io.page_source`."""
        said = (
            "the cache does not keep the pages of a call until they are read: it has too little room, or its disk is "
            "damaged; raise cache_bytes, make room on the disk, or pass another folder as cache"
        )
        return OSError(errno.ENOSPC, said, str(self._cache.folder))

    def keep(self, first: int, contents: bytes) -> None:
        """Write extents that were brought, from number `first` on, and mark them as used.

        Raises
        ------
        OSError
            When they cannot be written, on a full disk for one; they take no space then.
        """
        extents = slice(first, first + -(-len(contents) // EXTENT_BYTES))
        try:
            self._file.pwrite(contents, first * EXTENT_BYTES)
        except OSError:
            self.marks[extents] = 0
            self._punch(first * EXTENT_BYTES, len(contents))
            raise
        self.marks[extents] = 2

    def sweep(self, most: int) -> tuple[int, bool]:
        """Take away up to `most` extents that were not used since the last sweep; go on where that ended.

        Returns
        -------
        taken : int
        finished : bool
            Whether the sweep came to the end; the next one begins at the first extent.
        """
        marks = self.marks[self._swept :]
        idle = np.flatnonzero(marks == 1)[:most]
        stop = int(idle[-1]) + 1 if len(idle) == most else len(marks)
        used = np.flatnonzero(marks[:stop] == 2)
        marks[idle] = 0  # before the bytes go
        marks[used] = 1
        self._give_back(idle + self._swept)
        finished = self._swept + stop == len(self.marks)
        self._swept = 0 if finished else self._swept + stop
        return len(idle), finished

    def lock(self, *, exclusive: bool) -> bool:
        """Take the file's lock; see `memhier.files`."""
        return self._file.lock(exclusive=exclusive)

    def append(self, data: Any) -> int:
        """Refuse: a backup is only read, and so in `pwrite` and `truncate`."""
        raise self._read_only()

    def pwrite(self, data: Any, offset: int) -> None:
        """Refuse."""
        raise self._read_only()

    def truncate(self, length: int) -> None:
        """Refuse."""
        raise self._read_only()

    def fdatasync(self) -> None:
        """Do nothing: see the module."""

    def _read_only(self) -> OSError:
        return OSError(errno.EROFS, "a backup is open for reading", self._path)

    def close(self) -> None:
        """Do nothing: readers that have the segment keep it. The file is closed once it is forgotten."""

    def _give_back(self, extents: NDArray[np.int64]) -> None:
        """Give the disk space of extents back, which are marked as absent."""
        for run in np.split(extents, np.flatnonzero(np.diff(extents) > 1) + 1) if len(extents) else []:
            self._punch(int(run[0]) * EXTENT_BYTES, len(run) * EXTENT_BYTES)

    def _punch(self, start: int, length: int) -> None:
        """Give the disk space of a range back; of the whole file where the file system cannot do less."""
        descriptor = self._descriptor
        call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
        if call is None or call(descriptor, _PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(length)):
            self.marks[:] = 0
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, self._length)


def remove_unheld(folder: Path, named: Collection[Path]) -> None:
    """Remove the segments of other generations that no process has open."""
    files = RealFiles()
    for path in folder.glob("*.seg"):
        if path not in named:
            with files.open(str(path), "r") as file:
                if file.lock(exclusive=True):
                    path.with_suffix(".map").unlink(missing_ok=True)
                    path.unlink(missing_ok=True)


@contextmanager
def suppress_full() -> Iterator[None]:
    """Go on behind the block if the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise


def _shared_marks(path: Path, count: int) -> NDArray[np.uint8]:
    """Return the marks in a file, in memory that all processes share."""
    if not count:
        return np.empty(0, np.uint8)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            os.posix_fallocate(descriptor, 0, count)  # a full disk is an error here, and a signal in mapped memory
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}; pass another folder as cache", str(path)) from None
        return np.frombuffer(mmap.mmap(descriptor, count), np.uint8)
    finally:
        os.close(descriptor)
