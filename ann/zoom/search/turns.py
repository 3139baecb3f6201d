"""Turns of searches: no more run at a time than there is DRAM for."""

import itertools
import os
from _thread import LockType, allocate_lock
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Turns"]

_LENT_MOST = 4  # turns that one search holds beside its own; more rooms save hardly more


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
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._locks = [allocate_lock() for _ in range(self._count)]
        self._lent, self._wanted = set[LockType](), set[LockType]()
        self._pid = os.getpid()

    def next(self) -> LockType:
        """Return a turn to take: a free one if there is any, otherwise each in rotation, of those lent if some are."""
        if self._pid != os.getpid():  # threads of the parent process may have had all turns
            self._begin_anew()
        for lock in self._locks:
            if not lock.locked():
                return lock
        locks = [*self._lent] or self._locks  # those lent are free again soonest
        wanted = locks[next(self._asked) % len(locks)]
        self._wanted.add(wanted)
        return wanted

    @contextmanager
    def lent(self) -> Iterator[int]:
        """Hold free turns beside the one held, and give their number; others keep as many. Not to be interrupted.

        A turn that a thread came to wait for is not lent as soon as it is free: that thread would never get it.
        """
        free = [lock for lock in self._locks if not lock.locked()]
        some = [lock for lock in reversed(free) if lock not in self._wanted][: min(_LENT_MOST, len(free) // 2)]
        self._wanted.difference_update(free)
        taken = [lock for lock in some if lock.acquire(blocking=False)]  # the last ones: others take the first
        self._lent.update(taken)
        try:
            yield len(taken)
        finally:
            self._lent.difference_update(taken)
            for lock in taken:
                lock.release()

    @property
    def spare(self) -> bool:
        """Whether there are free turns enough to lend one."""
        return sum(not lock.locked() for lock in self._locks) > 1

    @property
    def awaited(self) -> bool:
        """Whether a thread waits for a turn that is lent."""
        return not self._lent.isdisjoint(self._wanted)

    @property
    def busy(self) -> bool:
        """Whether all turns are taken."""
        return self._pid == os.getpid() and all(lock.locked() for lock in self._locks)
