"""Work that threads do beside the commits: joins of parts, and the renewal of an index.

Python runs one thread at a time: a thread that reads, writes and computes in turn waits five milliseconds at every turn
while another computes. So the work waits at its pauses while the writer is busy. `give_way` then lets it have time, so
that the work ends also if the writer never rests.
"""

import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from memhier.ann.threads import one_thread
from memhier.ann.zoom.pauses import pause, pausing
from memhier.ann.zoom.renewal.anew import Anew
from memhier.callers import user_stacklevel
from memhier.ending import before_exit
from memhier.shield import when_gone

__all__ = ["Beside", "Caller", "Renewals", "StoppedError", "warn_of"]

_POLL_SECONDS, _WAIT_SECONDS = 0.002, 0.05
_SLOW, _SLOWER = 2, 4  # times that a renewal waited: how long a commit waits for it, and while room is scarce
_PATIENCE = 0.05  # of the changes: further ones after a failure before the next try


class StoppedError(Exception):
    """The work is no longer wanted."""


class Dropped(Protocol):
    """A result with files on disk, which remain unless it is used or dropped."""

    def drop(self) -> None:
        """Remove it."""


def warn_of(failures: Iterable[BaseException]) -> None:
    """Warn the user of failures of work beside the commits."""
    for failure in failures:
        warnings.warn(
            f"the index could not be made or measured anew, or its parts joined, beside its commits: {failure!r}. The "
            f"commit is durable all the same; the work starts again once more has changed, or at once by compact()",
            stacklevel=user_stacklevel(),
        )


class Named(Protocol):
    """A part of an index."""

    @property
    def name(self) -> str:
        """Its name."""


T = TypeVar("T", bound=Dropped)
M = TypeVar("M", bound=Dropped)
R = TypeVar("R", bound=Anew[Any, Any, Any])


