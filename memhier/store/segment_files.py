"""The files of segments: who holds them, whether they are whole, and when they go.

A reader holds a shared lock on each file of its generation, and a writer removes a file that the catalog no longer
names only if it gets the lock alone.
"""

import errno
import os
from collections.abc import Collection, Iterable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from memhier.errors import CorruptionError
from memhier.files import File, Files
from memhier.store.segments import SegmentInfo, read_pages

__all__ = ["Pins", "check_length", "read_checked", "remove_unnamed"]


class Pins:
    """Locks that keep the files of a generation where they are."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._held: list[File] = []

    def hold(self, segments: Iterable[SegmentInfo]) -> None:
        """Hold the files of these segments, or none of them.

        Raises
        ------
        FileNotFoundError
            When one is gone, or a writer is just removing it: it belongs to an older generation.
        """
        try:
            for info in segments:
                path = str(info.path)
                file = self._files.open(path, "r")
                self._held.append(file)
                if not file.lock(exclusive=False) or not self._files.exists(path):
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let go of all files."""
        for file in self._held:
            file.close()
        self._held.clear()


def check_length(files: Files, info: SegmentInfo) -> None:
    """Raise CorruptionError unless the file is there and as long as was committed."""
    with _open(files, info) as file:
        if file.size() < info.length:
            raise CorruptionError(f"{info.path}: {file.size()} bytes, but {info.length} were committed")


def read_checked(files: Files, info: SegmentInfo, out: NDArray[np.uint8] | None) -> None:
    """Read a segment into `out`, or only to check it; raise CorruptionError unless every page is as committed."""
    with _open(files, info) as file:
        damaged = read_pages(file, info, out)
    if damaged:
        raise CorruptionError(
            f"{info.path}: page {damaged[0]} does not match its checksum ({len(damaged)} such pages in all)"
        )


def remove_unnamed(files: Files, directory: str, named: Collection[str]) -> None:
    """Remove the segment files that the catalog does not name, but for those that a reader holds.

    Whatever goes wrong here leaves a file behind and nothing else, so it is left to the next writer.
    """
    with suppress(OSError):
        for name in files.list(directory):
            path = os.path.join(directory, name)
            if name.endswith(".seg") and name not in named:
                with suppress(OSError), files.open(path, "r") as file:
                    if file.lock(exclusive=True):
                        files.remove(path)


def _open(files: Files, info: SegmentInfo) -> File:
    try:
        return files.open(str(info.path), "r")
    except FileNotFoundError:
        raise CorruptionError(f"{info.path}: missing, but the catalog names it") from None
