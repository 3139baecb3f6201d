"""The transaction that logs of one store write in together, and its commit."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from memhier.errors import ClosedError
from memhier.store.segments import FullError
from memhier.store.store import SegmentInfo, Store
from memhier.store.transaction import Transaction
from memhier.store.way_back import keep_way_back

__all__ = ["TransactionGroup"]


class GroupedLog(Protocol):
    """A log as its group commits it; see `Log`."""

    def check_open(self) -> None: ...
    def give_locked(self) -> int: ...
    def seal_locked(self) -> None: ...
    def catalog_entry_locked(self) -> tuple[str, bytes]: ...
    def adopt_locked(self, segments: Mapping[str, SegmentInfo]) -> None: ...


class GroupedCompactor(Protocol):
    """A compactor as its group calls it around a commit; see `Compactor`."""

    def pay(self) -> None: ...
    def merge_locked(self) -> None: ...
    def plan_locked(self) -> None: ...


class TransactionGroup:
    """Owns the one transaction in which logs of a store write. The first log commits it; a failure ends all.

    Attributes
    ----------
    lock
        Held through a whole change of any of the logs; their threads that compact take it for each step.
    failure
        The error after which the logs take no more calls.
    """

    def __init__(self, store: Store, buffer_bytes: int) -> None:
        self.lock: threading.RLock = threading.RLock()
        self.failure: BaseException | None = None
        self._store = store
        self._buffer_bytes = buffer_bytes
        self._tx: Transaction | None = None
        self._members: list[tuple[GroupedLog, GroupedCompactor]] = []
        self._closed = 0

    def join(self, log: GroupedLog, compactor: GroupedCompactor) -> None:
        """Commit a log with the others from now on."""
        self._members.append((log, compactor))

    @property
    def is_writing(self) -> bool:
        """Whether a transaction is open."""
        return self._tx is not None and self.failure is None

    @property
    def memory_bytes(self) -> int:
        """DRAM held by the buffers of an open transaction, in bytes."""
        tx = self._tx  # another thread may end it
        return 0 if tx is None else tx.memory_bytes

    def begin(self) -> bool:
        """Make sure that there is a transaction; return whether it is new."""
        with self.lock:
            if not self._members:
                raise ClosedError("a log of this transaction is closed")
            if self._tx is not None:
                self._tx.check_open()
                return False
            self._tx = self._store.begin(self._buffer_bytes)
            return True

    def cancel(self) -> None:
        """Abort a transaction in which nothing was written."""
        tx, self._tx = self._tx, None
        if tx is not None:
            tx.abort()

    @contextmanager
    def failing(self, *, waits: bool = False) -> Iterator[Transaction]:
        """Close the logs if the block fails; but with `waits` not for lack of room on the disk."""
        assert self._tx is not None
        try:
            yield self._tx
        except BaseException as error:
            if not (waits and isinstance(error, FullError)):
                self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Take no more calls: each log holds changes that are gone."""
        self.failure = error
        self.cancel()

    def close(self) -> None:
        """Forget all changes as one log closes; after the last one forget the logs, which know this group.

        The aborted transaction stays: a log that is still open reads its rows, and the next change is refused.
        """
        if self._tx is not None:
            self._tx.abort()
        self._closed += 1
        if self._closed == len(self._members):
            self._members = []

    def commit(self, values: Mapping[str, bytes], waits: bool, way_back: bool, further: bool) -> int:
        """Make the changes of all logs durable at once; return the store's new generation.

        Parameters
        ----------
        values
            Values of the store's catalog to set in the same transaction.
        waits
            Take the room on disk first, and raise FullError while that changes nothing.
        way_back, further
            As `keep_way_back` says.
        """
        for _, compactor in self._members:
            compactor.pay()
        with self.lock:
            self.begin()
            for log, _ in self._members:
                log.check_open()
            for _, compactor in self._members:
                compactor.merge_locked()
            if waits:
                self._reserve_locked(values)
            with self.failing() as tx:
                for log, _ in self._members:
                    log.seal_locked()
                changes = dict(values)
                for log, _ in self._members:
                    key, changes[key] = log.catalog_entry_locked()
                tx.put_all(changes)
                if way_back:
                    keep_way_back(tx, self._store, further)
                generation = tx.commit()
                segments = self._store.segments()
                for log, _ in self._members:
                    log.adopt_locked(segments)
                for _, compactor in self._members:
                    compactor.plan_locked()
            self._tx = None
        return generation

    def _reserve_locked(self, values: Mapping[str, bytes]) -> None:
        with self.failing(waits=True) as tx:
            size = sum(len(key) + len(value) for key, value in values.items())
            for log, _ in self._members:
                size += log.give_locked()
            tx.reserve(size)
