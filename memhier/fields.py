"""Checks of what was decoded: values of JSON text, and arrays, against a description of what they have to be.

A checksum tells that bytes are those that were written, not that this library wrote them. So nothing decoded is used
before its types and ranges are known.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memhier.errors import CorruptionError, MemhierError

if TYPE_CHECKING:
    from memhier.store.store import SegmentInfo, Store

__all__ = [
    "Check", "Refused", "boolean", "decode_json", "described", "integer", "mapping", "one_of", "optional", "real",
    "record", "row", "sequence", "stored_array", "stored_segment", "text",
]  # fmt: skip

INT64_MAX = 2**63 - 1

Check = Callable[[Any], None]
"""Raises `Refused` for a value that is not as described."""


class Refused(Exception):
    """Says what is wrong with a value, and where in it."""

    def __init__(self, expected: str, value: object) -> None:
        super().__init__(expected)
        self.expected = expected
        self.value = value
        self.place: str = ""

    def within(self, place: str) -> "Refused":
        """Return it as a part of a larger value."""
        self.place = place + self.place
        return self


def decode_json(raw: bytes, where: object, check: Check) -> Any:
    """Return the value of JSON text that was stored.

    Parameters
    ----------
    raw
        UTF-8.
    where
        What errors name: the path, and the entry there.
    check
        Of the value.

    Raises
    ------
    CorruptionError
        When the text is no JSON, or its value is not as described.
    """
    try:
        value = json.loads(raw)
        check(value)
    except Refused as error:
        shown = repr(error.value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise CorruptionError(f"{where}{error.place}: {shown}, expected {error.expected}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{where}: no JSON: {error}") from None
    return value


def integer(least: int = 0, most: int = INT64_MAX) -> Check:
    """A whole number in a range."""

    def check(value: Any) -> None:
        if type(value) is not int or not least <= value <= most:
            raise Refused(f"an integer, {least} to {most}", value)

    return check


def real(least: float = -math.inf, most: float = math.inf) -> Check:
    """A number in a range, not NaN."""

    def check(value: Any) -> None:
        whole = type(value) is int and abs(value) <= 2**53
        if not (whole or type(value) is float) or not least <= value <= most:
            raise Refused(f"a number, {least} to {most}", value)

    return check


def boolean(value: Any) -> None:
    """True or false."""
    if type(value) is not bool:
        raise Refused("true or false", value)


def text(pattern: str = r"[\s\S]{0,65536}") -> Check:
    """Text that matches a pattern as a whole."""
    compiled = re.compile(pattern)

    def check(value: Any) -> None:
        if type(value) is not str or not compiled.fullmatch(value):
            raise Refused(f"text like {pattern}", value)

    return check


def one_of(*choices: str | int) -> Check:
    """One of a few texts or numbers."""

    def check(value: Any) -> None:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise Refused(f"one of {', '.join(map(repr, choices))}", value)

    return check


def optional(check: Check) -> Check:
    """Null, or a value as described."""

    def either(value: Any) -> None:
        if value is not None:
            check(value)

    return either


def sequence(each: Check, least: int = 0, most: int = INT64_MAX) -> Check:
    """A list of values that are described alike."""

    def check(value: Any) -> None:
        if type(value) is not list or not least <= len(value) <= most:
            raise Refused(f"a list of {least} to {most} values", value)
        for index, entry in enumerate(value):
            _at(f"[{index}]", each, entry)

    return check


def row(*checks: Check, without: int = 0) -> Check:
    """A list of as many values as there are descriptions, or without as many of the last."""

    def check(value: Any) -> None:
        if type(value) is not list or not len(checks) - without <= len(value) <= len(checks):
            raise Refused(f"a list of {len(checks)} values", value)
        for index, (each, entry) in enumerate(zip(checks, value, strict=False)):
            _at(f"[{index}]", each, entry)

    return check


def mapping(each: Check, key: Check | None = None, least: int = 0) -> Check:
    """An object of any names, at least so many, with values that are described alike."""

    def check(value: Any) -> None:
        if type(value) is not dict or len(value) < least:
            raise Refused("an object", value)
        for name, entry in value.items():
            if key is not None:
                _at(f"[{name!r}]", key, name)
            _at(f"[{name!r}]", each, entry)

    return check


def record(checks: Mapping[str, Check], others: Mapping[str, Check] | None = None) -> Check:
    """An object with these names, and perhaps the others; names that are in neither say nothing and are let pass."""

    def check(value: Any) -> None:
        if type(value) is not dict:
            raise Refused("an object", value)
        missing = [name for name in checks if name not in value]
        if missing:
            raise Refused(f"an object with {', '.join(map(repr, missing))}", value)
        for name, each in {**checks, **(others or {})}.items():
            if name in value:
                _at(f"[{name!r}]", each, value[name])

    return check


def _at(place: str, check: Check, value: Any) -> None:
    try:
        check(value)
    except Refused as error:
        raise error.within(place) from None


@contextmanager
def described(where: object) -> Iterator[None]:
    """Turn what goes wrong while something is made of stored values into a CorruptionError that names the place.

    For what descriptions of single values cannot tell, such as arrays that do not fit each other or are not there.
    """
    try:
        yield
    except MemhierError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CorruptionError(f"{where}: not as described: {type(error).__name__}: {error}") from error


def stored_segment(store: "Store", name: str) -> "SegmentInfo":
    """Return what the catalog says of a segment; raise CorruptionError when there is none."""
    info = store.segments().get(name)
    if info is None:
        raise CorruptionError(f"{store.path}: no segment {name!r}, which the catalog's values speak of")
    return info


def stored_array(store: "Store", name: str, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return a whole segment as an array, checked; its length is compared before room is made for it.

    Parameters
    ----------
    shape
        What the array has to have; one length may be -1, for as much as there is.

    Raises
    ------
    CorruptionError
        When there is no such segment, it holds another number of bytes, or a page does not match its checksum.
    """
    info = stored_segment(store, name)
    each = np.dtype(dtype).itemsize * math.prod(length for length in shape if length >= 0)
    fits = info.payload == each if -1 not in shape else each > 0 and info.payload % each == 0
    if not fits or min(shape, default=0) < -1:
        raise CorruptionError(f"{info.path}: {info.payload} bytes do not hold {np.dtype(dtype)}{list(shape)}")
    found: NDArray[Any] = store.read_segment(name).view(dtype).reshape(shape)
    return found
