"""A file layer in memory that knows the states that a power cut may leave.

Every file has the contents that programs see and the contents known to be on the disk; the writes between the two are
kept in order. Names work the same way: a change of name is durable only after its directory was synced. `crashes`
yields each state of the disk that is possible if the power fails now.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator

from memhier.files._interface import Buffer, File, FileBase, Mode

__all__ = ["MemoryFiles"]

_SECTOR = 512  # The unit that disks write whole; a torn write ends at one.


class _Inode:
    def __init__(self, contents: bytes = b"") -> None:
        self.contents = bytearray(contents)
        self.durable = bytes(contents)
        # Writes (offset, data) and cuts (length, None) since the last fdatasync.
        self.pending: list[tuple[int, bytes | None]] = []
        self.shared = 0
        self.exclusive = False

    def apply(self, changes: list[tuple[int, bytes | None]]) -> bytearray:
        """Return the durable contents with some of the pending changes made."""
        contents = bytearray(self.durable)
        for offset, data in changes:
            _change(contents, offset, data)
        return contents


def _change(contents: bytearray, offset: int, data: bytes | None) -> None:
    end = offset if data is None else offset + len(data)
    contents.extend(bytes(max(0, end - len(contents))))
    if data is None:
        del contents[offset:]
    else:
        contents[offset:end] = data


def _torn(inode: _Inode) -> bytearray:
    *whole, (offset, data) = inode.pending
    half = None if data is None else data[: len(data) // 2 // _SECTOR * _SECTOR]
    return inode.apply([*whole, (offset, half)] if half is not None else whole)


def _garbage(inode: _Inode) -> bytearray:
    return inode.apply([(offset, data and b"\xa5" * len(data)) for offset, data in inode.pending])


# The ways in which a power cut may apply a file's pending changes, by name.
_FATES: dict[str, Callable[[_Inode], bytearray]] = {
    "kept": lambda inode: inode.apply(inode.pending),
    "lost": lambda inode: inode.apply([]),
    "torn": _torn,
    "reordered": lambda inode: inode.apply(inode.pending[1:]),
    "length only": lambda inode: inode.apply([(o, d and bytes(len(d))) for o, d in inode.pending]),
    "garbage": _garbage,
}


# A change of name: its directory, the files that paths name afterwards, and paths that name nothing any more.
_Change = tuple[str, dict[str, _Inode | None], tuple[str, ...]]


class MemoryFiles:
    """Files in memory below ``/``, with the durable state beside the visible one.

    Parameters
    ----------
    names
        The files to begin with, durable, by path; None is a directory.
    """

    def __init__(self, names: "dict[str, _Inode | None] | None" = None) -> None:
        self._names: dict[str, _Inode | None] = names or {"/": None}
        self._durable = dict(self._names)
        self._renames: list[_Change] = []

    def open(self, path: str, mode: Mode) -> File:
        inode = self._names.get(path)
        if inode is None:
            if path in self._names:
                raise _fault(errno.EISDIR, path)
            if mode == "r":
                raise _fault(errno.ENOENT, path)
            self._parent(path)
            inode = _Inode()
            self._rename(path, {path: inode})
            return _MemoryFile(path, inode)
        if mode in ("x", "d"):
            raise _fault(errno.EEXIST, path)
        file = _MemoryFile(path, inode)
        if mode == "w":
            file.truncate(0)
        return file

    def rename(self, old: str, new: str) -> None:
        inode = self._inode(old)
        self._rename(new, {new: inode}, old)

    def remove(self, path: str) -> None:
        self._inode(path)
        self._rename(path, {}, path)

    def list(self, path: str) -> list[str]:
        if path not in self._names:
            raise _fault(errno.ENOENT, path)
        if self._names[path] is not None:
            raise _fault(errno.ENOTDIR, path)
        return sorted(os.path.basename(name) for name in self._names if name != path and os.path.dirname(name) == path)

    def stamp(self, path: str) -> tuple[int, ...]:
        inode = self._inode(path)
        return id(inode), len(inode.contents)

    def exists(self, path: str) -> bool:
        return path in self._names

    def make_directory(self, path: str) -> None:
        if self._names.get(path, self) is not None:
            if path in self._names:
                raise _fault(errno.EEXIST, path)
            self._parent(path)
            self._rename(path, {path: None})

    def sync_directory(self, path: str) -> None:
        if self._names.get(path, self) is not None:
            raise _fault(errno.ENOENT, path)
        synced = [change for change in self._renames if change[0] == path]
        self._durable = _renamed(self._durable, synced)
        self._renames = [change for change in self._renames if change[0] != path]

    def clock(self) -> float:
        return time.monotonic()

    def crashes(self) -> Iterator[tuple[str, "MemoryFiles"]]:
        """Yield the states that the disk may have if the power fails now, each with a description.

        Changes of name are cut at every prefix; the changed files share one fate, or all but one keep their changes.
        """
        dirty = {path for path, inode in self._names.items() if inode is not None and inode.pending}
        for count in range(len(self._renames) + 1):
            names = _renamed(self._durable, self._renames[:count])
            for fate in _FATES if dirty else ["kept"]:
                for unlucky in [dirty, *({path} for path in dirty if len(dirty) > 1 and fate != "kept")]:
                    changed = {
                        id(inode): _FATES[fate if path in unlucky else "kept"](inode)
                        for path, inode in self._names.items()
                        if inode is not None and inode.pending
                    }
                    title = f"{count} of {len(self._renames)} names, {fate}: {sorted(map(os.path.basename, unlucky))}"
                    yield title, _restarted(names, changed)

    def _parent(self, path: str) -> str:
        parent = os.path.dirname(path)
        if self._names.get(parent, self) is not None:
            raise _fault(errno.ENOENT, path)
        return parent

    def _inode(self, path: str) -> _Inode:
        inode = self._names.get(path)
        if inode is None:
            raise _fault(errno.EISDIR if path in self._names else errno.ENOENT, path)
        return inode

    def _rename(self, path: str, added: dict[str, _Inode | None], *removed: str) -> None:
        change = (self._parent(path), added, removed)
        self._renames.append(change)
        self._names = _renamed(self._names, [change])


def _renamed(names: dict[str, _Inode | None], changes: list[_Change]) -> dict[str, _Inode | None]:
    names = dict(names)
    for _, added, removed in changes:
        for path in removed:
            names.pop(path, None)
        names.update(added)
    return names


def _restarted(names: dict[str, _Inode | None], changed: dict[int, bytearray]) -> MemoryFiles:
    """Return the disk after the power is back: all of it is durable."""
    return MemoryFiles(
        {
            # A name in a directory that never became durable is gone.
            path: None if inode is None else _Inode(bytes(changed.get(id(inode), inode.durable)))
            for path, inode in names.items()
            if os.path.dirname(path) in names
        }
    )


def _fault(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)


class _MemoryFile(FileBase):
    def __init__(self, path: str, inode: _Inode) -> None:
        self._path = path
        self._inode = inode
        self._locked = ""

    @property
    def path(self) -> str:
        return self._path

    def size(self) -> int:
        return len(self._inode.contents)

    def read_into(self, buffer: bytearray | memoryview, offset: int) -> int:
        view = memoryview(buffer).cast("B")
        data = self._inode.contents[offset : offset + len(view)]
        view[: len(data)] = data
        return len(data)

    def append(self, data: Buffer) -> int:
        offset = self.size()
        self.pwrite(data, offset)
        return offset

    def pwrite(self, data: Buffer, offset: int) -> None:
        self._record(offset, bytes(data))

    def truncate(self, length: int) -> None:
        self._record(length, None)

    def _record(self, offset: int, data: bytes | None) -> None:
        if data == b"":
            return
        self._inode.pending.append((offset, data))
        _change(self._inode.contents, offset, data)

    def fdatasync(self) -> None:
        self._inode.durable = bytes(self._inode.contents)
        self._inode.pending.clear()

    def lock(self, *, exclusive: bool) -> bool:
        inode = self._inode
        self._unlock()
        if inode.exclusive or (exclusive and inode.shared):
            return False
        inode.exclusive = exclusive
        inode.shared += not exclusive
        self._locked = "exclusive" if exclusive else "shared"
        return True

    def _unlock(self) -> None:
        if self._locked == "exclusive":
            self._inode.exclusive = False
        elif self._locked == "shared":
            self._inode.shared -= 1
        self._locked = ""

    def close(self) -> None:
        self._unlock()
