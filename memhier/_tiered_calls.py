"""Who may call a tier: its own process, one call at a time, while it is open and nothing has failed for good."""

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from memhier._tiered_parts import TieredParts
from memhier.errors import ClosedError

__all__ = ["Calls"]

_PATIENCE_S = 0.01
_PAUSE_S = 0.0001


class Calls:
    """Lets calls in, one after the other, once what has gone wrong in the background has been said."""

    def __init__(self, parts: TieredParts) -> None:
        self._parts = parts
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._caller: int | None = None  # the thread whose call is in
        self._failure: BaseException | None = None
        self._returned: deque[NDArray[np.int64]] = deque()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Be the one call inside the block.

        Raises
        ------
        ClosedError
            In a forked child, after `close`, and for good once something has failed that leaves unknown what is on SSD.
        OSError, CorruptionError
            When a prefetch has failed; only once.
        RuntimeError
            When a function that the tier calls uses the tier.
        """
        self.check_process()
        with self._alone():
            self.check_open()
            self._take_back()
            if self._failure is not None:
                raise ClosedError(f"closed since a checkpoint failed ({self._failure}); reopen it") from self._failure
            self._parts.queue.check()
            self._parts.loader.check()
            self._parts.residents.resume()
            yield

    @contextmanager
    def giving_back(self) -> Iterator[bool]:
        """Be the one call inside the block, which only gives back; yield whether there is still something to give to.

        What has failed does not matter then.
        """
        if self._pid != os.getpid():
            yield False
            return
        with self._alone():
            if self._parts.alive:
                self._take_back()
            yield self._parts.alive

    @contextmanager
    def between(self) -> Iterator[bool]:
        """Be between two calls inside the block; yield False, and be not, where one that is in takes its time.

        Whoever comes again leaves calls that wait a moment first.
        """
        if not self._lock.acquire(timeout=_PATIENCE_S):
            yield False
            return
        try:
            self.check_open()
            yield True
        finally:
            self._lock.release()
            time.sleep(_PAUSE_S)

    def give_back_next(self, slots: NDArray[np.int64]) -> None:
        """Unpin slots before the next call does anything, without waiting for one that is under way."""
        self._returned.append(slots)

    def check_process(self) -> None:
        """Raise ClosedError in a forked child, which has none of the threads."""
        if self._pid != os.getpid():
            raise ClosedError(f"this tier belongs to process {self._pid}, which forked this one; open another here")

    def check_open(self) -> None:
        """Raise ClosedError after `close`."""
        if not self._parts.alive:
            raise ClosedError("the tier is closed")

    def fail(self, error: BaseException) -> None:
        """Let no more calls in."""
        self._failure = error

    def close(self) -> bool:
        """Close the parts once no call is in; return whether they were open.

        In a forked child they are the parent's, and stay as they are.
        """
        if self._pid != os.getpid():
            return False
        with self._alone():
            return self._parts.close()

    def _take_back(self) -> None:
        while self._returned:
            self._parts.residents.pins.unpin(self._returned.popleft())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        # A thread that waits for its own call to end would wait for ever.
        if self._caller == threading.get_ident():
            raise RuntimeError("a call of this tier is under way on this thread: initial must not use the tier")
        with self._lock:
            self._caller = threading.get_ident()
            try:
                yield
            finally:
                self._caller = None
