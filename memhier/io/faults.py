"""Faults that a batch of page reads reports instead of bytes, and the exception that each becomes.

Both cores report a fault as plain data, so that the wording and the class of an error exist once.
"""

import errno
import os
from typing import NoReturn

from memhier.errors import ClosedError, CorruptionError
from memhier.io.page_file import PAGE_BYTES, PageFile

__all__ = ["Fault", "is_unreadable", "raise_fault"]

Fault = tuple[str, object, int, int, int]
"""Kind, :class:`PageFile` or None, and three numbers that depend on the kind:

``"errno"``: the error number; without a file it belongs to the engine, not to one read.
``"short"``: where a read found the file's end, the committed length.
``"checksum"``: the page, the CRC that was committed, the CRC that was read.
``"range"``: the index of the request; its file changed or went while the batch was on its way.
``"closed"``: nothing.
``"layout"``: nothing; the file tells of places beyond its end.
"""


def is_unreadable(error: BaseException) -> bool:
    """Whether an error tells that bytes of a file cannot be had, so that another attempt is of no use."""
    return isinstance(error, CorruptionError) or (isinstance(error, OSError) and error.errno == errno.EIO)


def raise_fault(fault: Fault, engine: str) -> NoReturn:
    """Raise the exception that `fault` stands for."""
    kind, owner, first, second, third = fault
    file = owner if isinstance(owner, PageFile) else None
    path = None if file is None else file.path
    if kind == "short":
        size = 0 if file is None else file.size()
        if size >= second:  # by now
            raise OSError(errno.EIO, f"a read at byte {first:,} returned nothing", path)
        raise CorruptionError(
            f"{path}: the file ends at byte {size:,}, but {second:,} bytes of it were committed; it was cut short"
        )
    if kind == "checksum":
        raise CorruptionError(
            f"{path}: page {first} (byte {first * PAGE_BYTES:,}) is damaged: CRC32C 0x{third:08x}, "
            f"committed 0x{second:08x}"
        )
    if kind == "range":
        raise ValueError(f"offsets[{first}]: its file was removed, or the array changed, while the batch was read")
    if kind == "layout":
        raise CorruptionError(f"{path}: it tells of rows or records that lie outside of it")
    if kind == "closed":
        raise ClosedError("the reader was closed")
    if file is None:
        raise OSError(first, f"engine {engine!r} cannot submit reads: {os.strerror(first)}")
    raise OSError(first, os.strerror(first), path)