class Caller:
    """The thread that others work beside: whether it is busy, and for how many seconds it was.

    Attributes
    ----------
    busy
        Whether the others wait.
    owes
        Seconds that it was busy, less its idle seconds since.
    """

    def __init__(self) -> None:
        self.busy: bool = False  # without a lock: one that is held at a fork stays so
        self.owes: float = 0.0
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
    """One piece of work; holds no reference to its owner, which may go before it ends."""

    def __init__(self, work: Callable[[], T], name: str, caller: Caller) -> None:
        self._caller = caller
        self.pid = os.getpid()
        self.stopped = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None
        self._work = work
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._taken_back = before_exit(self.end)
        try:
            self.thread.start()
        except BaseException:
            self._taken_back()
            raise

    def _run(self) -> None:
        try:
            with one_thread(), pausing(self._pause):  # other threads are the caller's
                self.result = self._work()
        except StoppedError:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._taken_back()

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
        The work waits while it is busy.
    """

    def __init__(self, name: str, caller: Caller) -> None:
        self._name, self._caller = name, caller
        self._work: _Work[T] | None = None

    def start(self, work: Callable[[], T]) -> None:
        """Begin a piece of work; once it is to stop, it ends at its next pause (`memhier.ann.zoom.pauses`)."""
        assert self._work is None
        self._work = _Work(work, self._name, self._caller)
        when_gone(self, self._work.stopped.set)

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

    def give_way(self, seconds: float) -> float:
        """Wait until the work is done, but no longer than this; return the seconds that are left."""
        end = time.monotonic() + seconds
        while self._work is not None and self.occupied and not self.done and (left := end - time.monotonic()) > 0:
            self._work.thread.join(min(left, _WAIT_SECONDS))
            pause()
        return max(0.0, end - time.monotonic())

    def stop(self) -> None:
        """End the work, after the step that is under way, and forget its result; or its error."""
        work, self._work = self._work, None
        if work is None or work.pid != os.getpid():
            return  # a forked child does not have the thread
        work.end()
        if work.result is not None:
            work.result.drop()


class Renewals(Generic[M, R]):
    """A join of parts and a renewal of the index, each by a thread of its own. For one thread, that of the writer.

    Parameters
    ----------
    name
        Of the threads.

    Attributes
    ----------
    made
        A part made by a join, for the next commit to take over.
    renewed
        The index made anew, for a commit to take over, or to make up for newer parts.
    caller
        The writer; both threads wait while it is busy.
    """

    def __init__(self, name: str) -> None:
        self.made: M | None = None
        self.renewed: R | None = None
        self.caller: Caller = Caller()
        self._joins: Beside[M] = Beside(f"{name}-join", self.caller)
        self._renewals: Beside[R] = Beside(f"{name}-renew", self.caller)
        self._joined: frozenset[str] = frozenset()
        self._covered: frozenset[str] = frozenset()
        self._planned = 0
        self._failures: list[BaseException] = []
        self._last_failure: BaseException | None = None
        self._not_before = -1

    @property
    def joining(self) -> bool:
        """Whether a join is under way, or waits to be taken over."""
        return self.made is not None or self._joins.occupied

    @property
    def renewing(self) -> bool:
        """Whether a renewal is under way, or waits to be taken over."""
        return self.renewed is not None or self._renewals.occupied

    @property
    def planned_bytes(self) -> int:
        """DRAM of the join under way, until a commit takes it over."""
        return self._planned if self.joining else 0

    def claimed(self, parts: Sequence[Named]) -> int:
        """Return how many parts, from the first on, belong to the join or the renewal."""
        spoken = (self._joined if self.joining else frozenset()) | (self._covered if self.renewing else frozenset())
        return max((number for number, part in enumerate(parts, 1) if part.name in spoken), default=0)

    def may_start(self, changes: int) -> bool:
        """Whether enough has changed since something failed."""
        return changes >= self._not_before

    def start_join(self, parts: Iterable[Named], work: Callable[[], M], planned: int) -> None:
        """Begin to join some parts, which takes `planned` bytes of DRAM."""
        self._joined, self._planned = frozenset(part.name for part in parts), planned
        self._joins.start(work)

    def start_renewal(self, parts: Iterable[Named], work: Callable[[], R]) -> None:
        """Begin to make the index anew from some parts."""
        self.stop_joins()
        self._covered = frozenset(part.name for part in parts)
        self._renewals.start(work)
        self.caller.owes = min(self.caller.owes, _WAIT_SECONDS)  # it has not waited yet

    def make_up(self, parts: Iterable[Named], work: Callable[[R], R]) -> None:
        """Begin to add parts newer than the renewal to it."""
        renewed, self.renewed = self.renewed, None
        assert renewed is not None
        self.stop_joins()
        self._covered = frozenset((*renewed.replaced, *(part.name for part in parts)))
        try:
            self._renewals.start(partial(work, renewed))
        except BaseException:
            renewed.drop()
            raise

    def collect(self, changes: int) -> None:
        """Take finished work as `made` and `renewed`, and note failures.

        `changes` counts what was added and removed until now.
        """
        try:
            self.made = self.made or self._joins.take()
        except Exception as error:
            self.failed(error, changes)
        try:
            self.renewed = self.renewed or self._renewals.take()
        except Exception as error:
            self.failed(error, changes)

    def failed(self, error: BaseException, changes: int) -> None:
        """Note a failure; no other work starts until more has changed."""
        self._failures.append(error)
        self._last_failure = error
        self._not_before = changes + max(1, int(_PATIENCE * changes))

    def failures(self) -> list[BaseException]:
        """Return the failures since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def take_made(self) -> M | None:
        """Hand over the joined part; the caller uses or drops it."""
        made, self.made = self.made, None
        return made

    def take_renewed(self) -> R | None:
        """Hand over the renewed index; the caller uses or drops it."""
        renewed, self.renewed = self.renewed, None
        return renewed

    def give_way(self, *, scarce: bool = False) -> None:
        """Wait for the work under way, so that it ends however fast commits follow each other.

        That is as long as a join waited itself, and twice as long for a renewal, which takes as long as many commits;
        or four times, where room is `scarce`.
        """
        with suppress(KeyboardInterrupt):  # it ends the wait; the caller raises its own (`memhier.shield`)
            left = self._renewals.give_way((_SLOWER if scarce else _SLOW) * self.caller.owes)
            self._joins.give_way(min(left, self.caller.owes))
        self.caller.owes = 0.0

    def finish(self, changes: int) -> None:
        """Wait until the renewal under way is done, and take it as `renewed`."""
        self._renewals.give_way(math.inf)
        self.collect(changes)

    def stop_joins(self) -> None:
        """End the join, and drop its result."""
        self._joins.stop()
        if (made := self.take_made()) is not None:
            made.drop()

    def stop(self) -> None:
        """End all work, after the step that is under way, and drop the results."""
        self._renewals.stop()
        self.stop_joins()
        if (renewed := self.take_renewed()) is not None:
            renewed.drop()

    def stats(self, *, due: bool) -> str:
        """Return the state of the renewal; `due` tells whether one is called for."""
        if self.renewing:
            return "ready" if self.renewed is not None or self._renewals.done else "running"
        if due and self._last_failure is not None:
            return f"failed: {self._last_failure!r}"
        return "due" if due else "none"
