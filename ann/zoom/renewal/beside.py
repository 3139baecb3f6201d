"""Work that a thread does beside its caller's, one piece at a time, until it is done, has failed, or is stopped.

Python runs one thread at a time: beside another that computes, one that reads, writes and computes in turn waits five
milliseconds at every turn. So the work waits at its pauses while its caller is busy; and that the caller who never
rests does not keep it from ending, `give_way` lets it have as much time as the caller took.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from memhier.ann.threads import one_thread
from memhier.ann.zoom.renewal.pauses import pausing
from memhier.shield import when_gone

__all__ = ["Beside", "Caller", "StoppedError"]

_POLL_SECONDS = 0.002


class StoppedError(Exception):
    """The work is no longer wanted."""


class Dropped(Protocol):
    """A result that leaves something behind unless it is used."""

    def drop(self) -> None:
        """Remove what it left."""


T = TypeVar("T", bound=Dropped)


class Caller:
    """Who has work done beside its own: whether it is busy, and for how long it was, in seconds.

    Attributes
    ----------
    busy
        Whether work beside is to wait.
    owes
        Seconds that it was busy, less those that it was not since.
    """

    def __init__(self) -> None:
        self.busy = False  # without a lock: one that is held at a fork stays so
        self.owes = 0.0
        self._since = time.monotonic()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Be busy within the block."""
        started = time.monotonic()
        self.owes = max(0.0, self.owes - (started - self._since))
        self.busy = True
        try:
            yield
        finally:
            self.busy = False
            self._since = time.monotonic()
            self.owes += self._since - started


class _Work(Generic[T]):
    """One piece of work; knows nothing of who asked for it, so that they can be let go of."""

    def __init__(self, work: Callable[[], T], name: str, caller: Caller) -> None:
        self._caller = caller
        self.pid = os.getpid()
        self.stopped = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None
        self._work = work
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        atexit.register(self.end)  # a daemon that computes while Python goes down may crash it
        try:
            with one_thread(), pausing(self._pause):  # other threads are the caller's
                self.result = self._work()
        except StoppedError:
            pass
        except BaseException as error:
            self.error = error
        finally:
            atexit.unregister(self.end)

    def _pause(self) -> None:
        while self._caller.busy and not self.stopped.is_set():
            time.sleep(_POLL_SECONDS)
        if self.stopped.is_set():
            raise StoppedError

    def end(self) -> None:
        """Stop it, and wait until it has stopped."""
        self.stopped.set()
        if self.pid == os.getpid() and self.thread is not threading.current_thread():
            self.thread.join()


class Beside(Generic[T]):
    """A place for one piece of work at a time. For one thread; only the work itself runs in another.

    Parameters
    ----------
    name
        Of the thread.
    caller
        Whom it waits for.
    """

    def __init__(self, name: str, caller: Caller) -> None:
        self._name, self._caller = name, caller
        self._work: _Work[T] | None = None

    def start(self, work: Callable[[], T]) -> None:
        """Begin a piece of work, which ends at its next pause (`memhier.ann.zoom.renewal.pauses`) once it is to
        stop."""
        assert self._work is None
        self._work = _Work(work, self._name, self._caller)
        when_gone(self, self._work.stopped.set)
        self._work.thread.start()

    @property
    def occupied(self) -> bool:
        """Whether there is work under way, or a result to take."""
        return self._work is not None and self._work.pid == os.getpid()

    @property
    def done(self) -> bool:
        """Whether there is a result to take, or an error."""
        return self._work is not None and self.occupied and not self._work.thread.is_alive()

    def take(self) -> T | None:
        """Return the result, None where there is none yet; or raise the error that ended the work."""
        if self._work is None or not self.done:
            return None
        work, self._work = self._work, None
        if work.error is not None:
            raise work.error
        return work.result

    def wait(self, seconds: float) -> None:
        """Wait until the work is done, but no longer than this."""
        if self._work is not None and self.occupied:
            self._work.thread.join(seconds)

    def stop(self) -> None:
        """End the work, after the step that is under way, and forget its result; or its error."""
        work, self._work = self._work, None
        if work is None or work.pid != os.getpid():
            return  # a forked child does not have the thread
        work.end()
        if work.result is not None:
            work.result.drop()
