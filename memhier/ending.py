"""Threads that end before Python goes down: one that computes meanwhile may crash it."""

import atexit
import os
from collections.abc import Callable

__all__ = ["before_exit"]


def before_exit(end: Callable[[], object]) -> Callable[[], object]:
    """Have a call made when the program ends, in this process and not in its forks; the answer takes that back."""
    pid = os.getpid()

    def end_here() -> None:
        if os.getpid() == pid:
            end()

    atexit.register(end_here)
    return lambda: atexit.unregister(end_here)
