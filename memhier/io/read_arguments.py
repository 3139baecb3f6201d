"""The arrays that come into a read and go out of it: checked once, at the border, for both cores."""

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.io.page_file import PAGE_BYTES

__all__ = ["as_int", "as_offsets", "check_array", "check_checksums", "empty_rows"]


def as_int(name: str, value: Any) -> int:
    """Return an int, or say which argument is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: expected an int") from None


def as_offsets(offsets: Any) -> NDArray[np.int64]:
    """Return offsets as int64 ``[n]`` that the core can walk; copied only where they are not."""
    array: NDArray[Any] = np.asarray(offsets)
    if array.dtype != np.int64:
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"offsets: expected integers, got {array.dtype}")
        array = array.astype(np.int64)
    if array.ndim != 1:
        raise ValueError(f"offsets: expected shape [n], got {list(array.shape)}")
    return array if array.flags.c_contiguous and array.flags.aligned else array.copy()


def check_array(name: str, array: Any, dtype: type, shape: tuple[int, ...]) -> None:
    """Refuse an array that the core cannot use as it is; only ``file`` may be read-only."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        raise TypeError(
            f"{name}: expected a numpy array of {dtype.__name__}, got {getattr(array, 'dtype', type(array))}"
        )
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(array.shape)}")
    if not (array.flags.c_contiguous and array.flags.aligned):
        raise ValueError(f"{name}: expected a C-contiguous, aligned array; numpy.ascontiguousarray makes one")
    if name != "file" and not array.flags.writeable:
        raise ValueError(f"{name}: expected an array that may be written to")


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
