"""Checks of the directory of a store, and the lock that lets in one writer."""

import errno
import gc
import os
import re
from pathlib import Path

from memhier.errors import CorruptionError, FormatError, LockedError
from memhier.files import File, Files, read_file
from memhier.shield import settle
from memhier.store.catalog import Catalog

__all__ = [
    "LEFTOVER_NAMES",
    "STORE_NAMES",
    "already_exists",
    "clear_directory",
    "refuse_foreign",
    "require_published",
    "take_lock",
]

_NEW_LOCK = "lock.memhier-new"
LEFTOVER_NAMES = frozenset({_NEW_LOCK, "catalog.sum.new"})
STORE_NAMES = LEFTOVER_NAMES | {"lock", "catalog", "catalog.sum", "segments", "tmp"}
_LOCK_MARK = b"memhier\n"


def require_published(files: Files, root: Path) -> None:
    """Raise unless a store was published at a path."""
    if not files.exists(str(root)):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(root))
    if files.exists(str(root / "catalog.sum")):
        return
    if not files.exists(str(root / "catalog")):
        if files.exists(str(root / "manifests")):
            raise FormatError(f"{root}: a backup, not a store; open it by its URL, {root.as_uri()!r}, or pull it")
        raise FormatError(f"{root}: not a memhier store (no 'catalog' there)")
    if not Catalog(files, str(root)).is_unfinished():
        raise CorruptionError(f"{root / 'catalog.sum'}: missing, but the catalog beside it has commits")
    raise FormatError(f"{root}: an unfinished store, nothing was ever committed to it; build it again")


def refuse_foreign(files: Files, root: Path) -> None:
    """Raise if this library did not make all files of a directory, before anything there changes."""
    try:
        names = set(files.list(str(root)))
    except NotADirectoryError:
        raise already_exists(root) from None
    if names <= {_NEW_LOCK}:
        return
    # The lock is the first file of a new store. Earlier versions could leave it empty, as the only file.
    mark = read_file(files, str(root / "lock")) if "lock" in names else None
    if not names <= STORE_NAMES or mark is None or not (mark.startswith(_LOCK_MARK) or (not mark and len(names) == 1)):
        raise already_exists(root)


def already_exists(root: Path) -> FileExistsError:
    """Return the error for a path at which there is something."""
    return FileExistsError(errno.EEXIST, "something is there already; choose a new path or remove it first", str(root))


def take_lock(files: Files, root: Path) -> File:
    """Take the writer's lock and return its file; closing it gives the lock back."""
    path = str(root / "lock")
    file = files.open(path, "a") if files.exists(path) else _make_lock(files, root)
    try:
        if not file.lock(exclusive=True):
            holder = re.search(rb"pid (\d+)", read_file(files, path))
            if holder and int(holder[1]) == os.getpid():
                gc.collect()  # an interrupt may have lost a store that this process opened
                settle()
            if not file.lock(exclusive=True):
                writer = f"process {int(holder[1])}" if holder else "another process"
                raise LockedError(f"{root}: {writer} has it open for writing")
        if not read_file(files, path).startswith(_LOCK_MARK):
            file.truncate(0)
            file.pwrite(_LOCK_MARK, 0)
            file.fdatasync()
        # The mark is durable and stays: a power cut may take the number behind it, which only serves a message.
        file.truncate(len(_LOCK_MARK))
        file.pwrite(f"pid {os.getpid()}\n".encode(), len(_LOCK_MARK))
    except BaseException:
        file.close()
        raise
    return file


def _make_lock(files: Files, root: Path) -> File:
    """Return the lock of a directory that has none yet; it gets its name only once its mark is durable."""
    path, fresh = str(root / "lock"), str(root / _NEW_LOCK)
    file = files.open(fresh, "a")
    try:
        if not file.lock(exclusive=True):
            raise LockedError(f"{root}: another process is just making a store there")
        if not files.exists(path):
            file.truncate(0)
            file.pwrite(_LOCK_MARK, 0)
            file.fdatasync()
            files.rename(fresh, path)
            files.sync_directory(str(root))
            return file
    except BaseException:
        file.close()
        raise
    file.close()  # another process has made it meanwhile
    return files.open(path, "a")


def clear_directory(files: Files, path: Path) -> None:
    """Remove every file in a directory, if there is one."""
    for name in files.list(str(path)) if files.exists(str(path)) else []:
        files.remove(str(path / name))
