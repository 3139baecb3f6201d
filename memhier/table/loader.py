"""The loader fills slots of a slab with rows: from the write queue, from the log, or with their first values.

A slot is EMPTY until it is filled, LOADING while the reading thread works on it, and READY then. A failed read leaves
its slots EMPTY, so the next call that needs the rows tries again.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.cache.slab import Slab
from memhier.cache.slab_memory import whole_rows
from memhier.codecs import Codec
from memhier.errors import ClosedError, MemhierError
from memhier.log.row_log import RowLog
from memhier.policies import Belady, Policy
from memhier.table.page_mates import Ahead, PageMates, may_share_pages
from memhier.table.shortage import Shortage
from memhier.table.writer import WriteQueue

__all__ = ["EMPTY", "LOADING", "READY", "Initial", "Job", "Loader"]

EMPTY, LOADING, READY = range(3)

Ints = NDArray[np.int64]
Initial = Callable[[Ints], Any]

_NONE = np.empty(0, np.int64)
_EACH = slice(None)  # all places in their order
# First values are made in blocks of so many bytes: the user's function may need several times as much for a while.
_INITIAL_BYTES = 2**19
# Part of the staging buffer for rows of batches that are announced.
_MATES_PART = 2


class Job:
    """Rows for the reading thread to load. If it could not, `error` is set before `done`."""

    def __init__(self, keys: Ints, slots: Ints) -> None:
        self.keys: Ints = keys
        self.slots: Ints = slots
        self.filled = 0  # how many of them are READY
        self.ahead: Ahead = []  # rows of later batches
        self.earlier: list[Job] = []  # jobs that read other rows of the same ticket
        self.done: threading.Event = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        """Wait until the thread is done with it, and raise the error that prevented it."""
        self.done.wait()
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        """Wake the threads that wait. The ticket keeps the job, which needs no rows any more."""
        self.error = self.error or next((job.error for job in self.earlier if job.error is not None), None)
        self.keys = self.slots = _NONE
        self.earlier, self.ahead = [], []
        self.done.set()


class Loader:
    """Loads rows on the caller's thread or on its own. Both use one staging buffer, and take turns with it.

    Parameters
    ----------
    slab
        The rows in DRAM.
    log, queue
        The rows on SSD, and those on their way there.
    codec
        The form of rows in `log` and `queue`.
    initial
        Returns the first values of rows; None for zeros.
    staged
        Rows that the staging buffer holds.
    policy
        Knows the batches that are announced.
    """

    def __init__(
        self,
        slab: Slab,
        log: RowLog,
        queue: WriteQueue,
        codec: Codec,
        initial: Initial | None,
        staged: int,
        policy: Policy,
    ) -> None:
        self._slab = slab
        self._log = log
        self._capacity = log.capacity
        self._queue = queue
        self._codec = codec
        self._initial = initial
        self._dtype, self._shape = slab.dtype, slab.shape
        elements = int(np.prod(self._shape, dtype=np.int64))
        self._initial_rows_at_once = max(1, _INITIAL_BYTES // max(1, self._dtype.itemsize * elements))
        self.states: NDArray[np.uint8] = np.zeros(slab.slots, np.uint8)
        # Whether the key in a slot has a row in the log, or will have once its changes are written.
        self._stored = np.zeros(slab.slots, np.bool_)
        self._written = len(log)  # keys that have a row in the log, or will have
        row_bytes = codec.encoded_bytes(self._dtype, elements)
        self._encoded = np.empty((staged, row_bytes), np.uint8)
        self._staging_bytes = self._encoded.nbytes
        self._mates: PageMates | None = None
        if isinstance(policy, Belady) and staged >= _MATES_PART and may_share_pages(row_bytes):
            self._policy = policy
            self._encoded, kept = np.split(self._encoded, [staged - staged // _MATES_PART])
            self._mates = PageMates(log, kept)
        # Rows that are stored as they are need no second buffer.
        self._decoded = None if codec.lossless else np.empty((len(self._encoded), elements), self._dtype)
        # One lock, and a condition for each event: a thread that wakes for nothing takes the interpreter from the
        # training for a moment.
        lock = threading.Lock()
        self._filled, self._free, self._work = (threading.Condition(lock) for _ in range(3))
        self._busy = False
        self._hurry = 0  # callers that wait for their turn; the thread lets them go first
        self._jobs: deque[Job] = deque()
        self.failed: BaseException | None = None  # of a job; no ticket and no call has raised it yet
        self._closed = False
        self.counts: dict[str, int] = dict.fromkeys(("first_touches", "refetches", "queue_hits"), 0)
        self.read_s: float = 0.0  # seconds that reads of the log have taken, on either thread
        self.stall_s: float = 0.0  # seconds that callers have waited for rows
        self._thread = threading.Thread(target=self._run, name="memhier-load", daemon=True)
        self._thread.start()

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes, with the keys and slots of waiting jobs."""
        waiting = sum(job.keys.nbytes + job.slots.nbytes for job in tuple(self._jobs))
        decoded = 0 if self._decoded is None else self._decoded.nbytes
        kept = 0 if self._mates is None else self._mates.memory_bytes
        return self.states.nbytes + self._stored.nbytes + self._staging_bytes + decoded + waiting + kept

    def check(self) -> None:
        """Raise, once, the last error of the thread that no ticket has raised."""
        error, self.failed = self.failed, None
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
                self._load(keys[empty], slots[empty])
                self.stall_s += time.perf_counter() - started
            self.settle(slots)

    def settle(self, slots: Ints) -> None:
        """Return once the thread is done with these slots, whether it could fill them or not."""
        if (self.states[slots] == LOADING).any():
            started = time.perf_counter()
            with self._filled:
                self._filled.wait_for(lambda: not (self.states[slots] == LOADING).any())
            self.stall_s += time.perf_counter() - started

    def prepare(self, keys: Ints, slots: Ints) -> Job:
        """Fill the EMPTY ones of these slots whose rows need no read; return a job for the rows that do."""
        empty = np.flatnonzero(self.states[slots] == EMPTY)
        keys, slots = keys[empty], slots[empty]
        waiting = self._queue.find(keys)
        if waiting.any():
            places = np.flatnonzero(waiting)
            with self._turn():
                for part in self._staged(len(places)):
                    some = places[part]
                    waiting[some] = self._take(keys[some], slots[some])
            rest = np.flatnonzero(~waiting)
            keys, slots = keys[rest], slots[rest]
        known = np.asarray(self._log.contains(keys))
        self._stored[slots] = known
        if not known.all():
            self._first_rows(keys[~known], slots[~known])
            known = np.flatnonzero(known)
            keys, slots = keys[known], slots[known]
        job = Job(keys, slots)
        if self._mates is not None and len(job.keys):
            job.ahead = self._mates.look_ahead(self._policy)
        return job

    def copies(self, keys: Ints, slots: Ints) -> NDArray[Any]:
        """Return rows of distinct keys, [n, *shape]; keys in no slot, where `slots` is -1, get none by this."""
        rows = np.empty((len(keys), *self._shape), self._dtype)
        ready = slots >= 0
        self.settle(slots[ready])
        ready[ready] = self.states[slots[ready]] == READY
        rows[ready] = self._slab.gather(slots[ready])
        places = np.flatnonzero(~ready)
        for part in self._staged(len(places)):
            new = places[part]
            with self._turn():
                waiting = self._queue.take(keys[new], self._encoded)
                rows[new[waiting]] = self._decode(int(np.count_nonzero(waiting)))
                new = new[~waiting]
                read, found = self._log.read(keys[new], out=self._encoded[: len(new)])
                rows[new] = self._decode(len(read))
            new = new[~found]
            rows[new] = self._initial_rows(keys[new])
        return rows

    def check_never_written(self, keys: Ints, slots: Ints) -> int:
        """Return how many of these keys were never written; raise Shortage when they are too many for the log.

        `slots` has the slot of each key, -1 if it has none.
        """
        written = np.zeros(len(keys), np.bool_)
        resident = np.flatnonzero(slots >= 0)
        written[resident] = self._stored[slots[resident]]
        if written.all():
            return 0
        unsure = keys[~written]
        # The queue first: a row goes from there to the log, never back.
        written[~written] = self._queue.find(unsure) | self._log.contains(unsure)
        new = len(keys) - int(np.count_nonzero(written))
        if self._written + new > self._capacity:
            raise Shortage(
                f"keys: {new} of them are new beside {self._written} that were written before, but the log's index has "
                f"room for rows={self._capacity}; make the tier with rows={self._written + new} or more",
                "rows", needed=new, held=self._written, room=self._capacity, enough=self._written + new,
            )  # fmt: skip
        return new

    def wrote(self, slots: Ints, never_written: int) -> None:
        """Note that callers wrote rows into slots, some of them of keys that were never written before."""
        self._stored[slots] = True
        self._written += never_written
        self._mark(slots, READY)

    def vacate(self, slots: Ints) -> None:
        """Make slots EMPTY, for other rows, once the thread is done with them.

        The thread may still read rows of a released ticket.
        """
        self.settle(slots)
        self._stored[slots] = False
        self._mark(slots, EMPTY)

    def submit(self, job: Job, slots: Ints) -> None:
        """Give a job to the thread. Its slots are LOADING until the thread has read their rows.

        `slots` are all of the ticket's: some may be LOADING for another ticket already.
        """
        with self._work:
            others = slots[self.states[slots] == LOADING]
            if len(others):
                job.earlier = [other for other in self._jobs if np.isin(other.slots, others).any()]
            self.states[job.slots] = LOADING
            if len(job.keys) or job.earlier:
                self._jobs.append(job)
                self._work.notify_all()
            else:
                job.finish()  # nothing to read

    def wait(self, job: Job) -> None:
        """Wait for a job, and raise its error here instead of in the next call."""
        started = time.perf_counter()
        try:
            job.wait()
        finally:
            self.stall_s += time.perf_counter() - started
            if job.error is not None and self.failed is job.error:
                self.failed = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the thread from reading inside the block."""
        with self._turn():
            yield

    def close(self) -> None:
        """End the thread after the read that is under way; waiting jobs fail."""
        with self._work:
            self._closed = True
            self._work.notify_all()
        self._thread.join()

    def _load(self, keys: Ints, slots: Ints) -> None:
        """Fill EMPTY slots on the caller's thread."""
        for part in self._staged(len(keys)):
            some, places = keys[part], slots[part]
            with self._turn():
                waiting = self._take(some, places)
                some, places = some[~waiting], places[~waiting]
                found = self._read(some, places, [])
            self._stored[places] = found
            if not found.all():
                self._first_rows(some[~found], places[~found])

    def _staged(self, rows: int) -> Iterator[slice]:
        """Yield parts of a batch that fit the staging buffer."""
        step = len(self._encoded)
        return (slice(start, start + step) for start in range(0, rows, step))

    def _take(self, keys: Ints, slots: Ints) -> NDArray[np.bool_]:
        """Fill slots with the rows that wait in the queue; return which do. For the thread that has the turn."""
        waiting = self._queue.take(keys, self._encoded)
        taken = slots[waiting]
        if len(taken):
            self._fill(taken, self._decode(len(taken)))
            self._stored[taken] = True
            self.counts["queue_hits"] += len(taken)
            if self._mates is not None:
                self._mates.forget(keys[waiting])
        return waiting

    def _read(self, keys: Ints, slots: Ints, ahead: Ahead) -> NDArray[np.bool_]:
        """Fill slots with the rows that the log has; return which it has. For the thread that has the turn.

        Rows of `ahead` that lie on the same pages are kept for their turn.
        """
        started = time.perf_counter()
        order, there = self._stage(keys, ahead)
        count = int(np.count_nonzero(there))
        if count:
            self.counts["refetches"] += count
            rows, places = self._decode(len(keys)), slots[order]
            self._fill(*((places, rows) if count == len(keys) else (places[there], rows[there])))
            self.read_s += time.perf_counter() - started
        found = np.empty(len(keys), np.bool_)
        found[order] = there
        return found

    def _stage(self, keys: Ints, ahead: Ahead) -> tuple[Ints | slice, NDArray[np.bool_]]:
        """Stage rows of the log; return the places of their keys in the order of the rows, and which are there."""
        if self._mates is None:
            return _EACH, self._log.read(keys, out=self._encoded[: len(keys)])[1]
        kept = self._mates.take(keys, self._encoded)
        order, first = np.concatenate((np.flatnonzero(kept), np.flatnonzero(~kept))), int(np.count_nonzero(kept))
        rest, near, places = keys[order[first:]], _NONE, _NONE
        if ahead and len(rest):
            near, places = self._mates.beside(rest, ahead, len(self._encoded) - len(keys))
        out = self._encoded[first : len(keys) + len(near)]
        rows, there = self._log.read(np.concatenate((rest, near)), out=out)
        are_near = np.flatnonzero(there[len(rest) :])
        self._mates.keep(near[are_near], places[are_near], whole_rows(rows[len(rest) :])[are_near])
        return order, np.concatenate((np.ones(first, np.bool_), there[: len(rest)]))

    def _first_rows(self, keys: Ints, slots: Ints) -> None:
        """Fill slots with rows as they are before they are first written."""
        step = self._initial_rows_at_once
        for start in range(0, len(keys), step):
            part = slice(start, start + step)
            self._slab.scatter(slots[part], self._initial_rows(keys[part]))
            self._mark(slots[part], READY)
        self.counts["first_touches"] += len(keys)

    def _initial_rows(self, keys: Ints) -> NDArray[Any]:
        shape = (len(keys), *self._shape)
        rows = np.zeros(shape, self._dtype) if self._initial is None else np.asarray(self._initial(keys))
        if rows.dtype != self._dtype:
            raise TypeError(f"initial: expected it to return an array of {self._dtype}, got {rows.dtype}")
        if rows.shape != shape:
            raise ValueError(f"initial: expected it to return shape {shape}, got {rows.shape}")
        return rows

    def _fill(self, slots: Ints, rows: NDArray[Any]) -> None:
        self._slab.scatter(slots, rows)
        self._mark(slots, READY)

    def _decode(self, count: int) -> NDArray[Any]:
        """Return the first staged rows, valid until others are staged."""
        encoded = self._encoded[:count]
        if self._decoded is None:
            rows = encoded.view(self._dtype)
        else:
            rows = self._codec.decode(encoded, out=self._decoded[:count])
        return rows.reshape(count, *self._shape)

    def _mark(self, slots: Ints, state: int) -> None:
        with self._filled:
            self.states[slots] = state
            self._filled.notify_all()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Have the staging buffer inside the block; the thread lets callers go first."""
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
                self._read(job.keys[part], job.slots[part], job.ahead)
            job.filled += len(job.keys[part])

    def _fail(self, job: Job, error: BaseException) -> None:
        job.error = self.failed = error
        # Some of the slots that were filled may belong to other rows by now, and be LOADING for them.
        self._mark(job.slots[job.filled :], EMPTY)
