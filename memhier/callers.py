"""Which line of the user's a warning is about."""

import sys
from types import FrameType

__all__ = ["user_stacklevel"]

_BETWEEN = ("memhier", "torch", "transformers")  # a module, or the model that it is part of, is called through these


def user_stacklevel() -> int:
    """Return the `stacklevel` by which the caller's warning names the nearest line of the user's own code."""
    level, frame = 0, sys._getframe(1)
    while frame.f_back is not None and _is_between(frame):
        level, frame = level + 1, frame.f_back
    return level + 1


def _is_between(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).split(".")[0] in _BETWEEN
