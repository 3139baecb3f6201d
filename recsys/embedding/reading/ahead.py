"""One epoch read ahead: a thread reads batches, announces their rows and fetches them, a bounded number ahead.

The batches that are announced and held when a batch's rows are fetched depend on counts alone, never on time: so every
run reads and evicts the same rows. A batch's rows are fetched while the training works on the batch `prefetch` before
it; if there is no room for them, once that batch's rows were released.

Where every row has a slot and none had to be read for a while, there is nothing to fetch: the epoch rests. Its thread
ends, and batches pass from the loader to the training as they are, until rows have to be read again. A slow loader is
read ahead all the same. The bits of the training are the same either way.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from memhier.ending import before_exit
from memhier.errors import BudgetError
from memhier.recsys.embedding.groups.step_loan import StepTicket
from memhier.recsys.embedding.reading.read_modules import ReadModules
from memhier.recsys.embedding.tables import StepRows
from memhier.shield import at_end, shielded, wait_for
from memhier.store.segments import FullError

__all__ = ["Epoch", "Limits", "ReadAhead"]

# The window grows from a start by a step for each batch, so that the first step need not wait until it is full.
_RAMP_START, _RAMP_STEP = 8, 4
# Batches read but not announced, for when the loader is slow now and then.
_SLACK = 4
# The program's end waits so long for a thread: its loader, or another rank, may never answer.
_LAST_WAIT_S = 10.0
# Handing a batch from a thread to another takes about a fifth of this: a slower loader is worth it.
_SLOW_LOADER_S = 1e-3
_PACE_OF_LAST = 0.2  # share of the last batch in the loader's mean time
# The planner holds for an announced key its use, and an entry if it is not resident.
_PLANNED_BYTES = 12 + 80


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an epoch that is read ahead.

    Attributes
    ----------
    window
        Most batches known beyond the one being fetched.
    window_bytes
        Most bytes of all batches that wait, except that the next one may be larger; None for no limit.
    prefetch
        Batches fetched ahead of the one in training.
    grows
        Whether to announce only as many batches as are of use.
    """

    window: int
    window_bytes: int | None
    prefetch: int
    grows: bool


@dataclass(slots=True)
class _Waiting:
    batch: Any
    ids: list[Any]
    rows: list[StepRows]
    bytes: int
    tickets: list[StepTicket]


class Epoch(Iterator[Any]):
    """The iterator that a loop holds: the epoch ends when the loop is left and forgets it."""

    def __init__(self, ahead: "ReadAhead") -> None:
        self._ahead = ahead

    @classmethod
    def of(cls, ahead: "ReadAhead") -> "Epoch":
        """Return the iterator for a loop of this thread."""
        epoch = cls(ahead)
        ahead.farewell = at_end(epoch, ahead.close)
        return epoch if ahead.farewell is not None else _EpochOfThread(ahead)

    def __next__(self) -> Any:
        return self._ahead.next()


class _EpochOfThread(Epoch):
    """The same on a thread that no interrupt strikes."""

    def __del__(self) -> None:
        self._ahead.close()


