"""Pauses of long work: it may end there for an interrupt, or wait for other work of higher priority."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from memhier.shield import check_interrupt

__all__ = ["pause", "pausing"]

_LOCAL = threading.local()


def pause() -> None:
    """Call this thread's hook; raise KeyboardInterrupt if an interrupt waits."""
    check_interrupt()
    hook: Callable[[], None] | None = getattr(_LOCAL, "hook", None)
    if hook is not None:
        hook()


@contextmanager
def pausing(hook: Callable[[], None]) -> Iterator[None]:
    """Let this thread call `hook` at every pause within the block; it may wait, or raise."""
    _LOCAL.hook = hook
    try:
        yield
    finally:
        _LOCAL.hook = None
