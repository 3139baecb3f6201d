"""Checks of single numbers at the border: what came, what was expected."""

import operator
from typing import Any

__all__ = ["check_int"]


def check_int(name: str, value: Any, low: int, high: int, what: str = "") -> int:
    """Return an integer of any type as an int, or say what is wrong with it.

    Parameters
    ----------
    what
        What it counts, for the message, such as ``"bytes"``.
    """
    # A bool is an index for Python, but as a size it is a mistake.
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r}: expected an int")
    number = operator.index(value)
    if not low <= number <= high:
        raise ValueError(f"{name}={number}: expected {low} to {high}{what and f' {what}'}")
    return number