class ReadAhead:
    """The batches of one epoch, each handed out with its rows in DRAM.

    Attributes
    ----------
    farewell
        Keeps the call alive that ends the epoch once its loop is left.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        modules: ReadModules,
        limits: Limits,
        skipped: int,
    ) -> None:
        self._batches = batches
        self._modules = modules
        self._limits = limits
        self._skipped = skipped
        # Batches that were not handed out: first those whose rows were fetched, then those that were announced.
        self._window: deque[_Waiting] = deque()
        self._fetched = self._announced = 0
        self._announced_bytes = 0  # of those that were not fetched
        self._waiting_bytes = 0  # of all that were not handed out
        self._handed_out = 0
        self._granted = 0  # so many batches of the epoch may be fetched
        # If ranks read in step: the number of batches that wait, which alone decides whether one is read. Anything that
        # differs among ranks must not decide, or one would wait for a read that another never makes.
        self._in_step = 0
        self._blocked = False  # there was no room for the next one
        self._full: FullError | None = None  # the disk had no room for rows that have to leave
        self._planning = False  # of the modules, some may have the rows of the next batch
        self._holds = False  # the rows of the batch that was handed out last
        self._ended = False  # the loader has
        self._error: BaseException | None = None  # ended the loader, or the thread
        self._closed = self._failed = self._is_withdrawn = False
        self._rests = False  # no batch is read ahead any more
        self._idle = False  # the thread has ended
        self._passes = False  # batches are not fetched, as none waits here and the thread has ended
        self.farewell: object = None
        self._changed = threading.Condition()
        self._known = 0
        self._wait_s = self._loader_s = 0.0
        self._pace_s = 0.0  # the loader's mean time of late
        # The thread of the epoch before ends first: among ranks, reads of two epochs would take each other's messages.
        modules.begin_epoch(self._give_way)
        self._thread: threading.Thread | None = None
        self._passes = self._rests = self._should_rest
        if not self._passes:
            self._start()

    @property
    def position(self) -> int:
        """The number of batches handed out, those skipped at a resume included."""
        return self._skipped + self._handed_out

    @shielded
    def stats(self) -> dict[str, float]:
        """Return plain numbers; see :meth:`Lookahead.stats`."""
        with self._changed:
            return {
                "batches": self._handed_out,
                "window": self._known / max(1, self._handed_out + self._fetched),
                "wait_s": self._wait_s,
                "loader_s": self._loader_s,
                "bytes": self._waiting_bytes,
            }

    def next(self) -> Any:
        """Let the last batch's rows go, and return the next batch, its rows in DRAM."""
        if self._passes and not self._closed:
            if self._should_rest:
                return self._pass_on()
            self._begin_again()
        return self._next()

    def _pass_on(self) -> Any:
        """Return the loader's next batch as it is."""
        started = time.perf_counter()
        try:
            batch = next(self._batches)
        except Exception:
            self.close()
            raise
        spent = time.perf_counter() - started
        self._note_pace(spent)
        self._wait_s += spent
        self._handed_out += 1
        return batch

    @shielded
    def _next(self) -> Any:
        started = time.perf_counter()
        if self._comes_to_rest():
            self._let_go()
            self._passes = True
            return self._pass_on()
        try:
            waiting = self._await_next()
        except FullError:
            raise  # with room the same call goes on
        except BaseException:
            self.close()
            raise
        # Rows whose read failed are read again here: an error is this batch's then, and the batch stays.
        self._planning = True
        self._modules.plan(waiting.ids, waiting.rows, waiting.tickets)
        self._planning = False
        with self._changed:
            self._holds = True
            self._window.popleft()
            self._waiting_bytes -= waiting.bytes
            self._fetched -= 1
            self._announced -= 1
            self._handed_out += 1
            self._granted = self._handed_out + (self._limits.prefetch if self._limits.window else 0)
            self._rests = self._rests or (not self._in_step and self._should_rest)
            self._changed.notify_all()
        self._wait_s += time.perf_counter() - started
        return waiting.batch

    @shielded
    def _give_way(self) -> None:
        """End, as another epoch begins; a loop that goes on gets an error."""
        if not self._closed:
            self._error = RuntimeError(
                "lookahead: another epoch of lookahead began over the same tables, and ended this one; leave this loop "
                "first, or read the other loader without lookahead"
            )
            self.close()

    @shielded
    def close(self) -> None:
        """End the thread, and withdraw the announced batches."""
        if self._is_withdrawn:
            return  # another epoch may have read ahead since
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._planning:
            self._planning = False
            self._modules.drop_ahead()  # the batch was not handed out
            self._modules.end_plan()
        self._let_go()
        announced, self._announced = self._announced, 0
        for waiting in self._window:
            for ticket in waiting.tickets:
                ticket.release()
        self._window.clear()
        self._fetched = self._waiting_bytes = 0
        self._batches = iter(())  # the loader's workers and files go with its iterator
        if announced:
            self._modules.withdraw()
        self._modules.drop_ahead()
        self._is_withdrawn = True

    def _end_thread(self) -> None:
        """End the thread as the program ends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_LAST_WAIT_S)

    # On the training's thread.

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="memhier-lookahead", daemon=True)
        self._taken_back = before_exit(self._end_thread)
        self._thread.start()

    @property
    def _should_rest(self) -> bool:
        return self._limits.grows and self._pace_s < _SLOW_LOADER_S and self._modules.rest

    def _comes_to_rest(self) -> bool:
        """Whether all batches that were read ahead are gone, and the loader has more."""
        if not self._rests:
            return False
        with self._changed:
            wait_for(self._changed, lambda: self._idle or self._closed or bool(self._window))
            return not (self._window or self._ended or self._closed or self._error)

    @shielded
    def _begin_again(self) -> None:
        """Read ahead from the next batch on."""
        self._passes = self._rests = self._idle = False
        self._start()

    def _note_pace(self, spent: float) -> None:
        self._loader_s += spent
        self._pace_s += _PACE_OF_LAST * (spent - self._pace_s)

    def _await_next(self) -> _Waiting:
        with self._changed:
            if self._closed:
                raise self._end()
            wait_for(self._changed, self._is_settled_locked)
        self._modules.catch_up()
        self._let_go()
        if self._blocked or not self._fetched:
            # The next batch is fetched while no other rows have to stay.
            self._modules.settle()
            with self._changed:
                # Without lookahead a batch is fetched now; with it, this is the time for one that found no room.
                self._granted = max(self._granted, self._handed_out + 1)
                self._blocked, self._full = False, None
                self._changed.notify_all()
                wait_for(self._changed, self._is_settled_locked)
        if self._full is not None and not self._fetched:
            raise self._full
        if self._failed or self._closed or not self._fetched:
            raise self._end()
        return self._window[0]

    def _end(self) -> BaseException:
        """Return the error that ended the epoch, once, and StopIteration otherwise."""
        error, self._error = self._error, None
        return StopIteration() if error is None else error

    def _is_settled_locked(self) -> bool:
        """Whether all batches that may be fetched are fetched, as far as there is room."""
        if self._closed or self._failed or self._blocked:
            return True
        fetched = self._handed_out + self._fetched
        return fetched >= self._granted or (self._over and self._fetched == len(self._window))

    def _let_go(self) -> None:
        """Release the rows of the batch that was handed out last."""
        if self._holds:
            self._holds = False
            self._modules.end_plan()

    @property
    def _over(self) -> bool:
        """Whether no more batches are read ahead."""
        return self._ended or self._rests or self._error is not None

    # On the epoch's own thread.

    def _run(self) -> None:
        try:
            while self._step():
                continue
        except BaseException as error:
            with self._changed:
                self._error, self._failed = error, True
                self._changed.notify_all()
        finally:
            with self._changed:
                self._idle = True
                self._changed.notify_all()
            self._taken_back()

    def _step(self) -> bool:
        """Take the next action of the epoch; False once none is left."""
        with self._changed:
            self._changed.wait_for(self._is_due_locked)
            # Other ranks may be in a read by now, which ends only once all ranks have made it.
            closes = self._closed and not (self._in_step and self._may_read_locked())
            if closes or self._is_over_locked():
                return False
            fetches = self._may_fetch_locked() and not self._closed
        if not fetches or self._lacks_batches():
            self._read()
        else:
            self._fetch()
        return True

    def _is_due_locked(self) -> bool:
        return self._closed or self._is_over_locked() or self._may_fetch_locked() or self._may_read_locked()

    def _is_over_locked(self) -> bool:
        return self._over and self._fetched == len(self._window)

    def _may_fetch_locked(self) -> bool:
        return not self._blocked and self._handed_out + self._fetched < self._granted

    def _may_read_locked(self) -> bool:
        if self._over:
            return False
        if self._in_step:
            return len(self._window) < self._in_step
        limit = self._limits.window_bytes
        ahead = len(self._window) - self._announced
        return ahead < _SLACK and (limit is None or self._waiting_bytes < limit or not self._window)

    def _lacks_batches(self) -> bool:
        """Announce the batches that the next one should know of; return whether more have to be read for that."""
        while self._announced <= self._fetched or self._should_know_more():
            if self._announced == len(self._window):
                return not self._over
            waiting = self._window[self._announced]
            self._modules.announce(waiting.rows)
            with self._changed:
                self._announced += 1
                self._announced_bytes += waiting.bytes
        return False

    def _should_know_more(self) -> bool:
        limits, known = self._limits, self._announced - self._fetched - 1
        ramp = _RAMP_START + _RAMP_STEP * (self._handed_out + self._fetched)
        if known >= min(limits.window, ramp):
            return False
        if limits.window_bytes is not None:
            # Batches that are fetched meanwhile, and the one that is trained on, take about as much each as the next.
            others = (limits.prefetch + 1) * self._window[self._fetched].bytes
            if self._announced_bytes + others >= limits.window_bytes:
                return False
        return not (limits.grows and self._modules.is_known)

    def _read(self) -> None:
        started = time.perf_counter()
        try:
            with self._modules.reading():
                batch = next(self._batches)
                self._note_pace(time.perf_counter() - started)
                asked = self._modules.asked_of(batch)
            ids = self._modules.ids_of(asked)
            rows = self._modules.distinct(ids)
        except StopIteration:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            return
        except Exception as error:
            # It is raised once the batches before it were handed out.
            with self._changed:
                self._error = error
                self._changed.notify_all()
            return
        size = (
            _bytes_of(batch)
            + self._modules.bytes_of(ids)
            + sum(some.nbytes + _PLANNED_BYTES * len(some.keys) for some in rows)
        )
        if not self._window and not self._handed_out:
            self._agree(size)
        with self._changed:
            self._window.append(_Waiting(batch, ids, rows, size, []))
            self._waiting_bytes += size

    def _agree(self, size: int) -> None:
        """Settle with the other ranks, if there are any that read in step, how many batches may wait."""
        largest = self._modules.agree(size)
        if largest is None:
            return
        limits = self._limits
        most = limits.window + limits.prefetch + 1 + _SLACK
        if limits.window_bytes is not None:
            # Later batches take about as much as the first.
            most = max(limits.prefetch + 2, limits.window_bytes // max(1, largest))
            self._limits = replace(limits, window=most - limits.prefetch - 1, window_bytes=None)
        self._in_step = most

    def _fetch(self) -> None:
        """Fetch the rows of the first batch that has none, if there is room."""
        if self._fetched == len(self._window):
            return
        waiting = self._window[self._fetched]
        try:
            self._modules.prefetch(waiting.rows, waiting.tickets)
        except BudgetError:
            if not self._holds and not self._fetched:
                raise
            with self._changed:
                self._blocked = True
                self._changed.notify_all()
            return
        except FullError as error:
            with self._changed:
                self._blocked, self._full = True, error
                self._changed.notify_all()
            return
        with self._changed:
            self._known += self._announced - self._fetched - 1
            self._announced_bytes -= waiting.bytes
            self._fetched += 1
            self._changed.notify_all()


def _bytes_of(batch: Any) -> int:
    """Return about how many bytes the tensors and arrays of a batch take."""
    total, waiting, seen = 0, [batch], set[int]()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, torch.Tensor | np.ndarray):
            total += int(part.nbytes)
        elif isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, list | tuple):
            waiting += part
        else:
            waiting += getattr(part, "__dict__", {}).values()
            waiting += [getattr(part, name, None) for kind in type(part).__mro__ for name in _slots(kind)]
    return total


def _slots(kind: type) -> tuple[str, ...]:
    names = vars(kind).get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)
