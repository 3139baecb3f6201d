"""Fills slots of a slab with rows from wherever they are: the write queue, the log, or nowhere yet.

A slot is EMPTY until it is filled, LOADING while the reading thread is at it, and READY then. A read that fails leaves
its slots EMPTY, so whoever needs the rows next tries again.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memhier.cache.slab import Slab
from memhier.codecs import Codec
from memhier.errors import ClosedError, MemhierError
from memhier.table.shortage import Shortage
from memhier.table.write_queue import WriteQueue

if TYPE_CHECKING:
    from memhier.log.row_log import RowLog

__all__ = ["EMPTY", "LOADING", "READY", "Initial", "Job", "RowLoader"]

EMPTY, LOADING, READY = range(3)

Ints = NDArray[np.int64]
Initial = Callable[[Ints], Any]


_NONE = np.empty(0, np.int64)
# First rows are made so many bytes at a time: whoever makes them may need several times as much for a while.
_INITIAL_BYTES = 2**19


class Job:
    """Rows for the reading thread; `error` is set before `done` if it could not read them."""

    def __init__(self, keys: Ints, slots: Ints) -> None:
        self.keys = keys
        self.slots = slots
        self.filled = 0  # how many of them are there
        self.earlier: list[Job] = []  # those that read other rows of the same ticket
        self.done = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        """Wait until the thread is done with it, and raise what prevented it."""
        self.done.wait()
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        """Let those go on who wait. A ticket keeps its job, which needs no rows any more."""
        self.error = self.error or next((job.error for job in self.earlier if job.error is not None), None)
        self.keys = self.slots = _NONE
        self.earlier = []
        self.done.set()


class RowLoader:
    """Loads rows on the caller's thread or on its own; both share one staging buffer, and take turns with it."""

    def __init__(
        self, slab: Slab, log: "RowLog", queue: WriteQueue, codec: Codec, initial: Initial | None, staged: int
    ) -> None:
        self._slab = slab
        self._log = log
        self._queue = queue
        self._codec = codec
        self._initial = initial
        elements = int(np.prod(slab.shape, dtype=np.int64))
        self._initial_rows_at_once = max(1, _INITIAL_BYTES // max(1, slab.dtype.itemsize * elements))
        self.states = np.zeros(slab.slots, np.uint8)
        # Whether the key in a slot has a row in the log, or will have once its changes are written.
        self._stored = np.zeros(slab.slots, np.bool_)
        self._written = len(log)  # keys that have a row in the log, or will have
        self._encoded = np.empty((staged, codec.encoded_bytes(slab.dtype, elements)), np.uint8)
        # Rows that are stored as they are need no second buffer.
        self._decoded = None if codec.lossless else np.empty((staged, elements), slab.dtype)
        # One lock, and a condition for each thing that is waited for: who is woken for nothing takes the interpreter
        # from the training for a moment.
        lock = threading.Lock()
        self._filled, self._free, self._work = (threading.Condition(lock) for _ in range(3))
        self._busy = False
        self._hurry = 0  # callers who wait for their turn, before whom the thread stands back
        self._jobs: deque[Job] = deque()
        self._failed: BaseException | None = None
        self._closed = False
        self._counts = dict.fromkeys(("first_touches", "refetches", "queue_hits"), 0)
        self._read_s = 0.0
        self._stall_s = 0.0
        self._thread = threading.Thread(target=self._run, name="memhier-load", daemon=True)
        self._thread.start()

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes, the rows on their way to the thread included."""
        waiting = sum(job.keys.nbytes + job.slots.nbytes for job in tuple(self._jobs))
        decoded = 0 if self._decoded is None else self._decoded.nbytes
        return self.states.nbytes + self._stored.nbytes + self._encoded.nbytes + decoded + waiting

    @property
    def stall_s(self) -> float:
        """Seconds that callers have waited for rows."""
        return self._stall_s

    @property
    def read_s(self) -> float:
        """Seconds that reads of the log have taken, on whichever thread."""
        return self._read_s

    def counts(self) -> dict[str, int]:
        """Return how many rows came from where."""
        return dict(self._counts)

    def check(self) -> None:
        """Raise, once, what has gone wrong on the thread since the last time and was not raised by its ticket."""
        error, self._failed = self._failed, None
        if isinstance(error, OSError):
            raise OSError(error.errno, f"a prefetch failed: {error.strerror}", error.filename) from error
        if error is not None:
            kind = type(error) if isinstance(error, MemhierError) else RuntimeError
            raise kind(f"a prefetch failed: {error}") from error

    def ensure(self, keys: Ints, slots: Ints) -> None:
        """Return once all these slots are READY."""
        while not ((states := self.states[slots]) == READY).all():
            empty = states == EMPTY
            if empty.any():
                started = time.perf_counter()
                missing, places = self.prepare(keys[empty], slots[empty])
                for start in range(0, len(missing), len(self._encoded)):
                    part = slice(start, start + len(self._encoded))
                    with self._turn():
                        self._read(missing[part], places[part])
                self._stall_s += time.perf_counter() - started
            self.settle(slots)

    def settle(self, slots: Ints) -> None:
        """Return once the thread is done with these slots, whether it could fill them or not."""
        if (self.states[slots] == LOADING).any():
            started = time.perf_counter()
            with self._filled:
                self._filled.wait_for(lambda: not (self.states[slots] == LOADING).any())
            self._stall_s += time.perf_counter() - started

    def prepare(self, keys: Ints, slots: Ints) -> tuple[Ints, Ints]:
        """Fill the slots of rows that need no read; return keys and slots of those that do."""
        if len(self._queue):
            waiting = self._from_queue(keys, slots)
            keys, slots = keys[~waiting], slots[~waiting]
        known = np.asarray(self._log.contains(keys))
        self._stored[slots] = known
        if not known.all():
            self._first_rows(keys[~known], slots[~known])
        return keys[known], slots[known]

    def copies(self, keys: Ints, slots: Ints) -> NDArray[Any]:
        """Return rows of distinct keys, [n, *shape]. Those in no slot, where `slots` is -1, will not be in one then."""
        rows = np.empty((len(keys), *self._slab.shape), self._slab.dtype)
        ready = slots >= 0
        self.settle(slots[ready])
        ready[ready] = self.states[slots[ready]] == READY
        rows[ready] = self._slab.gather(slots[ready])
        rows[~ready] = self._elsewhere(keys[~ready])
        return rows

    def _elsewhere(self, keys: Ints) -> NDArray[Any]:
        rows = np.empty((len(keys), *self._slab.shape), self._slab.dtype)
        for start in range(0, len(keys), len(self._encoded)):
            part, some = keys[start : start + len(self._encoded)], rows[start : start + len(self._encoded)]
            with self._turn():
                waiting = self._queue.take(part, self._encoded)
                some[waiting] = self._decode(int(np.count_nonzero(waiting)))
                logged = ~waiting
                logged[logged] = self._log.contains(part[logged])
                count = int(np.count_nonzero(logged))
                self._log.read(part[logged], out=self._encoded[:count])
                some[logged] = self._decode(count)
            new = ~(waiting | logged)
            some[new] = self._initial_rows(part[new])
        return rows

    def check_never_written(self, keys: Ints, slots: Ints) -> int:
        """Return how many of these keys were never written; raise BudgetError when they are too many for the log.

        `slots` are those of the keys, -1 where a key has none.
        """
        written = np.zeros(len(keys), np.bool_)
        resident = slots >= 0
        written[resident] = self._stored[slots[resident]]
        unsure = keys[~written]
        # The queue first: from there a row goes to the log, never back.
        written[~written] = self._queue.find(unsure) | self._log.contains(unsure)
        new = len(keys) - int(np.count_nonzero(written))
        if self._written + new > self._log.capacity:
            raise Shortage(
                f"keys: {new} of them are new beside {self._written} that were written before, but the log's index has "
                f"room for rows={self._log.capacity}; make the tier with rows={self._written + new} or more",
                "rows", needed=new, held=self._written, room=self._log.capacity, enough=self._written + new,
            )  # fmt: skip
        return new

    def wrote(self, slots: Ints, never_written: int) -> None:
        """Note that slots have got rows that are to be kept, some of them of keys that were never written."""
        self._stored[slots] = True
        self._written += never_written
        self._mark(slots, READY)

    def vacate(self, slots: Ints) -> None:
        """Make slots EMPTY, for other rows, once the thread is done with them: a released ticket may still be read."""
        self.settle(slots)
        self._stored[slots] = False
        self._mark(slots, EMPTY)

    def submit(self, job: Job, slots: Ints) -> None:
        """Give rows to the thread. Their slots are LOADING until it has read them.

        `slots` are all of the ticket's: some may be LOADING for another one already.
        """
        with self._work:
            others = slots[self.states[slots] == LOADING]
            if len(others):
                job.earlier = [other for other in self._jobs if np.isin(other.slots, others).any()]
            self.states[job.slots] = LOADING
            self._jobs.append(job)
            self._work.notify_all()

    def wait(self, job: Job) -> None:
        """Wait for a job; what prevented it is told then, and not by the next call as well."""
        started = time.perf_counter()
        try:
            job.wait()
        finally:
            self._stall_s += time.perf_counter() - started
            if job.error is not None and self._failed is job.error:
                self._failed = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the thread from reading inside the block."""
        with self._turn():
            yield

    def close(self) -> None:
        """End the thread after the read that is under way; jobs that still wait fail."""
        with self._work:
            self._closed = True
            self._work.notify_all()
        self._thread.join()

    def _from_queue(self, keys: Ints, slots: Ints) -> NDArray[np.bool_]:
        found = np.zeros(len(keys), np.bool_)
        with self._turn():
            for start in range(0, len(keys), len(self._encoded)):
                part = slice(start, start + len(self._encoded))
                found[part] = self._queue.take(keys[part], self._encoded)
                self._fill(slots[part][found[part]])
        self._stored[slots[found]] = True
        self._counts["queue_hits"] += int(np.count_nonzero(found))
        return found

    def _first_rows(self, keys: Ints, slots: Ints) -> None:
        """Fill slots with what rows are before they are first written."""
        step = self._initial_rows_at_once
        for start in range(0, len(keys), step):
            part = slice(start, start + step)
            self._slab.scatter(slots[part], self._initial_rows(keys[part]))
            self._mark(slots[part], READY)
        self._counts["first_touches"] += len(keys)

    def _initial_rows(self, keys: Ints) -> NDArray[Any]:
        shape = (len(keys), *self._slab.shape)
        rows = np.zeros(shape, self._slab.dtype) if self._initial is None else np.asarray(self._initial(keys))
        if rows.dtype != self._slab.dtype:
            raise TypeError(f"initial: expected it to return an array of {self._slab.dtype}, got {rows.dtype}")
        if rows.shape != shape:
            raise ValueError(f"initial: expected it to return shape {shape}, got {rows.shape}")
        return rows

    def _read(self, keys: Ints, slots: Ints) -> None:
        """Read at most as many rows as can be staged; for whose turn it is."""
        started = time.perf_counter()
        self._log.read(keys, out=self._encoded[: len(keys)])
        self._fill(slots)
        self._read_s += time.perf_counter() - started
        self._counts["refetches"] += len(keys)

    def _fill(self, slots: Ints) -> None:
        """Decode the first staged rows into slots; for whose turn it is."""
        if len(slots):
            self._slab.scatter(slots, self._decode(len(slots)))
            self._mark(slots, READY)

    def _decode(self, count: int) -> NDArray[Any]:
        """Return the first staged rows, valid until others are staged."""
        encoded = self._encoded[:count]
        if self._decoded is None:
            rows = encoded.view(self._slab.dtype)
        else:
            rows = self._codec.decode(encoded, out=self._decoded[:count])
        return rows.reshape(count, *self._slab.shape)

    def _mark(self, slots: Ints, state: int) -> None:
        with self._filled:
            self.states[slots] = state
            self._filled.notify_all()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._free:
            self._hurry += 1
            try:
                self._free.wait_for(lambda: not self._busy)
                self._busy = True
            finally:
                self._hurry -= 1
        yield from self._until_done()

    @contextmanager
    def _background_turn(self) -> Iterator[None]:
        with self._free:
            self._free.wait_for(lambda: not self._busy and not self._hurry)
            self._busy = True
        yield from self._until_done()

    def _until_done(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._free:
                self._busy = False
                self._free.notify_all()

    def _run(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._closed or self._jobs)
                if self._closed:
                    break
                job = self._jobs[0]
            try:
                self._read_job(job)
            except BaseException as error:
                self._fail(job, error)
            with self._work:
                self._jobs.popleft()
            job.finish()
        for job in self._jobs:
            self._fail(job, ClosedError("closed before the rows of this ticket were read"))
            job.finish()
        self._jobs.clear()

    def _read_job(self, job: Job) -> None:
        while job.filled < len(job.keys):
            part = slice(job.filled, job.filled + len(self._encoded))
            with self._background_turn():
                self._read(job.keys[part], job.slots[part])
            job.filled += len(job.keys[part])

    def _fail(self, job: Job, error: BaseException) -> None:
        job.error = self._failed = error
        # Of the slots that were filled some may belong to other rows by now, and be LOADING for them.
        self._mark(job.slots[job.filled :], EMPTY)
