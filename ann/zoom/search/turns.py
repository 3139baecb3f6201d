"""Turns, which limit how many threads do something at a time."""

import itertools
import os
from _thread import LockType, allocate_lock

__all__ = ["Turns"]


class Turns:
    """Lets a fixed number of threads in at a time: ``with turns.next(): ...``.

    A turn is a built-in lock. No signal is handled between the lock and the `with` that takes and releases it. The
    steps of a semaphore are lines of Python, where an interrupt could keep a turn taken for ever.

    Parameters
    ----------
    count
        Threads at a time.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._asked = itertools.count()
        self._locks, self._pid = [allocate_lock() for _ in range(count)], os.getpid()

    def next(self) -> LockType:
        """Return a turn to take: a free one if there is any, otherwise each in rotation."""
        if self._pid != os.getpid():  # threads of the parent process may have had all turns
            self._locks, self._pid = [allocate_lock() for _ in range(self._count)], os.getpid()
        locks = self._locks
        for lock in locks:
            if not lock.locked():
                return lock
        return locks[next(self._asked) % len(locks)]
