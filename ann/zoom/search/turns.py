"""Turns: how many may do something at a time."""

import itertools
import os
from _thread import LockType, allocate_lock

__all__ = ["Turns"]


class Turns:
    """Lets so many in at a time: ``with turns.next(): ...``, from any number of threads.

    A turn is a built-in lock. No signal is handled between the lock and the `with` that takes it and gives it back,
    while a semaphore's steps are lines of Python: an interrupt there keeps a turn taken for ever.

    Parameters
    ----------
    count
        How many.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._asked = itertools.count()
        self._locks, self._pid = [allocate_lock() for _ in range(count)], os.getpid()

    def next(self) -> LockType:
        """Return a turn to be taken, one that is free if there is any; others are waited for by as many each."""
        if self._pid != os.getpid():  # threads that did not survive the fork may have had all turns
            self._locks, self._pid = [allocate_lock() for _ in range(self._count)], os.getpid()
        locks = self._locks
        for lock in locks:
            if not lock.locked():
                return lock
        return locks[next(self._asked) % len(locks)]
