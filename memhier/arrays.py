"""Checks of arrays at the border: what came, what was expected."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["as_bytes", "as_ints", "check_array", "check_range"]

_INT64_MAX = np.iinfo(np.int64).max


def as_ints(name: str, values: Any) -> NDArray[np.int64]:
    """Return integers of any type and layout as a C-contiguous int64 array of the same shape."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name}: expected integers, got an array of {array.dtype}")
    if array.dtype.kind == "u" and array.size and int(array.max()) > _INT64_MAX:
        raise ValueError(f"{name}: expected int64, but {int(array.max())} does not fit")
    return np.asarray(array, np.int64, order="C")


def check_range(name: str, values: NDArray[np.int64], limit: int, expected: str) -> None:
    """Raise unless all values lie in 0 to limit - 1."""
    if values.size and (int(values.min()) < 0 or int(values.max()) >= limit):
        flat = values.reshape(-1)
        at = int(np.flatnonzero((flat < 0) | (flat >= limit))[0])
        raise ValueError(f"{name}[{at}]={flat[at]}: expected {expected}")


def check_array(name: str, array: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    """Raise unless an array to be filled has just this type and shape, and can be filled in one piece."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        came = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name}: expected an array of {np.dtype(dtype)}, got {came}")
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError(f"{name}: expected a writable, C-contiguous array of shape {shape}")


def as_bytes(name: str, data: Any) -> memoryview:
    """Return the bytes of anything with a C-contiguous buffer, without a copy."""
    try:
        return np.frombuffer(data, np.uint8).data
    except TypeError as error:
        raise TypeError(f"{name}: expected bytes or an object with a buffer, got {type(data).__name__}") from error
    except ValueError as error:
        raise ValueError(f"{name}: expected C-contiguous bytes; numpy.ascontiguousarray makes them") from error
