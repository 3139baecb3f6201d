"""Checks of arguments at the border: the error names the argument, its value and the values expected.

One meaning for the whole library: a bool is no number, any type with ``__index__`` is an integer, and an array that the
core fills in place is C-contiguous and aligned.
"""

import math
import numbers
import operator
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "as_bytes",
    "as_ints",
    "by_name",
    "check_array",
    "check_here",
    "check_int",
    "check_number",
    "check_range",
    "counted",
    "is_url",
]

_INT64_MAX = np.iinfo(np.int64).max
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::.*)?://")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:[/\\]")  # a drive of Windows has one letter


def check_int(name: str, value: Any, low: int = 0, high: int | None = None, unit: str = "") -> int:
    """Return an integer of any type as an int.

    Parameters
    ----------
    low, high
        The range, both ends included; None has no end.
    unit
        The thing that the integer counts, for the message, such as ``"bytes"``.

    Raises
    ------
    TypeError
        If the value is no integer. A bool is none.
    ValueError
        If the value is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.arguments import check_int
    >>> check_int("rows", np.int32(3), 1)
    3
    >>> check_int("rows", True)
    Traceback (most recent call last):
    TypeError: rows=True: expected an int
    """
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r}: expected an int")
    try:
        number = operator.index(value)
    except TypeError:  # an array of several, or of floats
        raise TypeError(f"{name}={value!r}: expected an int") from None
    if number < low or (high is not None and number > high):
        expected = f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueError(f"{name}={number}: expected {expected}{unit and f' {unit}'}")
    return number


def check_number(
    name: str, value: Any, low: float = -math.inf, high: float = math.inf, *, above: bool = False
) -> float:
    """Return a real number of any type as a float.

    Parameters
    ----------
    low, high
        The range, both ends included.
    above
        The number is greater than `low`.

    Raises
    ------
    TypeError
        If the value is no real number. A bool is none.
    ValueError
        If the value is NaN or out of range.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, float | numbers.Real | np.floating):
        raise TypeError(f"{name}={value!r}: expected a number")
    number = float(value)
    if not (low < number if above else low <= number) or number > high:
        least = f"above {low:g}" if above else f"of at least {low:g}" if high == math.inf else f"from {low:g}"
        most = "" if high == math.inf else f" and at most {high:g}" if above else f" to {high:g}"
        raise ValueError(f"{name}={value}: expected a number {least}{most}")
    return number


def as_ints(name: str, values: Any) -> NDArray[np.int64]:
    """Return integers of any type and layout as a C-contiguous, aligned int64 array of the same shape."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name}: expected integers, got an array of {array.dtype}")
    if array.dtype.kind == "u" and array.size and int(array.max()) > _INT64_MAX:
        raise ValueError(f"{name}: expected int64, but {int(array.max())} does not fit")
    array = np.asarray(array, np.int64, order="C")
    return array if array.flags.aligned else array.copy()


def check_range(name: str, values: NDArray[np.int64], limit: int, expected: str) -> None:
    """Raise ValueError unless all values lie in 0 to limit - 1."""
    if values.size and values.astype(np.uint64).max() >= limit:  # a negative value is a large one there
        flat = values.reshape(-1)
        at = int(np.flatnonzero((flat < 0) | (flat >= limit))[0])
        raise ValueError(f"{name}[{at}]={flat[at]}: expected {expected}")


def check_array(name: str, array: Any, dtype: Any, shape: tuple[int, ...], *, writable: bool = True) -> None:
    """Raise unless an array has this dtype and shape and the core can use its memory as it is."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        came = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name}: expected an array of {np.dtype(dtype)}, got {came}")
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")
    if not array.flags.c_contiguous or not array.flags.aligned or (writable and not array.flags.writeable):
        kind = "a writable, C-contiguous, aligned" if writable else "a C-contiguous, aligned"
        raise ValueError(f"{name}: expected {kind} array of shape {shape}")


def counted(count: int, noun: str) -> str:
    """Return a number of things in words, with the noun in the plural unless it is one.

    Examples
    --------
    >>> from memhier.arguments import counted
    >>> counted(1, "row"), counted(0, "row"), counted(1200, "entry")
    ('1 row', '0 rows', '1,200 entries')
    """
    many = noun if count == 1 else f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s"
    return f"{count:,} {many}"


def by_name(name: str, value: Any, kinds: Mapping[str, Callable[[], Any]], expected: str, others: str = "") -> Any:
    """Return an object of the kind that a text names; anything else as it is, but no class.

    `expected` describes an object in place of a class, whose name goes in for ``{}``; `others` follow the names.
    """
    if isinstance(value, type):
        raise TypeError(f"{name}={value.__name__}: expected {expected.format(value.__name__)}, not its class")
    if not isinstance(value, str):
        return value
    if value not in kinds:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, kinds))}{others}")
    return kinds[value]()


def as_bytes(name: str, data: Any) -> memoryview:
    """Return the bytes of an object with a C-contiguous buffer, without a copy."""
    try:
        return np.frombuffer(data, np.uint8).data
    except TypeError as error:
        raise TypeError(f"{name}: expected bytes or an object with a buffer, got {type(data).__name__}") from error
    except ValueError as error:
        raise ValueError(f"{name}: expected C-contiguous bytes; numpy.ascontiguousarray makes them") from error


def is_url(path: object) -> TypeGuard[str]:
    """Whether a path is a URL, rather than a local path.

    Examples
    --------
    >>> from memhier.arguments import is_url
    >>> is_url("s3://bucket/index"), is_url("zip://index::s3://bucket/a.zip"), is_url("/data/index"), is_url("://x")
    (True, True, False, False)
    """
    return isinstance(path, str) and _URL.match(path) is not None


def check_here(path: object, advice: str) -> None:
    """Raise ValueError for a URL, or a `Path` made of one, where a folder on this machine is expected.

    Examples
    --------
    >>> from pathlib import Path
    >>> from memhier.arguments import check_here
    >>> check_here("/data/index", "push it there")
    >>> check_here(Path("s3://bucket/index"), "push it there")
    Traceback (most recent call last):
    ValueError: path='s3:/bucket/index': expected a folder on this machine, not a URL; push it there
    """
    if isinstance(path, str | os.PathLike) and _SCHEME.match(text := os.fsdecode(path)):
        raise ValueError(f"path={text!r}: expected a folder on this machine, not a URL; {advice}")
