"""Which line of the user's a warning is about."""

import sys
from types import FrameType

__all__ = ["user_stacklevel"]


def user_stacklevel() -> int:
    """Return the `stacklevel` by which the caller's warning names the nearest line that is not of this library."""
    level, frame = 0, sys._getframe(1)
    while frame.f_back is not None and _is_own(frame):
        level, frame = level + 1, frame.f_back
    return level + 1


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).split(".")[0] == "memhier"
