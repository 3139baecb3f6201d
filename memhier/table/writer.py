"""The writer brings changed rows from the slab to the log, by a bounded queue that serves reads meanwhile."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from memhier.cache.slab import Slab
from memhier.cache.slab_memory import whole_rows
from memhier.cache.slots import SlotMap
from memhier.codecs import Codec
from memhier.errors import ClosedError, LockedError
from memhier.log.row_log import RowLog
from memhier.store.segments import FullError

__all__ = ["WriteQueue", "Writer", "batch_rows"]

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_SAVE_BYTES = 2**20  # of an image written between two calls: about a millisecond
_FLUSH_SLOTS = 2**16  # looked through at a time, so that the numbers of all slots need not be held at once


class WriteQueue:
    """Encoded rows by key that the log does not have yet, and the thread that appends them.

    A key has one place: a newer row overwrites one that still waits, which spares a write. A row leaves only once the
    log has it, so a look here first and in the log second always finds the newest. The thread waits until half of the
    queue is taken, or a caller drains it: few long appends cost less than many short ones.

    While an image is taken (`begin_image` to `release`), rows written after its moment wait, and the log gets the
    others at once.

    When an append fails the queue is closed for good, as it is unknown which rows the log has got: every call raises.
    When another object is changing the store, or the disk is full, nothing is lost: the caller that needs room gets the
    error, and may try again.
    """

    def __init__(self, log: RowLog, rows: int, row_bytes: int) -> None:
        self._log = log
        self._places = SlotMap(rows)
        self._rows = np.empty((rows, row_bytes), np.uint8)
        self._items = whole_rows(self._rows)
        # Puts so far of each place's row: tells whether a row was overwritten while it was being appended.
        self._puts = np.zeros(rows, np.uint32)
        self._outgoing = np.empty((batch_rows(rows), row_bytes), np.uint8)
        self._changed = threading.Condition()
        self._waits = np.zeros(rows, np.bool_)  # places of rows written after the image's moment
        self._waiting = 0
        self._may_wait = rows - batch_rows(rows)  # the rest is for rows of the image, which never wait
        self._imaging = False
        self._drains = 0
        self._closed = False
        self.failure: BaseException | None = None  # of an append
        self._refused: LockedError | FullError | None = None
        self.stall_s: float = 0.0  # seconds that callers have waited, for room or for the queue to drain
        self._thread = threading.Thread(target=self._run, name="memhier-write", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Return how many rows wait."""
        return len(self._places)

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        arrays = (self._rows, self._puts, self._waits, self._outgoing)
        return self._places.memory_bytes + sum(array.nbytes for array in arrays)

    @staticmethod
    def bytes_for(rows: int, row_bytes: int) -> int:
        """Return the `memory_bytes` of such a queue."""
        return SlotMap.bytes_for(rows) + (row_bytes + 5) * rows + row_bytes * batch_rows(rows)

    def check(self) -> None:
        """Raise ClosedError, caused by the error, when an append has failed."""
        if self.failure is not None:
            raise ClosedError(
                f"closed since rows could not be written ({self.failure}); reopen to go on from the last checkpoint"
            ) from self.failure

    def has_room(self, keys: Ints) -> bool:
        """Return whether these rows, which are of no image, can be put without a wait for the end of one."""
        with self._changed:
            return not self._imaging or len(keys) <= self._may_wait - self._waiting

    def put(self, keys: Ints, rows: Bytes, *, of_image: bool = False) -> None:
        """Take rows, [n, row_bytes] of distinct keys, and wait for room as often as necessary.

        While an image is taken, its rows come with `of_image`.
        """
        start = 0
        with self._changed:
            self._refused = None
            while start < len(keys):
                self.check()
                waits, free, stop = self._imaging and not of_image, len(self._rows) - len(self._places), len(keys)
                if waits or stop - start > free:
                    # Overwriting needs no room: as many rows as the free places allow for new keys among them.
                    places = self._places.find(keys[start:])
                    if waits:
                        # A row of the image is not overwritten: it goes to the log first.
                        kept = (places >= 0) & ~self._waits[places]
                        places = places[: int(np.argmax(kept))] if kept.any() else places
                        free = min(free, self._may_wait - self._waiting)
                    stop = start + int(np.searchsorted(np.cumsum(places < 0), free, side="right"))
                    if stop == start:
                        self._wait_locked()
                        continue
                places = self._places.insert(keys[start:stop])
                np.put(self._items, places, whole_rows(rows[start:stop]), mode="clip")
                self._puts[places] += np.uint32(1)
                if waits:
                    self._waiting += int(np.count_nonzero(~self._waits[places]))
                    self._waits[places] = True
                start = stop
                if self._due_locked(len(self._places)):
                    self._changed.notify_all()

    def find(self, keys: Ints) -> NDArray[np.bool_]:
        """Return which keys wait here."""
        return self._places.find(keys) >= 0

    def take(self, keys: Ints, out: Bytes) -> NDArray[np.bool_]:
        """Copy the rows of the keys that wait here to the first rows of `out`; return which keys wait."""
        with self._changed:
            places = self._places.find(keys)
            found: NDArray[np.bool_] = places >= 0
            np.take(self._rows, places[found], axis=0, out=out[: np.count_nonzero(found)], mode="clip")
            return found

    def drain(self) -> None:
        """Wait until the log has every row; while an image is taken, every row of the image."""
        with self._changed:
            self._refused = None
            self._drains += 1
            self._changed.notify_all()
            try:
                while len(self._places) > self._waiting:
                    self.check()
                    self._wait_locked()
            finally:
                self._drains -= 1
            self.check()

    def write_through(self, keys: Ints, rows: Bytes) -> None:
        """Append rows of keys that are not here."""
        self._log.append(keys, rows)

    def begin_image(self) -> None:
        """Keep rows that are put from now on from the log until `release`; rows of the image excepted."""
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

    def _wait_locked(self) -> None:
        started = time.perf_counter()
        self._changed.notify_all()
        self._changed.wait()
        self.stall_s += time.perf_counter() - started
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
                self.failure = error
                self._changed.notify_all()

    def _append_some(self) -> bool:
        """Wait for rows and append as many as fit the buffer; False once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._due_locked(len(self._places)))
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

    def _due_locked(self, queued: int) -> bool:
        if self._closed:
            return True
        at_once = self._drains or self._imaging
        return queued - self._waiting > (0 if at_once else len(self._rows) // 2)


class Writer:
    """Hands changed rows of the slab to the write queue, and takes images of them. For one thread at a time.

    Parameters
    ----------
    slab
        The rows in DRAM.
    queue
        Takes rows that leave.
    codec
        The form of rows in the queue.
    outgoing
        Rows handed over at a time.
    keys_of
        Returns the key in each slot.
    beside
        A writer whose images begin and end with those of this one.
    """

    def __init__(
        self,
        slab: Slab,
        queue: WriteQueue,
        codec: Codec,
        outgoing: int,
        keys_of: Callable[[Ints], Ints],
        beside: "Writer | None" = None,
    ) -> None:
        self._together: list[ref[Writer]] = [] if beside is None else beside.together()
        self._together.append(ref(self))
        self._rows = slab.rows
        self._dtype, self._shape = slab.dtype, slab.shape
        self._queue = queue
        self._codec = codec
        self._keys_of = keys_of
        self._dirty = np.zeros(slab.slots, np.bool_)
        # Slots whose rows are part of the image under way, and not in the log yet. All of them are dirty.
        self._of_image = np.zeros(slab.slots, np.bool_)
        self._of_image_from = 0  # none before this one
        self._unsaved = False  # whether there may be any
        self._outgoing = np.empty((outgoing, *self._shape), self._dtype)
        row_bytes = codec.encoded_bytes(self._dtype, int(np.prod(self._shape, dtype=np.int64)))
        self._at_once = max(1, min(outgoing, _SAVE_BYTES // max(1, row_bytes)))
        # Rows that are stored as they are need no second buffer.
        self._encoded = np.empty((0 if codec.lossless else outgoing, row_bytes), np.uint8)
        self.writes: int = 0  # rows handed over

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes, without slab and queue."""
        return sum(each.nbytes for each in (self._dirty, self._of_image, self._outgoing, self._encoded))

    def together(self) -> "list[ref[Writer]]":
        """Return the writers whose images begin and end together."""
        return self._together

    def as_rows(self, rows: Any, keys: Ints) -> NDArray[Any]:
        """Return rows as an array, [*keys.shape, *shape]; raise ValueError if the codec could not hold one of them."""
        array: NDArray[Any] = np.asarray(rows)
        if array.dtype != self._dtype:
            raise TypeError(f"rows: expected an array of {self._dtype}, got {array.dtype}")
        if array.shape != keys.shape + self._shape:
            raise ValueError(f"rows: expected shape {keys.shape + self._shape}, got {array.shape}")
        if self._codec.lossless or not keys.size:
            return array
        flat = array.reshape(keys.size, -1)
        for start in range(0, keys.size, len(self._encoded)):
            part = flat[start : start + len(self._encoded)]
            self._codec.encode(part, out=self._encoded[: len(part)])
        return array

    def write_out(self, keys: Ints, slots: Ints) -> None:
        """Hand the changed rows among those of slots, which hold these keys, to the queue."""
        dirty = np.flatnonzero(self._dirty[slots])
        keys, slots = keys[dirty], slots[dirty]
        if self._unsaved:
            mine = self._of_image[slots]
            self._put(keys[mine], slots[mine], of_image=True)
            keys, slots = keys[~mine], slots[~mine]
        self._put(keys, slots)

    def flush(self) -> None:
        """Hand all changed rows to the queue, and wait until the log has them."""
        for start in range(0, len(self._dirty), _FLUSH_SLOTS):
            slots = np.flatnonzero(self._dirty[start : start + _FLUSH_SLOTS]) + start
            if len(slots):
                self.write_out(self._keys_of(slots), slots)
        self._queue.drain()

    def begin_image(self) -> None:
        """Take an image of this moment."""
        np.copyto(self._of_image, self._dirty)
        self._unsaved, self._of_image_from = True, 0
        self._queue.begin_image()

    def save_image(self, between: Callable[[], AbstractContextManager[bool]]) -> None:
        """Bring the rows of the image to the log, on a thread of its own.

        Parameters
        ----------
        between
            Returns a context that has a turn between two calls, or that yields False.
        """
        self._queue.drain()
        while self._unsaved:
            with between() as there:
                if there:
                    self._save_some()
        self._queue.drain()

    def release_queue(self) -> None:
        """Let the log have all rows again."""
        self._queue.release()

    def end_image(self, between: Callable[[], AbstractContextManager[bool]]) -> None:
        """Give up the rest of an image that failed, once its queue was released."""
        while self._unsaved:
            with between() as there:
                if there:
                    self._of_image[:] = False
                    self._unsaved = False

    def change(self, slots: Ints) -> None:
        """Note that the rows in slots are about to change; unsaved ones of the image go to the queue first."""
        if self._unsaved:
            mine = slots[self._of_image[slots]]
            self.write_out(self._keys_of(mine), mine)
        self._dirty[slots] = True

    def _put(self, keys: Ints, slots: Ints, *, of_image: bool = False) -> None:
        for start in range(0, len(keys), len(self._outgoing)):
            some, part = keys[start : start + len(self._outgoing)], slots[start : start + len(self._outgoing)]
            if not of_image and not self._queue.has_room(some):
                # These wait for the end of the image, which its thread cannot reach while this call is under way.
                for each in self._together:
                    if (writer := each()) is not None:
                        writer.finish_image()
            self._queue.put(some, self._encode(part), of_image=of_image)
            self._wrote(part)

    def finish_image(self) -> None:
        """Bring the rest of the image to the log, amid a call."""
        self._queue.drain()
        while self._unsaved:
            self._save_some()

    def _save_some(self) -> None:
        """Append some unsaved rows to the log, about a megabyte; older rows of their keys have left the queue."""
        while self._unsaved:
            begin = self._of_image_from
            slots = np.flatnonzero(self._of_image[begin : begin + _FLUSH_SLOTS])[: self._at_once] + begin
            if len(slots):
                self._queue.write_through(self._keys_of(slots), self._encode(slots))
                self._wrote(slots)
                self._of_image_from = int(slots[-1]) + 1
                return
            self._of_image_from += _FLUSH_SLOTS
            self._unsaved = self._of_image_from < len(self._of_image)

    def _encode(self, slots: Ints) -> Bytes:
        """Return rows as they are written, valid until others are."""
        rows = np.take(self._rows, slots, axis=0, out=self._outgoing[: len(slots)], mode="clip").reshape(len(slots), -1)
        if self._codec.lossless:
            return rows.view(np.uint8)
        try:
            return self._codec.encode(rows, out=self._encoded[: len(slots)])
        except ValueError:
            for slot, row in zip(slots, rows, strict=True):
                self._check_encodable(slot, row)
            raise

    def _check_encodable(self, slot: Any, row: NDArray[Any]) -> None:
        try:
            self._codec.encode(row[None], out=self._encoded[:1])
        except ValueError as error:
            key = int(self._keys_of(np.array([slot]))[0])
            raise ValueError(
                f"the row of key {key} cannot be written: {error}; committed rows are still there"
            ) from error

    def _wrote(self, slots: Ints) -> None:
        self._of_image[slots] = False
        self._dirty[slots] = False
        self.writes += len(slots)


def batch_rows(rows: int) -> int:
    """Return how many rows at most are appended at a time."""
    return max(1, rows // 4)
