"""One file opened for page reads: direct where the file system allows it, buffered otherwise."""

import errno
import mmap
import os
import stat

from memhier.errors import CorruptionError
from memhier.files import O_DIRECT, OPEN_FLAGS, close_with, keep_out_of_cache, set_direct

__all__ = ["PAGE_BYTES", "PageFile"]

PAGE_BYTES = 4096


class PageFile:
    """A read-only descriptor that is closed with the last reference to it.

    The compiled core holds a reference for as long as one of its batches may read from the descriptor, so a file can
    be removed from a reader while another thread still reads.

    Parameters
    ----------
    path
        The file.
    direct
        True insists on direct I/O, False refuses it, None tries it first.

    Raises
    ------
    OSError
        When the file cannot be opened or is not a regular file, or where `direct` is True and direct I/O is not to be
        had.
    """

    def __init__(self, path: str | os.PathLike[str], direct: bool | None) -> None:
        self.fd: int = -1
        self.path: str = os.fspath(path)
        self.wants_direct = direct
        self.direct: bool = False
        self.drops_cache: bool = False
        self._settled = False
        mode = os.stat(self.path).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.path)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", self.path)
        if direct is not False and O_DIRECT:
            try:
                self.fd = os.open(self.path, os.O_RDONLY | OPEN_FLAGS | O_DIRECT)
                self.direct = True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        if self.fd < 0:
            self.fd = os.open(self.path, os.O_RDONLY | OPEN_FLAGS)
        close_with(self, self.fd)
        self.settle()

    def settle(self) -> None:
        """Find out, once the file has a first byte, whether direct reads work, and fall back if they do not.

        Some file systems accept ``O_DIRECT`` at open and refuse the first read.
        """
        if self._settled or (self.direct and self.size() == 0):
            return
        if self.direct:
            with mmap.mmap(-1, PAGE_BYTES) as page:
                try:
                    os.preadv(self.fd, [page], 0)  # where there is O_DIRECT, there is this
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        error.filename = self.path
                        raise
                    self.direct = set_direct(self.fd, False)
        self._settled = True
        if not self.direct and self.wants_direct is not False:
            self._give_hints()

    def _give_hints(self) -> None:
        if keep_out_of_cache(self.fd):
            self.direct = True
            return
        if self.wants_direct:
            raise OSError(errno.EINVAL, "direct=True, but this file system has no direct I/O", self.path)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
            self.drops_cache = True

    def size(self) -> int:
        """Return the file's length in bytes now."""
        return os.fstat(self.fd).st_size

    def check_holds(self, length: int) -> None:
        """Raise CorruptionError when the file is shorter than `length`."""
        if (size := self.size()) < length:
            raise CorruptionError(f"{self.path}: the file has {size:,} bytes, but {length:,} were committed")
