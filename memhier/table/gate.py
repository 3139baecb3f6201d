"""The gate of a tier: calls enter one at a time, from the tier's own process, while the tier is open.

Tiers beside each other share a gate, so that a commit of all of them, and a change of rows of several, is one call.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from numpy.typing import NDArray

from memhier.errors import ClosedError, LockedError
from memhier.table.table import Ints, Table

__all__ = ["Gate", "Held", "LentRows", "Life", "State"]

_PATIENCE_S = 0.01
_PAUSE_S = 0.0001


class State(Enum):
    """The state of a tier."""

    OPEN = "open"
    FAILED = "failed"
    """A checkpoint failed, and it is unknown which rows are on SSD. Loans and tickets still go back."""
    CLOSED = "closed"


class Life:
    """The state of a tier, and the error that ended it. It knows nothing of the table, which may be gone before it."""

    def __init__(self) -> None:
        self.state: State = State.OPEN
        self.failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Let no more calls in."""
        if self.state is State.OPEN:
            self.state, self.failure = State.FAILED, error

    def close(self) -> None:
        """Let nothing in any more."""
        self.state = State.CLOSED


class Held:
    """The hold that a ticket has on its slots, and that loans of the same slots share.

    The slots go back once the last of them has let go of it. Built-in code notices that, so no interrupt comes between.
    """

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True)
class LentRows:
    """Distinct keys that are lent and their slots, in the table of a number."""

    number: int
    keys: Ints
    slots: Ints


class Returning(weakref.ref[Held]):
    """Gives slots back after their hold has gone."""

    __slots__ = ("give_back",)

    def __new__(cls, held: Held, told: Callable[["Returning"], object], give_back: Callable[[], object]) -> "Returning":
        return super().__new__(cls, held, told)

    def __init__(self, held: Held, told: Callable[["Returning"], object], give_back: Callable[[], object]) -> None:
        self.give_back: Callable[[], object] = give_back


class Gate:
    """Lets one call at a time to the tables, after it has raised the threads' errors. At close it forgets them.

    Parameters
    ----------
    life
        The state of the tiers. Closing a table, which happens by itself when a process ends, closes them.
    """

    def __init__(self, life: Life) -> None:
        self._tables: tuple[Table, ...] = ()
        self.life: Life = life
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._caller: int | None = None  # the thread whose call is in
        self._change: ExitStack | None = None  # of lent rows
        self._lent: dict[int, Returning] = {}
        self._returned: deque[Returning] = deque()

    @property
    def closed(self) -> bool:
        """Whether the tiers are closed."""
        return self.life.state is State.CLOSED

    def join(self, table: Table) -> int:
        """Let calls to a further table in; return its number."""
        with self._lock:
            self._tables += (table,)
        return len(self._tables) - 1

    def tables(self) -> tuple[Table, ...]:
        """Return the tables, outside of any turn; raise ClosedError after `close`."""
        tables = self._tables
        if not tables or self.life.state is State.CLOSED:
            raise ClosedError("the tier is closed")
        return tables

    def check_process(self) -> None:
        """Raise ClosedError in a forked child, which has none of the threads."""
        if self._pid != os.getpid():
            raise ClosedError(f"this tier belongs to process {self._pid}, which forked this one; open another here")

    @contextmanager
    def call(self, number: int = 0) -> Iterator[Table]:
        """Be the one call inside the block; yield the table of a number.

        Raises
        ------
        ClosedError
            In a forked child, after `close`, and for good after a failure that leaves unknown which rows are on SSD.
        OSError, CorruptionError
            When a prefetch has failed; only once.
        RuntimeError
            When a function that the tier calls uses the tier.
        """
        self.check_process()
        with self._turn():
            table = self.tables()[number]
            self._take_back_locked()
            if self.life.state is State.FAILED:
                failure = self.life.failure
                raise ClosedError(f"closed since a checkpoint failed ({failure}); reopen it") from failure
            table.check()
            yield table

    @contextmanager
    def changing(self, lent: Sequence[LentRows]) -> Iterator[list[NDArray[Any]]]:
        """Be a call that changes lent rows in place; yield all rows of each table that has some.

        It ends with the block, or before by `close`. Nothing has changed where it raises at the beginning.
        """
        with ExitStack() as change:
            change.enter_context(self.call())
            change.callback(setattr, self, "_change", None)
            self._change = change
            tables = self.tables()
            for some in lent:
                tables[some.number].check()
            yield [change.enter_context(tables[some.number].changing(some.keys, some.slots)) for some in lent]

    @contextmanager
    def giving_back(self, number: int) -> Iterator[Table | None]:
        """Be the one call inside the block, which only gives back; yield the table, None if there is none any more.

        Failures do not matter here.
        """
        if self._pid != os.getpid():
            yield None
            return
        with self._turn():
            if self.closed or not self._tables:
                yield None
                return
            self._take_back_locked()
            yield self._tables[number]

    @contextmanager
    def between(self) -> Iterator[bool]:
        """Have a turn between two calls; yield False, without a turn, if the call that is in takes its time.

        A pause at the end lets a waiting call in before the thread comes again.
        """
        if not self._lock.acquire(timeout=_PATIENCE_S):
            yield False
            return
        try:
            self.tables()
            yield True
        finally:
            self._lock.release()
            time.sleep(_PAUSE_S)

    def lend(self, give_back: Callable[[], object]) -> Held:
        """Return a hold on slots. Once it is gone, the next call gives the slots back before it does anything else.

        The hold may go at any time, in the middle of a call or on a thread that a call waits for: nothing waits then.
        """
        held = Held()
        returning = Returning(held, self._returned.append, give_back)
        self._lent[id(returning)] = returning
        return held

    def fail(self, error: BaseException) -> None:
        """Let no more calls in."""
        self.life.fail(error)

    def end_change(self) -> None:
        """End the change of lent rows that this thread has begun; an interrupt may have kept it from its end."""
        change = self._change
        if change is not None and self._pid == os.getpid() and self._caller == threading.get_ident():
            change.close()

    def close(self) -> None:
        """Close the tables once no call is in, and let them go.

        A forked child does nothing: the tables are the parent's.
        """
        if self._pid != os.getpid():
            return
        with self._turn():
            tables, self._tables = self._tables, ()
            self._lent.clear()
            self._returned.clear()
            for table in reversed(tables):  # the first one has the reader of all
                table.close()

    def _take_back_locked(self) -> None:
        while self._returned:
            returned = self._returned.popleft()
            returned.give_back()
            del self._lent[id(returned)]

    @contextmanager
    def _turn(self) -> Iterator[None]:
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
