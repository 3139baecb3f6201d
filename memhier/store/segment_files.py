"""The files of committed segments: locks on them, checks of them, and their removal.

A reader holds a shared lock on each file of its generation, and a writer removes a file that the catalog no longer
names only if it gets the lock alone.
"""

import errno
import os
from collections.abc import Collection
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from memhier.errors import CorruptionError
from memhier.files import File, Files
from memhier.io.kernels import crc32c_pages
from memhier.shield import check_interrupt
from memhier.store.contents import PAGE_BYTES, SegmentInfo

__all__ = ["check", "hold", "open_segment", "read_checked", "read_pages", "remove_unnamed"]

_READ_BYTES = 4 * 2**20


def hold(files: Files, segments: Collection[SegmentInfo], read: bool) -> list[File]:
    """Open the files of segments with a shared lock on each, and check them as `check` does; close them to let go.

    Raises
    ------
    FileNotFoundError
        When one is gone, or a writer is just removing it: it belongs to an older generation.
    """
    held: list[File] = []
    try:
        for info in segments:
            path = str(info.path)
            file = files.open(path, "r")
            held.append(file)
            if not file.lock(exclusive=False) or not files.exists(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        for file, info in zip(held, segments, strict=True):
            check(file, info, read)
    except BaseException:
        for file in held:
            file.close()
        raise
    return held


def check(file: File, info: SegmentInfo, read: bool) -> None:
    """Raise CorruptionError if the file is shorter than was committed or, with `read`, a page is damaged."""
    if read:
        read_checked(file, info)
    elif (size := file.size()) < info.length:
        raise _cut_short(info, size)


def open_segment(files: Files, info: SegmentInfo) -> File:
    """Open the file of a segment to read; raise CorruptionError if it is gone."""
    try:
        return files.open(str(info.path), "r")
    except FileNotFoundError:
        raise CorruptionError(f"{info.path}: missing, but the catalog names it") from None


def read_checked(file: File, info: SegmentInfo, out: NDArray[np.uint8] | None = None) -> None:
    """Read a segment into `out`, or only to check it; raise CorruptionError unless every page is as committed."""
    damaged = read_pages(file, info, out)
    if damaged:
        raise CorruptionError(
            f"{info.path}: page {damaged[0]} does not match its checksum ({len(damaged)} such pages in all)"
        )


def read_pages(file: File, info: SegmentInfo, out: NDArray[np.uint8] | None = None) -> list[int]:
    """Read a segment from end to end and return the pages that do not match their checksum.

    Parameters
    ----------
    file
        The segment's file, open for reading.
    out
        uint8 [length] to fill; None reads only to check.

    Raises
    ------
    CorruptionError
        When the file is shorter than was committed.
    """
    buffer = np.empty(0 if out is not None else min(_READ_BYTES, info.length), np.uint8)
    damaged: list[int] = []
    for start in range(0, info.length, _READ_BYTES):
        if out is None:
            check_interrupt()
        stop = min(start + _READ_BYTES, info.length)
        block = buffer[: stop - start] if out is None else out[start:stop]
        if file.read_into(block.data, start) != len(block):
            raise _cut_short(info, file.size())
        if info.checksums is not None:
            first = start // PAGE_BYTES
            wrong = crc32c_pages(block) != info.checksums[first : first + len(block) // PAGE_BYTES]
            damaged.extend((np.flatnonzero(wrong) + first).tolist())
    return damaged


def remove_unnamed(files: Files, directory: str, named: Collection[str]) -> None:
    """Remove the segment files that the catalog does not name, except those that a reader holds.

    An error leaves a file behind and nothing else, so it is left to the next writer.
    """
    with suppress(OSError):
        for name in files.list(directory):
            if name.endswith(".seg") and name not in named:
                path = os.path.join(directory, name)
                with suppress(OSError), files.open(path, "r") as file:
                    if file.lock(exclusive=True):
                        files.remove(path)


def _cut_short(info: SegmentInfo, size: int) -> CorruptionError:
    return CorruptionError(f"{info.path}: {size} bytes, but {info.length} were committed")
