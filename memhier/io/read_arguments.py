"""The arrays that come into a read and go out of it: checked once, at the border, for both cores."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import check_array
from memhier.io.page_file import PAGE_BYTES

__all__ = ["READ_TALLY", "Tallies", "as_tally", "check_checksums", "empty_rows"]

Tallies: TypeAlias = NDArray[np.void]  # records of counts
READ_TALLY = np.dtype([(name, np.int64) for name in ("reads", "pages", "bytes")])
"""I/Os, and the pages and bytes that they read."""


def as_tally(tally: NDArray[Any]) -> Tallies:
    """Return a tally, int64 ``[3]`` or a record of `READ_TALLY` ``[1]``, as the record."""
    numbers = tally.view(np.int64) if getattr(tally, "dtype", None) == READ_TALLY else tally
    check_array("tally", numbers, np.int64, (3,))
    return numbers.view(READ_TALLY)


def check_checksums(checksums: Any, length: int) -> NDArray[np.uint32] | None:
    """Return checksums for at least every page of `length` bytes."""
    if checksums is None:
        return None
    pages = -(-length // PAGE_BYTES)
    if not isinstance(checksums, np.ndarray) or checksums.dtype != np.uint32:
        raise TypeError(
            f"checksums: expected a numpy array of uint32, got {getattr(checksums, 'dtype', type(checksums))}"
        )
    if checksums.ndim != 1 or len(checksums) < pages or not (checksums.flags.c_contiguous and checksums.flags.aligned):
        raise ValueError(
            f"checksums: expected shape [{pages}], C-contiguous, one for each page of {length} bytes; "
            f"got {list(checksums.shape)}"
        )
    return checksums


def empty_rows(count: int, length: int) -> NDArray[np.uint8]:
    """Allocate the result; on a page boundary where whole pages may land in it."""
    if length < PAGE_BYTES:
        return np.empty((count, length), np.uint8)
    raw = np.empty(count * length + PAGE_BYTES, np.uint8)
    start = -int(raw.__array_interface__["data"][0]) % PAGE_BYTES
    return raw[start : start + count * length].reshape(count, length)
