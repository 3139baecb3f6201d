"""A file layer that fails on purpose."""

import errno
import os
from enum import Enum
from typing import NoReturn

from memhier.files._interface import Buffer, File, FileBase, Files, Mode

__all__ = ["Fault", "FaultyFiles", "SimulatedCrash"]


class Fault(Enum):
    """The failure of the chosen call."""

    ENOSPC = errno.ENOSPC
    EIO = errno.EIO
    SHORT_WRITE = "half of the bytes are written, then the disk is full; calls that write nothing fail as ENOSPC"
    CRASH = "the process dies before the call: nothing works afterwards, and its locks are gone"


class SimulatedCrash(BaseException):
    """The process is dead. Not an `Exception`, so that no handler of ordinary errors brings it back to life."""


class FaultyFiles:
    """Passes calls on to another file layer, and fails once.

    Attributes
    ----------
    fail_at
        Number of the call that fails, from 1; 0 never fails. May be set at any time.
    fault
        The failure.
    calls
        The calls so far, such as ``"pwrite segments/codes.00000001.seg"``.
    """

    def __init__(self, inner: Files, fail_at: int = 0, fault: Fault = Fault.EIO) -> None:
        self.calls: list[str] = []
        self._inner = inner
        self.fail_at = fail_at
        self.fault = fault
        self._open: list[File] = []
        self._crashed = False

    def before(self, operation: str, path: str) -> bool:
        """Count a call, and fail if it is the chosen one; True asks a write to stop half-way."""
        if self._crashed:
            raise SimulatedCrash(operation)
        self.calls.append(f"{operation} {os.path.basename(os.path.dirname(path))}/{os.path.basename(path)}")
        if len(self.calls) != self.fail_at:
            return False
        if self.fault is Fault.CRASH:
            self._crash(operation)
        if self.fault is Fault.SHORT_WRITE and operation in ("append", "pwrite"):
            return True
        code = errno.EIO if self.fault is Fault.EIO else errno.ENOSPC
        raise OSError(code, os.strerror(code), path)

    def _crash(self, operation: str) -> NoReturn:
        self._crashed = True
        for file in self._open:
            file.close()
        raise SimulatedCrash(operation)

    def open(self, path: str, mode: Mode) -> File:
        self.before(f"open-{mode}", path)
        inner = self._inner.open(path, mode)
        self._open.append(inner)
        return _FaultyFile(inner, self)

    def rename(self, old: str, new: str) -> None:
        self.before("rename", new)
        self._inner.rename(old, new)

    def remove(self, path: str) -> None:
        self.before("remove", path)
        self._inner.remove(path)

    def list(self, path: str) -> list[str]:
        self.before("list", path)
        return self._inner.list(path)

    def exists(self, path: str) -> bool:
        self.before("exists", path)
        return self._inner.exists(path)

    def stamp(self, path: str) -> tuple[int, ...]:
        self.before("stamp", path)
        return self._inner.stamp(path)

    def make_directory(self, path: str) -> None:
        self.before("make_directory", path)
        self._inner.make_directory(path)

    def sync_directory(self, path: str) -> None:
        self.before("sync_directory", path)
        self._inner.sync_directory(path)

    def clock(self) -> float:
        return self._inner.clock()


class _FaultyFile(FileBase):
    def __init__(self, inner: File, owner: FaultyFiles) -> None:
        self._inner = inner
        self._owner = owner

    @property
    def path(self) -> str:
        return self._inner.path

    def size(self) -> int:
        self._owner.before("size", self.path)
        return self._inner.size()

    def read_into(self, buffer: bytearray | memoryview, offset: int) -> int:
        self._owner.before("read_into", self.path)
        return self._inner.read_into(buffer, offset)

    def append(self, data: Buffer) -> int:
        if self._owner.before("append", self.path):
            self._inner.append(_first_half(data))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
        return self._inner.append(data)

    def pwrite(self, data: Buffer, offset: int) -> None:
        if self._owner.before("pwrite", self.path):
            self._inner.pwrite(_first_half(data), offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
        self._inner.pwrite(data, offset)

    def truncate(self, length: int) -> None:
        self._owner.before("truncate", self.path)
        self._inner.truncate(length)

    def fdatasync(self) -> None:
        self._owner.before("fdatasync", self.path)
        self._inner.fdatasync()

    def lock(self, *, exclusive: bool) -> bool:
        self._owner.before("lock", self.path)
        return self._inner.lock(exclusive=exclusive)

    def close(self) -> None:
        self._inner.close()


def _first_half(data: Buffer) -> memoryview:
    view = memoryview(data).cast("B")
    return view[: len(view) // 2]
