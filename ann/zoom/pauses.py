"""Where long work may wait, or end: for an interrupt; and work done beside others says what is to happen there."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from memhier.shield import check_interrupt

__all__ = ["pause", "pausing"]

_LOCAL = threading.local()


def pause() -> None:
    """Do what this thread's work is to do now and then; raise KeyboardInterrupt where that is what is waited for."""
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
