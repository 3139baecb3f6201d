"""Where a slab's bytes lie, and how another process finds them."""

import ast
import contextlib
import errno
import math
import mmap
import os
import re
import struct
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import check_int
from memhier.errors import FormatError
from memhier.files import OPEN_FLAGS

__all__ = ["SlabLayout", "open_shared_memory", "private_memory", "shared_memory", "whole_rows"]

_MAGIC = b"mhslab01"
_HEADER = struct.Struct("<8sI")  # the magic and the length of the text that follows: a dict like that of a .npy file
_NAME = re.compile(r"memhier-slab:(\d+):(\d+):(\d+)")


class SlabLayout:
    """Where things lie in a slab's memory: a header, the generations and the rows, each from a page's start."""

    def __init__(self, slots: int, dtype: np.dtype[Any], shape: tuple[int, ...], versioned: bool = True) -> None:
        self.slots = slots
        self.dtype = dtype
        self.shape = shape
        self.row_type: np.dtype[np.void] = np.dtype((np.void, int(np.prod(shape, dtype=object)) * dtype.itemsize))
        text = repr({"slots": slots, "shape": shape, "dtype": np.lib.format.dtype_to_descr(dtype)}).encode()
        self.header: bytes = _HEADER.pack(_MAGIC, len(text)) + text
        self.generations_at: int = _whole_pages(len(self.header))
        self.rows_at: int = self.generations_at + (_whole_pages(4 * slots) if versioned else 0)
        self.total_bytes: int = self.rows_at + _whole_pages(self.row_type.itemsize * slots)

    @classmethod
    def checked(cls, slots: Any, dtype: Any, shape: Any, versioned: bool = True) -> Self:
        """Return the layout for arguments of a user; TypeError or ValueError names the one that does not fit."""
        slots = check_int("slots", slots, 1)
        lengths = shape if isinstance(shape, tuple) else (shape,)
        lengths = tuple(
            check_int("shape" if lengths is not shape else f"shape[{axis}]", length, 1)
            for axis, length in enumerate(lengths)
        )
        dtype = np.dtype(dtype)
        if dtype.hasobject or dtype.itemsize == 0 or dtype.subdtype is not None:
            raise ValueError(f"dtype={dtype}: expected plain bytes of fixed size; give the shape of a row as shape")
        return cls(slots, dtype, lengths, versioned)

    @classmethod
    def parsed(cls, mapping: mmap.mmap, name: str) -> Self:
        """Return the layout that the header of shared memory `name` describes; FormatError where it is none."""
        magic, length = _HEADER.unpack_from(mapping)
        if magic != _MAGIC:
            raise FormatError(f"{name}: expected a slab that starts with {_MAGIC!r}, found {magic!r}")
        fields = ast.literal_eval(mapping[_HEADER.size : _HEADER.size + length].decode())
        return cls(fields["slots"], np.lib.format.descr_to_dtype(fields["dtype"]), fields["shape"])


def whole_rows(rows: NDArray[Any]) -> NDArray[np.void]:
    """Return C-contiguous rows [n, ...] as opaque items [n] in place: numpy moves these up to ten times as fast."""
    return rows.reshape(-1).view(np.dtype((np.void, rows.itemsize * math.prod(rows.shape[1:]))))


def private_memory(size: int) -> mmap.mmap:
    """Return zeroed memory of this process alone."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows, which does not fork
        return mmap.mmap(-1, size)
    # Python's default is a shared mapping, in which a forked child would write its parent's rows.
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Fewer address translations make scattered rows 10 to 15 % faster; a kernel may lack it.
    with contextlib.suppress(OSError, AttributeError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def shared_memory(size: int) -> tuple[mmap.mmap, int, str]:
    """Return zeroed memory, the descriptor that keeps it findable, and the name to find it by.

    The file has no name in any folder: the kernel drops it with its last user, however that one ends. Others reach it
    through the owner's table of open files; the inode tells it from a later file that took the same number.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "shared=True needs a memory file, which only Linux has")
    fd = os.memfd_create("memhier-slab", os.MFD_CLOEXEC)
    try:
        # A file that was merely stretched would take its memory later, and kill the process when there is none.
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size), fd, f"memhier-slab:{os.getpid()}:{fd}:{os.fstat(fd).st_ino}"
    except BaseException:
        os.close(fd)
        raise


def open_shared_memory(name: Any) -> mmap.mmap:
    """Map another process's shared memory, read-only."""
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ValueError(f"name={name!r}: expected the name of a shared slab, 'memhier-slab:PID:FD:INODE'")
    path = f"/proc/{match[1]}/fd/{match[2]}"
    try:
        fd = os.open(path, os.O_RDONLY | OPEN_FLAGS)
    except OSError as error:
        error.add_note(f"{name}: its owner has closed it or ended, or belongs to another user")
        raise
    try:
        status = os.fstat(fd)
        if status.st_ino != int(match[3]):
            raise FileNotFoundError(errno.ENOENT, "the owner has closed this slab", path)
        return mmap.mmap(fd, status.st_size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
