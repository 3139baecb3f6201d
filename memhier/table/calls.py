"""Who may call a tier: its own process, one call at a time, while it is open and nothing has failed for good."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from memhier.errors import ClosedError, LockedError
from memhier.table.parts import TieredParts
from memhier.table.tickets import Held, Returning

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
        self._change: ExitStack | None = None  # of lent rows
        self._failure: BaseException | None = None
        self._lent: dict[int, Returning] = {}
        self._returned: deque[Returning] = deque()

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
    def changing(self) -> Iterator[ExitStack]:
        """Be a call in which lent rows are changed; yield what ends with it, or before by `end_change`."""
        with ExitStack() as change:
            change.enter_context(self.call())
            change.callback(setattr, self, "_change", None)
            self._change = change
            yield change

    def end_change(self) -> None:
        """End the change that this thread has begun, which an interrupt may have kept from its end."""
        change = self._change
        if change is not None and self._pid == os.getpid() and self._caller == threading.get_ident():
            change.close()

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

    def lend(self, give_back: Callable[[], object]) -> Held:
        """Return what holds slots: once it is gone, they are given back before the next call does anything.

        It may go at any time, in the middle of a call or on a thread that one waits for: nothing waits then.
        """
        held = Held()
        returning = Returning(held, self._returned.append, give_back)
        self._lent[id(returning)] = returning
        return held

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
            returned = self._returned.popleft()
            returned.give_back()
            del self._lent[id(returned)]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        # A thread that waits for its own call to end would wait for ever.
        if self._caller == threading.get_ident():
            if self._change is not None:
                raise LockedError(
                    "rows lent by this tier are being changed on this thread: leave the block of loan.changing() "
                    "first, or, where an interrupt has cut it short, close the tier and open it again"
                )
            raise RuntimeError("a call of this tier is under way on this thread: initial must not use the tier")
        with self._lock:
            self._caller = threading.get_ident()
            try:
                yield
            finally:
                self._caller = None
