"""The calls that operating systems have in different forms: reads and writes at an offset, locks, direct I/O.

Windows lacks fcntl, preadv and pwrite; macOS lacks O_DIRECT and fdatasync.
"""

import errno
import os
import sys
import threading
from importlib import import_module
from types import ModuleType

__all__ = ["OPEN_FLAGS", "O_DIRECT", "fdatasync", "keep_out_of_cache", "lock_file", "read_at", "set_direct", "write_at"]


def _module(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        return None


_fcntl, _msvcrt = _module("fcntl"), _module("msvcrt")

OPEN_FLAGS: int = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOINHERIT", 0) | getattr(os, "O_BINARY", 0)
"""Flags of every file that is opened: bytes as they are, and not for child programs."""

O_DIRECT: int = getattr(os, "O_DIRECT", 0)
"""The flag of direct I/O, 0 where there is none."""

fdatasync = getattr(os, "fdatasync", os.fsync)
"""Makes contents and length of a descriptor durable."""

_F_NOCACHE = 48  # macOS: fcntl's way to keep reads out of the page cache
_LOCKED_BYTE = 1 << 40  # Windows: beyond every file, as nobody can read a locked byte
_seeking = threading.Lock()


def read_at(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer from an offset and return the bytes read, as ``os.preadv`` does."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [buffer], offset)
    with _seeking:
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, len(buffer))
    buffer[: len(data)] = data
    return len(data)


def write_at(fd: int, data: memoryview, offset: int) -> int:
    """Write at an offset and return the bytes written, as ``os.pwrite`` does."""
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, data, offset)
    with _seeking:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)


def set_direct(fd: int, wanted: bool) -> bool:
    """Read and write past the page cache or not; return whether the descriptor does now."""
    if _fcntl is None or not O_DIRECT:
        return False
    flags = _fcntl.fcntl(fd, _fcntl.F_GETFL)
    try:
        _fcntl.fcntl(fd, _fcntl.F_SETFL, flags | O_DIRECT if wanted else flags & ~O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return wanted


def keep_out_of_cache(fd: int) -> bool:
    """Let reads pass by the page cache where the system has a call for it (macOS); return whether they do."""
    if sys.platform != "darwin" or _fcntl is None:
        return False
    _fcntl.fcntl(fd, _F_NOCACHE, 1)
    return True


def lock_file(fd: int, exclusive: bool) -> bool:
    """Take the lock of an open file without waiting; False if another holder has it."""
    if _fcntl is not None:
        try:
            _fcntl.flock(fd, (_fcntl.LOCK_EX if exclusive else _fcntl.LOCK_SH) | _fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    elif _msvcrt is not None and exclusive:  # it has no shared locks, and Windows itself keeps files that are open
        try:
            with _seeking:
                os.lseek(fd, _LOCKED_BYTE, os.SEEK_SET)
                _msvcrt.locking(fd, _msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
    return True
