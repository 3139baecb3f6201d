"""The file layer on the operating system."""

import errno
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from memhier.closing import Closing
from memhier.files._interface import Buffer, File, Mode
from memhier.files._system import OPEN_FLAGS, fdatasync, lock_file, set_direct

__all__ = ["RealFiles", "close_descriptor", "close_with", "read_at"]

_FLAGS = {
    "r": os.O_RDONLY,
    "w": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "x": os.O_RDWR | os.O_CREAT | os.O_EXCL,
    "a": os.O_RDWR | os.O_CREAT,
    "d": os.O_RDWR | os.O_CREAT | os.O_EXCL,
}

_seeking = threading.Lock()

_open: dict[int, "_Descriptor"] = {}
"""By number. One that went with its owner stays until the next file has its number."""


class _Descriptor(weakref.ref[Any]):
    """A descriptor that is closed once its owner is gone: `os.close` is called with this, and asks for its value.

    Only built-in functions hear of the end of the owner: in `__del__`, or under `weakref.finalize`, an interrupt would
    be lost, as Python prints the error and goes on, and the file might stay open.
    """

    __slots__ = ("__index__",)
    __index__: Callable[[], int]


def close_with(owner: object, number: int) -> None:
    """Close a descriptor once its owner is gone, unless that was done before."""
    descriptor = _Descriptor(owner, cast(Any, os.close))
    descriptor.__index__ = number.__index__
    _open[number] = descriptor


def close_descriptor(number: int) -> None:
    """Close a descriptor now, which is done once."""
    del _open[number]
    os.close(number)


def read_at(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer from an offset and return the bytes read, as ``os.preadv`` does, which Windows lacks."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [buffer], offset)
    with _seeking:
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, len(buffer))
    buffer[: len(data)] = data
    return len(data)


def _write_at(fd: int, data: memoryview, offset: int) -> int:
    """Write at an offset and return the bytes written, as ``os.pwrite`` does, which Windows lacks."""
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, data, offset)
    with _seeking:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Calls on a descriptor fail without a path: add it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


class _RealFile(Closing):
    def __init__(self, path: str, mode: Mode) -> None:
        self._path = path
        self._fd = os.open(path, _FLAGS[mode] | OPEN_FLAGS, 0o644)
        close_with(self, self._fd)
        self._direct = mode == "d" and set_direct(self._fd, True)
        self._end = self.size() if mode == "a" else 0

    @property
    def path(self) -> str:
        return self._path

    def size(self) -> int:
        with _naming(self._path):
            return os.fstat(self._fd).st_size

    def read_into(self, buffer: bytearray | memoryview, offset: int) -> int:
        view = memoryview(buffer).cast("B")
        done = 0
        with _naming(self._path):
            while done < len(view):
                count = read_at(self._fd, view[done:], offset + done)
                if count == 0:
                    break
                done += count
        return done

    def append(self, data: Buffer) -> int:
        offset = self._end
        self.pwrite(data, offset)
        return offset

    def pwrite(self, data: Buffer, offset: int) -> None:
        view = memoryview(data).cast("B")
        done = 0
        with _naming(self._path):
            # A call may write less than asked: a signal, a full disk, or the 2 GiB limit of one call.
            while done < len(view):
                try:
                    done += _write_at(self._fd, view[done:], offset + done)
                except OSError as error:
                    # Some file systems take the flag and refuse the write; the rest of a short one is not aligned.
                    if not self._direct or error.errno != errno.EINVAL:
                        raise
                    self._direct = set_direct(self._fd, False)
        if done:
            self._end = max(self._end, offset + done)

    def truncate(self, length: int) -> None:
        with _naming(self._path):
            os.ftruncate(self._fd, length)
        self._end = length

    def fdatasync(self) -> None:
        with _naming(self._path):
            fdatasync(self._fd)

    def lock(self, *, exclusive: bool) -> bool:
        if exclusive and self in _exclusive:  # Windows takes a lock once
            return True
        with _naming(self._path):
            locked = lock_file(self._fd, exclusive)
        if locked and exclusive:
            _exclusive.add(self)
        return locked

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_descriptor(fd)
            _exclusive.discard(self)


_exclusive: weakref.WeakSet[_RealFile] = weakref.WeakSet()


def _drop_inherited_locks() -> None:
    """Close the files that this child holds alone: a lock ends once each copy of its descriptor is closed."""
    for file in list(_exclusive):
        file.close()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_drop_inherited_locks)


class RealFiles:
    """Files of the operating system.

    Locks are ``flock`` locks, on Windows those of its C library. They belong to the open file, end with the process
    however it ends, and an exclusive one is not handed to forked children.
    """

    def open(self, path: str, mode: Mode) -> File:
        return _RealFile(path, mode)

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)  # which Windows' rename would not

    def remove(self, path: str) -> None:
        os.remove(path)

    def list(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def stamp(self, path: str) -> tuple[int, ...]:
        found = os.stat(path)
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size

    def exists(self, path: str) -> bool:
        try:
            os.lstat(path)
        except (OSError, ValueError):
            return False
        return True

    def make_directory(self, path: str) -> None:
        if not os.path.isdir(path):
            os.mkdir(path)

    def sync_directory(self, path: str) -> None:
        if not hasattr(os, "O_DIRECTORY"):  # Windows opens no directories
            return
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with _naming(path):
                os.fsync(fd)
        finally:
            os.close(fd)

    def clock(self) -> float:
        return time.monotonic()
