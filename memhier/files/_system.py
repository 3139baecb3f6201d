"""The calls that operating systems have in different forms: locks, direct I/O, syncs.

Windows lacks fcntl; macOS lacks O_DIRECT and fdatasync.
"""

import errno
import os
import sys
from importlib import import_module
from types import ModuleType

__all__ = ["OPEN_FLAGS", "O_DIRECT", "fdatasync", "keep_out_of_cache", "lock_file", "set_direct"]


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
_LOCKED_BYTE = 1 << 40  # Windows: beyond every file, as no process can read a locked byte


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
            os.lseek(fd, _LOCKED_BYTE, os.SEEK_SET)
            _msvcrt.locking(fd, _msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
    return True
