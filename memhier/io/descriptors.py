"""File descriptors that are closed with the objects they belong to.

A built-in function closes each one. In `__del__`, or under `weakref.finalize`, an interrupt would be lost, as Python
prints the error and goes on, and the file might stay open.
"""

import os
import weakref
from collections.abc import Callable
from typing import Any, cast

__all__ = ["close_descriptor", "close_with"]

_open: dict[int, "_Descriptor"] = {}
"""By number. A descriptor that was closed with its owner stays here until the next file has its number."""


class _Descriptor(weakref.ref[Any]):
    """A reference to an owner. Python calls `os.close` with it once the owner is gone; its index is the number."""

    __slots__ = ("__index__",)
    __index__: Callable[[], int]


def close_with(owner: object, number: int) -> None:
    """Close a descriptor once its owner is gone, unless that was done before."""
    descriptor = _Descriptor(owner, cast(Any, os.close))
    descriptor.__index__ = number.__index__
    _open[number] = descriptor


def close_descriptor(number: int) -> None:
    """Close a descriptor now, which is done once."""
    del _open[number]
    os.close(number)
