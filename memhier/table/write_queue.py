"""Rows on their way out of DRAM: a bounded buffer that serves reads while a thread empties it into the log."""

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memhier.cache.slots import SlotMap
from memhier.errors import ClosedError, LockedError
from memhier.store.segments import FullError

if TYPE_CHECKING:
    from memhier.log.row_log import RowLog

__all__ = ["WriteQueue"]

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class WriteQueue:
    """Encoded rows by key that the log does not have yet.

    A key has one place: a newer row overwrites one that still waits, which spares a write. A row leaves only once the
    log has it, so that looking here first and in the log second always finds the newest. The thread waits until half
    of the queue is taken, or somebody drains it: few long appends cost less than many short ones.

    While an image is taken (`begin_image` to `release`), rows of after its moment wait, and the log gets the others at
    once.

    When an append fails the queue is closed for good, as nobody knows what the log has got: every call raises. When
    somebody else is changing the store, or the disk is full, nothing is lost: the caller that needs room is told, and
    may try again.
    """

    def __init__(self, log: "RowLog", rows: int, row_bytes: int) -> None:
        self._log = log
        self._places = SlotMap(rows)
        self._rows = np.empty((rows, row_bytes), np.uint8)
        # Puts so far of each place's row: tells whether a row was overwritten while it was being appended.
        self._puts = np.zeros(rows, np.uint32)
        self._outgoing = np.empty((batch_rows(rows), row_bytes), np.uint8)
        self._changed = threading.Condition()
        self._waits = np.zeros(rows, np.bool_)  # places of rows of after the image's moment
        self._waiting = 0
        self._may_wait = rows - batch_rows(rows)  # the rest is for rows of the image, which never wait
        self._imaging = False
        self._drains = 0
        self._closed = False
        self._failure: BaseException | None = None
        self._refused: LockedError | FullError | None = None
        self._stall_s = 0.0
        self._thread = threading.Thread(target=self._run, name="memhier-write", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """How many rows wait."""
        return len(self._places)

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        arrays = (self._rows, self._puts, self._waits, self._outgoing)
        return self._places.memory_bytes + sum(array.nbytes for array in arrays)

    @staticmethod
    def bytes_for(rows: int, row_bytes: int) -> int:
        """Return what `memory_bytes` of such a queue will be."""
        return SlotMap.bytes_for(rows) + (row_bytes + 5) * rows + row_bytes * batch_rows(rows)

    @property
    def stall_s(self) -> float:
        """Seconds that callers have waited, for room or for the queue to drain."""
        return self._stall_s

    def check(self) -> None:
        """Raise ClosedError when an append has failed, with what went wrong as its cause."""
        if self._failure is not None:
            raise ClosedError(
                f"closed since rows could not be written ({self._failure}); reopen to go on from the last checkpoint"
            ) from self._failure

    def has_room(self, keys: Ints) -> bool:
        """Return whether these rows, none of an image, can be put without waiting for the end of one."""
        with self._changed:
            return not self._imaging or len(keys) <= self._may_wait - self._waiting

    def put(self, keys: Ints, rows: Bytes, *, of_image: bool = False) -> None:
        """Take rows in, [n, row_bytes] of distinct keys, waiting for room as often as need be.

        While an image is taken, those that are part of it come with `of_image`.
        """
        start = 0
        with self._changed:
            self._refused = None
            while start < len(keys):
                self.check()
                # Overwriting needs no room: as many rows as the free places allow for new keys among them.
                places = self._places.find(keys[start:])
                free, waits = self._places.free, self._imaging and not of_image
                if waits:
                    # A row of the image is not overwritten: it goes to the log first.
                    kept = (places >= 0) & ~self._waits[places]
                    places = places[: int(np.argmax(kept))] if kept.any() else places
                    free = min(free, self._may_wait - self._waiting)
                stop = start + int(np.searchsorted(np.cumsum(places < 0), free, side="right"))
                if stop == start:
                    self._wait()
                    continue
                places = self._places.insert(keys[start:stop])
                self._rows[places] = rows[start:stop]
                self._puts[places] += np.uint32(1)
                if waits:
                    self._waiting += int(np.count_nonzero(~self._waits[places]))
                    self._waits[places] = True
                start = stop
                if self._due():
                    self._changed.notify_all()

    def find(self, keys: Ints) -> NDArray[np.bool_]:
        """Return which keys wait here."""
        return self._places.find(keys) >= 0

    def take(self, keys: Ints, out: Bytes) -> NDArray[np.bool_]:
        """Copy the rows of those keys that wait here to the first rows of `out`; return which they are."""
        with self._changed:
            places = self._places.find(keys)
            found: NDArray[np.bool_] = places >= 0
            np.take(self._rows, places[found], axis=0, out=out[: np.count_nonzero(found)], mode="clip")
            return found

    def drain(self) -> None:
        """Wait until the log has every row; while an image is taken, all of that."""
        with self._changed:
            self._refused = None
            self._drains += 1
            self._changed.notify_all()
            try:
                while len(self._places) > self._waiting:
                    self.check()
                    self._wait()
            finally:
                self._drains -= 1
            self.check()

    def write_through(self, keys: Ints, rows: Bytes) -> None:
        """Append rows of keys that are not here."""
        self._log.append(keys, rows)

    def begin_image(self) -> None:
        """Keep rows that come from now on from the log, those of the image excepted, until `release`."""
        with self._changed:
            self._imaging = True
            self._changed.notify_all()

    def release(self) -> None:
        """Let the log have all rows again."""
        with self._changed:
            self._imaging = False
            self._waits[:] = False
            self._waiting = 0
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread after the append that is under way; rows that still wait are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _wait(self) -> None:
        started = time.perf_counter()
        self._changed.notify_all()
        self._changed.wait()
        self._stall_s += time.perf_counter() - started
        refused = self._refused
        if isinstance(refused, FullError):
            words = f"rows could not be written yet, make room and call again ({refused.strerror})"
            raise FullError(refused.errno, words, refused.filename) from refused
        if refused is not None:
            raise LockedError(f"rows could not be written yet: {refused}") from refused

    def _run(self) -> None:
        try:
            while self._append_some():
                continue
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _append_some(self) -> bool:
        """Wait for rows and append as many as fit the buffer; False once closed."""
        with self._changed:
            self._changed.wait_for(self._due)
            if self._closed:
                return False
            keys, places = self._places.items()
            if self._waiting:
                goes = ~self._waits[places]
                keys, places = keys[goes], places[goes]
            keys, places = keys[: len(self._outgoing)], places[: len(self._outgoing)]
            puts = self._puts[places]
            # A copy: the places may be overwritten while the log works.
            rows = np.take(self._rows, places, axis=0, out=self._outgoing[: len(places)], mode="clip")
        try:
            self._log.append(keys, rows)
        except (LockedError, FullError) as error:
            with self._changed:
                self._refused = error
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self._refused is None)
            return True
        with self._changed:
            self._places.erase(keys[self._puts[places] == puts])
            self._changed.notify_all()
        return True

    def _due(self) -> bool:
        if self._closed:
            return True
        at_once = self._drains or self._imaging
        return len(self._places) - self._waiting > (0 if at_once else self._places.capacity // 2)


def batch_rows(rows: int) -> int:
    """Return how many rows at most are appended at a time."""
    return max(1, rows // 4)
